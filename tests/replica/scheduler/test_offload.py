"""Offload, return and pause, as the scheduler's owner sees them."""

import dataclasses

import numpy as np
import pytest
from small_config import small_config

from quire.protos.errors import DeadlineExceeded, EngineError
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Phase, Request
from quire.replica.core.step_plan import CopiesDone, StepResult
from quire.replica.scheduler.scheduler import Scheduler

# On a GPU steps run beside the copies.
CONFIG = small_config(device="cuda", num_blocks=8, num_host_blocks=16)


def make_scheduler(**changes):
    return Scheduler(dataclasses.replace(CONFIG, **changes))


def submit(scheduler, key, prompt, max_tokens=4, **options):
    request = Request(key, list(prompt), SamplingParams(max_tokens=max_tokens), **options)
    assert scheduler.add(request) is None
    return request


def step(scheduler, now_s=0.0):
    """One step; the plan and {key: delta}."""
    plan = scheduler.plan(now_s)
    tokens = np.full(len(plan.sampling.token_index), 7)
    deltas = {d.key: d for d in scheduler.commit(plan, StepResult(tokens, 0.01), now_s)}
    scheduler.check()
    return plan, deltas


def run(scheduler):
    ended = {}
    while (plan := scheduler.plan(0.0)) is not None:
        tokens = np.full(len(plan.sampling.token_index), 7)
        for delta in scheduler.commit(plan, StepResult(tokens, 0.01), 0.0):
            if delta.finish_reason:
                ended[delta.key] = delta
        scheduler.check()
    return ended


def until_offloaded(scheduler, *keys, **options):
    """Requests of 15 tokens side by side until one is offloaded; returns them and the plan."""
    requests = {
        key: submit(scheduler, key, range(100 * i, 100 * i + 15), 40, **options)
        for i, key in enumerate(keys, 1)
    }
    while not scheduler.book.counters.num_offloads:
        plan, _ = step(scheduler)
    return requests, plan


def test_the_oldest_goes_to_the_host_tier_and_returns_for_one_token():
    scheduler = make_scheduler(safety_margin=0.2)
    requests, plan = until_offloaded(scheduler, "a", "b", "c")
    preempted = requests["a"]
    assert preempted.phase is Phase.OFFLOADED
    blocks = preempted.offloaded.blocks
    assert plan.saves[:, 1].tolist() == [block.host_block for block in blocks]
    (entry,) = scheduler.snapshot()["returning"]
    assert (entry["key"], entry["host_blocks"]) == ("a", plan.saves[:, 1].tolist())
    assert scheduler.load().host_blocks_in_use == len(blocks)
    missing = preempted.num_tokens - preempted.offloaded.num_computed
    assert missing == 1
    while preempted.phase is Phase.OFFLOADED:
        plan, deltas = step(scheduler)
    assert np.diff(plan.cu_q)[-1] == 1
    assert len(deltas["a"].token_ids) == 1
    assert plan.num_decode_rows == plan.num_rows - 1
    still = [entry["host_blocks"] for entry in scheduler.snapshot()["returning"]]
    assert scheduler.load().host_blocks_in_use == sum(map(len, still))
    assert {d.facts.num_output_tokens for d in run(scheduler).values()} == {40}
    assert scheduler.book.counters.num_restores == scheduler.book.counters.num_offloads


