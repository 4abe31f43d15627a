"""The cost function: who gets a request, and why."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.policy import ReplicaView, RouteRequest, SloPolicy, make_policy

VIEWS = st.builds(
    ReplicaView,
    replica=st.just(""),
    matched_blocks=st.integers(0, 100),
    reported_prefill_tokens=st.integers(0, 100_000),
    booked_prefill_tokens=st.integers(0, 100_000),
    num_requests=st.integers(0, 100),
    prefill_s_per_token=st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    report_age_s=st.one_of(st.none(), st.floats(0, 100)),
)


def idle(name, **fields):
    values = {"replica": name, "prefill_s_per_token": 1e-4, "report_age_s": 0.0} | fields
    return ReplicaView(**values)


def choose(views, num_prompt_tokens=1000, policy=None, seed=0):
    policy = policy or SloPolicy()
    return policy.choose(RouteRequest(num_prompt_tokens), views, 0.0, random.Random(seed))


def winners(views, num_prompt_tokens=1000, draws=400):
    rng, policy = random.Random(7), SloPolicy()
    request = RouteRequest(num_prompt_tokens)
    return Counter(policy.choose(request, views, 0.0, rng)[0].replica for _ in range(draws))


@given(st.lists(VIEWS, max_size=8), st.integers(1, 50_000), st.integers(0, 2**32))
def test_the_ranking_is_a_permutation_in_order_of_cost(views, num_prompt_tokens, seed):
    views = [replace(view, replica=str(i)) for i, view in enumerate(views)]
    ranking = choose(views, num_prompt_tokens, seed=seed)
    assert sorted(score.replica for score in ranking) == sorted(view.replica for view in views)
    for score in ranking:
        assert 0 <= score.cached_tokens < num_prompt_tokens
        assert score.prefill_s > 0 and score.wait_s >= 0 and score.interference_s >= 0
        total = score.wait_s + score.prefill_s + score.interference_s
        assert score.cost_s == pytest.approx(total)
    if ranking.policy == "slo":
        costs = [score.cost_s for score in ranking]
        assert costs == sorted(costs)


@given(VIEWS, st.sampled_from(["queue", "bookings", "requests", "match"]))
def test_more_work_or_a_shorter_match_never_costs_less(view, change):
    worse = {
        "queue": replace(view, reported_prefill_tokens=view.reported_prefill_tokens + 1000),
        "bookings": replace(view, booked_prefill_tokens=view.booked_prefill_tokens + 1000),
        "requests": replace(view, num_requests=view.num_requests + 5),
        "match": replace(view, matched_blocks=view.matched_blocks // 2),
    }[change]
    assert choose([worse], 8000)[0].cost_s >= choose([view], 8000)[0].cost_s


def test_unrelated_requests_spread_over_idle_replicas():
    counts = winners([idle("a"), idle("b"), idle("c")])
    assert min(counts.values()) > 90 and len(counts) == 3


def test_they_spread_although_measured_speeds_differ_by_noise():
    counts = winners([idle("a", prefill_s_per_token=1.0e-4), idle("b", prefill_s_per_token=1.5e-4)])
    assert min(counts["a"], counts["b"]) > 150


def test_a_slow_replica_prices_itself_out():
    counts = winners([idle("a"), idle("b", prefill_s_per_token=2.2e-4)])
    assert counts == {"a": 400}


def test_a_shared_prefix_attracts_until_its_holder_is_busier_than_the_prefill():
    holder, other = idle("a", matched_blocks=2), idle("b")
    assert winners([holder, other]) == {"a": 400}
    assert winners([replace(holder, reported_prefill_tokens=100), other]) == {"a": 400}
    assert winners([replace(holder, reported_prefill_tokens=200), other]) == {"b": 400}


def test_a_prefix_attracts_before_any_speed_is_known():
    views = [idle("a", prefill_s_per_token=0.0), idle("b", prefill_s_per_token=0.0)]
    views[1] = replace(views[1], matched_blocks=2)
    assert winners(views) == {"b": 400}


def test_an_unknown_speed_is_the_median_of_the_known_ones():
    views = [idle("a"), idle("b"), idle("c", prefill_s_per_token=0.0)]
    assert {score.prefill_s for score in choose(views)} == {1000 * 1e-4}
    fallback = SloPolicy(fallback_prefill_s_per_token=2e-3)
    assert choose([views[2]], policy=fallback)[0].prefill_s == 2.0


def test_without_any_report_the_least_loaded_wins():
    views = [
        ReplicaView("a", num_requests=2, booked_prefill_tokens=10),
        ReplicaView("b", num_requests=1, booked_prefill_tokens=90),
        ReplicaView("c", num_requests=1, booked_prefill_tokens=50),
    ]
    ranking = choose(views)
    assert ranking.policy == "least_loaded"
    assert [score.replica for score in ranking] == ["c", "b", "a"]


def test_a_reported_queue_shrinks_with_time_but_silence_is_no_progress():
    def wait(age):
        return choose([idle("a", reported_prefill_tokens=30_000, report_age_s=age)])[0].wait_s

    assert wait(0.0) == 3.0
    assert wait(0.5) == 2.5
    assert wait(5.0) == 2.0  # max_decay_s


def test_requests_in_flight_raise_the_price_of_a_long_prefill():
    busy, quiet = idle("a", num_requests=10), idle("b", reported_prefill_tokens=500)
    assert choose([busy, quiet], 200)[0].replica == "a"
    assert choose([busy, quiet], 2000)[0].replica == "b"


def test_the_last_prompt_token_is_never_counted_as_cached():
    score = choose([idle("a", matched_blocks=2)], 128)[0]
    assert score.cached_tokens == 127 and score.prefill_s == 1e-4


def test_no_replicas_give_an_empty_ranking():
    assert len(choose([])) == 0


def test_policies_are_made_by_name():
    assert make_policy("slo", eta=0.3) == SloPolicy(eta=0.3)
    with pytest.raises(ValueError, match="policy must be one of slo, got 'best'"):
        make_policy("best")
    with pytest.raises(ValueError, match="kappa"):
        make_policy("slo", kappa=1)
    with pytest.raises(ValueError, match="eta must be >= 0, got -1"):
        make_policy("slo", eta=-1)
    with pytest.raises(ValueError, match="must be > 0, got 0"):
        make_policy("slo", fallback_prefill_s_per_token=0)
