"""Where a request goes: pure functions from what is known of the replicas to a ranking of them.

A policy sees the request, a `Fleet` (one row for each replica that can take it, in columns, so that a
thousand replicas are a few array operations) and the time. It owns no state but a counter and a
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

MAX_RANKED = 16  # replicas that a ranking names: the choice and its fall-backs


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request."""

    num_prompt_tokens: int
    session: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives at the fleet, as exponential averages (`router/demand.py`)."""

    arrivals_per_s: float = 0.0  # at each replica
    prefill_share: float = 0.0  # [0, 1) of a replica's time that prefill takes
    mean_prefill_s: float = 0.0
    mean_square_prefill_s2: float = 0.0
    output_tokens: float = 200.0  # of one request
    # Seconds by which one more token in the KV cache of the decoding requests lengthens a step.
    decode_s_per_kv_token: float = 0.0


@dataclass(slots=True)
class Fleet:
    """What a policy may know of the replicas that can take a request: one row for each.

    *Work* counts prefill tokens, weighted by the attention to what precedes them: a token at context c
    is 1 + c / `attention_context_tokens` of work (`prefill_work`).
    """

    replicas: Sequence[str]  # [n]
    gpu_tokens: np.ndarray  # [n] float64, prompt tokens that it holds or will hold on its device
    host_tokens: np.ndarray  # [n] float64, further ones that it holds in host memory
    report_age_s: np.ndarray  # [n] float64, inf: it has never reported
    reported_work: np.ndarray  # [n] float64, queued by its last report
    booked_work: np.ndarray  # [n] float64, of our own requests that the report cannot contain
    unanswered_work: np.ndarray  # [n] float64, of all our own requests without a first token
    head_work: np.ndarray  # [n] float64, of the oldest of those
    head_age_s: np.ndarray  # [n] float64, for how long it has been the oldest
    num_requests: (
        np.ndarray
    )  # [n] float64, in flight: running and waiting by the report, and booked
    kv_tokens: np.ndarray  # [n] float64, of the decoding requests, with our own unanswered ones
    mean_kv_tokens: np.ndarray  # [n] float64, of the decoding ones, mean of the last half minute
    prefill_s_per_work: np.ndarray  # [n] float64, measured and still believed; 0: not yet known
    host_copy_s_per_token: np.ndarray  # [n] float64, from host memory to the device
    cache_age_s: np.ndarray  # [n] float64, for how long a block stays cached; inf: nothing evicted
    free_tokens: np.ndarray  # [n] float64, of KV memory, evictable ones included; inf: not known
    used_tokens: np.ndarray  # [n] float64, of KV memory of running requests
    num_waiting: np.ndarray  # [n] float64, requests that wait there for a place, by the last report
    num_places: (
        np.ndarray
    )  # [n] float64, further requests of ours until it refuses one; inf: no bound
    prior_s_per_work: float = 0.0  # median of those that are known; 0: none is
    demand: Demand = field(default_factory=Demand)
    attention_context_tokens: float = 30_000.0
    longest_prefix: int | None = None  # hash of the longest prefix of this prompt that is held
    followers: float = 0.0  # requests of late with that prefix
    session_row: int = -1  # where the session's last request went

    def __len__(self) -> int:
        return len(self.replicas)


def prefill_work(
    num_tokens: np.ndarray | float, context: np.ndarray | float, attention_context_tokens: float
) -> np.ndarray | float:
    """Work of prefilling tokens after a context: sum of 1 + c / A over their positions c."""
    return num_tokens * (1.0 + (context + num_tokens * 0.5) * (1.0 / attention_context_tokens))


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
