"""The last decisions of a router, for `GET /v1/router/explain`.

Keeping a decision costs an append: the ring stores the policy's ranking with its arrays, and converts it to plain data
when a client requests it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.router.policy.policy import Ranking, Score
from quire.router.types import Explain


class _Decision(NamedTuple):
    """One decision.

    Attributes
    ----------
    answer_id
        The id in the client's answer.
    attempt
        1 for a request's first.
    decided_s
        Time of the router's clock.
    explain
        The stream's own object, which the stream updates with the outcome.
    """

    request_id: str
    answer_id: str
    attempt: int
    decided_s: float
    num_prompt_tokens: int
    ranking: Ranking
    explain: Explain


class DecisionRing:
    """The last `size` decisions of one router.

    It takes 32 bytes per replica and decision (cost, wait, tokens held), and 170 for decisions that left some replicas
    out.

    Parameters
    ----------
    router_id
        Part of every answer, since several routers decide independently.
    size
        Number of decisions to keep; the oldest is dropped first.
    clock
        The clock of `add`'s `now_s`, seconds.
    """

    def __init__(self, router_id: str, size: int, clock: Callable[[], float] = time.monotonic):
        self.router_id = router_id
        self._clock = clock
        self._decisions: deque[_Decision] = deque(maxlen=size)

    @property
    def size(self) -> int:
        return self._decisions.maxlen or 0

    def resize(self, size: int) -> None:
        """Change the number of decisions to keep; the newest ones stay."""
        self._decisions = deque(self._decisions, maxlen=size)

    def add(
        self,
        request_id: str,
        answer_id: str,
        ranking: Ranking,
        num_prompt_tokens: int,
        explain: Explain,
        now_s: float,
    ) -> None:
        """Keep a decision, which `explain.attempts` already counts."""
        self._decisions.append(
            _Decision(
                request_id=request_id,
                answer_id=answer_id,
                attempt=explain.attempts,
                decided_s=now_s,
                num_prompt_tokens=num_prompt_tokens,
                ranking=ranking,
                explain=explain,
            )
        )

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """Return the decisions for a request id or an answer id, oldest first.

        There is one for each attempt, and for each request if a client used the same request id again.
        """
        return [
            self._describe(decision)
            for decision in self._decisions
            if request_id in (decision.request_id, decision.answer_id)
        ]

    def last(self, limit: int) -> list[dict[str, Any]]:
        """Return the last decisions, newest first."""
        newest = list(self._decisions)[: -limit - 1 : -1]
        return [self._describe(decision) for decision in newest]

    def _describe(self, decision: _Decision) -> dict[str, Any]:
        """Convert a decision to plain data; `cluster.http.http_answers.Decision` describes the fields."""
        explain, ranking = decision.explain, decision.ranking
        age_s = self._clock() - decision.decided_s
        is_last = explain.attempts == decision.attempt
        return {
            "request_id": decision.request_id,
            "answer_id": decision.answer_id,
            "router": self.router_id,
            "policy": ranking.policy,
            "attempt": decision.attempt,
            "decided": time.time() - age_s,
            "prompt_tokens": decision.num_prompt_tokens,
            "num_replicas": len(ranking.fleet),
            "ranking": [_describe_score(score) for score in ranking],
            # A later attempt overwrote the outcome of an earlier one.
            "outcome": _describe_outcome(explain) if is_last and explain.answered else None,
        }


def _describe_score(score: Score) -> dict[str, Any]:
    return {
        "replica": score.replica,
        "cost_s": score.cost_s,
        "terms": {name: float(seconds) for name, seconds in score.terms.items()},
        "cached_tokens": score.cached_tokens,
        "host_cached_tokens": score.host_tokens,
    }


def _describe_outcome(explain: Explain) -> dict[str, Any]:
    return {
        "replica": explain.replica,
        "cached_tokens": explain.cached_tokens,
        "queue_s": explain.queue_s,
        "ttft_s": explain.ttft_s,
    }
