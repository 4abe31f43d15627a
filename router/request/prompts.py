"""The streams of requests with a list of prompts, and of requests without output tokens (`max_tokens: 0`).

Each prompt of a list has its own stream with `n` choices. Choice j of prompt i is choice i * n + j of the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from quire.router.request.choices import ChoicesStream, end_streams
from quire.router.scored_token import TokenScores
from quire.router.types import Explain, OutputDelta, Usage

if TYPE_CHECKING:
    from quire.router.request.request_stream import RequestStream


class PromptsStream:
    """The `GenerationStream` of a list of prompts: the deltas of all prompts in order of arrival.

    Parameters
    ----------
    streams
        One for each prompt, in order, not started.
    num_choices
        Number of choices of each prompt.
    """

    def __init__(self, streams: Sequence[RequestStream | ChoicesStream], num_choices: int):
        first = streams[0]
        self.request_id, self.model, self.origin = first.request_id, first.model, first.origin
        self._streams = streams
        self._num_choices = num_choices
        # Deltas and errors not read yet; None stands for the end of one prompt.
        self._items: deque[OutputDelta | Exception | None] = deque()
        self._arrival, self._room = asyncio.Event(), asyncio.Event()
        self._is_read = False
        self._pumps: list[asyncio.Task[None]] = []
        self._num_open = len(streams)

    @property
    def usage(self) -> Usage:
        """The sum over all prompts."""
        usages = [stream.usage for stream in self._streams]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            host_cached_tokens=sum(usage.host_cached_tokens for usage in usages),
            peer_cached_tokens=sum(usage.peer_cached_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages),
        )

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None:
        """The log-probabilities of the tokens of prompt `index`; None if the request does not ask for them."""
        return self._streams[index].prompt_scores

    @property
    def prompt_scores(self) -> list[TokenScores] | None:
        """The scores of the first prompt."""
        return self.scores_of_prompt(0)

    @property
    def explain(self) -> Explain:
        """The routing of the first prompt."""
        return self._streams[0].explain

    async def start(self) -> None:
        """Submit all prompts and wait for the first token of each. A refusal ends all prompts."""
        loop = asyncio.get_running_loop()
        begun = [loop.create_future() for _ in self._streams]
        self._pumps = [
            asyncio.ensure_future(self._pump(index, stream, begun[index]))
            for index, stream in enumerate(self._streams)
        ]
        try:
            await asyncio.gather(*begun)
        except BaseException:
            await self.aclose()
            raise
        self._is_read = True

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        while self._num_open:
            while not self._items:
                self._arrival.clear()
                await self._arrival.wait()
            item = self._items.popleft()
            self._room.set()
            if item is None:
                self._num_open -= 1
            elif isinstance(item, Exception):
                await self.aclose()
                raise item
            else:
                return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the prompts that still run. Idempotent."""
        self._num_open = 0
        await end_streams(self._pumps, self._streams)

    async def _pump(
        self, index: int, stream: RequestStream | ChoicesStream, begun: asyncio.Future[None]
    ) -> None:
        try:
            await stream.start()
            begun.set_result(None)
            async for delta in stream:
                delta.choice += index * self._num_choices
                await self._put(delta)
        except Exception as error:
            if begun.done():
                await self._put(error)
            else:
                begun.set_exception(error)
        else:
            await self._put(None)

    async def _put(self, item: OutputDelta | Exception | None) -> None:
        # Wait for room only after all prompts have begun, because the client reads nothing before. A prompt that paused
        # earlier would keep the KV memory that other prompts wait for.
        while self._is_read and len(self._items) >= len(self._streams):
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._arrival.set()


class PromptOnlyStream:
    """The `GenerationStream` of `max_tokens: 0`: the engine generates one token, which the client does not get.

    Parameters
    ----------
    stream
        The stream of the same request with `max_tokens` 1, not started.
    has_logprobs
        The client asks for log-probabilities of the output, and gets an empty list.
    """

    def __init__(self, stream: RequestStream | ChoicesStream | PromptsStream, has_logprobs: bool):
        self.request_id, self.model, self.origin = stream.request_id, stream.model, stream.origin
        self._stream = stream
        self._has_logprobs = has_logprobs

    @property
    def usage(self) -> Usage:
        """The usage without the generated token."""
        usage = self._stream.usage
        return Usage(
            usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            host_cached_tokens=usage.host_cached_tokens,
            peer_cached_tokens=usage.peer_cached_tokens,
        )

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None:
        """See `GenerationStream`."""
        return self._stream.scores_of_prompt(index)

    @property
    def prompt_scores(self) -> list[TokenScores] | None:
        """See `GenerationStream`."""
        return self._stream.prompt_scores

    @property
    def explain(self) -> Explain:
        """See `GenerationStream`."""
        return self._stream.explain

    async def start(self) -> None:
        """Submit and wait until the prompt is computed or refused."""
        await self._stream.start()

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        async for delta in self._stream:
            if delta.finish_reason is not None:
                scores: list[TokenScores] | None = [] if self._has_logprobs else None
                return OutputDelta("", [], "length", None, scores, delta.choice)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request if it still runs. Idempotent."""
        await self._stream.aclose()
