"""Estimates how fast each replica prefills, from its reports, and weights old measurements less.

A report measures the speed at its time. If the replica prefilled next to many decoding requests, or on a CPU core
shared with another replica, it took longer than it would now. In an idle cluster, a replica that seems slow gets no
further requests, so its measurement would never be corrected. Therefore a measurement moves towards the median of all
replicas as it ages:

    seconds per work = prior * (measured / prior) ** w        w = exp(-age / horizon)
    prior            = median of the measured speeds, each with weight w
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

# Time between two computations of the speeds that policies see.
_PERIOD_S = 0.2
# Largest weight of one report that is slower than the average.
_MAX_SLOWER_WEIGHT = 0.5
# Horizon of the average over reports; a measurement of this age has weight 1/e.
HORIZON_S = 30.0


class MeasuredSpeed:
    """One replica's prefill speed: seconds per unit of prefill work (`fleet_view.prefill_work`).

    Attributes
    ----------
    s_per_work
        Average over `HORIZON_S`, a time of many prompts; 0: not yet known.
    measured_s
        Time of the last report that contained a new prefill; -inf: none has.
    """

    __slots__ = ("_reported", "_tokens", "_work", "measured_s", "s_per_work")

    def __init__(self) -> None:
        self.s_per_work = 0.0
        self.measured_s = -math.inf
        # The last reported value, seconds per token.
        self._reported = 0.0
        # Prefill tokens and work of our requests that the replica answered recently. The ratio converts the reported
        # seconds per token to seconds per work.
        self._tokens = 0.0
        self._work = 0.0

    def answered(self, num_tokens: int, work: float) -> None:
        """Count the prefill of a request of ours when it gets its first token."""
        self._tokens += num_tokens
        self._work += work

    def take(self, s_per_token: float, now_s: float) -> None:
        """Take in a report that arrived at `now_s`. Each prefill changes the value, so an equal value is not new."""
        if s_per_token <= 0 or s_per_token == self._reported:
            return
        if not self.s_per_work:
            self.measured_s = now_s
        keep = math.exp((self.measured_s - now_s) / HORIZON_S)
        work_per_token = self._work / self._tokens if self._tokens else 1.0
        speed = s_per_token / work_per_token
        # Other work on the machine can make a prefill slower, but nothing makes it faster than the replica is. So one
        # slow report may be an accident, and in an idle cluster the replica would get no second prompt to correct it.
        if speed > self.s_per_work > 0:
            keep = max(keep, 1.0 - _MAX_SLOWER_WEIGHT)
        # A much faster report shows that the average was too slow, so the average counts less.
        elif self.s_per_work:
            keep = min(keep, speed / self.s_per_work)
        self.s_per_work = keep * (self.s_per_work or speed) + (1.0 - keep) * speed
        self._reported, self.measured_s = s_per_token, now_s
        self._tokens *= keep
        self._work *= keep


class FleetSpeeds:
    """The speeds of all replicas as policies use them, computed every `_PERIOD_S`.

    Attributes
    ----------
    s_per_work
        [rows] float64, read-only, a new array at each update; 0: not yet known.
    prior_s_per_work
        Median of the known speeds; 0: none is known.
    """

    def __init__(self) -> None:
        self.s_per_work = np.zeros(0)
        self.prior_s_per_work = 0.0
        self._stale_s = -math.inf

    def expire(self) -> None:
        """Make `is_stale` return True. Call it when the replicas' rows have changed."""
        self._stale_s = -math.inf

    def is_stale(self, now_s: float) -> bool:
        return now_s >= self._stale_s

    def update(self, measured: Iterable[MeasuredSpeed], now_s: float) -> None:
        """Compute the speeds from the measurements of the replicas, in the order of their rows."""
        speeds = np.array([(speed.s_per_work, speed.measured_s) for speed in measured])
        s_per_work, measured_s = speeds.reshape(-1, 2).T
        self.s_per_work, self.prior_s_per_work = believed(s_per_work, now_s - measured_s)
        self.s_per_work.setflags(write=False)
        # While no speed is known, compute at each decision, because the first report may have arrived.
        self._stale_s = now_s + (_PERIOD_S if self.prior_s_per_work else 0.0)


def believed(s_per_work: np.ndarray, age_s: np.ndarray) -> tuple[np.ndarray, float]:
    """Move measured speeds towards their median, older ones more.

    Parameters
    ----------
    s_per_work, age_s
        [n] float64: the measured speeds, 0 where not known; and their ages.

    Returns
    -------
    [n] float64 speeds, 0 where not known; and the prior, 0.0 if none is known.
    """
    known = (s_per_work > 0).nonzero()[0]
    if not len(known):
        return np.zeros(len(s_per_work)), 0.0
    speeds = s_per_work[known]
    ages = age_s[known]
    # Weights are relative to the newest measurement, so that they don't all become 0 when all are old.
    weights = np.exp((ages.min() - ages) / HORIZON_S)
    prior = _weighted_median(speeds, weights)
    result = np.zeros(len(s_per_work))
    result[known] = prior * (speeds / prior) ** np.exp(-ages / HORIZON_S)
    return result, prior


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted median; the mean of the two middle values if each side has exactly half of the weight."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    half = below[-1] / 2
    low = int(np.searchsorted(below, half * (1 - 1e-9)))
    high = int(np.searchsorted(below, half * (1 + 1e-9)))
    return float(values[order[low]] + values[order[high]]) / 2
