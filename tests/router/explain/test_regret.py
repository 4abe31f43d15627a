"""The regret of decisions against hindsight: small cases by hand, bounds for all cases, and the interval."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_fleets import ROWS, fleet_of, idle

from quire.router.explain.decisions import DecisionRing
from quire.router.explain.regret import HORIZON_S, RegretMeter, Window, merged_regrets, windows_of
from quire.router.explain.regret_worker import MAX_SHARE, PERIOD_S, RegretWorker
from quire.router.policy.by_name import POLICY_NAMES, make_policy
from quire.router.policy.policy import RouteRequest, rank
from quire.router.types import Explain

TOKENS, S_PER_TOKEN = 10_000, 1e-4  # a prefill of 1 s


def decide(ring, rows, chosen, *, at_s=0.0, tokens=TOKENS, policy=None, **outcome):
    """Keep a decision for the replica `chosen`; `outcome` has the values of an answered request."""
    fleet = fleet_of(rows, tokens)
    if policy is None:
        cost = fleet.gpu_tokens * 0.0
        cost[chosen] = -1.0
        ranking = rank("by_hand", fleet, cost, random.Random(0))
    else:
        ranking = make_policy(policy).choose(
            RouteRequest(tokens), fleet, at_s, random.Random(len(rows))
        )
    explain = Explain(replica=str(chosen), attempts=1)
    if outcome:
        explain = dataclasses.replace(explain, answered_attempt=1, **outcome)
    ring.add("id", "answer", ranking, tokens, explain, at_s)


def window(ring) -> Window:
    (found,) = windows_of(ring.snapshot())
    return found


def saved_s(ring) -> float:
    found = window(ring)
    return found.recorded_s - found.best_s


@pytest.fixture
def ring():
    return DecisionRing("router", 1000)


def test_requests_on_one_of_two_replicas_wait_for_each_other(ring):
    for _ in range(3):
        decide(ring, [idle(), idle()], 0)
    # 1 + 2 + 3 s; with hindsight 1 + 1 + 2 s.
    assert window(ring).recorded_s == pytest.approx(6.0, rel=1e-3)
    assert window(ring).best_s == pytest.approx(4.0, rel=1e-3)


def test_requests_that_come_later_find_the_queue_shorter(ring):
    decide(ring, [idle(), idle()], 0)
    decide(ring, [idle(), idle()], 0, at_s=0.75)
    assert window(ring).recorded_s == pytest.approx(1.0 + 1.25, rel=1e-3)
    decide(ring, [idle(), idle()], 0, at_s=100.0)
    assert window(ring).recorded_s == pytest.approx(3.25, rel=1e-3)


def test_a_missed_prefix_is_regretted(ring):
    rows = [idle(), idle(gpu_tokens=4000.0, host_tokens=2000.0)]
    decide(ring, rows, 0)
    assert saved_s(ring) == pytest.approx(0.6, rel=1e-3)


def test_what_the_engine_really_had_counts_not_what_was_predicted(ring):
    rows = [idle(gpu_tokens=6000.0), idle()]
    decide(ring, rows, 0, cached_tokens=1000, ttft_s=0.95)
    found = window(ring)
    assert found.recorded_s == pytest.approx(0.9, rel=1e-3)
    assert (found.measured_s, found.num_measured) == (0.95, 1)
    decide(ring, rows, 0, at_s=50.0, cached_tokens=6000, ttft_s=0.5)
    assert window(ring).recorded_s == pytest.approx(0.9 + 0.4, rel=1e-3)


def test_speeds_are_those_that_are_measured_later(ring):
    """The router believed that both were equal: it could not know better, hindsight does."""
    decide(ring, [idle(), idle()], 0)
    slow = idle(prefill_s_per_work=3 * S_PER_TOKEN)
    decide(ring, [slow, idle()], 1, at_s=100.0)
    assert window(ring).recorded_s == pytest.approx(3.0 + 1.0, rel=1e-3)
    assert window(ring).best_s == pytest.approx(2.0, rel=1e-3)


def test_a_queue_of_other_routers_is_the_same_for_every_plan(ring):
    busy = idle(reported_work=20_000.0)
    decide(ring, [busy, idle()], 1, policy="slo")
    assert saved_s(ring) == pytest.approx(0.0, abs=1e-9)
    decide(ring, [busy, busy], 0, at_s=100.0, policy="slo")
    # It waits for the queue that is there, and hindsight would too.
    assert window(ring).recorded_s == pytest.approx(1.0 + 3.0, rel=1e-3)
    assert saved_s(ring) == pytest.approx(0.0, abs=1e-9)


def test_a_replica_that_answered_instead_of_the_first_choice_has_the_work(ring):
    decide(ring, [idle(), idle()], 0, cached_tokens=0, ttft_s=1.0)
    decide(ring, [idle(), idle()], 0)
    ring.snapshot()[0].explain.replica = "1"
    assert window(ring).recorded_s == pytest.approx(2.0, rel=1e-3)


@settings(max_examples=40)
@given(st.data())
def test_hindsight_is_never_worse(data):
    ring = DecisionRing("router", 100)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    now_s, num = 0.0, data.draw(st.integers(1, 4))
    for _ in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.lists(ROWS, min_size=num, max_size=num + 1))
        policy = data.draw(st.sampled_from(POLICY_NAMES))
        now_s += rng.random()
        outcome = {}
        if rng.random() < 0.5:
            outcome = {"cached_tokens": rng.randrange(1000), "ttft_s": rng.random()}
        decide(ring, rows, rng.randrange(num), at_s=now_s, policy=policy, **outcome)
    windows = list(windows_of(ring.snapshot()))
    assert sum(found.num_requests for found in windows) == ring.num_added
    for found in windows:
        assert 0 <= found.best_s <= found.recorded_s * (1 + 1e-9) + 1e-9
        assert math.isfinite(found.recorded_s)


def test_random_placement_is_regretted_more_than_the_cost():
    """Requests for a hot prefix and for new prompts, decided by two policies in the same fleets."""
    regrets = {}
    for policy in ("slo", "power_of_two"):
        rng, ring = random.Random(1), DecisionRing("router", 1000)
        policy_object = make_policy(policy)
        queued = [0.0] * 4
        for i in range(200):
            now_s = 0.3 * i
            queued = [max(0.0, work - 0.3 / S_PER_TOKEN) for work in queued]
            held = [4000.0 if i % 2 and name < 2 else 0.0 for name in range(4)]
            rows = [
                idle(gpu_tokens=tokens, reported_work=work, num_requests=float(work > 0))
                for tokens, work in zip(held, queued, strict=True)
            ]
            fleet = fleet_of(rows, TOKENS)
            ranking = policy_object.choose(RouteRequest(TOKENS), fleet, now_s, rng)
            explain = Explain(replica=ranking.names()[0], attempts=1)
            ring.add("id", "answer", ranking, TOKENS, explain, now_s)
            row = ranking.rows[0]
            queued[row] += TOKENS - held[row]
        regrets[policy] = saved_s(ring) / 200
    assert regrets["slo"] < 0.7 * regrets["power_of_two"]


# -- the estimate -----------------------------------------------------------------------------------------


def of(saved: float, num: int = 10, policy: str = "slo") -> Window:
    return Window(policy, num, 5.0 + saved, 5.0, 2.0, num)


def test_the_interval_covers_the_mean_and_shrinks_with_windows():
    rng, covered, lengths = random.Random(0), 0, {}
    for _ in range(400):
        meter = RegretMeter()
        for i in range(20):
            meter.add(of(10 * rng.gauss(0.1, 0.02)), i)
            if i in (4, 19):
                (found,) = meter.estimates(i)
                lengths.setdefault(i, []).append(found.high_s - found.low_s)
        covered += found.low_s <= 0.1 <= found.high_s
    assert 0.92 < covered / 400 < 0.98
    assert sum(lengths[19]) < 0.5 * sum(lengths[4])


def test_windows_count_by_their_requests():
    meter = RegretMeter()
    meter.add(of(10.0, num=100), 0)
    meter.add(of(0.0, num=300), 1)
    (found,) = meter.estimates(1)
    assert (found.num_requests, found.mean_s) == (400, pytest.approx(10.0 / 400))
    assert found.modelled_s == pytest.approx(20.0 / 400) and found.measured_s == 4.0 / 400


def test_one_window_has_no_interval_and_old_ones_are_forgotten():
    meter = RegretMeter()
    meter.add(of(1.0), 0)
    (found,) = meter.estimates(0)
    assert found.half_s == math.inf and found.low_s == 0.0
    meter.add(of(1.0, policy="e2e"), HORIZON_S)
    assert [r.policy for r in meter.estimates(HORIZON_S + 1)] == ["e2e"]


def test_routers_estimates_are_joined_by_policy():
    def estimate(policy, saved):
        meter = RegretMeter()
        for i, value in enumerate(saved):
            meter.add(of(value, policy=policy), i)
        return meter.estimates(len(saved))

    one, two = estimate("slo", [1.0, 3.0]), estimate("slo", [2.0, 4.0])
    other = estimate("e2e", [1.0])
    e2e, slo = merged_regrets([one, [*two, *other]])
    assert (slo.policy, slo.num_requests) == ("slo", 40)
    assert slo.mean_s == pytest.approx((one[0].mean_s + two[0].mean_s) / 2)
    assert slo.half_s == pytest.approx(math.hypot(one[0].half_s, two[0].half_s) / 2)
    assert e2e == other[0]
    assert merged_regrets([one]) == one and merged_regrets([[], []]) == []


# -- the thread -------------------------------------------------------------------------------------------


def test_a_step_replays_each_decision_once(ring):
    now_s = [0.0]
    worker = RegretWorker(ring, lambda: now_s[0])
    worker.step()
    assert list(worker.regrets) == []
    for i in range(3):
        for _ in range(2):
            decide(ring, [idle(), idle()], 0, at_s=100.0 * i)
        worker.step()
    (found,) = worker.regrets
    assert (found.policy, found.num_requests) == ("by_hand", 6)
    assert found.mean_s == pytest.approx(0.5, rel=1e-3) and found.half_s == pytest.approx(
        0, abs=1e-6
    )
    assert worker.cpu_s > 0
    now_s[0] = HORIZON_S + 1
    worker.step()
    assert list(worker.regrets) == []


def test_more_decisions_than_the_ring_keeps_are_sampled():
    ring = DecisionRing("router", 4)
    worker = RegretWorker(ring, lambda: 0.0)
    for i in range(10):
        decide(ring, [idle(), idle()], 0, at_s=100.0 * i)
    worker.step()
    assert worker.regrets[0].num_requests == 4


def test_the_thread_ends_and_keeps_to_its_share(monkeypatch):
    waited = []
    ring = DecisionRing("router", 4)
    worker = RegretWorker(ring, lambda: 0.0)

    def wait(seconds):
        waited.append(seconds)
        return len(waited) > 3

    def step():
        worker.cpu_s += 1.0

    monkeypatch.setattr(worker._stopped, "wait", wait)
    monkeypatch.setattr(worker, "step", step)
    worker._run()
    assert waited == [PERIOD_S, *[pytest.approx(1.0 / MAX_SHARE)] * 3]
    idle_worker = RegretWorker(ring)
    idle_worker.start()
    idle_worker.close()
    assert not idle_worker._thread.is_alive()
    RegretWorker(ring).close()


def test_a_defect_ends_the_thread_and_nothing_else(ring, monkeypatch, caplog):
    worker = RegretWorker(ring, lambda: 0.0)

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(worker, "step", fail)
    monkeypatch.setattr(worker._stopped, "wait", lambda seconds: False)
    worker._run()
    assert "no longer computed" in caplog.text
