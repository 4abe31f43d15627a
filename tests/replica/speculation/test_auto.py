"""The automatic number of drafted tokens: it pays where drafts are right, and costs next to nothing elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.replica.speculation.draft_lengths import choose_lengths
from quire.replica.speculation.step_costs import LossBudget, StepCosts
from tests.replica.speculation.simulated_engine import (
    SimulatedEngine,
    busy_cpu_step_s,
    cpu_step_s,
    gpu_step_s,
)

COSTS = {"cpu": cpu_step_s, "gpu": gpu_step_s}
# Tokens of each row: enough steps for a loss of one step to be small.
COUNT = {1: 1000, 16: 400, 64: 250}


@pytest.mark.parametrize("rows", COUNT)
@pytest.mark.parametrize("likely", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("device", COSTS)
def test_speculation_costs_at_most_two_percent(device: str, likely: float, rows: int):
    engine = SimulatedEngine(COSTS[device])
    assert engine.run(rows, [likely], COUNT[rows]) >= 0.98


@pytest.mark.parametrize("device", COSTS)
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_noisy_machine_does_not_change_that(device: str, noise: float):
    drafting = SimulatedEngine(COSTS[device], noise=noise)
    speed = drafting.run(1, [0.3], 3000)
    # The noise alone changes the mean of 3000 steps by 2 standard deviations at most.
    assert speed >= 0.98 - 2 * noise / np.sqrt(3000)


@pytest.mark.parametrize(
    ("likely", "least"), [(0.5, 0.98), (0.6, 0.98), (0.7, 0.98), (0.8, 1.03), (0.97, 1.3)]
)
def test_neither_does_other_work_that_comes_and_goes(likely: float, least: float):
    """A full batch whose drafts hardly pay: a step that looks cheap because the machine has become faster must not
    count, and one that looks expensive must not keep good drafts away."""
    speeds = []
    for seed in range(4):
        engine = SimulatedEngine(
            busy_cpu_step_s, noise=0.1, slow=0.4, mixed=0.1, most_tokens=32, seed=seed
        )
        speeds.append(engine.run(16, [likely], 800))
    assert np.mean(speeds) >= least
    assert min(speeds) >= least - 0.02


@pytest.mark.parametrize("rows", [1, 7, 15, 16])
def test_drafts_for_which_a_step_has_no_room_cost_nothing(rows: int):
    """The room is part of the choice, and only what a step has verified is paid."""
    room = SimulatedEngine(gpu_step_s, most_tokens=rows + 3)
    assert room.run(rows, [0.95], 600) >= 1.01


@pytest.mark.parametrize(
    ("device", "rows", "likely", "least"),
    [
        ("cpu", 1, 0.9, 2.3),
        ("cpu", 4, 0.98, 1.5),
        ("gpu", 1, 0.9, 2.7),
        ("gpu", 16, 0.9, 2.2),
        ("gpu", 64, 0.98, 2.5),
    ],
)
def test_it_pays_where_drafts_are_right(device: str, rows: int, likely: float, least: float):
    assert SimulatedEngine(COSTS[device]).run(rows, [likely], 1200 if rows == 1 else 500) >= least


@pytest.mark.parametrize("device", COSTS)
def test_phases_of_a_text_are_noticed_in_both_directions(device: str):
    """Half of the text repeats itself, in two parts."""
    assert SimulatedEngine(COSTS[device]).run(1, [0.0, 0.95, 0.0, 0.95], 400) >= 1.35


def test_a_full_batch_on_a_cpu_drafts_next_to_nothing():
    """A drafted token costs as much as a row there, so even right drafts gain nothing."""
    engine = SimulatedEngine(cpu_step_s)
    engine.run(64, [0.9], 200)
    assert engine.num_drafted <= 64


def test_short_requests_learn_from_earlier_ones():
    """No request is long enough to learn from its own tokens."""
    engine = SimulatedEngine(gpu_step_s)
    engine.run(1, [0.0], 50)
    speeds = [engine.run(1, [0.0], 30) for _ in range(60)]
    assert np.mean(speeds) >= 0.98


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=64),
    st.floats(0, 0.5),
    st.floats(0, 1),
    st.integers(1, 300),
)
def test_chosen_lengths_are_the_best_of_all(rows, rates, fixed, per_token, most_together):
    """No other number of the most valuable tokens gives more tokens per second; nothing is drafted for little."""
    acceptance, most = map(np.array, zip(*rates, strict=True))
    extra = (fixed, per_token / rows)
    lengths = choose_lengths(rows, acceptance, most, extra, most_together)
    assert (lengths <= most).all()
    assert lengths.sum() <= most_together
    worth = sorted((a**k for a, m in rates for k in range(1, m + 1)), reverse=True)

    def speed(count: int, gained: float) -> float:
        cost = 1 + fixed + extra[1] * count
        return (1 + gained / rows) / cost if count else 1.0

    gained = sum(a**k for (a, _), d in zip(rates, lengths, strict=True) for k in range(1, d + 1))
    reached = speed(int(lengths.sum()), gained)
    best = max(speed(j, sum(worth[:j])) for j in range(min(len(worth), most_together) + 1))
    assert reached >= best - 1e-9 or (not lengths.sum() and best < 1.03 + 1e-9)


@pytest.mark.parametrize(("fixed", "per_token"), [(0.0, 0.0), (0.0, 1.0), (0.3, 0.05), (0.1, 0.4)])
def test_costs_of_drafts_are_measured(fixed: float, per_token: float):
    costs, rng = StepCosts(), np.random.default_rng(0)
    for _ in range(200):
        costs.observe(8, 0, 0.01)
        drafted = int(rng.integers(1, 64))
        costs.observe(8, drafted, 0.01 * (1 + fixed + per_token * drafted / 8))
    assert costs.predicted_extra_s(8, 16) == pytest.approx(
        0.01 * (fixed + 2 * per_token), rel=0.1, abs=1e-4
    )


def test_first_drafts_are_small_and_a_plain_step_follows_many_drafted_ones():
    costs = StepCosts()
    assert costs.wants_plain(64)
    for _ in range(3):
        costs.observe(64, 0, 0.01)
    assert not costs.wants_plain(64)
    assert costs.plain_s(70) == pytest.approx(0.01)
    assert costs.plain_s(200) == 0
    assert costs.max_drafted(64) == 4
    costs.observe(64, 4, 0.01)
    assert costs.max_drafted(64) == 8
    for _ in range(16):
        costs.observe(64, 8, 0.01)
    assert costs.wants_plain(64)
    costs.observe(64, 0, 0.01)
    assert not costs.wants_plain(64)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 1e-4, 0.004, 0.05]), min_size=300, max_size=300))
def test_a_budget_loses_at_most_its_share(wanted: list[float]):
    """Whatever a step would cost, it is spent only if the budget allows it; the last one may exceed it."""
    budget, spent = LossBudget(), 0.0
    for seconds in wanted:
        budget.earn(0.01)
        if not budget.is_resting():
            budget.spend(seconds)
            spent += seconds
    assert spent <= 0.01 * (1 + 0.01 * len(wanted)) + max(wanted) + 1e-9
