"""Retention of a conversation's blocks between two turns, as the scheduler's owner sees it."""

import dataclasses

import numpy as np
import pytest
from small_config import small_config

from quire.protos.errors import EngineError
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.scheduler import Scheduler

CONFIG = small_config(num_blocks=8, session_max_share=1.0)
RETAIN_S = 10.0


def make_scheduler(**changes):
    return Scheduler(dataclasses.replace(CONFIG, **changes))


def submit(scheduler, key, prompt, max_tokens=1, **options):
    request = Request(key, list(prompt), SamplingParams(max_tokens=max_tokens), **options)
    assert scheduler.add(request) is None


def run(scheduler, now_s=0.0):
    """Run until no request is left; returns {key: last delta}."""
    ended = {}
    while (plan := scheduler.plan(now_s)) is not None:
        tokens = np.full(len(plan.sampling.token_index), 7)
        for delta in scheduler.commit(plan, StepResult(tokens, 0.01), now_s):
            if delta.finish_reason:
                ended[delta.key] = delta
        scheduler.check()
    return ended


def pressure(scheduler, num_tokens=31, now_s=0.0):
    """Other conversations, one after the other."""
    for i in range(8):
        submit(scheduler, ("other", i), range(100 * i + 100, 100 * i + 100 + num_tokens))
        run(scheduler, now_s)


TURN = list(range(1, 26))  # 3 blocks of 8 tokens, and one token
NEXT_TURN = [*TURN, 7, 50, 51]


def cached_tokens_of_next_turn(scheduler, now_s=0.0):
    submit(scheduler, "next", NEXT_TURN)
    return run(scheduler, now_s)["next"].facts.num_cached_tokens


@pytest.mark.parametrize(("retain_s", "num_cached"), [(RETAIN_S, 24), (0.0, 0)])
def test_a_retained_turn_survives_the_pressure_of_others(retain_s, num_cached):
    scheduler = make_scheduler()
    submit(scheduler, "turn", TURN, retain_s=retain_s)
    run(scheduler)
    pressure(scheduler)
    assert scheduler.load().blocks_retained == num_cached // 8
    assert cached_tokens_of_next_turn(scheduler) == num_cached


def test_without_other_blocks_retained_ones_go_to_the_host_tier_and_stay_retained_there():
    scheduler = make_scheduler(num_host_blocks=6, restore="always")
    submit(scheduler, "turn", TURN, retain_s=RETAIN_S)
    run(scheduler)
    submit(scheduler, "whole cache", range(200, 263))
    run(scheduler)
    load = scheduler.load()
    assert (load.blocks_retained, load.host_blocks_retained) == (0, 3)
    # The others are saved in the rest of the host tier only.
    pressure(scheduler, num_tokens=60)
    load = scheduler.load()
    assert (load.host_blocks_retained, load.host_blocks_cached) == (3, 6)
    submit(scheduler, "next", NEXT_TURN)
    ended = run(scheduler)["next"]
    assert ended.facts.num_cached_tokens == ended.facts.num_host_cached_tokens == 24


def test_a_retention_ends_at_its_time_or_when_it_is_dropped():
    scheduler = make_scheduler()
    submit(scheduler, "a", TURN, retain_s=RETAIN_S)
    submit(scheduler, "b", [*TURN[:8], *range(70, 80)], retain_s=2 * RETAIN_S)
    run(scheduler, now_s=5.0)
    assert scheduler.load().blocks_retained == 4
    assert scheduler.next_deadline_s() == 15.0
    assert scheduler.plan(14.9) is None and scheduler.load().blocks_retained == 4
    # "b" still needs the first block of "a".
    assert scheduler.plan(15.0) is None and scheduler.load().blocks_retained == 2
    scheduler.check()
    scheduler.drop_retained("b")
    assert scheduler.load().blocks_retained == 0
    assert scheduler.next_deadline_s() is None
    scheduler.check()
    # A live request is told before it ends.
    submit(scheduler, "c", TURN, retain_s=RETAIN_S)
    scheduler.drop_retained("c")
    run(scheduler)
    assert scheduler.load().blocks_retained == 0 == scheduler.snapshot()["retained_sequences"]


