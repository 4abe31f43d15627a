"""The measured cost of drafted tokens, and the seconds that speculation may lose.

The time of a step with R rows and D drafted tokens is fitted as a multiple of the time of a plain step with R rows:

    seconds(R, D) = plain(R) * (1 + fixed + per_token * D / R)

`plain` is an average for each R. `fixed` and `per_token` are fitted for each power of two of R, because they depend on
the batch: on a CPU `per_token` is small for one row, whose step waits for memory, and near 1 for a large batch, whose
step computes. On a GPU it is near 0 until the batch is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Share of an average that one step replaces.
_WEIGHT = 0.1
# A plain step that took more than this multiple of the average counts as this multiple: the machine was busy.
_MAX_OUTLIER = 2.0
# Plain steps that are needed to know a number of rows, and drafted steps after which another one is needed.
_LEAST_PLAIN = 2
_MAX_DRAFTED = 32
# An unknown number of rows is taken for a known one if they differ by this share at most.
_NEAR = 0.25
_FIT_KEEP = 0.97
# Steps of different lengths that tell the cost of drafting at all from the cost of each token.
_LEAST_FIT = 3
# The first step with drafts has at most one token, or this share of the rows; later ones at most twice as many as any
# before. So a first guess cannot cost much where a drafted token is as expensive as a row.
_FIRST_SHARE = 1 / 16


@dataclass(slots=True)
class _Plain:
    """The average of plain steps of one number of rows."""

    seconds: float = 0.0
    count: int = 0
    num_drafted_since: int = 0

    def observe(self, duration_s: float) -> None:
        self.num_drafted_since = 0
        self.count += 1
        if self.count > _LEAST_PLAIN:
            duration_s = min(duration_s, _MAX_OUTLIER * self.seconds)
        self.seconds += max(1 / self.count, _WEIGHT) * (duration_s - self.seconds)


class _Fit:
    """A least-squares line through weighted points; one point at the origin, of weight 1, stays."""

    def __init__(self) -> None:
        # Sums of the weights, of x, y, x * x and x * y.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        # The largest x so far, and the number of points.
        self.largest_x = 0.0
        self.count = 0

    def observe(self, x: float, y: float) -> None:
        self.count += 1
        self._n = _FIT_KEEP * self._n + 1
        self._x = _FIT_KEEP * self._x + x
        self._y = _FIT_KEEP * self._y + y
        self._xx = _FIT_KEEP * self._xx + x * x
        self._xy = _FIT_KEEP * self._xy + x * y
        self.largest_x = max(self.largest_x, x)

    def line(self) -> tuple[float, float]:
        """The value at 0 and the slope, both at least 0."""
        if not self._xx:
            return 0.0, 0.0
        n = self._n + 1
        spread = n * self._xx - self._x * self._x
        slope = (n * self._xy - self._x * self._y) / spread
        at_zero = (self._y - slope * self._x) / n
        if at_zero < 0:
            return 0.0, max(0.0, self._xy / self._xx)
        return (at_zero, slope) if slope > 0 else (max(0.0, self._y / n), 0.0)


class StepCosts:
    """Measured times of decode steps with and without drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, _Plain] = {}
        self._fits: dict[int, _Fit] = {}

    def plain_s(self, num_rows: int) -> float:
        """Seconds of a step of this many rows without drafts; 0: not known."""
        plain = self._near(num_rows)
        return 0.0 if plain is None else plain.seconds

    def wants_plain(self, num_rows: int) -> bool:
        """Whether the next step should have no drafts, to measure it."""
        plain = self._near(num_rows)
        return (
            plain is None or plain.count < _LEAST_PLAIN or plain.num_drafted_since >= _MAX_DRAFTED
        )

    def extra(self, num_rows: int) -> tuple[float, float]:
        """`fixed`, and the cost of one drafted token, both as a fraction of a plain step."""
        fit = self._fits.get(num_rows.bit_length())
        fixed, per_token = (0.0, 0.0) if fit is None else fit.line()
        return fixed, per_token / num_rows

    def num_priced(self, num_rows: int) -> float:
        """Number of drafted tokens of a step up to which their cost is known."""
        fit = self._fits.get(num_rows.bit_length())
        if fit is not None and fit.count >= _LEAST_FIT:
            return math.inf
        return self._num_tried(num_rows)

    def max_drafted(self, num_rows: int) -> int:
        """Most drafted tokens of the next step."""
        return max(1, round(max(2 * self._num_tried(num_rows), _FIRST_SHARE * num_rows)))

    def _num_tried(self, num_rows: int) -> float:
        fit = self._fits.get(num_rows.bit_length())
        return 0.0 if fit is None else fit.largest_x * num_rows

    def predicted_extra_s(self, num_rows: int, num_drafted: int) -> float:
        """Seconds by which a step with drafts takes longer than one without."""
        if not num_drafted:
            return 0.0
        fixed, per_token = self.extra(num_rows)
        return (fixed + per_token * num_drafted) * self.plain_s(num_rows)

    def observe(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        """Measure a step of decoding rows only."""
        if not num_drafted:
            self._plain.setdefault(num_rows, _Plain()).observe(duration_s)
            return
        plain = self._near(num_rows)
        if plain is None:
            return
        plain.num_drafted_since += 1
        x = num_drafted / num_rows
        ratio = min(duration_s / plain.seconds, _MAX_OUTLIER * (1 + x))
        self._fits.setdefault(num_rows.bit_length(), _Fit()).observe(x, ratio - 1)

    def _near(self, num_rows: int) -> _Plain | None:
        plain = self._plain.get(num_rows)
        if plain is not None:
            return plain
        near = min(self._plain, key=lambda known: abs(known - num_rows), default=0)
        return self._plain[near] if near and abs(near - num_rows) <= _NEAR * num_rows else None


class LossBudget:
    """The seconds that speculation may still lose.

    Every plain step adds a share of its time. Whatever speculation costs is taken off: the longer steps and the host's
    time. Tokens that it saves are added. Below zero it rests until a part of a plain step is saved up. So over a long
    time it costs at most the share, whatever the predictions say.
    """

    _SHARE = 0.01
    # In plain steps: what is there at first, the most that is kept, and what must be there after a rest.
    _FIRST = 1.0
    _MOST = 3.0
    _ENOUGH = 0.2

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_resting = False
        self._plain_s = 0.0

    def earn(self, plain_s: float) -> None:
        """Add the share of a plain step."""
        if not self._plain_s:
            self.seconds += self._FIRST * plain_s
        self._plain_s = plain_s
        self.spend(-self._SHARE * plain_s)

    def spend(self, seconds: float) -> None:
        """Take off what speculation has cost; a negative number is a gain."""
        self.seconds = min(self.seconds - seconds, self._MOST * self._plain_s)

    def is_resting(self) -> bool:
        """Whether nothing may be spent now."""
        if self.seconds < 0:
            self._is_resting = True
        elif self.seconds >= self._ENOUGH * self._plain_s:
            self._is_resting = False
        return self._is_resting
