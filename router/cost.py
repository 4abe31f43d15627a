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
Wq / (k (k + 1)); `Fleet.followers` is their number of late, an estimate of how many are to come.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields

import numpy as np

from quire.router.fleet import Fleet, prefill_work
from quire.router.policy import Ranking, RouteRequest, rank

_TERMS = (
    "wait_s",
    "prefill_s",
    "host_copy_s",
    "interference_s",
    "later_s",
    "decode_s",
    "eviction_s",
    "memory_s",
    "copy_value_s",
)
_MAX_SHARE = 0.95  # bounds 1 / (1 - rho)
_HEAD_DONE = 0.9  # an unanswered request is not prefilled yet, however long it has been the head


@dataclass(slots=True)
class _LastSpeeds:
    """What `CostPolicy._speeds` said last. It depends on the reports alone, and they change it a few times a second."""

    measured: np.ndarray | None = None  # [n] float64, read-only: the same array is the same values
    prior: float = 0.0
    speeds: np.ndarray | None = None  # [n] float64


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
    _believed: _LastSpeeds = field(
        default_factory=_LastSpeeds, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for weight in fields(self):
            if not weight.init:
                continue
            value = getattr(self, weight.name)
            if weight.name in ("window_prefills", "reuse_s", "fallback_prefill_s_per_work"):
                if value <= 0:
                    raise ValueError(f"{weight.name} must be > 0, got {value}")
            elif weight.name != "name" and value < 0:
                raise ValueError(f"{weight.name} must be >= 0, got {value}")

    def choose(
        self, request: RouteRequest, replicas: Fleet, now_s: float, rng: random.Random
    ) -> Ranking:
        fleet = replicas
        if not len(fleet):
            return Ranking(self.name, fleet, (), np.empty(0))
        # [n] float64, all that follow
        nothing = np.zeros(len(fleet))  # what a term is that no replica has; it is not added
        speed = self._speeds(fleet)  # seconds of a unit of work
        host_copy, cached = nothing, fleet.gpu_tokens
        if _largest(fleet.host_tokens) > 0:
            cached = cached + fleet.host_tokens
            host_copy = fleet.host_tokens * fleet.host_copy_s_per_token
        missing = request.num_prompt_tokens - cached
        prefill = prefill_work(missing, cached, fleet.attention_context_tokens)
        prefill *= speed
        wait = self._wait(fleet, speed)
        cost = wait + prefill
        interference = self.eta * prefill
        interference *= fleet.num_requests
        later = (
            host_copy,
            interference,
            self._later(fleet, cost, prefill, nothing),
            self._decode(fleet, request, nothing),
            self._eviction(fleet, missing, speed, nothing),
            self._memory(fleet, missing, nothing),
            self._copy_value(fleet, cached, nothing),
        )
        for term in later:
            if term is not nothing:
                cost += term
        if fleet.session_row >= 0:
            cost[fleet.session_row] -= self.stickiness * prefill[fleet.session_row]
        if _largest(fleet.report_age_s) > self.stale_after_s:
            stale = (fleet.report_age_s > self.stale_after_s).nonzero()[0]
            if len(stale) > 2:
                out = np.delete(stale, rng.sample(range(len(stale)), 2))
                cost[out] += 1.0 + cost.max()  # behind all others, in their order
        terms = dict(zip(_TERMS, (wait, prefill, *later), strict=True))
        return rank(self.name, fleet, cost, rng, self.tie_s, terms)

    def _speeds(self, fleet: Fleet) -> np.ndarray:
        """[n] seconds of a unit of work; who has not measured its own has what the others show."""
        prior = fleet.prior_s_per_work or self.fallback_prefill_s_per_work
        measured, last = fleet.prefill_s_per_work, self._believed
        if measured is last.measured and prior == last.prior:
            return last.speeds
        noise = np.abs(measured - prior) <= self.speed_noise * prior
        noise |= measured <= 0
        speeds = np.where(noise, prior, measured)
        if not measured.flags.writeable:  # the next decisions have the same
            last.measured, last.prior, last.speeds = measured, prior, speeds
        return speeds

    def _wait(self, fleet: Fleet, speed: np.ndarray) -> np.ndarray:
        """W: what is still queued, by the report and by our own unanswered requests."""
        reported = fleet.reported_work * speed
        reported -= np.minimum(fleet.report_age_s, self.max_decay_s)
        np.maximum(reported, 0.0, out=reported)
        reported += fleet.booked_work * speed
        # One prompt after the other is prefilled, mostly in their order: only the oldest can be partly done.
        head_done = fleet.head_work * speed
        head_done *= _HEAD_DONE
        np.minimum(head_done, fleet.head_age_s, out=head_done)
        ours = fleet.unanswered_work * speed
        ours -= head_done
        return np.maximum(reported, ours, out=ours)

    def _later(
        self, fleet: Fleet, window: np.ndarray, prefill: np.ndarray, nothing: np.ndarray
    ) -> np.ndarray:
        """Q: delay of those who arrive later, behind a window of W + P."""
        demand = fleet.demand
        if demand.mean_prefill_s <= 0:
            return nothing
        price = self.kappa * demand.arrivals_per_s / (1.0 - min(_MAX_SHARE, demand.prefill_share))
        bounded = window * (1.0 / (self.window_prefills * demand.mean_prefill_s))
        bounded += 1.0
        np.divide(window, bounded, out=bounded)
        bounded *= prefill
        bounded *= price
        return bounded

    def _decode(self, fleet: Fleet, request: RouteRequest, nothing: np.ndarray) -> np.ndarray:
        """delta D: this request's steps read the others' KV, and theirs read its own."""
        demand = fleet.demand
        seconds = self.delta * demand.output_tokens * demand.decode_s_per_kv_token
        if not seconds:
            return nothing
        read = fleet.num_requests * (0.5 * request.num_prompt_tokens)
        read += fleet.mean_kv_tokens
        read *= seconds
        return read

    def _eviction(
        self, fleet: Fleet, missing: np.ndarray, speed: np.ndarray, nothing: np.ndarray
    ) -> np.ndarray:
        """E: as much cache as the request adds goes, and would be computed again when reused."""
        age_s = fleet.cache_age_s
        if age_s[age_s.argmin()] == math.inf:
            return nothing
        reuse = age_s * (-1.0 / self.reuse_s)
        np.exp(reuse, out=reuse)  # the chance of it
        reuse *= missing * speed
        reuse *= self.eviction
        return reuse

    def _memory(self, fleet: Fleet, missing: np.ndarray, nothing: np.ndarray) -> np.ndarray:
        """M: running requests give their memory back over the time of one output."""
        short = missing - fleet.free_tokens
        if _largest(short) <= 0:
            return nothing
        np.maximum(short, 0.0, out=short)
        demand = fleet.demand
        output_s = demand.output_tokens * demand.decode_s_per_kv_token * fleet.kv_tokens
        return self.memory * short / np.maximum(fleet.used_tokens, 1.0) * output_s

    def _copy_value(self, fleet: Fleet, cached: np.ndarray, nothing: np.ndarray) -> np.ndarray:
        """-V: replicas that do not hold the longest prefix of it that anybody holds."""
        if fleet.followers <= 0:
            return nothing
        longest = _largest(cached)
        if longest <= 0:
            return nothing
        demand = fleet.demand
        k = np.count_nonzero(cached == longest)
        busy = 1.0 - min(_MAX_SHARE, demand.prefill_share)
        queue_s = demand.arrivals_per_s * demand.mean_square_prefill_s2 / (2.0 * busy)
        saved_s = self.copies * fleet.followers * queue_s / (k * (k + 1))
        return (cached - longest) * (saved_s / longest)


def _largest(values: np.ndarray) -> float:
    """Its maximum, not empty: a third of the time of `max`, which sets up a reduction."""
    return float(values[values.argmax()])


def e2e_policy(**weights: float) -> CostPolicy:
    """The preset `e2e`, for the time to the last token: others' delays and decoding count for more."""
    return CostPolicy(**({"eta": 0.3, "delta": 1.0, "name": "e2e"} | weights))
