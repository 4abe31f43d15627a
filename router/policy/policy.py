"""The interface of routing policies: functions from a request and a view of the fleet to a ranking of the replicas.

A policy sees the request, a `FleetView` (`router/policy/fleet_view.py`), the time and a random generator. To add one,
write a class with the method of `Policy` in a module of its own, and give it a name in `router/policy/by_name.py`.
`router/policy/baselines.py` has short examples. `router/policy/cost.py` is the default.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from quire.router.policy.fleet_view import FleetView

# Replicas in a ranking: the choice and its fall-backs.
MAX_RANKED = 16
# Parts of a fleet; the minima of the parts bound the costs that can be ranked.
_NUM_PARTS = 64


class RouteRequest(NamedTuple):
    """The facts about a request that a policy may use.

    Attributes
    ----------
    is_continued
        Another replica has had the request before.
    """

    num_prompt_tokens: int
    session: str = ""
    priority: int = 0
    is_continued: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """One replica's cost for a request.

    Attributes
    ----------
    terms
        The terms of the cost by name, in seconds.
    cached_tokens, host_tokens
        Prompt tokens predicted to be on the device, and further ones in host memory.
    pulled_tokens, pull_from
        Further ones that the replica would pull, and the replica of another node that holds them; 0 and empty: none.
    """

    replica: str
    cost_s: float
    terms: dict[str, float]
    cached_tokens: int
    host_tokens: int = 0
    pulled_tokens: int = 0
    pull_from: str = ""

    @property
    def wait_s(self) -> float:
        """Seconds of prefill queued before the request; 0 if the policy has no such term."""
        return self.terms.get("wait_s", 0.0)

    @property
    def prefill_s(self) -> float:
        return self.terms.get("prefill_s", 0.0)

    @property
    def held_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        return self.cached_tokens + self.host_tokens + self.pulled_tokens


@dataclass(slots=True, eq=False)
class Ranking:
    """Replicas from best to worst, at most `MAX_RANKED`; empty if the view has no replica.

    Attributes
    ----------
    rows
        [ranked] rows of `fleet`, best first.
    cost_s
        [n] costs that the policy compared. This array and the ones below share no memory with the fleet's columns:
        `router/explain/decisions.py` reads them after the columns have changed.
    wait_s
        [n] seconds of prefill queued before the request; None: the policy has no such term.
    term_names, terms
        Names of the cost's terms, and their values for `rows`, [ranked, terms] seconds; None: the cost has one term.
    """

    policy: str
    fleet: FleetView
    rows: Sequence[int]
    cost_s: np.ndarray
    wait_s: np.ndarray | None = None
    term_names: tuple[str, ...] = ()
    terms: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rank: int) -> Score:
        row, terms = self.rows[rank], self.terms
        seconds = [] if terms is None else terms[rank].tolist()
        named = dict(zip(self.term_names, seconds, strict=True))
        peers = self.fleet.peers if named.get("pull_s") else None
        return Score(
            replica=self.fleet.replicas[row],
            cost_s=float(self.cost_s[row]),
            terms=named,
            cached_tokens=int(self.fleet.gpu_tokens[row]),
            host_tokens=int(self.fleet.host_tokens[row]),
            pulled_tokens=0 if peers is None else int(peers.tokens[row]),
            pull_from="" if peers is None else self.fleet.replicas[peers.rows[row]],
        )

    def __iter__(self) -> Iterator[Score]:
        return (self[rank] for rank in range(len(self.rows)))

    def names(self) -> list[str]:
        """Return the names of the ranked replicas, best first."""
        replicas = self.fleet.replicas
        return [replicas[row] for row in self.rows]

    def led_by(self, replica: str) -> Ranking:
        """Return the same ranking with this replica first, if it is one of the ranked."""
        names = self.names()
        if replica not in names:
            return self
        rank = names.index(replica)
        order = [rank, *range(rank), *range(rank + 1, len(names))]
        terms = None if self.terms is None else self.terms[order]
        return dataclasses.replace(self, rows=[self.rows[i] for i in order], terms=terms)


class Policy(Protocol):
    """A routing policy."""

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        """Rank the replicas for a request.

        Parameters
        ----------
        now_s
            Time of the router's clock, the same as `fleet.now_s`.
        rng
            Source of all random choices, so that the same seed gives the same ranking.
        """
        ...


def ranked_rows(cost: np.ndarray, rng: random.Random, tie: float = 0.0) -> np.ndarray:
    """Return [ranked] rows by cost, smallest first. The first is a random row within `tie` of the smallest."""
    best = _smallest(cost)
    if len(best) <= 1:
        return best
    costs = cost.take(best).tolist()
    bound = costs[0] + tie
    if costs[1] > bound:
        return best
    rows = best.tolist()
    if costs[-1] <= bound:
        # There may be more ties than ranked rows.
        ties = (cost <= bound).nonzero()[0].tolist()
    else:
        ties = sorted(rows[: bisect.bisect_right(costs, bound)])
    first = ties[rng.randrange(len(ties))]
    return np.array([first, *(row for row in rows if row != first)][:MAX_RANKED])


def rank(policy: str, fleet: FleetView, cost: np.ndarray, rng: random.Random) -> Ranking:
    """Rank the replicas by a cost that is one number each, without terms."""
    return Ranking(policy, fleet, ranked_rows(cost, rng).tolist(), cost)


def _smallest(cost: np.ndarray) -> np.ndarray:
    """Return the rows of the `MAX_RANKED` smallest costs, smallest first; equal costs keep the order of their rows.

    The fleet is cut into `_NUM_PARTS` parts. Each minimum is the cost of a replica in its part, so the `MAX_RANKED`-th
    smallest minimum is an upper bound of the costs to return. numpy's partition took twice as long with a thousand
    random costs.
    """
    if len(cost) <= _NUM_PARTS:
        return np.argsort(cost, kind="stable")[:MAX_RANKED]
    in_parts = cost[: len(cost) // _NUM_PARTS * _NUM_PARTS].reshape(-1, _NUM_PARTS)
    minima = in_parts.min(axis=0)
    minima.sort()
    candidates = (cost <= minima[MAX_RANKED - 1]).nonzero()[0]
    order = cost.take(candidates).argsort(kind="stable")
    best: np.ndarray = candidates.take(order[:MAX_RANKED])
    return best
