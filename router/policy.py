"""Where a request goes: pure functions from what is known of the replicas to a ranking of them.

A policy sees the request, a `Fleet` (`router/fleet.py`) and the time. It owns no state but a counter and a
generator. `router/cost.py` holds the one to use; the plain ones here are what others do, for
comparison.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from quire.router.fleet import Fleet

MAX_RANKED = 16  # replicas that a ranking names: the choice and its fall-backs


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request."""

    num_prompt_tokens: int
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """One replica's cost, with its terms, all in seconds but the last two."""

    replica: str
    cost_s: float
    terms: dict[str, float]
    cached_tokens: int  # prompt tokens predicted to be found on the device
    host_tokens: int = 0  # further ones, predicted to be found in host memory

    @property
    def wait_s(self) -> float:
        """Prefill queued before the request; 0 for a policy that does not price it."""
        return self.terms.get("wait_s", 0.0)

    @property
    def prefill_s(self) -> float:
        return self.terms.get("prefill_s", 0.0)


@dataclass(frozen=True, slots=True)
class Ranking(Sequence[Score]):
    """Replicas from best to worst, at most `MAX_RANKED`; empty when there was none to choose from.

    Attributes
    ----------
    rows
        [ranked] rows of `fleet`, best first.
    cost_s
        [n] what was compared; like the terms, arrays of their own: a decision is asked about long
        after the fleet's columns have changed (`router/decisions.py`).
    terms
        Name -> [n], in the order in which they are explained.
    """

    policy: str
    fleet: Fleet
    rows: Sequence[int]
    cost_s: np.ndarray
    terms: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rank: int) -> Score:
        row = self.rows[rank]
        return Score(
            self.fleet.replicas[row],
            float(self.cost_s[row]),
            {name: float(values[row]) for name, values in self.terms.items()},
            int(self.fleet.gpu_tokens[row]),
            int(self.fleet.host_tokens[row]),
        )

    def __iter__(self) -> Iterator[Score]:
        return (self[rank] for rank in range(len(self.rows)))

    def names(self) -> list[str]:
        """The replicas, best first."""
        replicas = self.fleet.replicas
        return [replicas[row] for row in self.rows]


class Policy(Protocol):
    """The plug-in interface: one method."""

    def choose(
        self, request: RouteRequest, replicas: Fleet, now_s: float, rng: random.Random
    ) -> Ranking:
        """Rank the replicas for a request.

        Parameters
        ----------
        now_s
            The router's clock, the one that the fleet's ages were taken at.
        rng
            Breaks ties and draws samples, so that a seed gives the same choices again.
        """
        ...


def rank(
    policy: str,
    fleet: Fleet,
    cost: np.ndarray,
    rng: random.Random,
    tie: float = 0.0,
    terms: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Ranking:
    """Rank rows by cost, smallest first; one of those within `tie` of the best comes first."""
    n = len(cost)
    if n <= 1:
        return Ranking(policy, fleet, range(n), cost, terms)
    if n > MAX_RANKED:
        best = cost.argpartition(MAX_RANKED)[:MAX_RANKED]
        costs = cost.take(best)
        order = costs.argsort(kind="stable")
        best, costs = best.take(order), costs.take(order).tolist()
    else:
        best = cost.argsort(kind="stable")
        costs = cost.take(best).tolist()
    rows, bound = best.tolist(), costs[0] + tie
    if costs[1] <= bound:  # chance decides
        if costs[-1] <= bound:
            ties = (cost <= bound).nonzero()[0].tolist()  # perhaps more than are ranked
        else:
            ties = sorted(rows[: bisect.bisect_right(costs, bound)])
        first = ties[rng.randrange(len(ties))]
        rows = [first, *(row for row in rows if row != first)][:MAX_RANKED]
    return Ranking(policy, fleet, rows, cost, terms)


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, request: RouteRequest, replicas: Fleet, now_s: float, rng: random.Random
    ) -> Ranking:
        n = len(replicas)
        cost = (np.arange(n, dtype=np.float64) - self._turn) % max(n, 1)
        self._turn += 1
        return rank("round_robin", replicas, cost, rng)


class LeastLoaded:
    """Fewest requests in flight."""

    def choose(
        self, request: RouteRequest, replicas: Fleet, now_s: float, rng: random.Random
    ) -> Ranking:
        return rank("least_loaded", replicas, replicas.num_requests.copy(), rng)


class PowerOfTwo:
    """The less loaded of two at random (Mitzenmacher 2001), which is Ray Serve's own rule."""

    def choose(
        self, request: RouteRequest, replicas: Fleet, now_s: float, rng: random.Random
    ) -> Ranking:
        n = len(replicas)
        if n <= 2:
            return rank("power_of_two", replicas, replicas.num_requests.copy(), rng)
        drawn = rng.sample(range(n), 2)
        # The rest are fall-backs for when both refuse.
        cost = replicas.num_requests + (1.0 + replicas.num_requests.max())
        cost[drawn] = replicas.num_requests[drawn]
        return rank("power_of_two", replicas, cost, rng)


class PrefixAffinity:
    """The longest prefix held on the device, whatever the load; among equals the least loaded."""

    def choose(
        self, request: RouteRequest, replicas: Fleet, now_s: float, rng: random.Random
    ) -> Ranking:
        held = replicas.gpu_tokens
        below_a_token = 1.0 + (replicas.num_requests.max() if len(replicas) else 0.0)
        cost = replicas.num_requests / below_a_token - held
        return rank("prefix_affinity", replicas, cost, rng)


def make_policy(name: str, **weights: Any) -> Policy:
    """The policy of a name, with its weights.

    Raises
    ------
    ValueError
        No policy has the name, or it has no such weight.
    """
    from quire.router import cost  # it needs the types above

    makers: Mapping[str, Callable[..., Policy]] = MappingProxyType(
        {
            "slo": cost.CostPolicy,
            "e2e": cost.e2e_policy,
            "round_robin": RoundRobin,
            "least_loaded": LeastLoaded,
            "power_of_two": PowerOfTwo,
            "prefix_affinity": PrefixAffinity,
        }
    )
    if name not in makers:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}, got {name!r}")
    try:
        return makers[name](**weights)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {error}") from error


POLICY_NAMES = ("slo", "e2e", "round_robin", "least_loaded", "power_of_two", "prefix_affinity")