def test_blocks_that_nobody_took_meanwhile_are_not_copied_back():
    scheduler = make_scheduler(num_blocks=5)
    submit(scheduler, "a", range(100, 117), max_tokens=9)
    step(scheduler)
    submit(scheduler, "b", range(200, 215), max_tokens=4)
    while not scheduler.book.counters.num_offloads:
        step(scheduler)
    # "b" ends before it needs more than the free blocks and its partial one.
    while not scheduler.book.counters.num_restores:
        plan, _ = step(scheduler)
    assert len(plan.restores) < -(-17 // 8)
    run(scheduler)


def test_no_new_request_overtakes_a_preempted_one():
    scheduler = make_scheduler()
    until_offloaded(scheduler, "a", "b", "c")
    later = submit(scheduler, "later", [900], 1)
    num_waits = 0
    while later.phase is Phase.PENDING:
        num_waits += scheduler.memory.blocks.num_available > 0
        step(scheduler)
        assert later.phase is Phase.PENDING or not scheduler.snapshot()["returning"]
    assert num_waits > 0, "there was room for it"


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_in_the_tier_a_preempted_request_computes_again(num_host_blocks):
    scheduler = make_scheduler(num_host_blocks=num_host_blocks, prefix_caching=False)
    for i in range(3):
        submit(scheduler, i, range(100 * i, 100 * i + 15), 40)
    assert {d.facts.num_output_tokens for d in run(scheduler).values()} == {40}
    assert scheduler.book.counters.num_preemptions > scheduler.book.counters.num_offloads == 0
    assert scheduler.memory.host.blocks.num_free == num_host_blocks


@pytest.mark.parametrize("how", ["abort", "deadline", "clear"])
def test_an_offloaded_request_ends_or_goes_on_wherever_it_is(how):
    scheduler = make_scheduler()
    deadline_s = 5.0 if how == "deadline" else None
    requests, _ = until_offloaded(scheduler, "a", "b", "c", deadline_s=deadline_s)
    if how == "abort":
        assert scheduler.abort("a").finish_reason == "abort"
    elif how == "deadline":
        assert scheduler.plan(6.0) is None
        ended = scheduler.take_ended()
        assert len(ended) == 3
        assert all(isinstance(d.facts.error, DeadlineExceeded) for d in ended)
    else:
        scheduler.clear_cache()
        assert scheduler.memory.host.blocks.num_in_use == len(requests["a"].offloaded.blocks)
    scheduler.check()
    ended = run(scheduler)
    assert set(ended) == {"abort": {"b", "c"}, "deadline": set(), "clear": {"a", "b", "c"}}[how]
    assert scheduler.memory.host.blocks.num_in_use == 0


def test_when_the_step_that_saves_fails_the_preempted_request_computes_again():
    scheduler = make_scheduler()
    requests = [submit(scheduler, i, range(100 * i, 100 * i + 15), 40) for i in range(3)]
    while not scheduler.book.counters.num_offloads:
        plan = scheduler.plan(0.0)
        if not scheduler.book.counters.num_offloads:
            scheduler.commit(plan, StepResult(np.full(len(plan.sampling.token_index), 7), 0.1), 0.0)
    (preempted,) = (r for r in requests if r.phase is Phase.OFFLOADED)
    failed = {d.key for d in scheduler.fail_step(plan, EngineError("the device is gone"))}
    scheduler.check()
    assert preempted.phase is Phase.PENDING
    assert failed == {r.key for r in requests if r is not preempted}
    assert scheduler.memory.host.blocks.num_free == 16
    assert run(scheduler)[preempted.key].facts.num_output_tokens == 40


def test_evicted_prefixes_return_from_the_host_tier_and_are_told():
    scheduler = make_scheduler()
    for i in range(4):
        submit(scheduler, i, range(100 * i, 100 * i + 30), 1)
        run(scheduler)
    submit(scheduler, "again", range(0, 30), 1)
    plan, deltas = step(scheduler)
    assert (plan.num_tokens, len(plan.restores)) == (30 - 24, 3)
    assert (
        deltas["again"].facts.num_cached_tokens
        == deltas["again"].facts.num_host_cached_tokens
        == 24
    )
    assert scheduler.snapshot()["prefix"]["tokens_hit_on_host"] == 24


@pytest.mark.parametrize(("num_pulled", "told"), [(0, None), (16, 16), (100, 24)])
def test_pulled_tokens_are_a_part_of_those_from_the_host_tier(num_pulled, told):
    scheduler = make_scheduler()
    for i in range(4):
        submit(scheduler, i, range(100 * i, 100 * i + 30), 1)
        run(scheduler)
    submit(scheduler, "again", range(0, 30), 1).num_pulled_tokens = num_pulled
    facts = step(scheduler)[1]["again"].facts
    assert (facts.num_host_cached_tokens, facts.num_peer_cached_tokens) == (24, told)


# -- pause -----------------------------------------------------------------------------------------------


def test_a_paused_request_keeps_its_blocks_and_computes_nothing():
    scheduler = make_scheduler(num_blocks=64)
    submit(scheduler, "a", range(100, 115), 20)
    submit(scheduler, "b", range(200, 215), 20)
    step(scheduler)
    scheduler.pause("a")
    for _ in range(5):
        plan, deltas = step(scheduler)
        assert (plan.num_rows, set(deltas)) == (1, {"b"})
    assert scheduler.num_running == 2
    scheduler.pause("b")
    assert scheduler.plan(0.0) is None
    scheduler.resume("b")
    scheduler.resume("a")
    _, deltas = step(scheduler)
    assert (deltas["a"].index, deltas["b"].index) == (1, 6)
    assert {d.facts.num_output_tokens for d in run(scheduler).values()} == {20}


def test_a_token_in_flight_still_comes():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 115), 3)
    plan = scheduler.plan(0.0)
    scheduler.pause("a")
    (delta,) = scheduler.commit(plan, StepResult(np.array([7]), 0.1), 0.0)
    assert delta.token_ids == [7]
    assert scheduler.plan(0.0) is None
    scheduler.resume("a")
    assert run(scheduler)["a"].facts.num_output_tokens == 3


