"""The cost of a request on each replica: the seconds that it costs everybody (DESIGN §5).

    cost = W + P + H + eta n P + Q(P, W + P) + delta D + E + M - V

    W  seconds of prefill queued before it: the report, less the time since, plus our bookings that
       the report cannot contain; and never less than what our own unanswered requests still need
    P  seconds to prefill what the replica does not hold, at its measured speed; H: to copy what it
       holds in host memory
    eta n P    the n requests in flight wait while the new prompt is prefilled
    Q          delay of later arrivals, below
    delta D    slow-down of decoding, below
    E          what its blocks push out of a full cache, by the chance that it were used again
    M          wait for KV memory to become free
    V          what one more copy of a prefix in demand will save its followers, below

The smallest cost wins. Hot prefixes so copy themselves, slow replicas price themselves out, and
without reuse what is left is a load balancer.

**Q.** In an M/G/1 queue a job of P seconds behind W delays those who arrive in what is left of the
busy period: lambda P (W + P) / (1 - rho). Behind a router they do not all arrive: while a replica is
busy, requests that are not bound to it go elsewhere, so that only a window of a few mean prefills
counts. With w = W + P and the window w0 = `window_prefills` times the mean prefill,

    Q = kappa lambda / (1 - rho) P w / (1 + w / w0)

With `kappa` = 2 that is, at w = w0, what the busy period alone would say.

**D.** A step reads the KV cache of every request that decodes. So all steps of this one, m in the mean,
are longer by the KV of those that decode along with it. That is foretold by its mean of the last half
minute, a few outputs long: what runs at this moment will have ended, and where conversations come back to,
they do so again. And the steps of the n requests that are there now are longer by this one's KV
for as long as they overlap: m / 2 steps in the mean, whatever the distribution S of the lengths. One that
is met on its way has more than k steps left with probability (1 / m) int_k^inf S, and the integral of that
times S(k) is m / 2. Those who come later choose for themselves. With b the seconds by which a token of KV
lengthens a step, and T the tokens of the prompt,

    D = m b (KV + n T / 2)

**V.** While k replicas hold a prefix, its followers wait for the best of k: about Wq / k, with the
Pollaczek-Khinchine wait Wq = lambda E[P^2] / (2 (1 - rho)). One more copy saves each of them
Wq / (k (k + 1)); `FleetView.followers` is their number of late, an estimate of how many are to come.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import numpy as np

from quire.router.policy.cost_terms import Prices, Terms, terms_of
from quire.router.policy.fleet_view import FleetView
from quire.router.policy.policy import Ranking, RouteRequest, ranked_rows

_MAX_SHARE = 0.95  # bounds 1 / (1 - rho)


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """The cost above; the defaults are the preset `slo`, for time-to-first-token objectives.

    Attributes
    ----------
    eta, kappa, delta, eviction, memory, copies
        Weights of the terms eta n P, Q, delta D, E, M and V. Where only the mean of all delays
        counts the derivation says 1, and of `kappa` 2.
    window_prefills
        See Q.
    reuse_s
        Typical time between two uses of a block, for E.
    stickiness
        A session's last replica is cheaper by this fraction of P: it decides among near equals.
    stale_after_s
        Of replicas with older reports only two, drawn at random, compete: or every router would send
        all it has to the one that looked idle last. Above the longest heartbeat interval.
    max_decay_s
        A reported queue is taken to shrink with time for at most so long: the longest heartbeat
        interval. Longer silence is no evidence of progress.
    speed_noise
        Speeds within this fraction of the median are taken as equal to it. A measured speed moves
        with the lengths of the prompts it was measured on; without this, the luckiest replica would
        get every request that finds the cluster idle.
    fallback_prefill_s_per_work
        Speed used while no replica has measured its own.
    tie_s
        Costs that differ by less are equal, and chance decides.
    """

    eta: float = 0.1
    kappa: float = 2.0
    delta: float = 0.75
    eviction: float = 1.0
    memory: float = 1.0
    copies: float = 1.0
    window_prefills: float = 3.0
    reuse_s: float = 120.0
    stickiness: float = 0.05
    stale_after_s: float = 1.5
    max_decay_s: float = 1.0
    speed_noise: float = 0.25
    fallback_prefill_s_per_work: float = 1e-4
    tie_s: float = 1e-6
    name: str = "slo"

    def __post_init__(self) -> None:
        for weight in fields(self):
            value = getattr(self, weight.name)
            if weight.name in ("window_prefills", "reuse_s", "fallback_prefill_s_per_work"):
                if value <= 0:
                    raise ValueError(f"{weight.name} must be > 0, got {value}")
            elif weight.name != "name" and value < 0:
                raise ValueError(f"{weight.name} must be >= 0, got {value}")

    def choose(
        self, request: RouteRequest, fleet: FleetView, now_s: float, rng: random.Random
    ) -> Ranking:
        if not len(fleet):
            return Ranking(self.name, fleet, (), np.empty(0))
        terms = terms_of(fleet, self._s_per_work(fleet), self._prices(request, fleet))
        cost = terms.total_s()
        if fleet.session_row >= 0:
            cost[fleet.session_row] -= self.stickiness * terms.prefill_s[fleet.session_row]
        self._put_stale_last(fleet, cost, rng)
        rows = ranked_rows(cost, rng, self.tie_s)
        return Ranking(
            self.name, fleet, rows.tolist(), cost, terms.wait_s, Terms._fields, terms.of_rows(rows)
        )

    def _prices(self, request: RouteRequest, fleet: FleetView) -> Prices:
        demand = fleet.demand
        busy = 1.0 - min(_MAX_SHARE, demand.prefill_share)
        is_awaited = demand.mean_prefill_s > 0
        queue_s = demand.arrivals_per_s * demand.mean_square_prefill_s2 / (2.0 * busy)
        window_s = self.window_prefills * demand.mean_prefill_s
        return Prices(
            prompt_tokens=request.num_prompt_tokens,
            max_decay_s=self.max_decay_s,
            interference=self.eta,
            later=self.kappa * demand.arrivals_per_s / busy if is_awaited else 0.0,
            later_per_window_s=1.0 / window_s if is_awaited else 0.0,
            decode_s_per_token=self.delta * demand.output_tokens * demand.decode_s_per_kv_token,
            reuse_s=self.reuse_s,
            eviction=self.eviction,
            memory=self.memory,
            output_s_per_token=demand.output_tokens * demand.decode_s_per_kv_token,
            copies_s=self.copies * fleet.followers * queue_s,
        )

    def _s_per_work(self, fleet: FleetView) -> np.ndarray:
        """[n] float64, seconds of a unit of prefill work; the prior where nothing else is measured."""
        prior = fleet.prior_s_per_work or self.fallback_prefill_s_per_work
        measured = fleet.prefill_s_per_work
        is_prior = np.abs(measured - prior) <= self.speed_noise * prior
        is_prior |= measured <= 0
        return np.where(is_prior, prior, measured)

    def _put_stale_last(self, fleet: FleetView, cost: np.ndarray, rng: random.Random) -> None:
        """Put all but two of the replicas with stale reports behind all others, in their order."""
        reports_s = fleet.report_s
        if fleet.now_s - reports_s[reports_s.argmin()] <= self.stale_after_s:
            return
        stale = (fleet.report_age_s > self.stale_after_s).nonzero()[0]
        if len(stale) > 2:
            out = np.delete(stale, rng.sample(range(len(stale)), 2))
            cost[out] += 1.0 + cost.max()


def e2e_policy(**weights: float) -> CostPolicy:
    """The preset `e2e`, for the time to the last token: others' delays and decoding count for more."""
    return CostPolicy(**({"eta": 0.3, "delta": 1.0, "name": "e2e"} | weights))
