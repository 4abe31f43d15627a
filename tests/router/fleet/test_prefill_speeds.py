"""Prefill speeds: averages of new reports; old measurements move to the median of the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.scheduler.speed import StepSpeed
from quire.router.fleet.prefill_speeds import HORIZON_S, MeasuredSpeed, believed
from quire.router.policy.cost import CostPolicy

speeds = st.floats(1e-7, 1.0)
ages = st.floats(0.0, 1e4)


def test_reports_are_averaged_over_time_and_per_unit_of_work():
    speed = MeasuredSpeed()
    assert speed.s_per_work == 0 and speed.measured_s == -math.inf
    speed.answered(100, 200.0)  # twice the work of tokens without context
    speed.take(0.002, 5.0)
    assert speed.s_per_work == pytest.approx(0.001) and speed.measured_s == 5.0
    speed.take(0.001, 5.0 + HORIZON_S)
    assert speed.s_per_work == pytest.approx(0.001 / math.e + 0.0005 * (1 - 1 / math.e))


def test_a_slower_report_after_a_pause_is_a_hint_and_a_faster_one_is_proof():
    speed = MeasuredSpeed()
    speed.take(0.001, 0.0)
    speed.take(0.009, 40 * HORIZON_S)
    assert speed.s_per_work == pytest.approx(0.005)
    # It stays slow.
    for _ in range(6):
        speed.take(0.009 + speed.s_per_work * 1e-9, speed.measured_s + HORIZON_S)
    assert speed.s_per_work == pytest.approx(0.009, rel=0.02)
    speed.take(0.001, speed.measured_s + 40 * HORIZON_S)
    assert speed.s_per_work == pytest.approx(0.001)


def test_a_much_faster_report_shows_that_the_number_was_an_accident():
    """Four replicas start at once on one machine: the one with the slowest first prompt must not stay the slowest."""
    speed = MeasuredSpeed()
    speed.take(0.001, 0.0)
    speed.take(0.0001, 0.05)
    assert speed.s_per_work == pytest.approx(0.1 * 0.001 + 0.9 * 0.0001)
    speed.take(0.0000999, 0.1)
    assert speed.s_per_work == pytest.approx(0.0001, rel=0.5)


def test_differences_between_reports_are_averaged():
    """Reports vary by a tenth, twenty times a second: the mean varies by less."""
    speed = MeasuredSpeed()
    for i in range(2000):
        speed.take(0.001 * (0.9 if i % 2 else 1.1) * (1 + i * 1e-9), 0.05 * i)
    assert 0.0009 < speed.s_per_work < 0.0011


def test_one_accident_among_the_idle_costs_little_and_is_soon_forgotten():
    """A prompt of 100 tokens takes ten times as long, on a replica that had none for a minute."""
    engine, speed = StepSpeed(), MeasuredSpeed()
    for second in range(20):
        engine.observe(100, 0, 0.1, end_s=float(second))
        speed.take(engine.prefill_s_per_token * (1 + second * 1e-9), second)
    engine.observe(100, 0, 1.0, end_s=80.0)
    speed.take(engine.prefill_s_per_token, 80.0)
    slow = np.array([0.001, speed.s_per_work])
    assert believed(slow, np.array([0.0, 0.0]))[0][1] < 0.0016
    # Within this fraction of the median, a speed counts as equal to it.
    noise = CostPolicy().speed_noise
    assert believed(slow, np.array([0.0, HORIZON_S]))[0][1] < 0.001 * (1 + noise)


def test_heartbeats_of_an_idle_replica_are_no_news():
    speed = MeasuredSpeed()
    speed.take(0.009, 1.0)
    for second in range(2, 400):
        speed.take(0.009, second)
        speed.take(0.0, second)
    assert speed.measured_s == 1.0 and speed.s_per_work == 0.009
    speed.take(0.001, 400.0)  # the old measurement has no weight in the average
    assert speed.s_per_work == pytest.approx(0.001, rel=1e-4)


def test_an_old_measurement_returns_to_what_the_fresh_show():
    measured = np.array([0.001, 0.009])
    fresh, _ = believed(measured, np.array([0.0, 0.0]))
    assert fresh == pytest.approx(measured)
    old, prior = believed(measured, np.array([0.0, 2 * HORIZON_S]))
    assert prior == 0.001 and old == pytest.approx([0.001, 0.001 * 9 ** math.exp(-2)])
    assert old[1] < 0.0014  # too little to matter against one waiting request


def test_a_replica_slow_under_load_stays_slow():
    """A machine half as fast as the others, which gets prompts all the time."""
    measured, prior = believed(np.array([1.0, 1.0, 2.0]), np.array([0.1, 0.2, 0.1]))
    assert prior == 1.0 and measured[2] == pytest.approx(2.0, rel=0.01)


def test_nothing_known_stays_unknown():
    measured, prior = believed(np.array([0.0, 0.5]), np.array([math.inf, 3.0]))
    assert measured.tolist() == [0.0, 0.5] and prior == 0.5
    measured, prior = believed(np.zeros(2), np.full(2, math.inf))
    assert measured.tolist() == [0.0, 0.0] and prior == 0.0


@given(st.lists(st.tuples(speeds, ages), min_size=1, max_size=20))
def test_belief_lies_between_the_measured_and_the_prior(replicas):
    measured, age_s = (np.array(column) for column in zip(*replicas, strict=True))
    result, prior = believed(measured, age_s)
    slack = 1e-9
    assert measured.min() * (1 - slack) <= prior <= measured.max() * (1 + slack)
    assert np.all(result >= np.minimum(measured, prior) * (1 - slack))
    assert np.all(result <= np.maximum(measured, prior) * (1 + slack))


@given(st.lists(speeds, min_size=1, max_size=20), ages)
def test_of_one_age_the_prior_is_the_median(measured, age_s):
    _, prior = believed(np.array(measured), np.full(len(measured), age_s))
    assert prior == pytest.approx(float(np.median(measured)))