def test_a_paused_request_gives_way_first_and_blocks_nobody():
    scheduler = make_scheduler()
    requests = [submit(scheduler, i, range(100 * i, 100 * i + 15), 40) for i in range(3)]
    step(scheduler)
    scheduler.pause(1)
    while not scheduler.book.counters.num_preemptions:
        step(scheduler)
    assert requests[1].phase is Phase.OFFLOADED
    submit(scheduler, "new", [900], 1)
    ended = run(
        scheduler
    )  # it does not return, and holds up neither preempted requests nor new ones
    assert set(ended) == {0, 2, "new"}
    assert scheduler.num_waiting == 1
    scheduler.resume(1)
    assert run(scheduler)[1].facts.num_output_tokens == 40


def test_those_who_wait_get_the_room_of_the_paused():
    scheduler = make_scheduler(max_running_requests=1)
    submit(scheduler, "a", range(100, 115), 20)
    step(scheduler)
    scheduler.pause("a")
    submit(scheduler, "b", range(200, 210), 2)
    assert set(run(scheduler)) == {"b"}
    scheduler.resume("a")
    assert set(run(scheduler)) == {"a"}


def test_a_paused_request_does_not_start_and_those_behind_it_do():
    scheduler = make_scheduler()
    for key in "abc":
        submit(scheduler, key, [100], 1)
    scheduler.pause("a")
    scheduler.pause("b")
    _, deltas = step(scheduler)
    assert set(deltas) == {"c"}
    assert scheduler.plan(0.0) is None
    assert scheduler.num_waiting == 2
    scheduler.resume("b")
    _, deltas = step(scheduler)
    assert set(deltas) == {"b"}
    assert scheduler.abort("a").finish_reason == "abort"
    scheduler.check()


def test_a_deadline_ends_a_paused_request():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 115), 20, deadline_s=9.0)
    step(scheduler)
    scheduler.pause("a")
    assert scheduler.plan(1.0) is None
    assert scheduler.next_deadline_s() == 9.0
    assert scheduler.plan(9.5) is None
    (delta,) = scheduler.take_ended()
    assert isinstance(delta.facts.error, DeadlineExceeded)
    assert scheduler.next_deadline_s() is None


# -- copied back, or computed again --------------------------------------------------------------------------


