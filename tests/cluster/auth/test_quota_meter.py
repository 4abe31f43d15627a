"""Quotas of one key in one router."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.auth.key_file import Quotas
from quire.cluster.auth.quota_meter import QuotaMeter, duration
from quire.protos.errors import RateLimited


def meter(**quotas: int) -> QuotaMeter:
    return QuotaMeter(Quotas(**quotas))


def test_without_quotas_nothing_is_refused():
    free = meter()
    for _ in range(1000):
        free.enter(4)
        free.take(10**9, 0.0, 4)
    assert free.tokens(0.0, 4) is None


def test_a_minute_refills_the_bucket():
    bounded = meter(tokens_per_minute=600)
    bounded.take(600, 0.0, 1)
    with pytest.raises(RateLimited) as caught:
        bounded.take(100, 0.0, 1)
    assert caught.value.retry_after_s == pytest.approx(10)
    assert "tokens_per_minute 600" in caught.value.message
    bounded.take(100, 10.0, 1)
    state = bounded.tokens(10.0, 1)
    assert (state.limit, state.remaining, state.reset_s) == (600, 0, pytest.approx(60))
    assert bounded.tokens(70.0, 1).remaining == 600


def test_output_leaves_a_debt_that_must_be_refilled():
    bounded = meter(tokens_per_minute=60)
    bounded.take(10, 0.0, 1)
    bounded.charge(110)
    assert bounded.tokens(0.0, 1).remaining == 0
    with pytest.raises(RateLimited) as caught:
        bounded.take(1, 0.0, 1)
    assert caught.value.retry_after_s == pytest.approx(61)
    bounded.take(1, 61.0, 1)


def test_a_prompt_above_the_quota_needs_a_full_bucket():
    bounded = meter(tokens_per_minute=60)
    bounded.take(1000, 0.0, 1)
    with pytest.raises(RateLimited):
        bounded.take(1000, 990.0, 1)
    bounded.take(1000, 1000.0, 1)


def test_each_of_several_routers_has_its_share():
    routers = [meter(tokens_per_minute=600, concurrent_requests=4) for _ in range(2)]
    for router in routers:
        router.take(300, 0.0, 2)
        router.enter(2)
        router.enter(2)
        for refused in (lambda r=router: r.take(1, 0.0, 2), lambda r=router: r.enter(2)):
            with pytest.raises(RateLimited):
                refused()
    # The state is that of all routers, as this one estimates it.
    assert routers[0].tokens(30.0, 2).remaining == 300


def test_a_place_is_free_again_after_a_request():
    bounded = meter(concurrent_requests=1)
    bounded.enter(3)  # rounded up: no router is left without a place
    with pytest.raises(RateLimited, match="concurrent_requests 1"):
        bounded.enter(3)
    bounded.leave()
    bounded.enter(3)


@given(
    quota=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 50)), max_size=40),
)
def test_no_more_than_the_quota_is_admitted(quota, steps):
    """Over any time, prompts get at most a full bucket, the refill, and the last prompt's debt."""
    bounded = meter(tokens_per_minute=quota)
    now_s, admitted, largest = 0.0, 0, 0
    for tokens, seconds in steps:
        now_s += seconds
        try:
            bounded.take(tokens, now_s, 1)
        except RateLimited as error:
            assert error.retry_after_s > 0
        else:
            admitted += tokens
            largest = max(largest, tokens)
    assert admitted <= quota + now_s * quota / 60 + max(0, largest - quota) + 1e-3


@given(
    quota=st.integers(1, 10_000),
    spent=st.integers(0, 50_000),
    tokens=st.integers(1, 20_000),
)
def test_the_time_to_retry_is_enough(quota, spent, tokens):
    bounded = meter(tokens_per_minute=quota)
    bounded.charge(spent)
    try:
        bounded.take(tokens, 0.0, 1)
    except RateLimited as error:
        bounded.take(tokens, error.retry_after_s * (1 + 1e-9) + 1e-9, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.1201, "121ms"),
        (1, "1s"),
        (7.5, "7.5s"),
        (59.9, "59.9s"),
        (360, "6m0s"),
        (3661, "1h1m1s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str):
    assert duration(seconds) == text
