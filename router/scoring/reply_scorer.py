"""Scores the replies to questions: one request for each reply, with the log-probabilities of its tokens.

```
 first question, first reply     computes the conversation; its blocks are cached now
 other questions, first replies  compute their questions
 all other replies               compute their own tokens
```

The requests are routed as all others are, so they go to the replica that has the conversation.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np

from quire.router.bill import Bill
from quire.router.scoring.many_prompts import ManyPrompts, run_all
from quire.router.scoring.question_prompts import QuestionPrompts
from quire.router.types import Explain, ReplyScores, Usage


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


class ReplyScorer:
    """Scores the replies of one request."""

    def __init__(self, prompts: QuestionPrompts, new_stream: NewStream):
        self._prompts = prompts
        self._new_stream = new_stream
        self._logprobs = [[0.0] * len(question.ids) for question in prompts.questions]
        self._shared_len = prompts.shared_len
        self._numbers = ManyPrompts(prompts.num_tokens)

    async def run(self, bill: Bill | None, clock: Callable[[], float]) -> ReplyScores:
        """Score all replies, as one answer of the bill.

        Raises
        ------
        QuireError
            One of the requests was refused or failed; all others are ended.
        """
        return await self._numbers.billed(self._run, bill, clock)

    async def _run(self) -> ReplyScores:
        sizes = list(enumerate(len(question.ids) for question in self._prompts.questions))
        await self._score((0, 0))
        await run_all([(question, 0) for question, _ in sizes[1:]], self._score)
        others = [(question, i) for question, size in sizes for i in range(1, size)]
        await run_all(others, self._score)
        return ReplyScores(self._logprobs, self._numbers.usage, self._numbers.explain)

    async def _score(self, job: tuple[int, int]) -> None:
        """Score one reply; the job is its question's index and its own."""
        question, reply = job
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
        usage = self._numbers.usage
        if question == 0:
            self._numbers.explain = stream.explain
            usage.host_cached_tokens = min(stream.usage.host_cached_tokens, num_cached)
            usage.peer_cached_tokens = min(
                stream.usage.peer_cached_tokens, usage.host_cached_tokens
            )
        else:
            num_cached = max(0, num_cached - self._shared_len)
        usage.cached_tokens += num_cached
