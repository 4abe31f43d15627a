from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.admission.failover_budget import FailoverBudget


@given(
    st.floats(1e-3, 10),
    st.integers(1, 50),
    st.lists(st.floats(0, 10), min_size=1, max_size=200),
)
def test_takes_at_most_the_burst_and_the_refill(refill_s, burst, gaps):
    budget, now_s, taken = FailoverBudget(refill_s, burst), 1000.0, 0
    for gap in gaps:
        now_s += gap
        taken += budget.take(now_s) == 0.0
        assert taken <= burst + (now_s - 1000.0) / refill_s + 1e-6


@given(st.floats(1e-3, 10), st.integers(1, 50))
def test_a_token_is_there_after_the_returned_wait(refill_s, burst):
    budget = FailoverBudget(refill_s, burst)
    assert [budget.take(5.0) for _ in range(burst)] == [0.0] * burst
    wait_s = budget.take(5.0)
    assert 0 < wait_s <= refill_s + 1e-9
    assert budget.take(5.0 + wait_s * 0.9) > 0.0
    assert budget.take(5.0 + wait_s * 1.001) == 0.0


def test_a_clock_that_goes_back_gives_nothing_away():
    budget = FailoverBudget(1.0, 1)
    assert budget.take(100.0) == 0.0
    for now_s in (0.0, 50.0, 100.0, 99.0, 100.0):
        assert budget.take(now_s) == pytest.approx(1.0)
    assert budget.take(101.0) == 0.0


@pytest.mark.parametrize(("refill_s", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_bounds(refill_s, burst):
    with pytest.raises(ValueError, match="refill_s must be > 0 and burst >= 1"):
        FailoverBudget(refill_s, burst)


@pytest.mark.parametrize("num_routers", [1, 2, 5, 16])
def test_routers_share_the_budget_of_the_cluster(num_routers):
    refill_s, burst, seconds = 0.1, 40, 60
    routers = [FailoverBudget(refill_s, burst) for _ in range(num_routers)]
    taken = 0
    for tick in range(seconds * 20):
        for budget in routers:
            while budget.take(tick / 20, num_routers) == 0.0:
                taken += 1
    # What a share rounds off is one token a router at most.
    assert taken == pytest.approx(burst + seconds / refill_s, abs=num_routers + 1)


def test_a_router_that_comes_takes_its_share_from_the_others():
    budget = FailoverBudget(1.0, 8)
    assert budget.take(10.0) == 0.0
    taken = 0
    while budget.take(10.0, 4) == 0.0:
        taken += 1
    assert taken == 2
    assert budget.take(10.0, 4) == pytest.approx(4.0)
