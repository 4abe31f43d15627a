"""A request that runs as many requests, one for each prompt, and is billed as one answer.

At most `MAX_AT_ONCE` of them run at a time, so a request with thousands of prompts leaves the queue to other clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from quire.router.bill import Bill, BilledAnswer
from quire.router.types import Explain, Usage

MAX_AT_ONCE = 32
_Job = TypeVar("_Job")
_T = TypeVar("_T")


class PartOfBill:
    """The bill of a request that is a part of another one: the other one pays."""

    def __init__(self, tenant: str):
        self.tenant = tenant

    def begin(self, num_prompt_tokens: int, num_answers: int) -> None:
        """See `Bill`."""

    def end(self, answer: BilledAnswer) -> None:
        """See `Bill`."""


class ManyPrompts:
    """The numbers of such a request.

    Attributes
    ----------
    usage
        Of all prompts.
    explain
        The routing of the first prompt.
    """

    def __init__(self, num_prompt_tokens: int):
        self.usage = Usage(prompt_tokens=num_prompt_tokens)
        self.explain = Explain()

    async def billed(
        self, run: Callable[[], Awaitable[_T]], bill: Bill | None, clock: Callable[[], float]
    ) -> _T:
        """Await `run()`, as one answer of the bill.

        Raises
        ------
        QuireError
            A quota is used up, or `run` failed.
        """
        if bill is None:
            return await run()
        bill.begin(self.usage.prompt_tokens, 1)
        begun_s, finish_reason = clock(), "abort"
        try:
            result = await run()
            finish_reason = "stop"
            return result
        except Exception:
            finish_reason = "error"
            raise
        finally:
            bill.end(self._answer(finish_reason, clock() - begun_s))

    def _answer(self, finish_reason: str, total_s: float) -> BilledAnswer:
        """Return the end of the request for its bill. It costs nothing if no prompt has an answer."""
        queue_s = min(self.explain.queue_s, total_s)
        return BilledAnswer(
            finish_reason,
            is_answered=self.explain.answered,
            is_fork=False,
            completion_tokens=0,
            reasoning_tokens=0,
            cached_tokens=self.usage.cached_tokens,
            host_cached_tokens=self.usage.host_cached_tokens,
            peer_cached_tokens=self.usage.peer_cached_tokens,
            queue_s=queue_s,
            prefill_s=total_s - queue_s,
            decode_s=0.0,
        )


async def run_all(jobs: Sequence[_Job], run: Callable[[_Job], Awaitable[None]]) -> None:
    """Await `run` for each job, in their order, at most `MAX_AT_ONCE` at a time. An error ends all."""
    waiting = iter(jobs)
    workers = [
        asyncio.ensure_future(_work(waiting, run)) for _ in range(min(MAX_AT_ONCE, len(jobs)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(waiting: Iterator[_Job], run: Callable[[_Job], Awaitable[None]]) -> None:
    for job in waiting:
        await run(job)
