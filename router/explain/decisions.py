"""The last decisions of a router, for `GET /v1/router/explain` and the live page.

Keeping a decision costs one append on the request's path: the ring stores the policy's ranking with its arrays. It
converts a ranking to plain data only when a client asks for it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.router.policy.policy import Ranking, Score
from quire.router.types import Explain


class RoutingDecision(NamedTuple):
    """One decision.

    Attributes
    ----------
    answer_id
        The id in the client's answer.
    attempt
        1 for the request's first decision; each failover to another replica is a further attempt.
    decided_s
        Time of the decision on the router's clock.
    explain
        The object of the request's stream, which writes the outcome to it later.
    payer
        The request's tenant.
    left_replica
        The replica of the attempt before; empty for the first.
    """

    request_id: str
    answer_id: str
    attempt: int
    decided_s: float
    num_prompt_tokens: int
    ranking: Ranking
    explain: Explain
    payer: str
    left_replica: str

    @property
    def is_answered(self) -> bool:
        """Whether `explain` has the outcome of this attempt; the attempts of a request share it."""
        return self.explain.answered_attempt == self.attempt


class DecisionRing:
    """The last `size` decisions of one router.

    A decision takes 32 bytes per replica (cost, wait, tokens on the device and in host memory). If it left some
    replicas out, it has copies of their columns too and takes 170 bytes per replica.

    Parameters
    ----------
    router_id
        Id of this router, included in every answer: several routers decide independently.
    size
        Number of decisions to keep; the oldest is dropped first.
    clock
        The clock that `add`'s `now_s` is read from, seconds.

    Attributes
    ----------
    num_added
        Decisions since the start, dropped ones included.
    """

    def __init__(self, router_id: str, size: int, clock: Callable[[], float] = time.monotonic):
        self.router_id = router_id
        self._clock = clock
        self._decisions: deque[RoutingDecision] = deque(maxlen=size)
        self.num_added = 0

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
        payer: str = "",
        left_replica: str = "",
    ) -> None:
        """Keep a decision. `explain.attempts` must already include this attempt."""
        self.num_added += 1
        self._decisions.append(
            RoutingDecision(
                request_id=request_id,
                answer_id=answer_id,
                attempt=explain.attempts,
                decided_s=now_s,
                num_prompt_tokens=num_prompt_tokens,
                ranking=ranking,
                explain=explain,
                payer=payer,
                left_replica=left_replica,
            )
        )

    def find(self, request_id: str, payer: str | None = None) -> list[dict[str, Any]]:
        """Return the decisions for a request id or an answer id, oldest first; only a payer's unless it is None.

        There is one for each attempt. If a client used the request id for several requests, all their decisions are
        returned.
        """
        return [
            self.describe(decision)
            for decision in self._decisions
            if request_id in (decision.request_id, decision.answer_id)
            and payer in (None, decision.payer)
        ]

    def last(self, limit: int, payer: str | None = None) -> list[dict[str, Any]]:
        """Return the last `limit` decisions, newest first; only a payer's unless it is None."""
        found = [one for one in self._decisions if payer in (None, one.payer)]
        newest = found[: -limit - 1 : -1]
        return [self.describe(decision) for decision in newest]

    def recent(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> list[dict[str, Any]]:
        """Return what `find` does for a request id, and what `last` does without one."""
        return self.last(limit, payer) if request_id is None else self.find(request_id, payer)

    def snapshot(self) -> list[RoutingDecision]:
        """Return all kept decisions, oldest first. Any thread may call this."""
        return list(self._decisions.copy())

    def newest(self, limit: int) -> Iterator[RoutingDecision]:
        """Yield the last `limit` decisions, newest first."""
        return itertools.islice(reversed(self._decisions), limit)

    def describe(self, decision: RoutingDecision, num_ranked: int | None = None) -> dict[str, Any]:
        """Convert a decision to plain data; `cluster.http.http_answers.Decision` describes the fields.

        Parameters
        ----------
        num_ranked
            Describe only this many replicas of the ranking, the best ones; None: all.
        """
        explain, ranking = decision.explain, decision.ranking
        age_s = self._clock() - decision.decided_s
        return {
            "request_id": decision.request_id,
            "answer_id": decision.answer_id,
            "router": self.router_id,
            "policy": ranking.policy,
            "attempt": decision.attempt,
            "decided": time.time() - age_s,
            "prompt_tokens": decision.num_prompt_tokens,
            "left_replica": decision.left_replica,
            "num_replicas": len(ranking.fleet),
            "ranking": [_describe_score(s) for s in itertools.islice(ranking, num_ranked)],
            "outcome": _describe_outcome(explain) if decision.is_answered else None,
        }


def _describe_score(score: Score) -> dict[str, Any]:
    return {
        "replica": score.replica,
        "cost_s": score.cost_s,
        "terms": {name: float(seconds) for name, seconds in score.terms.items()},
        "cached_tokens": score.cached_tokens,
        "host_cached_tokens": score.host_tokens,
        "pulled_tokens": score.pulled_tokens,
        "pull_from": score.pull_from,
    }


def _describe_outcome(explain: Explain) -> dict[str, Any]:
    return {
        "replica": explain.replica,
        "cached_tokens": explain.cached_tokens,
        "queue_s": explain.queue_s,
        "ttft_s": explain.ttft_s,
    }
