"""Several samples (choices) of one request: `n` streams that the client reads as one.

For a replica, each choice is a request with the same prompt, parameters and seed, and with its own `choice` index. The
index is part of the key of the sampling noise, so choices differ. All choices run on the replica of the first one, as
its forks: the replica computes the prompt once, the choices share its full blocks, and each has a copy of the last,
partly filled block. A choice that loses its replica continues independently on any replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from quire.router.scored_token import TokenScores
from quire.router.types import Explain, OutputDelta, Usage

if TYPE_CHECKING:
    from quire.router.request.request_stream import RequestStream


async def end_streams(
    pumps: Sequence[asyncio.Task[None]], streams: Sequence[RequestStream | ChoicesStream]
) -> None:
    """Stop the tasks that read the streams, then end the streams."""
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    for stream in streams:
        await stream.aclose()


class ChoicesStream:
    """The `GenerationStream` of a request with `n` > 1: the deltas of all choices in the order of their arrival.

    Parameters
    ----------
    streams
        One for each choice, in order, not started.
    lead
        The first stream that runs. It is not always the first choice: a client that resumes may have that one
        completely.
    """

    def __init__(self, streams: Sequence[RequestStream], lead: RequestStream):
        self._streams = streams
        self._lead = lead
        self.request_id = streams[0].request_id
        self.model = streams[0].model
        self.origin = streams[0].origin
        self._queue: asyncio.Queue[OutputDelta | BaseException | None] = asyncio.Queue(len(streams))
        self._pumps: list[asyncio.Task[None]] = []
        self._num_open = len(streams)

    @property
    def usage(self) -> Usage:
        """The prompt counted once, and the output of all choices.

        Cached tokens are those of the choice that found the fewest, because that choice computed the prompt.
        """
        usages = [stream.usage for stream in self._streams]
        ran = [stream.usage for stream in self._streams if not stream.was_complete] or usages
        first = min(ran, key=lambda usage: (usage.cached_tokens, -usage.host_cached_tokens))
        return Usage(
            prompt_tokens=usages[0].prompt_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=first.cached_tokens,
            host_cached_tokens=first.host_cached_tokens,
            peer_cached_tokens=first.peer_cached_tokens,
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages),
        )

    @property
    def prompt_scores(self) -> list[TokenScores] | None:
        """The prompt's log-probabilities, which the lead asks for; None if the request does not ask for them."""
        return self._lead.prompt_scores

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None:
        """The same as `prompt_scores`, since this stream has one prompt."""
        return self.prompt_scores

    @property
    def explain(self) -> Explain:
        """The routing of the lead."""
        return self._lead.explain

    async def start(self) -> None:
        """Submit all choices and wait for the first token of each. If any is refused, end all and raise the refusal."""
        # Tasks start in the order of their creation, so the first choice is submitted before its forks.
        starts = [asyncio.ensure_future(stream.start()) for stream in self._streams]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.aclose()
            raise

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        if not self._pumps:
            self._pumps = [
                asyncio.ensure_future(self._pump(i, stream))
                for i, stream in enumerate(self._streams)
            ]
        while self._num_open:
            item = await self._queue.get()
            if item is None:
                self._num_open -= 1
            elif isinstance(item, BaseException):
                await self.aclose()
                raise item
            else:
                return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the choices that still run. Idempotent."""
        self._num_open = 0
        await end_streams(self._pumps, self._streams)

    async def _pump(self, choice: int, stream: RequestStream) -> None:
        try:
            async for delta in stream:
                delta.choice = choice
                await self._queue.put(delta)
        except Exception as error:
            await self._queue.put(error)
        else:
            await self._queue.put(None)
