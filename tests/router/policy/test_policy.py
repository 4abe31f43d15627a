"""Properties of every policy, and the choices of the baselines."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleets import FLEETS, fleet_of, idle

from quire.cluster.config.router_section import RouterArgs
from quire.router.policy.by_name import POLICIES, POLICY_NAMES, make_policy
from quire.router.policy.cost import CostPolicy
from quire.router.policy.policy import MAX_RANKED, RouteRequest, ranked_rows


@given(FLEETS, st.integers(1, 50_000), st.integers(0, 2**32), st.sampled_from(POLICY_NAMES))
def test_the_ranking_names_each_replica_once_in_order_of_cost(rows, num_tokens, seed, name):
    fleet = fleet_of(rows, num_tokens)
    ranking = make_policy(name).choose(RouteRequest(num_tokens), fleet, 0.0, random.Random(seed))
    names = ranking.names()
    assert len(set(names)) == len(names) == min(len(rows), MAX_RANKED)
    assert set(names) <= set(fleet.replicas)
    costs = [score.cost_s for score in ranking]
    assert np.isfinite(costs).all()
    assert all(a <= b + 1e-6 for a, b in pairwise(costs))
    assert not rows or costs[0] <= ranking.cost_s.min() + 1e-6


# Few distinct values, so that many costs are equal; and fleets below and above the size that is cut into parts.
@given(st.lists(st.integers(0, 40).map(float), min_size=1, max_size=300))
def test_the_cheapest_come_first_and_equal_ones_in_their_order(costs):
    cost = np.array(costs)
    by_cost = cost.argsort(kind="stable")[:MAX_RANKED].tolist()
    rows = ranked_rows(cost, random.Random(0)).tolist()
    first = rows.pop(0)
    assert cost[first] == cost.min()
    assert rows == [row for row in by_cost if row != first][: len(by_cost) - 1]


@given(FLEETS, st.integers(0, 2**32), st.sampled_from(POLICY_NAMES))
def test_a_seed_decides_the_same_again(rows, seed, name):
    fleet = fleet_of(rows, 1000)

    def decide():
        rng, policy = random.Random(seed), make_policy(name)
        return [policy.choose(RouteRequest(1000), fleet, 0.0, rng).names() for _ in range(3)]

    assert decide() == decide()


def wins(name, fleet, draws=400):
    rng, policy = random.Random(7), make_policy(name)
    chosen = (policy.choose(RouteRequest(1000), fleet, 0.0, rng)[0] for _ in range(draws))
    return Counter(score.replica for score in chosen)


@given(FLEETS, st.integers(1, 3000), st.integers(0, 99), st.sampled_from(POLICY_NAMES))
def test_a_ranking_led_by_a_replica_keeps_the_order_of_the_others(rows, num_tokens, seed, name):
    fleet = fleet_of(rows, num_tokens)
    ranking = make_policy(name).choose(RouteRequest(num_tokens), fleet, 0.0, random.Random(seed))
    for score in ranking:
        led = ranking.led_by(score.replica)
        assert led[0] == score
        assert list(led)[1:] == [other for other in ranking if other.replica != score.replica]
    assert list(ranking.led_by("another")) == list(ranking)


def test_round_robin_takes_turns():
    assert wins("round_robin", fleet_of([idle()] * 4)) == dict.fromkeys("0123", 100)


def test_least_loaded_counts_requests_and_nothing_else():
    rows = [idle(num_requests=2), idle(num_requests=1, gpu_tokens=0), idle(num_requests=1)]
    counts = wins("least_loaded", fleet_of(rows))
    assert set(counts) == {"1", "2"} and min(counts.values()) > 150


def test_power_of_two_avoids_the_most_loaded_and_nothing_else():
    counts = wins("power_of_two", fleet_of([idle(num_requests=i) for i in range(4)]), 1200)
    # Three of the six pairs contain replica 0, two others contain 1, and the last contains 2.
    assert "3" not in counts
    assert counts["0"] == pytest.approx(600, abs=80) and counts["2"] == pytest.approx(200, abs=60)


def test_prefix_affinity_follows_the_longest_match_into_any_queue():
    rows = [idle(gpu_tokens=640, num_requests=500), idle(gpu_tokens=576), idle()]
    assert wins("prefix_affinity", fleet_of(rows)) == {"0": 400}
    rows = [idle(gpu_tokens=640, num_requests=5), idle(gpu_tokens=640, num_requests=4)]
    assert wins("prefix_affinity", fleet_of(rows)) == {"1": 400}


def test_policies_are_made_by_the_names_that_the_configuration_takes():
    assert get_args(RouterArgs.model_fields["policy"].annotation) == POLICY_NAMES
    assert tuple(POLICIES) == POLICY_NAMES
    assert make_policy("slo", eta=0.5) == CostPolicy(eta=0.5)
    assert make_policy("e2e").eta > make_policy("slo").eta
    with pytest.raises(ValueError, match=r"policy must be one of slo, .*, got 'best'"):
        make_policy("best")
    with pytest.raises(ValueError, match="gamma"):
        make_policy("slo", gamma=1)
    with pytest.raises(ValueError, match="eta must be >= 0, got -1"):
        make_policy("slo", eta=-1)
    with pytest.raises(ValueError, match="fallback_prefill_s_per_work must be > 0, got 0"):
        make_policy("slo", fallback_prefill_s_per_work=0)
