"""The cost policy: which replica gets a request, and by which terms."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleets import COLUMNS, FLEETS, ROWS, fleet_of, idle

from quire.router.policy.cost import CostPolicy, e2e_policy
from quire.router.policy.cost_terms import HANDOVER_S, PULL_OVERHEAD_S
from quire.router.policy.fleet_view import (
    COLUMN_NAMES,
    Demand,
    FleetView,
    PeerPrefixes,
    PrefillRows,
    prefill_work,
)
from quire.router.policy.policy import RouteRequest

BUSY = Demand(2.0, 0.5, 0.25, 0.1, 200.0, 1e-7)


def choose(rows, num_tokens=1000, policy=None, seed=0, **facts):
    fleet = fleet_of(rows, num_tokens, **facts)
    policy = policy or CostPolicy()
    return policy.choose(RouteRequest(num_tokens), fleet, 0.0, random.Random(seed))


def winners(rows, num_tokens=1000, draws=400, policy=None, **facts):
    rng, policy = random.Random(7), policy or CostPolicy()
    fleet = fleet_of(rows, num_tokens, **facts)
    return Counter(
        policy.choose(RouteRequest(num_tokens), fleet, 0.0, rng)[0].replica for _ in range(draws)
    )


def test_a_fleet_of_columns_that_do_not_fit_is_refused():
    columns = {name: [0.0, 0.0] for name in COLUMN_NAMES}
    fleet = FleetView.of("ab", columns, session_row=1)
    assert fleet.gpu_tokens.dtype == np.float64 and len(fleet) == 2
    with pytest.raises(ValueError, match=r"gpu_tokens must have shape \[2\], got \[1\]"):
        FleetView.of("ab", columns | {"gpu_tokens": [0.0]})
    with pytest.raises(ValueError, match="session_row must be from -1 to 1, got 2"):
        FleetView.of("ab", columns, session_row=2)


@given(FLEETS, st.integers(1, 50_000), st.floats(0, 50))
def test_the_terms_add_up_and_only_the_value_of_a_copy_is_a_gain(rows, num_tokens, followers):
    for row in rows:
        row["report_age_s"] = 0.0
    for score in choose(rows, num_tokens, demand=BUSY, followers=followers):
        assert score.cost_s == pytest.approx(sum(score.terms.values()), abs=1e-9)
        assert score.terms.pop("copy_value_s") <= 0
        assert all(seconds >= 0 for seconds in score.terms.values())
        assert score.cached_tokens + score.host_tokens < num_tokens


WORSE = {
    "reported_work": 1000,
    "booked_work": 1000,
    "unanswered_work": 1000,
    "num_requests": 5,
    "kv_tokens": 5000,
    "mean_kv_tokens": 5000,
    "host_copy_s_per_token": 1e-4,
    "cache_age_s": -10,
    "free_tokens": -1000,
}


@given(ROWS, st.sampled_from(sorted(WORSE)))
def test_more_work_never_costs_less(row, column):
    row["report_age_s"] = 0.0
    worse = row | {column: max(0.0, row[column] + WORSE[column])}
    costs = [choose([r], 8000, demand=BUSY)[0].cost_s for r in (row, worse)]
    assert costs[0] <= costs[1] * (1 + 1e-12)


@given(ROWS)
def test_cached_tokens_never_cost_more_than_missing_ones(row):
    row |= {"report_age_s": 0.0, "host_tokens": 0.0, "gpu_tokens": min(row["gpu_tokens"], 7999)}
    nothing = row | {"gpu_tokens": 0.0}
    costs = [choose([r], 8000, demand=BUSY)[0].cost_s for r in (row, nothing)]
    assert costs[0] <= costs[1] * (1 + 1e-12)


def test_unrelated_requests_spread_over_idle_replicas():
    counts = winners([idle()] * 3)
    assert len(counts) == 3 and min(counts.values()) > 90


def test_they_spread_although_measured_speeds_differ_by_noise():
    speeds = (1.0e-4, 1.2e-4, 1.3e-4)
    counts = winners([idle(prefill_s_per_work=s) for s in speeds])
    assert len(counts) == 3 and min(counts.values()) > 90


def test_a_slow_replica_prices_itself_out_until_the_others_queue():
    slow = idle(prefill_s_per_work=2e-4)
    assert "2" not in winners([idle(), idle(), slow])
    busy = idle(reported_work=3000)
    assert winners([busy, busy, slow]) == {"2": 400}


def test_a_shared_prefix_attracts_until_its_holder_is_busier_than_the_prefill():
    other = idle()
    assert winners([idle(gpu_tokens=128), other]) == {"0": 400}
    assert winners([idle(gpu_tokens=128, reported_work=100), other]) == {"0": 400}
    assert winners([idle(gpu_tokens=128, reported_work=200), other]) == {"1": 400}


def test_a_prefix_attracts_before_any_speed_is_known():
    rows = [idle(prefill_s_per_work=0.0), idle(prefill_s_per_work=0.0, gpu_tokens=128)]
    assert winners(rows) == {"1": 400}


def test_an_unknown_speed_is_the_median_of_the_known_ones():
    rows = [idle(), idle(), idle(prefill_s_per_work=0.0)]
    seconds = [score.prefill_s for score in choose(rows)]
    assert seconds == pytest.approx([1000 * 1e-4] * 3)
    fallback = CostPolicy(fallback_prefill_s_per_work=2e-3)
    assert choose(rows[2:], policy=fallback)[0].prefill_s == pytest.approx(2.0)


def test_host_memory_is_better_than_nothing_and_worse_than_the_device():
    rows = [idle(), idle(host_tokens=640), idle(gpu_tokens=640)]
    assert choose(rows).names() == ["2", "1", "0"]
    assert choose(rows)[1].terms["host_copy_s"] == pytest.approx(640 * 1e-5)
    slow_copy = idle(host_tokens=640, host_copy_s_per_token=1e-3)
    assert choose([idle(), slow_copy]).names() == ["0", "1"]


def test_attention_makes_the_same_tokens_dearer_at_the_end_of_a_long_prompt():
    def seconds(cached):
        row = idle(gpu_tokens=cached)
        return choose([row], cached + 1000, attention_context_tokens=30_000)[0].prefill_s

    # The mean context of the 1000 tokens is 500 and 60,500.
    assert seconds(60_000) / seconds(0) == pytest.approx((1 + 60_500 / 3e4) / (1 + 500 / 3e4))


def test_a_reported_queue_shrinks_with_time_but_silence_is_no_progress():
    def wait(age):
        return choose([idle(reported_work=30_000, report_age_s=age)])[0].wait_s

    assert wait(0.0) == pytest.approx(3.0)
    assert wait(0.5) == pytest.approx(2.5)
    assert wait(1.4) == wait(100.0) == pytest.approx(2.0)  # max_decay_s


def test_our_own_unanswered_requests_are_still_queued_if_the_report_lacks_them():
    def wait(**columns):
        return choose([idle(**columns)])[0].wait_s

    # Three requests of 0.1 s, the first in prefill for 50 ms. A report without them must be older than they are.
    own = {"unanswered_work": 3000, "head_work": 1000, "head_age_s": 0.05}
    assert wait(**own) == pytest.approx(0.25)
    assert wait(**own, reported_work=4000) == pytest.approx(0.4)
    # The first request is not done, however long its prefill has taken.
    assert wait(**own | {"head_age_s": 60}) == pytest.approx(0.21)


def test_requests_in_flight_raise_the_price_of_a_long_prefill():
    rows = [idle(num_requests=10), idle(reported_work=500)]
    assert choose(rows, 200)[0].replica == "0"
    assert choose(rows, 2000)[0].replica == "1"


def test_decoding_is_cheaper_where_the_cache_is_shorter():
    rows = [idle(mean_kv_tokens=50_000), idle(mean_kv_tokens=20_000, num_requests=3)]
    assert winners(rows, demand=BUSY) == {"1": 400}
    # 200 steps with the KV of the others, and half as many steps of three others with the prompt's 1000 tokens.
    terms = choose(rows, demand=BUSY)[0].terms
    assert terms["decode_s"] == pytest.approx(
        CostPolicy().delta * 1e-7 * (200 * 20_000 + 100 * 3 * 1000)
    )


def test_requests_overlap_for_half_an_output_for_any_lengths():
    """Count the overlap, the reason for the factor 1/2: one request arrives per step and decodes for its own length."""
    rng = np.random.default_rng(5)
    for lengths in (
        np.full(20_000, 40),
        rng.integers(1, 80, 20_000),
        np.maximum(1, rng.lognormal(3.0, 1.2, 20_000).astype(int)),
    ):
        arrived = np.arange(len(lengths))
        ends = arrived + lengths
        overlap = met = 0
        for i in range(10_000, 10_500):
            others = ends[:i] > i
            overlap += np.minimum(ends[:i][others] - i, lengths[i]).sum()
            met += others.sum()
        assert overlap / met == pytest.approx(lengths.mean() / 2, rel=0.15)


def test_a_full_cache_of_fresh_blocks_sends_a_new_prompt_elsewhere():
    full, stale, room = idle(cache_age_s=10), idle(cache_age_s=600), idle()
    assert choose([full, stale, room]).names() == ["2", "1", "0"]


def test_a_replica_without_memory_has_a_wait():
    rows = [idle(free_tokens=100, used_tokens=9000, kv_tokens=9000), idle(num_requests=1)]
    terms = choose(rows, demand=BUSY)
    assert terms[0].replica == "1" and terms[1].terms["memory_s"] > 0


def test_a_prefix_in_demand_gets_a_second_copy_before_its_holder_is_that_busy():
    holder, other = idle(gpu_tokens=900, reported_work=300), idle()
    assert winners([holder, other], demand=BUSY) == {"0": 400}
    assert winners([holder, other], demand=BUSY, followers=3) == {"1": 400}
    # If many replicas hold the prefix, one more copy saves little.
    copies = [holder] * 4 + [other]
    assert set(winners(copies, demand=BUSY, followers=3)) == set("0123")


def test_later_arrivals_make_a_long_job_behind_a_queue_dearer_up_to_a_window():
    def later(work):
        return choose([idle(reported_work=work)], demand=BUSY)[0].terms["later_s"]

    assert later(0) < later(1000) < later(10_000)
    # kappa lambda / (1 - rho) P w0
    at_most = CostPolicy().kappa * 2.0 / 0.5 * 0.1 * (3 * BUSY.mean_prefill_s)
    assert later(1e9) == pytest.approx(at_most, rel=1e-3)


def test_a_session_stays_among_near_equals():
    near = [idle(reported_work=2), idle()]
    fleet = fleet_of(near)
    assert winners(near) == {"1": 400}
    sticky = replace(fleet, session_row=0)
    ranking = CostPolicy().choose(RouteRequest(1000), sticky, 0.0, random.Random(0))
    assert ranking[0].replica == "0"
    assert winners([idle(reported_work=200), idle()], session_row=0) == {"1": 400}


def test_a_busy_holder_of_a_prefix_lends_it_to_an_idle_replica_of_another_node():
    holder, other = idle(gpu_tokens=8000, reported_work=50_000), idle()
    peers = PeerPrefixes(np.array([0.0, 8000.0]), np.array([1, 0]), 1e-6)
    best, second = choose([holder, other], 8200, peers=peers)
    assert (best.replica, best.pulled_tokens, best.pull_from) == ("1", 8000, "0")
    assert best.terms["pull_s"] == pytest.approx(8000 * (1e-6 + 1e-5) + PULL_OVERHEAD_S)
    assert best.prefill_s == pytest.approx(200 * 1e-4, rel=1e-4) and best.held_tokens == 8000
    assert (second.pulled_tokens, second.pull_from) == (0, "")
    # A copy that takes longer than the prefill is not made.
    slow = replace(peers, s_per_token=2e-4)
    ranking = choose([holder, other], 8200, peers=slow)
    assert all(score.pulled_tokens == 0 and score.terms["pull_s"] == 0 for score in ranking)
    # With the holder idle, nothing is copied either.
    assert choose([idle(gpu_tokens=8000), other], 8200, peers=peers)[0].replica == "0"
    alone = fleet_of([holder, other], 8200, peers=peers).only(1)
    assert alone.peers.tokens.tolist() == [8000.0]


def test_of_stale_reports_two_at_random_compete():
    rows = [idle(report_age_s=5.0, reported_work=20_000 + i) for i in range(6)]
    counts = winners(rows, draws=1500)
    # The i-th best wins if it is drawn with a worse one: in 5, 4, ... 1 of the 15 pairs.
    assert counts["0"] == pytest.approx(500, abs=80) and counts["4"] == pytest.approx(100, abs=40)
    assert "5" not in counts
    fresh = idle(reported_work=1000)
    assert winners([*rows, fresh]) == {"6": 400}


def plain_terms(policy, fleet, num_tokens):
    """Compute each term for each replica with the formulas of `router/policy/cost.py`."""
    demand = fleet.demand
    prior = fleet.prior_s_per_work or policy.fallback_prefill_s_per_work
    measured = fleet.prefill_s_per_work
    is_noise = (np.abs(measured - prior) <= policy.speed_noise * prior) | (measured <= 0)
    speed = np.where(is_noise, prior, measured)
    cached = fleet.gpu_tokens + fleet.host_tokens
    missing = num_tokens - cached
    prefill = prefill_work(missing, cached, fleet.attention_context_tokens) * speed
    pull = np.zeros(len(fleet))
    if fleet.peers is not None:
        tokens = fleet.peers.tokens
        held = cached + tokens
        rest = prefill_work(num_tokens - held, held, fleet.attention_context_tokens) * speed
        copy_s = fleet.peers.s_per_token + fleet.columns.host_copy_s_per_token
        copied = tokens * copy_s + PULL_OVERHEAD_S
        pays = (tokens > 0) & (rest + copied < prefill)
        prefill, pull = np.where(pays, rest, prefill), np.where(pays, copied, 0.0)
    decayed = fleet.reported_work * speed - np.minimum(fleet.report_age_s, policy.max_decay_s)
    head_done = np.minimum(fleet.columns.head_work * speed * 0.9, fleet.head_age_s)
    wait = np.maximum(
        np.maximum(decayed, 0.0) + fleet.columns.booked_work * speed,
        fleet.columns.unanswered_work * speed - head_done,
    )
    window, later = wait + prefill, np.zeros(len(fleet))
    busy = 1.0 - min(0.95, demand.prefill_share)
    if demand.mean_prefill_s > 0:
        price = policy.kappa * demand.arrivals_per_s / busy
        bounded = window * (1.0 / (policy.window_prefills * demand.mean_prefill_s)) + 1.0
        later = window / bounded * prefill * price
    handover = np.zeros(len(fleet))
    output_s = demand.output_tokens * demand.decode_s_per_kv_token
    overlap_s = policy.delta * demand.output_tokens * demand.decode_s_per_kv_token
    read = fleet.columns.num_requests * (0.5 * num_tokens) + fleet.columns.mean_kv_tokens
    decode = read * overlap_s
    interference = fleet.columns.num_requests * (policy.eta * prefill)
    if fleet.prefill is not None and not fleet.prefill.is_prefill.all():
        is_prefill = fleet.prefill.is_prefill
        copy_s = fleet.prefill.s_per_token + fleet.columns.host_copy_s_per_token
        lacking = num_tokens - cached[~is_prefill].max()
        handover = np.where(is_prefill, HANDOVER_S + lacking * copy_s, 0.0)
        decode[is_prefill] = decode[~is_prefill].min()
        interference[is_prefill] = 0.0
    short = np.maximum(missing - fleet.columns.free_tokens, 0.0)
    freed = np.maximum(fleet.columns.used_tokens, 1.0)
    longest, copy_value = cached.max(), np.zeros(len(fleet))
    if fleet.followers > 0 and longest > 0:
        k = np.count_nonzero(cached == longest)
        queue_s = demand.arrivals_per_s * demand.mean_square_prefill_s2 / (2.0 * busy)
        saved_s = policy.copies * fleet.followers * queue_s / (k * (k + 1))
        copy_value = (cached - longest) * (saved_s / longest)
    return {
        "wait_s": wait,
        "prefill_s": prefill,
        "host_copy_s": fleet.host_tokens * fleet.columns.host_copy_s_per_token,
        "interference_s": interference,
        "later_s": later,
        "decode_s": decode,
        "eviction_s": np.exp(fleet.columns.cache_age_s * (-1.0 / policy.reuse_s))
        * (missing * speed)
        * policy.eviction,
        "memory_s": policy.memory * short / freed * (output_s * fleet.columns.kv_tokens),
        "copy_value_s": copy_value,
        "pull_s": pull,
        "handover_s": handover,
        "adapter_s": np.zeros(len(fleet)) if fleet.adapter_s is None else fleet.adapter_s,
    }


DEMANDS = st.one_of(
    st.just(Demand()),
    st.builds(
        Demand,
        st.floats(0, 20),
        st.floats(0, 0.99),
        st.one_of(st.just(0.0), st.floats(1e-6, 10)),
        st.floats(0, 100),
        st.floats(1, 1000),
        st.one_of(st.just(0.0), st.floats(0, 1e-5)),
    ),
)


@given(
    st.lists(st.fixed_dictionaries({}, optional=COLUMNS), min_size=1, max_size=40),
    st.integers(1, 50_000),
    DEMANDS,
    st.one_of(st.just(0.0), st.floats(0, 50)),
    st.integers(-1, 39),
    st.sampled_from([CostPolicy(), e2e_policy(speed_noise=0.0)]),
    st.one_of(st.none(), st.tuples(st.floats(0, 1e-3), st.floats(0, 1))),
    st.one_of(st.none(), st.floats(0, 1e-3)),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_costs_are_those_of_the_plain_formulas_bit_for_bit(
    rows, num_tokens, demand, followers, session_row, policy, pulls, handover_s, adapter_s
):
    rows = [idle(**row) for row in rows]
    facts = {"attention_context_tokens": 3e4, "demand": demand, "followers": followers}
    fleet = fleet_of(rows, num_tokens, **facts)
    fleet.session_row = session_row if session_row < len(rows) else -1
    if pulls is not None:
        s_per_token, part = pulls
        lacking = num_tokens - 1 - fleet.gpu_tokens - fleet.host_tokens
        rows_of = np.zeros(len(rows), np.int64)
        fleet.peers = PeerPrefixes(np.floor(lacking * part), rows_of, s_per_token)
    if handover_s is not None:
        is_prefill = np.arange(len(rows)) % 4 == 0
        fleet.prefill = PrefillRows(is_prefill, np.full(len(rows), handover_s))
    if adapter_s is not None:
        fleet.adapter_s = adapter_s * (np.arange(len(rows)) % 3)
    expected = plain_terms(policy, fleet, num_tokens)
    ranking = policy.choose(RouteRequest(num_tokens), fleet, 0.0, random.Random(0))
    assert list(ranking.term_names) == list(expected)
    for name, values in zip(ranking.term_names, ranking.terms.T, strict=True):
        assert values.tolist() == expected[name].take(ranking.rows).tolist(), name
    assert ranking.wait_s.tolist() == expected["wait_s"].tolist()
    cost = np.zeros(len(rows))
    for values in expected.values():
        cost = cost + values
    if fleet.session_row >= 0:
        row = fleet.session_row
        cost[row] -= policy.stickiness * expected["prefill_s"][row]
    stale = fleet.report_age_s > policy.stale_after_s
    # All stale replicas but two are ranked behind the others.
    if np.count_nonzero(stale) > 2:
        behind = (ranking.cost_s != cost).nonzero()[0]
        assert stale[behind].all() and len(behind) == np.count_nonzero(stale) - 2
        cost[behind] += 1.0 + cost.max()
    assert ranking.cost_s.tolist() == cost.tolist()
    assert ranking.cost_s[ranking.rows[0]] <= cost.min() + policy.tie_s
    ranked = cost[list(ranking.rows[1:])]
    assert sorted(ranked) == ranked.tolist()
    left_out = np.delete(cost, ranking.rows)
    assert not len(left_out) or ranked.max() <= left_out.min() + policy.tie_s


def test_a_replica_that_lacks_the_adapter_pays_for_it_until_the_other_queue_is_longer():
    adapter_s = np.array([0.0, 0.2])
    assert winners([idle(), idle()], adapter_s=adapter_s) == {"0": 400}
    shorter = [idle(reported_work=1000), idle()]  # 0.1 s
    best, other = choose(shorter, adapter_s=adapter_s)
    assert (best.replica, best.terms["adapter_s"], other.terms["adapter_s"]) == ("0", 0.0, 0.2)
    longer = [idle(reported_work=3000), idle()]  # 0.3 s
    assert winners(longer, adapter_s=adapter_s) == {"1": 400}
    alone = fleet_of(longer, adapter_s=adapter_s).only(1)
    ranking = CostPolicy().choose(RouteRequest(1000), alone, 0.0, random.Random(0))
    assert ranking[0].terms["adapter_s"] == 0.2
    assert choose([idle()])[0].terms["adapter_s"] == 0.0


def test_speeds_that_change_are_not_those_of_the_decision_before():
    policy, request = CostPolicy(speed_noise=0.0), RouteRequest(1000)

    def prefill_s(speeds, is_kept):
        fleet = fleet_of([idle(prefill_s_per_work=speed) for speed in speeds])
        fleet.prefill_s_per_work.setflags(write=not is_kept)
        ranking = policy.choose(request, fleet, 0.0, random.Random(0))
        if not is_kept:
            fleet.prefill_s_per_work *= 2
            ranking = policy.choose(request, fleet, 0.0, random.Random(0))
        by_row = sorted(zip(ranking.rows, ranking, strict=True))
        return [score.prefill_s for _, score in by_row]

    assert prefill_s([1e-4, 2e-4], True) == pytest.approx([0.1, 0.2])
    assert prefill_s([3e-4, 2e-4], True) == pytest.approx([0.3, 0.2])
    assert prefill_s([1e-4, 2e-4], False) == pytest.approx([0.2, 0.4])


def test_no_replicas_give_an_empty_ranking():
    assert len(choose([])) == 0
