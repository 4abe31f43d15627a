"""The length of a draft model's drafts: long where they pay, none where they do not, and found again after a change."""

from __future__ import annotations

import random

import pytest

from quire.replica.speculation.measured_lengths import MeasuredLengths

MAX_TOKENS = 8


class Device:
    """Rows that decode, all with the same acceptance, on a device with given times; a plain step takes 1 s.

    Parameters
    ----------
    draft_s
        Seconds of a step of the draft model.
    token_s
        Seconds by which a drafted token makes a step longer.
    """

    def __init__(self, num_rows: int, draft_s: float, token_s: float):
        self.lengths = MeasuredLengths(MAX_TOKENS)
        self._num_rows = num_rows
        self.draft_s, self._token_s = draft_s, token_s
        self._has_drafted = False
        self._random = random.Random(7)

    def speed(self, acceptance: float, num_steps: int) -> float:
        """Tokens per second and row, so 1 without drafts."""
        seconds = num_tokens = 0.0
        for _ in range(num_steps):
            length, num_asked = self.lengths.choose(self._num_rows)
            assert 0 <= length <= MAX_TOKENS and num_asked <= self._num_rows
            drafted = length * num_asked
            noise = 1 + 0.1 * self._random.random()
            step_s = noise * (1 + self._token_s * drafted)
            seconds += step_s + noise * length * self.draft_s
            num_tokens += self._num_rows
            if length:
                if self._has_drafted:  # otherwise the draft model computes many tokens first
                    self.lengths.observe_draft(noise * self.draft_s)
                for _ in range(num_asked):
                    num_right = 0
                    while num_right < length and self._random.random() < acceptance:
                        num_right += 1
                    self.lengths.observe(length, num_right)
                    num_tokens += num_right
            self._has_drafted = length > 0
            self.lengths.observe_step(self._num_rows, drafted, step_s)
        return 1.05 * num_tokens / self._num_rows / seconds


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_good_and_cheap_draft_model_gains(num_rows):
    device = Device(num_rows, draft_s=0.05, token_s=0.01)
    device.speed(0.95, 50)
    assert device.speed(0.95, 1000) > 3


@pytest.mark.parametrize(("acceptance", "draft_s"), [(0.0, 0.05), (0.3, 0.4), (1.0, 1.0)])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_draft_model_that_is_wrong_or_slow_costs_little(num_rows, acceptance, draft_s):
    device = Device(num_rows, draft_s, token_s=0.02)
    device.speed(acceptance, 50)
    assert device.speed(acceptance, 4000) > 0.98


def test_drafts_come_back_when_they_pay_again():
    device = Device(1, draft_s=0.1, token_s=0.02)
    device.speed(0.0, 500)
    device.speed(0.95, 4000)
    assert device.speed(0.95, 500) > 2


def test_a_draft_model_that_was_slow_for_a_while_is_used_again():
    device = Device(1, draft_s=0.1, token_s=0.02)
    device.speed(0.95, 100)
    device.draft_s = 3.0
    device.speed(0.95, 100)
    device.draft_s = 0.1
    device.speed(0.95, 200)
    assert device.speed(0.95, 200) > 2


def test_rows_that_are_expensive_to_verify_get_no_drafts():
    device = Device(16, draft_s=0.1, token_s=1 / 16)
    device.speed(0.5, 100)
    assert device.speed(0.5, 2000) > 0.97
