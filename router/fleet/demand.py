"""Measures the demand: averages over the arriving requests, from this router's own decisions and the replicas' reports.

The averages are exponential, over `HORIZON_S`. A router that shares the fleet with other routers sees only its own
requests. So the averages are divided by `share`, this router's part of all requests in flight.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from quire.router.policy.fleet_view import Demand

HORIZON_S = 30.0
_MIN_SHARE = 1 / 64
_OUTPUT_WEIGHT = 0.01
# Reports of steps before the slope is used.
_MIN_STEPS = 32
_STEP_WEIGHT = 0.002


class DemandMeter:
    """Averages of one router's requests: arrivals, prefill seconds, outputs."""

    def __init__(self) -> None:
        self._arrivals = 0.0
        self._prefill_s = 0.0
        self._prefill_s2 = 0.0
        self._tokens = 0.0
        self._work = 0.0
        self._first_s: float | None = None
        self._last_s = 0.0
        self._share = 1.0
        self._output_tokens = 200.0
        self._slope = StepSlope()

    def on_decision(
        self, prefill_s: float, tokens: float, work: float, share: float, now_s: float
    ) -> None:
        """Count a request that was sent to a replica.

        Parameters
        ----------
        prefill_s, tokens, work
            Its predicted prefill: seconds, tokens, and work (tokens weighted by their attention, `prefill_work`).
        share
            This router's part of the fleet's requests in flight.
        """
        self._decay(now_s)
        self._arrivals += 1.0
        self._prefill_s += prefill_s
        self._prefill_s2 += prefill_s * prefill_s
        self._tokens += tokens
        self._work += work
        self._share += _OUTPUT_WEIGHT * (share - self._share)

    def on_output(self, num_tokens: int) -> None:
        """Count a request that ended after `num_tokens` tokens."""
        self._output_tokens += _OUTPUT_WEIGHT * (num_tokens - self._output_tokens)

    def on_step(self, kv_tokens: int, step_s: float) -> None:
        """Add a replica's report of a decode step: its duration and the KV tokens that it read."""
        self._slope.add(kv_tokens, step_s)

    @property
    def work_per_token(self) -> float:
        return self._work / self._tokens if self._tokens > 0 else 1.0

    def demand(self, num_replicas: int, now_s: float) -> Demand:
        """Return the averages at `now_s`; rates are per replica."""
        if self._first_s is None:
            return Demand(
                output_tokens=self._output_tokens, decode_s_per_kv_token=self._slope.s_per_token
            )
        keep = math.exp((self._last_s - now_s) / HORIZON_S)
        seen_s = max(1.0, HORIZON_S * (1.0 - math.exp((self._first_s - now_s) / HORIZON_S)))
        per_replica = keep / (seen_s * num_replicas * max(self._share, _MIN_SHARE))
        arrivals = max(self._arrivals, 1e-9)
        return Demand(
            arrivals_per_s=self._arrivals * per_replica,
            prefill_share=min(0.99, self._prefill_s * per_replica),
            mean_prefill_s=self._prefill_s / arrivals,
            mean_square_prefill_s2=self._prefill_s2 / arrivals,
            output_tokens=self._output_tokens,
            decode_s_per_kv_token=self._slope.s_per_token,
        )

    def _decay(self, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = self._last_s = now_s
        keep = math.exp((self._last_s - now_s) / HORIZON_S)
        self._last_s = now_s
        self._arrivals *= keep
        self._prefill_s *= keep
        self._prefill_s2 *= keep
        self._tokens *= keep
        self._work *= keep


class StepSlope:
    """Least-squares line of decode step time over KV tokens, with exponential forgetting.

    The slope is the time that one more KV token adds to a step. `s_per_token` is three standard errors below the
    estimated slope: otherwise, after a few noisy steps of an idle cluster, one more KV token could seem to cost more
    than the prefill of a whole prompt on another replica. It is at most the slope of a line through 0, since a step
    with an empty cache takes time too.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        # Running means, and variances and covariance around them.
        self._x = self._y = self._xx = self._xy = self._yy = 0.0
        # None: must be computed, since a step was added.
        self._s_per_token: float | None = 0.0

    def add(self, kv_tokens: float, step_s: float) -> None:
        if step_s <= 0 or kv_tokens <= 0:
            return
        self._s_per_token = None
        self._weight += 1.0 if self._weight < 1 / _STEP_WEIGHT else 0.0
        part = 1.0 / self._weight
        x, y = kv_tokens - self._x, step_s - self._y
        self._x += part * x
        self._y += part * y
        self._xx += part * (x * (kv_tokens - self._x) - self._xx)
        self._xy += part * (x * (step_s - self._y) - self._xy)
        self._yy += part * (y * (step_s - self._y) - self._yy)

    @property
    def s_per_token(self) -> float:
        # Computed when read, because decisions read it less often than frames add to it.
        if self._s_per_token is None:
            self._s_per_token = self._proven()
        return self._s_per_token

    def _proven(self) -> float:
        if self._weight < _MIN_STEPS or self._xx <= 0.01 * self._x * self._x:
            return 0.0
        slope = self._xy / self._xx
        unexplained = max(0.0, self._yy - slope * self._xy)
        error = math.sqrt(unexplained / (self._xx * (self._weight - 2)))
        return min(max(0.0, slope - 3 * error), self._y / self._x)


class Followers:
    """Counts recent requests by prefix, identified by its last routing hash. The least recently used are dropped."""

    def __init__(self, horizon_s: float = 60.0, max_prefixes: int = 65_536):
        self._horizon_s = horizon_s
        self._max_prefixes = max_prefixes
        # Hash -> (weighted count, its time).
        self._seen: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def count(self, prefix: int, now_s: float) -> float:
        """Return the number of requests with this prefix in the last `horizon_s`, exponentially weighted, less one."""
        count, then_s = self._seen.get(prefix, (0.0, now_s))
        return max(0.0, count * math.exp((then_s - now_s) / self._horizon_s) - 1.0)

    def add(self, prefix: int, now_s: float) -> None:
        count, then_s = self._seen.pop(prefix, (0.0, now_s))
        self._seen[prefix] = (count * math.exp((then_s - now_s) / self._horizon_s) + 1.0, now_s)
        if len(self._seen) > self._max_prefixes:
            self._seen.popitem(last=False)
