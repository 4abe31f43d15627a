"""Copy back or compute again: by what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.scheduler.speed import CopySpeed, StepSpeed, overhead_tokens


def speed_of(token_s: float) -> StepSpeed:
    speed = StepSpeed()
    for start in (0, 100, 300):
        keys = 100 * start + 5050
        speed.observe(100, 0, 100 * token_s, keys, end_s=1.0)
    return speed


def observe(copies: CopySpeed, num_blocks: int, seconds: float) -> None:
    """Often enough to be believed."""
    for _ in range(4):
        copies.observe(num_blocks, seconds)


def test_what_is_not_known_is_copied():
    assert CopySpeed(StepSpeed()).prefers_copy(1000, 0, 1)
    unknown_copy = CopySpeed(speed_of(1e-3))
    assert unknown_copy.prefers_copy(1000, 0, 1)
    for _ in range(3):
        unknown_copy.observe(1, 100.0)
    assert unknown_copy.prefers_copy(1000, 0, 1)
    unknown_copy.observe(1, 100.0)
    assert not unknown_copy.prefers_copy(1000, 0, 1)
    unknown_prefill = CopySpeed(StepSpeed())
    observe(unknown_prefill, 1, 100.0)
    assert unknown_prefill.prefers_copy(1000, 0, 1)


@given(
    block_s=st.floats(1e-6, 1.0),
    num_blocks=st.integers(1, 500),
    start=st.integers(0, 10_000),
    num_tokens=st.integers(1, 10_000),
)
def test_the_cheaper_is_chosen(block_s, num_blocks, start, num_tokens):
    speed = speed_of(1e-3)
    copies = CopySpeed(speed)
    observe(copies, num_blocks, block_s * num_blocks)
    copy_s, compute_s = num_blocks * copies.block_s, speed.prefill_s(start, num_tokens)
    assert copies.prefers_copy(num_blocks, start, num_tokens) == (copy_s <= compute_s)
    assert (copies.num_copied, copies.num_computed) in ((1, 0), (0, 1))


def test_a_copy_that_had_to_wait_does_not_count():
    copies = CopySpeed(speed_of(1e-3))
    for seconds in (0.5, 0.01, 3.0, 0.7):
        copies.observe(10, seconds)
    assert copies.block_s == 0.001
    for _ in range(8):
        copies.observe(10, 0.1)
    assert copies.block_s == 0.01


def test_copying_is_tried_again_some_time():
    copies = CopySpeed(speed_of(1e-3))
    observe(copies, 1, 1.0)
    choices = [copies.prefers_copy(1, 0, 32) for _ in range(60)]
    assert not any(choices[:20]) and any(choices)


def test_always_is_always():
    copies = CopySpeed(speed_of(1e-6), always_copies=True)
    observe(copies, 1, 1.0)
    assert copies.prefers_copy(100, 0, 1)


def test_short_prompts_do_not_make_long_ones_seem_slow():
    """A step of this device takes 8 ms and 25 us for each token."""
    step_s = lambda tokens: 8e-3 + 25e-6 * tokens  # noqa: E731
    speed = StepSpeed(overhead_tokens({1: step_s(1), 8192: step_s(8192)}))
    assert speed.overhead_tokens == pytest.approx(8e-3 / 25e-6, rel=1e-3)
    for number in range(1, 100):
        speed.observe(8, 0, step_s(8), 36, end_s=float(number))
        assert speed.prefill_s_per_token == pytest.approx(25e-6, rel=0.01)
    # The device is half as fast: short prompts show it soon.
    for number in range(101, 130):
        speed.observe(8, 0, 2 * step_s(8), 36, end_s=float(number))
    assert speed.prefill_s_per_token == pytest.approx(50e-6, rel=0.1)
    speed.observe(5000, 0, step_s(5000), 5000 * 5001 // 2, end_s=200.0)
    assert speed.prefill_s_per_token == pytest.approx(25e-6, rel=0.1)


def test_the_overhead_of_a_step_is_bounded_and_zero_where_it_is_not_measured():
    assert overhead_tokens({}) == overhead_tokens({1: 0.5}) == 0.0
    assert overhead_tokens({1: 0.1, 64: 6.4}) == 0.0
    # Other work has disturbed the first step.
    assert overhead_tokens({1: 0.5, 64: 0.4}) == 0.0
    assert overhead_tokens({1: 0.5, 64: 0.5001}) == 64.0
    assert overhead_tokens({1: 0.5, 8192: 0.5001}) == 1024.0


def test_the_first_steps_are_predicted_from_the_warm_up():
    """A chunk of a large model takes longer than a step may for which no time is predicted."""
    speed = StepSpeed()
    assert speed.predicted_step_s(512) == 0.0
    speed.begin_with({1: 0.25, 64: 1.6})
    assert speed.predicted_step_s(0) == 0.25
    assert speed.predicted_step_s(512) == pytest.approx(0.25 + 512 * 0.025)
    assert speed.prefill_s_per_token == 0.0, "routers are told what steps have taken"
    speed.observe(100, 0, 1.0, 5050, end_s=1.0)
    assert speed.predicted_step_s(512) == pytest.approx(0.25 + 512 * speed.prefill_s_per_token)
    speed.observe(0, 3, 0.1, end_s=2.0)
    assert speed.predicted_step_s(0) == pytest.approx(0.1)
