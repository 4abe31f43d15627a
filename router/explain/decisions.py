"""What a router remembers of its last decisions, for `GET /v1/router/explain`.

To remember one costs the decision an append: the ring holds the ranking as the policy made it, whose
arrays are of that moment, and turns it into plain data only when somebody asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.router.policy.policy import Ranking, Score
from quire.router.types import Explain


class _Decision(NamedTuple):
    request_id: str
    answer_id: str  # what the client's answer carries
    attempt: int  # 1 for a request's first
    decided_s: float  # the router's clock
    num_prompt_tokens: int
    ranking: Ranking
    explain: Explain  # the stream's own, which goes on learning what came of it


class DecisionRing:
    """The last `size` decisions of one router.

    Holds what each replica cost and held for each of them: 32 bytes x `size` x replicas, 170 for decisions that left
    some replicas out.

    Parameters
    ----------
    router_id
        Named in every answer: with several routers, who decided is part of why.
    size
        Decisions that are remembered; the oldest goes first. 0 remembers none.
    clock
        The one that `add` is given the time of, seconds.
    """

    def __init__(self, router_id: str, size: int, clock: Callable[[], float] = time.monotonic):
        self.router_id = router_id
        self._clock = clock
        self._decisions: deque[_Decision] = deque(maxlen=size)

    @property
    def size(self) -> int:
        return self._decisions.maxlen or 0

    def resize(self, size: int) -> None:
        """Remember so many from now on, of those that are there the last."""
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
        """Remember a decision; `explain.attempts` counts it already."""
        self._decisions.append(
            _Decision(
                request_id, answer_id, explain.attempts, now_s, num_prompt_tokens, ranking, explain
            )
        )

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """The decisions for one request, by its id or its answer's, first to last: one for each attempt and, where
        a client used its id again, of each request."""
        return [
            self._describe(decision)
            for decision in self._decisions
            if request_id in (decision.request_id, decision.answer_id)
        ]

    def last(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, the newest first."""
        newest = list(self._decisions)[: -limit - 1 : -1]
        return [self._describe(decision) for decision in newest]

    def _describe(self, decision: _Decision) -> dict[str, Any]:
        """Plain data; see `cluster.http_answers.Decision` for what each field means."""
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
            # A later attempt has overwritten what came of an earlier one.
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
