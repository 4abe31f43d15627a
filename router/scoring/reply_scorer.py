"""Scores the replies to questions: one request for each reply, with the log-probabilities of its tokens.

```
 first question, first reply     computes the conversation; its blocks are cached now
 other questions, first replies  compute their questions
 all other replies               compute their own tokens
```

The requests are routed as all others are, so they go to the replica that has the conversation. At most `MAX_AT_ONCE` of
them run at a time, so a decision with thousands of replies leaves the queue to other clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from quire.router.bill import Bill, BilledAnswer
from quire.router.scoring.question_prompts import QuestionPrompts
from quire.router.types import Explain, ReplyScores, Usage

MAX_AT_ONCE = 32


class ScoredStream(Protocol):
    """The part of `RequestStream` that is used here."""

    @property
    def usage(self) -> Usage: ...

    @property
    def explain(self) -> Explain: ...

    @property
    def prompt_logprobs(self) -> np.ndarray:
        """[tokens from the start on] float32."""
        ...

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...


# Makes the stream, not started, of a prompt ([tokens] int32) with log-probabilities from a position on.
NewStream = Callable[[np.ndarray, int], Awaitable[ScoredStream]]


class PartOfBill:
    """The bill of a request that is a part of another one: the other one pays."""

    def __init__(self, tenant: str):
        self.tenant = tenant

    def begin(self, num_prompt_tokens: int, num_answers: int) -> None:
        """See `Bill`."""

    def end(self, answer: BilledAnswer) -> None:
        """See `Bill`."""


class ReplyScorer:
    """Scores the replies of one request."""

    def __init__(self, prompts: QuestionPrompts, new_stream: NewStream):
        self._prompts = prompts
        self._new_stream = new_stream
        self._logprobs = [[0.0] * len(question.ids) for question in prompts.questions]
        self._shared_len = prompts.shared_len
        self.usage = Usage(prompt_tokens=prompts.num_tokens)
        self.explain = Explain()

    async def run(self, bill: Bill | None, clock: Callable[[], float]) -> ReplyScores:
        """Score all replies, as one answer of the bill.

        Raises
        ------
        QuireError
            One of the requests was refused or failed; all others are ended.
        """
        if bill is None:
            return await self._run()
        bill.begin(self.usage.prompt_tokens, 1)
        begun_s, finish_reason = clock(), "abort"
        try:
            scores = await self._run()
            finish_reason = "stop"
            return scores
        except Exception:
            finish_reason = "error"
            raise
        finally:
            bill.end(self._billed(finish_reason, clock() - begun_s))

    async def _run(self) -> ReplyScores:
        sizes = list(enumerate(len(question.ids) for question in self._prompts.questions))
        await self._score(0, 0)
        await self._score_all([(question, 0) for question, _ in sizes[1:]])
        await self._score_all([(question, i) for question, size in sizes for i in range(1, size)])
        return ReplyScores(self._logprobs, self.usage, self.explain)

    def _billed(self, finish_reason: str, total_s: float) -> BilledAnswer:
        """Return the end of the request for its bill. It costs nothing if no reply has been scored."""
        queue_s = min(self.explain.queue_s, total_s)
        return BilledAnswer(
            finish_reason,
            is_answered=self.explain.answered,
            is_fork=False,
            completion_tokens=0,
            reasoning_tokens=0,
            cached_tokens=self.usage.cached_tokens,
            host_cached_tokens=self.usage.host_cached_tokens,
            queue_s=queue_s,
            prefill_s=total_s - queue_s,
            decode_s=0.0,
        )

    async def _score_all(self, jobs: Sequence[tuple[int, int]]) -> None:
        waiting = iter(jobs)
        workers = [
            asyncio.ensure_future(self._work(waiting)) for _ in range(min(MAX_AT_ONCE, len(jobs)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, waiting: Iterator[tuple[int, int]]) -> None:
        for question, reply in waiting:
            await self._score(question, reply)

    async def _score(self, question: int, reply: int) -> None:
        start = self._prompts.questions[question].start
        stream = await self._new_stream(self._prompts.prompt_ids(question, reply), start)
        try:
            await stream.start()
            # A sum without rounding does not depend on the order of its terms.
            self._logprobs[question][reply] = math.fsum(stream.prompt_logprobs.tolist())
            if reply == 0:
                self._count(question, stream)
        finally:
            await stream.aclose()

    def _count(self, question: int, stream: ScoredStream) -> None:
        """Count the cached tokens of a question's first reply that no earlier prompt of this request has computed."""
        num_cached = min(stream.usage.cached_tokens, self._prompts.questions[question].start)
        if question == 0:
            self.explain = stream.explain
            self.usage.host_cached_tokens = min(stream.usage.host_cached_tokens, num_cached)
        else:
            num_cached = max(0, num_cached - self._shared_len)
        self.usage.cached_tokens += num_cached
