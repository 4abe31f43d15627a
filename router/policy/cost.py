"""The cost of a request on each replica: the seconds by which it delays itself and all other requests together.

    cost = W + P + H + C + S + A + eta n P + Q(P, W + P) + delta D + E + M - V

    W        wait for the prefill queued before the request: the queue of the replica's last report, less the time
             since the report, plus our requests sent too late for the report to contain them. At least the prefill
             that our own requests without a first token still need
    P        prefill of the prompt tokens that the replica does not hold, at its measured speed
    H        copy of the prompt tokens that it holds in host memory only
    C        copy of the prompt tokens that a replica of another node holds, at the speed of earlier copies, where that
             takes less time than the prefill of these tokens. P is then the prefill of the rest
    S        hand-over of the stream after its first token, on replicas that only compute prompts, below
    A        wait for the request's adapter, below
    eta n P  wait of the n requests in flight while the new prompt is prefilled
    Q        delay of later arrivals, below
    delta D  slow-down of decoding, below
    E        prefill that the blocks evicted from a full cache for this request would have saved, weighted by the
             chance that they would have been used again
    M        wait for KV memory to become free
    V        time that one more copy of a prefix saves its followers (later requests with this prefix), below

The replica with the smallest cost gets the request. So prefixes of many requests are copied to further replicas, slow
replicas get few requests, and without shared prefixes the policy is a load balancer.

**Q.** In an M/G/1 queue with arrival rate lambda and load rho, a job of P seconds behind W seconds of work delays all
later arrivals of the busy period, by lambda P (W + P) / (1 - rho) in total. Behind a router fewer requests arrive:
while a replica is busy, requests without a prefix there go to other replicas. So only arrivals within a window of a few
mean prefills count. With w = W + P and the window w0 = `window_prefills` times the mean prefill,

    Q = kappa lambda / (1 - rho) P w / (1 + w / w0)

With `kappa` = 2, Q at w = w0 equals the delay of the busy period alone.

**D.** A step reads the KV cache of every decoding request. So each step of this request, m steps in the mean, takes
longer by the KV of the requests that decode at the same time. Their predicted KV is the mean of the last half minute,
a few outputs long: the requests that decode now will have ended, and a replica that conversations return to keeps
getting them. In the other direction, the steps of the n requests in flight take longer by this request's KV while they
overlap with it: m / 2 steps in the mean, for every distribution S of the lengths. A request met at a random step has
more than k steps left with probability (1 / m) int_k^inf S, and the integral of that times S(k) is m / 2. Later
requests choose a replica by its load at that time. With b the seconds by which one KV token lengthens a step, and T the
tokens of the prompt,

    D = m b (KV + n T / 2)

**V.** While k replicas hold a prefix, its followers wait for the best of k: about Wq / k, with the
Pollaczek-Khinchine wait Wq = lambda E[P^2] / (2 (1 - rho)). One more copy saves each follower Wq / (k (k + 1)).
`FleetView.followers` is the number of recent requests with the prefix, an estimate of the number to come.

**S.** With the preset `disaggregated` some replicas only compute prompts (`router/fleet/prefill_pool.py`). The requests
there wait for their own prefill or leave, so eta n P is 0. In return the stream moves to another replica after its
first token: with the s seconds per token to copy KV there, and the U tokens of the prompt that no such replica holds,

    S = hand-over + U s

D is then that of the best replica that decodes. So a long prompt goes to a prefill replica while many streams decode
elsewhere and its queue is short; a short prompt, one with a hit, and one that meets few streams do not. A request that
a replica has had before goes to a prefill replica only if there is no other.

**A.** A request with an adapter starts when the adapter is in a slot of the device's memory. Where it is there already,
A is 0. Else it is copied there from host memory, after it was read from its folder if it is not in host memory. While
running requests use all n slots, the next slot becomes free in the mean after an n-th of an output's m steps:

    A = read + load + m step / n

So the requests with an adapter go to a replica that has it, until its queue is longer than A is elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from quire.router.policy.cost_terms import Prices, Terms, terms_of
from quire.router.policy.fleet_view import FleetView
from quire.router.policy.policy import Ranking, RouteRequest, ranked_rows

# Upper bound of rho, which bounds 1 / (1 - rho).
_MAX_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """The policy that chooses the smallest cost. The defaults are the preset `slo`, for the time to the first token.

    Attributes
    ----------
    eta, kappa, delta, eviction, memory, copies
        Weights of the terms eta n P, Q, delta D, E, M and V. The derivation above minimizes the mean of all delays with
        weights of 1, and 2 for `kappa`.
    window_prefills
        Length of the window w0, in mean prefills.
    reuse_s
        Mean time between two uses of a block, for E.
    stickiness
        The cost of the session's last replica is reduced by this fraction of its P. It decides between nearly equal
        costs.
    stale_after_s
        Age above which a report is stale; longer than the longest heartbeat interval. Of the replicas with stale
        reports, only two random ones compete. Otherwise all routers would send all requests to one replica, the one
        with the shortest queue in its last report.
    max_decay_s
        W subtracts at most this time from the reported queue; the longest heartbeat interval. After a longer silence
        the replica may have made no progress.
    speed_noise
        A speed that differs from the median by at most this fraction counts as equal to it. A measured speed also
        depends on the lengths of the prompts, so small differences mean nothing; without this, one replica would get
        every request that arrives at an idle cluster.
    fallback_prefill_s_per_work
        Seconds per unit of prefill work (`prefill_work`) while no replica has reported a measured speed.
    tie_s
        Difference below which two costs are equal; the choice between them is random.
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
        if fleet.prefill is not None and request.is_continued:
            _put_last(fleet.prefill.is_prefill, cost)
        if fleet.session_row >= 0:
            cost[fleet.session_row] -= self.stickiness * terms.prefill_s[fleet.session_row]
        self._put_stale_last(fleet, cost, rng)
        rows = ranked_rows(cost, rng, self.tie_s)
        return Ranking(
            policy=self.name,
            fleet=fleet,
            rows=rows.tolist(),
            cost_s=cost,
            wait_s=terms.wait_s,
            term_names=Terms._fields,
            terms=terms.of_rows(rows),
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
        """Return [n] float64 seconds of a unit of prefill work; the prior where no speed is known or it is close."""
        prior = fleet.prior_s_per_work or self.fallback_prefill_s_per_work
        measured = fleet.prefill_s_per_work
        is_prior = np.abs(measured - prior) <= self.speed_noise * prior
        is_prior |= measured <= 0
        return np.where(is_prior, prior, measured)

    def _put_stale_last(self, fleet: FleetView, cost: np.ndarray, rng: random.Random) -> None:
        """Raise the costs of all but two replicas with stale reports above all others, keeping their order."""
        reports_s = fleet.columns.report_s
        if fleet.now_s - reports_s[reports_s.argmin()] <= self.stale_after_s:
            return
        stale = (fleet.report_age_s > self.stale_after_s).nonzero()[0]
        if len(stale) > 2:
            _put_last(np.delete(stale, rng.sample(range(len(stale)), 2)), cost)


def _put_last(rows: np.ndarray, cost: np.ndarray) -> None:
    """Raise the costs of these rows above all others, keeping their order."""
    cost[rows] += 1.0 + cost.max()


def e2e_policy(**weights: Any) -> CostPolicy:
    """Return the preset `e2e`, for the time to the last token: delays of other requests and of decoding weigh more."""
    preset: dict[str, Any] = {"eta": 0.3, "delta": 1.0, "name": "e2e"}
    return CostPolicy(**preset | weights)


def disaggregated_policy(**weights: Any) -> CostPolicy:
    """Return the preset `disaggregated`: the delay of streams that decode weighs as much as the request's own."""
    preset: dict[str, Any] = {"eta": 1.0, "name": "disaggregated"}
    return CostPolicy(**preset | weights)
