"""Where a request goes: pure functions from what is known of the replicas to a ranking of them.

A policy sees the request, a `FleetView` (`router/policy/fleet_view.py`), the time and a random generator. To add one,
write a class with the method of `Policy` in a module of its own and give it a name in `router/policy/by_name.py`;
`router/policy/baselines.py` has short ones. `router/policy/cost.py` is the default.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from quire.router.policy.fleet_view import FleetView

# Replicas that a ranking names: the choice and its fall-backs.
MAX_RANKED = 16
# Parts of a fleet whose minima bound the costs that can be ranked.
_NUM_PARTS = 64


class RouteRequest(NamedTuple):
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


@dataclass(slots=True, eq=False)
class Ranking(Sequence[Score]):
    """Replicas from best to worst, at most `MAX_RANKED`; empty when there was none to choose from.

    Attributes
    ----------
    rows
        [ranked] rows of `fleet`, best first.
    cost_s
        [n] what was compared; like all that follows, an array of its own: a decision is asked about long
        after the fleet's columns have changed (`router/explain/decisions.py`).
    wait_s
        [n] seconds of prefill queued before the request; None: the policy does not price it.
    term_names, terms
        What the cost of `rows` is made of, in the order in which it is explained, [ranked, terms] seconds; None: of
        nothing else.
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
        return Score(
            self.fleet.replicas[row],
            float(self.cost_s[row]),
            {} if terms is None else dict(zip(self.term_names, terms[rank].tolist(), strict=True)),
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
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
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


def ranked_rows(cost: np.ndarray, rng: random.Random, tie: float = 0.0) -> np.ndarray:
    """[ranked] rows by cost, smallest first; one of those within `tie` of the best comes first."""
    best = _smallest(cost)
    if len(best) <= 1:
        return best
    costs = cost.take(best).tolist()
    bound = costs[0] + tie
    if costs[1] > bound:
        return best
    rows = best.tolist()  # chance decides
    if costs[-1] <= bound:
        ties = (cost <= bound).nonzero()[0].tolist()  # perhaps more than are ranked
    else:
        ties = sorted(rows[: bisect.bisect_right(costs, bound)])
    first = ties[rng.randrange(len(ties))]
    return np.array([first, *(row for row in rows if row != first)][:MAX_RANKED])


def rank(policy: str, fleet: FleetView, cost: np.ndarray, rng: random.Random) -> Ranking:
    """Rank rows by a cost of one part."""
    return Ranking(policy, fleet, ranked_rows(cost, rng).tolist(), cost)


def _smallest(cost: np.ndarray) -> np.ndarray:
    """[ranked] rows of the `MAX_RANKED` smallest, smallest first; equal ones in their order.

    numpy's partition takes ten times as long on a thousand costs. Each part of the fleet has a cost that is at most the
    part's minimum, so the `MAX_RANKED` smallest of the minima bound those of all.
    """
    if len(cost) <= _NUM_PARTS:
        return cost.argsort(kind="stable")[:MAX_RANKED]
    in_parts = cost[: len(cost) // _NUM_PARTS * _NUM_PARTS].reshape(-1, _NUM_PARTS)
    minima = in_parts.min(axis=0)
    minima.sort()
    candidates = (cost <= minima[MAX_RANKED - 1]).nonzero()[0]
    order = cost.take(candidates).argsort(kind="stable")
    return candidates.take(order[:MAX_RANKED])