def learn(scheduler, copy_s):
    """What a block takes to copy; what a token takes to compute is known from steps."""
    step(scheduler)
    for _ in range(4):
        scheduler.copies.observe(1, copy_s)


def test_a_preempted_request_whose_blocks_are_slow_to_copy_computes_again():
    scheduler = make_scheduler()
    for i in range(3):
        submit(scheduler, i, range(100 * i, 100 * i + 15), 40)
    learn(scheduler, 1000.0)
    assert {d.facts.num_output_tokens for d in run(scheduler).values()} == {40}
    assert scheduler.book.counters.num_offloads > 0 == scheduler.book.counters.num_restores
    assert (
        scheduler.copies.num_computed
        >= scheduler.book.counters.num_offloads
        > scheduler.copies.num_copied
    )
    assert scheduler.memory.host.blocks.num_in_use == 0


def test_a_preempted_request_whose_blocks_are_fast_to_copy_returns_with_them():
    scheduler = make_scheduler()
    for i in range(3):
        submit(scheduler, i, range(100 * i, 100 * i + 15), 40)
    learn(scheduler, 1e-9)
    assert {d.facts.num_output_tokens for d in run(scheduler).values()} == {40}
    assert scheduler.book.counters.num_restores == scheduler.book.counters.num_offloads > 0
    assert scheduler.copies.num_computed == 0


@pytest.mark.parametrize(("copy_s", "num_cached"), [(1e-9, 24), (1000.0, 0)])
def test_a_prefix_in_the_host_tier_is_copied_if_that_is_faster(copy_s, num_cached):
    scheduler = make_scheduler()
    submit(scheduler, "first", range(1, 26), 1)
    learn(scheduler, copy_s)
    submit(scheduler, "others", range(100, 163), 1)  # needs the whole cache
    run(scheduler)
    submit(scheduler, "again", range(1, 26), 1)
    ended = run(scheduler)["again"]
    assert ended.facts.num_cached_tokens == ended.facts.num_host_cached_tokens == num_cached


def test_blocks_are_copied_while_a_step_runs_that_does_not_use_them():
    scheduler = make_scheduler()
    requests, _ = until_offloaded(scheduler, "a", "b", "c")
    preempted = requests["a"]
    while preempted.phase is Phase.OFFLOADED:
        plan, deltas = step(scheduler)
    assert len(plan.restores) and not plan.uses_restores
    assert preempted.row not in plan.rows.tolist() and "a" not in deltas
    plan, deltas = step(scheduler)
    assert preempted.row in plan.rows.tolist() and "a" in deltas
    assert not len(plan.restores)


def test_on_a_cpu_blocks_are_copied_for_the_step_that_uses_them():
    scheduler = make_scheduler(device="cpu")
    requests, _ = until_offloaded(scheduler, "a", "b", "c")
    preempted = requests["a"]
    while preempted.phase is Phase.OFFLOADED:
        plan, deltas = step(scheduler)
    assert len(plan.restores) and plan.uses_restores
    assert preempted.row in plan.rows.tolist() and "a" in deltas


def commit(scheduler, plan, restored_step):
    tokens = np.full(len(plan.sampling.token_index), 7)
    result = StepResult(tokens, 0.01, copies=CopiesDone(restored_step=restored_step))
    deltas = {d.key: d for d in scheduler.commit(plan, result, 0.0)}
    scheduler.check()
    return deltas


def until_returning(scheduler):
    """A preempted request among others, and the plan that copies its blocks back."""
    requests, _ = until_offloaded(scheduler, "a", "b", "c")
    preempted = requests["a"]
    while True:
        plan = scheduler.plan(0.0)
        if preempted.phase is not Phase.OFFLOADED:
            return preempted, plan
        commit(scheduler, plan, None)


