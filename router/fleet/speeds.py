"""How fast each replica prefills, from what it reports, and how far that is still to be believed.

A replica's number is evidence of the time in which it was measured. Prompts beside many decodes, or on a core that
another replica shared, took longer than they would now, and an idle cluster sends nothing more to who seems slow: the
number would stand for ever. So it returns to what the others show as it ages:

    seconds per work = prior * (measured / prior) ** w        w = exp(-age / horizon)
    prior            = median of the measured, each counted w times
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_PERIOD_S = 0.2  # between two computations of the speeds that policies see
_HINT = 0.5  # the most that a first slower report after a pause counts
HORIZON_S = 30.0  # over which reports are averaged, and after which a measurement counts 1/e


class MeasuredSpeed:
    """Seconds of a unit of one replica's prefill work (`policy.prefill_work`).

    Attributes
    ----------
    s_per_work
        Averaged over `HORIZON_S`, long enough for many prompts; 0: not yet known.
    measured_s
        When the last report came that tells of a prefill; -inf: none has.
    """

    __slots__ = ("_reported", "_tokens", "_work", "measured_s", "s_per_work")

    def __init__(self) -> None:
        self.s_per_work = 0.0
        self.measured_s = -math.inf
        self._reported = 0.0  # seconds per token
        # Of our requests that it answered of late: what its number is an average of.
        self._tokens = 0.0
        self._work = 0.0

    def answered(self, num_tokens: int, work: float) -> None:
        """It prefilled these tokens of a request of ours."""
        self._tokens += num_tokens
        self._work += work

    def take(self, s_per_token: float, now_s: float) -> None:
        """A report that came at `now_s`. Each prefill changes the number: an equal one is no news."""
        if s_per_token <= 0 or s_per_token == self._reported:
            return
        if not self.s_per_work:  # the first
            self.measured_s = now_s
        keep = math.exp((self.measured_s - now_s) / HORIZON_S)
        work_per_token = self._work / self._tokens if self._tokens else 1.0
        speed = s_per_token / work_per_token
        # What runs beside a prompt makes it slow and nothing makes it fast: one that is slower than all before it may
        # be an accident, and whoever seems slow among the idle is sent no second one that would show it.
        if speed > self.s_per_work > 0:
            keep = max(keep, 1.0 - _HINT)
        # And one that is much faster shows that the number was one, whose own average would stand for as long again.
        elif self.s_per_work:
            keep = min(keep, speed / self.s_per_work)
        self.s_per_work = keep * (self.s_per_work or speed) + (1.0 - keep) * speed
        self._reported, self.measured_s = s_per_token, now_s
        self._tokens *= keep
        self._work *= keep


class FleetSpeeds:
    """The speeds of all replicas that a policy may count on, computed again every `_PERIOD_S`.

    Attributes
    ----------
    s_per_work
        [rows] float64, read-only, another array when they change; 0: not yet known.
    prior_s_per_work
        Median of those that are known; 0: none is.
    """

    def __init__(self) -> None:
        self.s_per_work = np.zeros(0)
        self.prior_s_per_work = 0.0
        self._stale_s = -math.inf

    def expire(self) -> None:
        """The rows changed: the next `is_stale` is True."""
        self._stale_s = -math.inf

    def is_stale(self, now_s: float) -> bool:
        return now_s >= self._stale_s

    def update(self, measured: Iterable[MeasuredSpeed], now_s: float) -> None:
        """Compute the speeds from what each replica measured, in the order of the rows."""
        speeds = np.array([(speed.s_per_work, speed.measured_s) for speed in measured])
        s_per_work, measured_s = speeds.reshape(-1, 2).T
        self.s_per_work, self.prior_s_per_work = believed(s_per_work, now_s - measured_s)
        self.s_per_work.setflags(write=False)
        # While no speed is known, each look may find the first.
        self._stale_s = now_s + (_PERIOD_S if self.prior_s_per_work else 0.0)


def believed(s_per_work: np.ndarray, age_s: np.ndarray) -> tuple[np.ndarray, float]:
    """What to count on, of replicas that measured `s_per_work` [n] float64 (0: not known) so long ago, [n] float64.

    Returns
    -------
    [n] float64, 0 where nothing was measured; and the prior, 0.0 where nobody has measured.
    """
    known = (s_per_work > 0).nonzero()[0]
    if not len(known):
        return np.zeros(len(s_per_work)), 0.0
    speeds = s_per_work[known]
    ages = age_s[known]
    # When all are old, who is the least old still leads: the weights are relative.
    weights = np.exp((ages.min() - ages) / HORIZON_S)
    prior = _weighted_median(speeds, weights)
    result = np.zeros(len(s_per_work))
    result[known] = prior * (speeds / prior) ** np.exp(-ages / HORIZON_S)
    return result, prior


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Between two values that have half of the weight each, their mean."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    half = below[-1] / 2
    low = int(np.searchsorted(below, half * (1 - 1e-9)))
    high = int(np.searchsorted(below, half * (1 + 1e-9)))
    return float(values[order[low]] + values[order[high]]) / 2
