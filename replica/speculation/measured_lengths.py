"""How many tokens a draft model drafts: as many as raise tokens per second, by measured acceptance and times.

The same number k is drafted for all rows, because each step of the draft model drafts for all of them:

    tokens of a row   1 + a + a ** 2 + ... + a ** k        a: the fraction of drafted tokens that are right
    seconds           plain step * (1 + fixed + per token * rows * k) + k * step of the draft model

Where no k pays, a few steps now and then draft one token of one row, to see whether that has changed.
"""

from __future__ import annotations

import numpy as np

from quire.replica.speculation.draft_lengths import Acceptance
from quire.replica.speculation.step_costs import StepCosts

# The predicted gain must be at least this share, or nothing is drafted.
_LEAST_GAIN = 0.03
# Steps without drafts before a trial, at first and at most. A trial without success doubles them.
_FIRST_REST, _MAX_REST = 32, 1024
# Steps of a trial. Before the first draft the draft model computes all tokens since the last trial, so only the others
# show the time of its steps.
_NUM_TRIALS = 3
# Share of an average that the newest value replaces.
_WEIGHT = 0.1
# A step that took more than this multiple of the average counts as this multiple: the machine was busy.
_MAX_OUTLIER = 2.0


class MeasuredLengths:
    """Chooses the length of drafts.

    Parameters
    ----------
    max_tokens
        Most tokens of a draft.
    """

    def __init__(self, max_tokens: int):
        self._counts = np.arange(max_tokens + 1)
        self._acceptance = Acceptance(1.0, 1.0, 0.95)
        self._costs = StepCosts()
        # Average seconds of a step of the draft model, and number of times.
        self._draft_s = 0.0
        self._num_times = 0
        self._num_rested = 0
        self._rest = _FIRST_REST

    def choose(self, num_rows: int) -> tuple[int, int]:
        """The length of the next drafts, and the number of rows that get one."""
        costs = self._costs
        if costs.wants_plain(num_rows):
            return 0, 0
        plain_s = costs.plain_s(num_rows)
        fixed, per_token = costs.extra(num_rows) if costs.knows_extra(num_rows) else (0.0, 0.0)
        # A first guess of the cost of a long draft may be wrong, so drafts grow.
        most = max(1, costs.max_drafted(num_rows) // num_rows)
        k = self._counts[: most + 1]
        tokens = np.cumsum(self._acceptance.rate() ** k)
        seconds = 1 + fixed * (k > 0) + k * (per_token * num_rows + self._draft_s / plain_s)
        gain = tokens / seconds
        best = int(gain.argmax())
        if gain[best] >= 1 + _LEAST_GAIN:
            self._num_rested, self._rest = 0, _FIRST_REST
            return best, num_rows
        self._num_rested += 1
        if self._num_rested < self._rest:
            return 0, 0
        if self._num_rested == self._rest + _NUM_TRIALS - 1:
            self._num_rested, self._rest = 0, min(2 * self._rest, _MAX_REST)
        return min(1, len(k) - 1), 1

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of a row was verified."""
        self._acceptance.observe(num_accepted, num_accepted < num_drafted)

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        """A step of decoding rows only took this long, without the draft model."""
        self._costs.observe(num_rows, num_drafted, duration_s)

    def observe_draft(self, step_s: float) -> None:
        """Steps of the draft model took this long each."""
        self._num_times += 1
        if self._num_times > 2:
            step_s = min(step_s, _MAX_OUTLIER * self._draft_s)
        self._draft_s += max(1 / self._num_times, _WEIGHT) * (step_s - self._draft_s)
