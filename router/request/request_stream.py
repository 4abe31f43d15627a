"""One request that runs: from its prompt's tokens to the last character of its answer.

1. `Attempts` submits the request; the first token, or the refusal, decides what `start` returns or raises.
2. `AnswerText` turns tokens into text and deltas, up to a stop string.
3. `Attempts` replaces a lost replica by another one, and the stream continues.
4. Every exit goes through `_close`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Hello, TokenDelta
from quire.router.chat.reply_parser import ReplyParser
from quire.router.request.accounting import Accounting
from quire.router.request.answer_text import AnswerText
from quire.router.request.attempts import Attempts
from quire.router.request.context import Arrived, RouterContext
from quire.router.scored_token import TokenScores
from quire.router.text.detokenizer import Detokenizer
from quire.router.trace.request_trace import AnswerTrace
from quire.router.transport.transport import Attempt, Lost, OutputGap
from quire.router.types import (
    Explain,
    GenerationRequest,
    Mark,
    Origin,
    OutputDelta,
    Usage,
)


class RequestStream:
    """The `GenerationStream` of one choice of one prompt, across all replicas that it takes.

    Parameters
    ----------
    origin
        What the stream's event ids say about it.
    mark
        What the client of a resumed stream has already; no delta repeats it.
    special_stops
        Stop strings that are special tokens, by token id.
    parser
        Finds reasoning and tool calls in the answer; None: it has none.
    lead
        The first choice of the same request that runs. This choice is a fork of it, on the same replica.
    prediction_ids
        [tokens] int32: the client's guess of the answer; None: it has none.
    """

    def __init__(
        self,
        router: RouterContext,
        request: GenerationRequest,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        hashes: np.ndarray,
        hello: Hello,
        detokenizer: Detokenizer,
        arrived: Arrived,
        origin: Origin,
        mark: Mark,
        special_stops: Mapping[int, str],
        parser: ReplyParser | None = None,
        lead: RequestStream | None = None,
        prediction_ids: np.ndarray | None = None,
    ):
        self.request_id = request.request_id
        self.model = router.facts.name if request.adapter is None else request.adapter.name
        self.origin = origin
        # Whether the client of a resumed stream has the whole answer already, so that nothing is left to do.
        self.was_complete = mark.finished
        self._router = router
        self._request, self._weights = request, hello.weights
        self._prompt_ids, self._hashes, self._is_fork = prompt_ids, hashes, lead is not None
        self._answer = AnswerText(
            request,
            prompt_ids,
            sampling,
            hello,
            detokenizer,
            router.scorer,
            mark,
            special_stops,
            parser,
        )
        trace = None
        if arrived.trace is not None and not self.was_complete:
            arrived.trace.set("gen_ai.response.model", self.model)
            trace = AnswerTrace(arrived.trace, sampling.choice, is_fork=lead is not None)
        self._accounting = Accounting(
            router, request, origin, len(prompt_ids), arrived.at_s, trace, is_fork=lead is not None
        )
        lead_attempts = None if lead is None else lead.attempts
        self.attempts: Attempts = Attempts(
            router,
            request,
            self._answer,
            self._accounting,
            hashes,
            hello.weights,
            lead_attempts,
            prediction_ids,
        )
        # The current attempt once it decodes plainly: a delta without facts only needs its text.
        self._plain_attempt: Attempt | None = None
        self._first_delta: OutputDelta | None = None
        self._closed = self.was_complete
        if self.was_complete:
            self.usage.completion_tokens = mark.num_tokens

    @property
    def usage(self) -> Usage:
        return self._accounting.usage

    @property
    def explain(self) -> Explain:
        return self._accounting.explain

    @property
    def prompt_scores(self) -> list[TokenScores] | None:
        """The prompt's tokens with their log-probabilities; None if the request does not ask for them."""
        return self._answer.prompt_scores()

    @property
    def prompt_logprobs(self) -> np.ndarray:
        """The log-probabilities of the prompt's tokens from `prompt_logprobs_start` on, [tokens] float32."""
        return self._answer.prompt_logprobs()

    @property
    def pooled(self) -> np.ndarray:
        """The pooled hidden states of the prompt, [hidden size] float32; empty without `SamplingParams.pooling`."""
        return self._answer.pooled

    def scores_of_prompt(self, index: int) -> list[TokenScores] | None:
        """The same as `prompt_scores`, since this stream has one prompt."""
        return self.prompt_scores

    async def start(self) -> None:
        """Submit the request and wait for its first delta; raise the error if it is refused."""
        if self._closed:
            return
        try:
            self._first_delta = await self._next_delta()
        except BaseException as error:
            self._close_on(error)
            raise

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        delta, self._first_delta = self._first_delta, None
        if delta is None:
            if self._closed:
                raise StopAsyncIteration
            try:
                delta = await self._next_delta()
            except BaseException as error:
                self._close_on(error)
                raise
        attempt = self.attempts.current
        if attempt is not None:
            attempt.taken_s = self._router.clock()
        return delta

    async def aclose(self) -> None:
        """End the request on its replica if it still runs. Idempotent."""
        self._close("abort")

    async def _next_delta(self) -> OutputDelta:
        attempts = self.attempts
        while True:
            attempt = attempts.current or await attempts.begin()
            while (event := attempt.take()) is None:
                # `Attempt.next` would add a coroutine for every token.
                await attempt.arrival()
            if isinstance(event, TokenDelta):
                delta = self._take(event, attempt)
                if delta is not None:
                    return delta
            elif isinstance(event, Lost):
                await attempts.on_lost(event)
            else:
                await attempts.on_completion(event)

    def _take(self, event: TokenDelta, attempt: Attempt) -> OutputDelta | None:
        """Turn a replica's delta into a delta for the client; return None if nothing in it is new."""
        if attempt is self._plain_attempt:
            delta = self._answer.next_tokens(event)
            if delta is not None:
                self._accounting.on_next_tokens(len(event.token_ids))
                return delta
        try:
            new_ids = self._answer.new_ids(event)
        except OutputGap as gap:
            self.attempts.fail(str(gap))
            return None
        if not new_ids and event.finish_reason is None:
            return None
        now_s = self._router.clock()
        if self.explain.answered:
            self._accounting.on_tokens(event.facts, attempt.replica, now_s)
        else:
            is_first_choice = self.attempts.is_at_first_choice
            self._accounting.on_first_token(event.facts, attempt.replica, is_first_choice, now_s)
            self.attempts.on_first_token()
            self._note_hit(event.facts.num_cached_tokens, now_s)
        self.attempts.on_tokens(len(self._answer.token_ids) + len(new_ids), now_s)
        delta = self._answer.take(event, new_ids)
        self._accounting.on_output(len(self._answer.token_ids))
        self.usage.reasoning_tokens = self._answer.num_reasoning_tokens
        if event.finish_reason is not None:
            self._accounting.on_drafts(event.facts)
        if delta is None:
            return None
        if delta.finish_reason is not None:
            self._answer.check_end()
            self._close(delta.finish_reason)
        elif self._answer.is_plain and not self.attempts.is_isolated:
            self._plain_attempt = attempt
        return delta

    def _note_hit(self, num_cached: int, now_s: float) -> None:
        """Count the cached prefix for replicas that join later, if blocks can travel."""
        request, peers = self._request, self._router.table.peers
        if peers.are_there and not self._is_fork:
            prompt = self._hashes, self._prompt_ids, num_cached
            peers.popular.add(*prompt, request.tenant, request.adapter, self._weights, now_s)

    def _close_on(self, error: BaseException) -> None:
        """End the stream with an exception. One that is no `Exception` cancels it: the client has left."""
        if isinstance(error, Exception):
            self._close("error", error)
        else:
            self._close("abort")

    def _close(self, finish_reason: str, error: Exception | None = None) -> None:
        """End the stream after it finished or failed, or after its client left."""
        if not self._closed:
            self._closed = True
            self.attempts.close(finish_reason)
            self._router.observer.on_end(self._accounting.end(finish_reason, error))