def test_others_decode_until_a_preempted_requests_blocks_are_there():
    scheduler = make_scheduler()
    preempted, plan = until_returning(scheduler)
    first = plan.step
    for _ in range(4):
        assert not plan.uses_restores and preempted.row not in plan.rows.tolist()
        assert plan.num_decode_rows == plan.num_rows > 0
        commit(scheduler, plan, first - 1)
        plan = scheduler.plan(0.0)
    commit(scheduler, plan, first)
    plan = scheduler.plan(0.0)
    assert preempted.row in plan.rows.tolist()
    assert "a" in commit(scheduler, plan, plan.step)
    assert run(scheduler)["a"].facts.num_output_tokens == 40


def test_with_nobody_else_to_run_a_step_waits_for_the_blocks():
    scheduler = make_scheduler()
    preempted, plan = until_returning(scheduler)
    first = plan.step
    commit(scheduler, plan, first - 1)
    for key in ("b", "c"):
        scheduler.abort(key)
    plan = scheduler.plan(0.0)
    assert plan.rows.tolist() == [preempted.row] and plan.uses_restores
    assert "a" in commit(scheduler, plan, plan.step)


def test_whoever_gets_a_block_that_is_still_copied_to_waits_for_that():
    """Its owner is gone: another must not write there before the copy does."""
    scheduler = make_scheduler(prefix_caching=False)
    _, plan = until_returning(scheduler)
    first, copied = plan.step, set(plan.restores[:, 1].tolist())
    commit(scheduler, plan, first - 1)
    for key in ("a", "b", "c"):
        scheduler.abort(key)
    submit(scheduler, "new", range(900, 960), 4)  # needs the whole cache
    plan = scheduler.plan(0.0)
    assert copied & set(plan.block_tables.gather().ravel().tolist()) and plan.uses_restores
    commit(scheduler, plan, plan.step)
    assert not scheduler.plan(0.0).restores.size


def test_alone_it_does_not_wait_for_another_step():
    scheduler = make_scheduler(num_blocks=5)
    submit(scheduler, "a", range(100, 117), max_tokens=9)
    step(scheduler)
    submit(scheduler, "b", range(200, 215), max_tokens=4)
    while not scheduler.book.counters.num_restores:
        plan, deltas = step(scheduler)
    assert plan.num_rows == 1 and plan.uses_restores and "a" in deltas


def test_what_was_restored_for_a_step_that_failed_is_computed_again():
    """The row was not in that step, and its blocks may hold nothing."""
    scheduler = make_scheduler()
    requests, _ = until_offloaded(scheduler, "a", "b", "c")
    preempted = requests["a"]
    while True:
        plan = scheduler.plan(0.0)
        if preempted.phase is not Phase.OFFLOADED:
            break
        tokens = np.full(len(plan.sampling.token_index), 7)
        scheduler.commit(plan, StepResult(tokens, 0.01), 0.0)
    assert not plan.uses_restores
    ended = {d.key for d in scheduler.fail_step(plan, EngineError("the device is gone"))}
    assert "a" not in ended and preempted.phase is Phase.PENDING and preempted.row < 0
    scheduler.check()
    assert run(scheduler)["a"].facts.num_output_tokens == 40


@pytest.mark.parametrize("length", range(14, 24))
def test_what_was_restored_and_filled_in_a_step_that_failed_is_forgotten_once(length):
    """Alone it returns and computes in one step: its last block is copied back half full, and may be filled."""
    scheduler = make_scheduler(num_blocks=5)
    submit(scheduler, "a", range(100, 100 + length), max_tokens=9)
    step(scheduler)
    submit(scheduler, "b", range(200, 215), max_tokens=4)
    while True:
        plan = scheduler.plan(0.0)
        if scheduler.book.counters.num_restores:
            break
        scheduler.commit(plan, StepResult(np.full(len(plan.sampling.token_index), 7), 0.01), 0.0)
    assert plan.uses_restores
    (failed,) = scheduler.fail_step(plan, EngineError("the device is gone"))
    scheduler.check()
    assert failed.key == "a"
    assert not any(block in scheduler.memory.prefix for block in plan.restores[:, 1].tolist())
