"""The slope of decode step times, from reports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.fleet.demand import StepSlope


def feed(slope: StepSlope, kv_tokens: np.ndarray, step_s: np.ndarray) -> float:
    for x, y in zip(kv_tokens.tolist(), step_s.tolist(), strict=True):
        slope.add(x, y)
    return slope.s_per_token


@given(st.integers(32, 2000), st.floats(1e-9, 1e-5), st.floats(1e-4, 0.1), st.integers(0, 99))
def test_steps_without_noise_give_their_slope(count, slope_s, base_s, seed):
    kv_tokens = np.random.default_rng(seed).uniform(1, 50_000, count)
    found = feed(StepSlope(), kv_tokens, base_s + slope_s * kv_tokens)
    assert found == pytest.approx(slope_s, rel=1e-3)


@pytest.mark.parametrize("seed", range(32))
def test_noisy_steps_of_an_idle_cluster_prove_no_slope(seed):
    """Steps of 10 ms, plus or minus 5, at contexts of a few hundred tokens, give a slope by chance.

    It must not cost more than the prefill of a prompt of that length, 0.1 s. Without the three standard errors it did.
    """
    rng = np.random.default_rng(seed)
    slope, worst = StepSlope(), 0.0
    for _ in range(500):
        slope.add(rng.uniform(50, 400), abs(rng.normal(0.01, 0.005)) + 1e-4)
        worst = max(worst, slope.s_per_token)
    assert 0.1 * 200 * worst * 480 < 0.1
    assert slope.s_per_token * 200 < 0.002


@pytest.mark.parametrize("seed", range(4))
def test_a_slope_shows_through_the_noise(seed):
    rng = np.random.default_rng(seed)
    kv_tokens = rng.uniform(0, 100_000, 2000)
    step_s = 0.02 + 4e-7 * kv_tokens + rng.normal(0, 0.005, 2000)
    assert feed(StepSlope(), kv_tokens, step_s) == pytest.approx(4e-7, rel=0.1)


def test_there_is_no_slope_before_the_reports_differ():
    assert feed(StepSlope(), np.array([1000.0] * 50), np.linspace(0.01, 0.02, 50)) == 0.0
    assert feed(StepSlope(), np.linspace(10, 2000, 31), np.linspace(0.01, 0.02, 31)) == 0.0