def test_the_time_of_a_retention_begins_at_the_end_of_its_request():
    scheduler = make_scheduler()
    submit(scheduler, "paused", TURN, 9, retain_s=RETAIN_S, credit_tokens=1)
    run(scheduler, now_s=1.0)
    # The loop has slept since; it hears of the abort before it plans.
    assert scheduler.abort("paused").finish_reason == "abort"
    assert scheduler.plan(100.0) is None
    assert scheduler.next_deadline_s() == 100.0 + RETAIN_S
    assert scheduler.load().blocks_retained == 3


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_the_share_bounds_both_tiers_and_the_oldest_conversation_gives_way(share):
    scheduler = make_scheduler(num_host_blocks=16, session_max_share=share, restore="always")
    for i in range(6):
        submit(scheduler, i, range(100 * i + 50, 100 * i + 67), retain_s=RETAIN_S)
        run(scheduler)
        load = scheduler.load()
        assert load.blocks_retained <= share * 8
        assert load.host_blocks_retained <= share * 16
    assert load.blocks_retained == share * 8
    pressure(scheduler)
    submit(scheduler, "first", [*range(50, 67), 7, 8])
    submit(scheduler, "last", [*range(550, 567), 7, 8])
    ended = run(scheduler)
    assert ended["last"].facts.num_cached_tokens == (16 if share else 0)
    assert ended["first"].facts.num_cached_tokens <= ended["last"].facts.num_cached_tokens


def test_failed_requests_are_not_retained_and_an_empty_cache_retains_nothing():
    scheduler = make_scheduler()
    submit(scheduler, "failed", TURN, 9, retain_s=RETAIN_S)
    plan = scheduler.plan(0.0)
    scheduler.fail_step(plan, EngineError("the device is gone"))
    assert scheduler.load().blocks_retained == 0
    submit(scheduler, "turn", TURN, retain_s=RETAIN_S)
    run(scheduler)
    assert scheduler.load().blocks_retained == 3
    scheduler.clear_cache()
    scheduler.check()
    assert scheduler.load().blocks_retained == scheduler.load().blocks_cached == 0
    # A request that runs on without its index is not retained.
    submit(scheduler, "runs on", TURN, 9, retain_s=RETAIN_S)
    assert scheduler.plan(0.0) is not None
    scheduler.clear_cache()
    scheduler.abort("runs on")
    scheduler.check()
    assert scheduler.snapshot()["retained_sequences"] == 0


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_retention_changes_no_step_of_requests_without_a_common_prefix(num_host_blocks):
    """A crowd that preempts: the steps are the same whether every request is retained or none."""
    lives = []
    for retain_s in (0.0, 3.0):
        scheduler = make_scheduler(
            num_blocks=16,
            num_host_blocks=num_host_blocks,
            session_max_share=0.7,
            max_waiting_requests=99,
        )
        rng = np.random.default_rng(3)
        life, retained = [], 0
        for i in range(300):
            if i % 6 == 0:
                prompt = [i, *rng.integers(3, 900, int(rng.integers(5, 60)))]
                submit(scheduler, i, prompt, int(rng.integers(1, 40)), retain_s=retain_s)
            plan = scheduler.plan(0.25 * i)
            tokens = np.full(len(plan.sampling.token_index), 7)
            scheduler.commit(plan, StepResult(tokens, 0.01), 0.25 * i)
            load = scheduler.load()
            life.append((plan.num_tokens, plan.num_rows, load.num_preemptions, load.num_offloads))
            retained += load.blocks_retained
            scheduler.check()
        assert load.num_preemptions > 5
        assert (retained > 0) == (retain_s > 0)
        lives.append(life)
    assert lives[0] == lives[1]
