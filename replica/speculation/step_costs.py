"""The measured cost of drafted tokens, and the seconds that speculation may lose.

The time of a step with R rows and D drafted tokens is fitted as a multiple of the time of a plain step with R rows:

    seconds(R, D) = plain(R) * (1 + fixed + per_token * D / R)

The machine's speed changes with its other work, so a step with drafts is compared with plain steps just before it.
`plain` is an average for each R, in which the newest steps count most. `fixed` and `per_token` are fitted for each size
of batches, because they depend on it: on a CPU `per_token` is small for one row, whose step waits for memory, and near
1 for a large batch, whose step computes. On a GPU it is near 0 until the batch is large.
"""

from __future__ import annotations

from dataclasses import dataclass

# Share of an average that a plain step replaces, and that the first one after steps with drafts replaces.
_WEIGHT = 0.1
_WEIGHT_AFTER_DRAFTS = 0.5
# A plain step that took more than this multiple of the average counts as this multiple: the machine was busy.
_MAX_OUTLIER = 2.0
# Plain steps that are needed to know a number of rows, and drafted steps after which another one is needed.
_LEAST_PLAIN = 2
_MAX_DRAFTED = 16
# An unknown number of rows is taken for a known one if they differ by this share at most.
_NEAR = 0.25
_FIT_KEEP = 0.97
# Steps of different lengths that tell the cost of drafting at all from the cost of each token. Later ones count only if
# they come right after a plain step.
_LEAST_FIT = 4
_NUM_FRESH = 2
# Another point of the line, of small weight: a drafted token costs half a row. Without it, one slow step with few
# tokens would set the cost of many.
_GUESS, _GUESS_WEIGHT = 0.5, 0.05
# After so many plain steps in a row, the cost of drafts is measured again: it was perhaps measured at a bad moment.
_MAX_PLAIN = 256
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
        weight = _WEIGHT_AFTER_DRAFTS if self.num_drafted_since else _WEIGHT
        self.num_drafted_since = 0
        self.count += 1
        if self.count > _LEAST_PLAIN:
            duration_s = min(duration_s, _MAX_OUTLIER * self.seconds)
        self.seconds += max(1 / self.count, weight) * (duration_s - self.seconds)


class _Fit:
    """A least-squares line through weighted points; the points (0, 0), of weight 1, and the guess stay."""

    def __init__(self) -> None:
        # Sums of the weights, of x, y, x * x and x * y.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        # The largest x so far, and the number of points.
        self.largest_x = 0.0
        self.count = 0
        # Plain steps since the last step with drafts.
        self.num_plain_since = 0

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
        w = _GUESS_WEIGHT
        n, x, xx = self._n + 1 + w, self._x + w, self._xx + w
        y, xy = self._y + w * _GUESS, self._xy + w * _GUESS
        slope = (n * xy - x * y) / (n * xx - x * x)
        at_zero = (y - slope * x) / n
        if at_zero < 0:
            return 0.0, max(0.0, xy / xx)
        return (at_zero, slope) if slope > 0 else (max(0.0, y / n), 0.0)


def _bucket(num_rows: int) -> int:
    """About the power of two that is nearest: 11 to 21 rows are one bucket.

    A full batch is often a power of two, and has one row less while a request joins it.
    """
    return (3 * num_rows).bit_length()


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
        fit = self._fits.get(_bucket(num_rows))
        fixed, per_token = (0.0, 0.0) if fit is None else fit.line()
        return fixed, per_token / num_rows

    def knows_extra(self, num_rows: int) -> bool:
        """Whether enough steps with drafts were measured."""
        fit = self._fits.get(_bucket(num_rows))
        return fit is not None and fit.count >= _LEAST_FIT

    def max_drafted(self, num_rows: int) -> int:
        """Most drafted tokens of the next step."""
        fit = self._fits.get(_bucket(num_rows))
        most = _FIRST_SHARE if fit is None else max(_FIRST_SHARE, 2 * fit.largest_x)
        return max(1, round(most * num_rows))

    def predicted_extra_s(self, num_rows: int, num_drafted: int) -> float:
        """Seconds by which a step with drafts takes longer than one without."""
        if not num_drafted:
            return 0.0
        fixed, per_token = self.extra(num_rows)
        return (fixed + per_token * num_drafted) * self.plain_s(num_rows)

    def observe(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        """Measure a step of decoding rows only."""
        bucket = _bucket(num_rows)
        if not num_drafted:
            self._plain.setdefault(num_rows, _Plain()).observe(duration_s)
            self._forget(bucket)
            return
        plain = self._near(num_rows)
        if plain is None:
            return
        plain.num_drafted_since += 1
        fit = self._fits.setdefault(bucket, _Fit())
        fit.num_plain_since = 0
        if plain.num_drafted_since <= _NUM_FRESH or fit.count < _LEAST_FIT:
            x = num_drafted / num_rows
            ratio = min(duration_s / plain.seconds, _MAX_OUTLIER * (1 + x))
            fit.observe(x, ratio - 1)

    def _forget(self, bucket: int) -> None:
        """Forget the cost of drafts if it has kept them away for long."""
        fit = self._fits.get(bucket)
        if fit is not None:
            fit.num_plain_since += 1
            if fit.num_plain_since >= _MAX_PLAIN:
                del self._fits[bucket]

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
