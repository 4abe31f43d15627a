import dataclasses

import numpy as np
import pytest
from small_config import small_config

from quire.protos.errors import DeadlineExceeded, EngineError
from quire.protos.routing_hash import RoutingHasher
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup
from quire.replica.scheduler.scheduler import Scheduler

CONFIG = small_config()


def make_scheduler(**changes):
    return Scheduler(dataclasses.replace(CONFIG, **changes))


def submit(scheduler, key, prompt, max_tokens=4, **options):
    names = {"num_emitted", "tenant", "arrival_s", "deadline_s", "priority"}
    arguments = {name: options.pop(name) for name in names & options.keys()}
    params = SamplingParams(max_tokens=max_tokens, **options)
    return scheduler.add(Request(key, list(prompt), params, **arguments))


def fill(plan, token=7, duration_s=0.01):
    return StepResult(np.full(len(plan.sampling.token_index), token), duration_s)


def step(scheduler, token=7, now_s=0.0):
    """One step; returns the plan and {key: delta}."""
    plan = scheduler.plan(now_s)
    deltas = {delta.key: delta for delta in scheduler.commit(plan, fill(plan, token), now_s)}
    scheduler.check()
    return plan, deltas


def run(scheduler, token=7):
    """Steps until nothing is alive; returns {key: (output tokens, last delta)}."""
    outputs = {}
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, fill(plan, token), 0.0):
            tokens, _ = outputs.get(delta.key, ([], None))
            outputs[delta.key] = (tokens + delta.token_ids, delta)
        scheduler.check()
    return outputs


# -- sharing ---------------------------------------------------------------------------------------------


def test_a_burst_of_equal_prompts_computes_the_prefix_once():
    scheduler = make_scheduler()
    prompt = range(100, 160)  # 7 full blocks and 4 tokens
    for i in range(12):
        submit(scheduler, i, prompt)
    tokens = 0
    first = {}
    while len(first) < 12:
        plan, deltas = step(scheduler)
        tokens += plan.num_tokens - plan.num_decode_rows
        for key, delta in deltas.items():
            first.setdefault(key, delta)
    assert tokens == 60 + 11 * 4
    assert [first[i].facts.num_cached_tokens for i in range(12)] == [0] + [56] * 11
    assert scheduler.book.counters.num_prefix_tokens_hit == 11 * 56
    assert scheduler.book.counters.num_prefix_tokens_queried == 12 * 60


def test_rows_of_one_step_share_what_the_step_itself_computes():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 120))
    submit(scheduler, "b", range(100, 121))
    plan = scheduler.plan(0.0)
    assert np.diff(plan.cu_q).tolist() == [20, 5]
    tables = plan.block_tables.gather()
    assert tables[0, 0, :2].tolist() == tables[0, 1, :2].tolist()
    assert tables[0, 0, 2] != tables[0, 1, 2]


def test_a_prompt_longer_than_a_step_is_shared_once_it_is_planned():
    scheduler = make_scheduler(max_batch_tokens=30)
    submit(scheduler, "a", range(100, 180))
    submit(scheduler, "b", range(100, 180))
    chunks = []
    for _ in range(3):
        plan, _ = step(scheduler)
        chunks.append(np.diff(plan.cu_q).tolist())
    assert chunks == [[30], [30], [20, 8]]  # b recomputes only its last block


def test_generated_tokens_are_cached_too():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 110), max_tokens=20)
    (output, _) = run(scheduler)["a"]
    assert len(output) == 20
    submit(scheduler, "b", [*range(100, 110), *output, 5])
    _, deltas = step(scheduler)
    assert deltas["b"].facts.num_cached_tokens == 24  # the last token was never computed


def test_equal_blocks_filled_twice_become_one():
    scheduler = make_scheduler()
    prompt = list(range(100, 116))  # whole blocks: the last is computed again by each
    submit(scheduler, "a", prompt, max_tokens=20)
    submit(scheduler, "b", prompt, max_tokens=20)
    plan = scheduler.plan(0.0)
    tables = plan.block_tables.gather()
    assert tables[0, 0, 1] != tables[0, 1, 1]
    scheduler.commit(plan, fill(plan), 0.0)
    rows = scheduler.snapshot()["rows"]
    assert rows[0]["blocks"][:2] == rows[1]["blocks"][:2]
    scheduler.check()
    for _ in range(10):
        step(scheduler)
    rows = scheduler.snapshot()["rows"]
    assert rows[0]["blocks"][:3] == rows[1]["blocks"][:3]
    assert scheduler.memory.blocks.num_in_use == 5
    outputs = run(scheduler)
    assert len(outputs) == 2


def test_without_prefix_caching_nothing_is_shared_or_kept():
    scheduler = make_scheduler(prefix_caching=False)
    for i in range(3):
        submit(scheduler, i, range(100, 120))
    outputs = run(scheduler)
    assert [outputs[i][1].facts.num_cached_tokens for i in range(3)] == [0, 0, 0]
    assert scheduler.memory.blocks.num_free == 64
    assert scheduler.events.flush() is None


def test_events_tell_the_routing_hashes_and_their_removal():
    scheduler = make_scheduler(num_blocks=20)
    prompt = np.arange(100, 230)
    submit(scheduler, "a", prompt, max_tokens=1, tenant="t")
    run(scheduler)
    hashes = RoutingHasher("m", "r", "t").hashes(prompt).tolist()
    assert scheduler.events.flush().stored.tolist() == hashes
    submit(scheduler, "b", range(300, 340), max_tokens=1)
    run(scheduler)
    # 17 blocks of a: the partial one was free at once, then the leaf of the chain went.
    assert scheduler.events.flush().removed.tolist() == hashes[1:]


# -- budgets and order -----------------------------------------------------------------------------------


def test_decodes_first_then_running_prefills_then_arrivals():
    scheduler = make_scheduler(max_batch_tokens=20)
    submit(scheduler, "a", range(100, 110), max_tokens=9)
    step(scheduler)
    submit(scheduler, "b", range(200, 250))
    submit(scheduler, "c", range(300, 305))
    shapes = [np.diff(step(scheduler)[0].cu_q).tolist() for _ in range(3)]
    assert shapes == [[1, 19], [1, 19], [1, 12, 5]]


def test_chunks_continue_where_they_stopped():
    scheduler = make_scheduler(max_batch_tokens=7)
    prompt = list(range(100, 130))
    submit(scheduler, "a", prompt)
    seen = []
    while len(seen) < 30:
        plan, deltas = step(scheduler)
        assert plan.positions.tolist() == list(range(len(seen), len(seen) + plan.num_tokens))
        seen += plan.token_ids.tolist()
        assert ("a" in deltas) == (len(seen) == 30)
    assert seen == prompt
    assert deltas["a"].index == 0


def test_no_more_rows_than_allowed_run():
    scheduler = make_scheduler(max_running_requests=3)
    for i in range(8):
        submit(scheduler, i, [100 + i], max_tokens=2)
    assert scheduler.load().num_startable == 3, "they came during a step"
    plan, _ = step(scheduler)
    assert plan.num_rows == 3
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 5)
    assert scheduler.load().num_startable == 0
    assert set(run(scheduler)) == set(range(8))
    assert scheduler.load().num_startable == 3


def test_nothing_is_admitted_into_the_margin_while_anything_runs():
    scheduler = make_scheduler(num_blocks=10, safety_margin=0.3)
    submit(scheduler, "a", range(100, 140), max_tokens=1)  # 5 of 10 blocks
    submit(scheduler, "b", range(200, 224), max_tokens=1)  # 3 blocks, would leave 2 of 10
    plan, _ = step(scheduler)
    assert plan.num_rows == 1
    plan, _ = step(scheduler)
    assert plan.num_rows == 1
    submit(scheduler, "c", range(300, 370), max_tokens=2)  # 9 blocks: alone it may
    assert run(scheduler)["c"][1].finish_reason == "length"


def test_a_stream_from_another_replica_is_admitted_into_the_margin():
    scheduler = make_scheduler(num_blocks=10, safety_margin=0.3)
    submit(scheduler, "a", range(100, 140), max_tokens=9)  # 5 of 10 blocks
    submit(scheduler, "moved", range(200, 224), max_tokens=9, num_emitted=3)  # would leave 2 of 10
    submit(scheduler, "new", range(300, 324), max_tokens=1)  # as many blocks
    while scheduler.num_running < 2:
        step(scheduler)
    assert scheduler.num_waiting == 1, "the new prompt waits"
    assert set(run(scheduler)) == {"a", "moved", "new"}


def test_rows_are_free_but_not_for_who_lacks_memory():
    scheduler = make_scheduler(num_blocks=10, max_running_requests=4)
    submit(scheduler, "a", range(100, 148), max_tokens=20)  # 6 of 10 blocks, and more to come
    submit(scheduler, "b", range(200, 248), max_tokens=2)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.load().num_startable == 0
    run(scheduler)
    submit(scheduler, "c", [1, 2], max_tokens=2)
    assert scheduler.load().num_startable == 4
    run(scheduler)


def test_a_later_request_that_would_fit_does_not_overtake():
    scheduler = make_scheduler(num_blocks=10)
    submit(scheduler, "a", range(100, 148), max_tokens=3)
    submit(scheduler, "b", range(200, 240), max_tokens=1)
    submit(scheduler, "c", [300], max_tokens=1)
    plan, _ = step(scheduler)
    assert plan.num_rows == 1
    assert [entry["key"] for entry in scheduler.snapshot()["waiting"]] == ["b", "c"]


def test_when_a_blocked_head_leaves_the_next_one_starts():
    scheduler = make_scheduler(num_blocks=10)
    submit(scheduler, "a", range(100, 148), max_tokens=9)
    submit(scheduler, "b", range(200, 240), max_tokens=1)
    submit(scheduler, "c", [300], max_tokens=1)
    step(scheduler)
    scheduler.abort("b")
    _, deltas = step(scheduler)
    assert set(deltas) == {"a", "c"}


def test_a_blocked_head_costs_no_search_until_something_changes(monkeypatch):
    scheduler = make_scheduler(num_blocks=10)
    submit(scheduler, "a", range(100, 148), max_tokens=8)
    submit(scheduler, "b", range(200, 240), max_tokens=1)
    step(scheduler)
    searches = []
    match = scheduler.memory.prefix.match
    monkeypatch.setattr(
        scheduler.memory.prefix,
        "match",
        lambda *args, **kw: searches.append(1) or match(*args, **kw),
    )
    for _ in range(6):
        step(scheduler)
    assert len(searches) <= 1
    assert set(run(scheduler)) == {"a", "b"}


def test_cached_blocks_that_a_request_takes_are_not_counted_as_room():
    scheduler = make_scheduler(num_blocks=10)
    submit(scheduler, "before", range(100, 141), max_tokens=1)  # leaves 5 blocks cached
    run(scheduler)
    submit(scheduler, "a", range(500, 530), max_tokens=3)  # 4 blocks
    step(scheduler)
    # 6 blocks are available, 5 of them are its prefix, and it needs 2 more.
    submit(scheduler, "b", range(100, 150), max_tokens=1)
    plan, _ = step(scheduler)
    assert plan.num_rows == 1
    assert run(scheduler)["b"][1].facts.num_cached_tokens == 40


# -- the cache is full -----------------------------------------------------------------------------------


def test_a_full_cache_takes_the_oldest_then_the_newest_and_the_client_notices_nothing():
    scheduler = make_scheduler(num_blocks=8, safety_margin=0.2)
    for i in range(3):
        submit(scheduler, i, range(100 * i, 100 * i + 15), max_tokens=40)
    indices = {i: [] for i in range(3)}
    order = []
    sampled = 0
    while (plan := scheduler.plan(0.0)) is not None:
        tokens = np.arange(sampled, sampled + len(plan.sampling.token_index)) % 900 + 10
        sampled += len(tokens)
        for delta in scheduler.commit(plan, StepResult(tokens, 0.01), 0.0):
            indices[delta.key].append(delta.index)
            if delta.finish_reason:
                order.append((delta.key, delta.finish_reason, delta.facts.num_output_tokens))
        scheduler.check()
    assert scheduler.book.counters.num_preemptions > 0
    assert all(indices[i] == list(range(40)) for i in range(3))
    # 0 gives way to the others, then 2: so 1, the oldest of those that run, ends first.
    assert order[0][0] == 1
    assert sorted(order) == [(i, "length", 40) for i in range(3)]
    assert scheduler.load().num_preemptions == scheduler.book.counters.num_preemptions


def test_a_request_that_fills_the_whole_cache_runs_alone_to_its_end():
    scheduler = make_scheduler(num_blocks=4, safety_margin=0.5)
    refusal = submit(scheduler, "too long", range(100, 120), max_tokens=13)
    assert (refusal.facts.error.code, refusal.facts.error.field) == (
        "context_length_exceeded",
        "max_tokens",
    )
    for key in ("a", "b"):
        assert submit(scheduler, key, range(100, 120), max_tokens=12) is None
    outputs = run(scheduler)
    assert [len(outputs[key][0]) for key in ("a", "b")] == [12, 12]
    assert scheduler.memory.blocks.num_in_use == 0


def test_a_reset_request_finds_its_own_blocks_again():
    scheduler = make_scheduler(num_blocks=6)
    submit(scheduler, "old", range(100, 115), max_tokens=20, arrival_s=0.0)
    submit(scheduler, "new", range(200, 215), max_tokens=20)
    step(scheduler, now_s=1.0)
    submit(scheduler, "later", range(300, 345), max_tokens=1)
    while scheduler.book.counters.num_preemptions == 0:
        step(scheduler, now_s=2.0)
    snapshot = scheduler.snapshot()
    (preempted,) = snapshot["returning"]
    assert preempted["key"] == "old"
    assert [entry["key"] for entry in snapshot["waiting"]] == ["later"]
    assert preempted["length"] > 15
    while scheduler.num_waiting == 2:
        plan, deltas = step(scheduler, now_s=3.0)
    assert plan.num_tokens - plan.num_decode_rows < preempted["length"]
    # What is told of the admission is told of the first one.
    assert (deltas["old"].facts.num_cached_tokens, deltas["old"].facts.queue_s) == (0, 1.0)


def serve_a_crowd(**config):
    """300 requests whose outputs are longer than the cache has room for; returns the scheduler and the prefill
    tokens that were computed for them."""
    scheduler = make_scheduler(
        max_model_len=1024,
        block_size=16,
        num_blocks=512,
        max_batch_tokens=512,
        max_running_requests=256,
        max_waiting_requests=300,
        **config,
    )
    rng = np.random.default_rng(0)
    for i in range(300):
        prompt = rng.integers(3, 1000, rng.integers(32, 200))
        assert submit(scheduler, i, prompt, int(rng.integers(50, 600)), ignore_eos=True) is None
    prefill_tokens, ended = 0, 0
    while (plan := scheduler.plan(0.0)) is not None:
        prefill_tokens += plan.num_tokens - plan.num_decode_rows
        deltas = scheduler.commit(plan, fill(plan), 0.0)
        ended += sum(delta.finish_reason == "length" for delta in deltas.whole)
    assert ended == 300
    scheduler.check()
    return scheduler, prefill_tokens


def test_a_second_mark_keeps_a_full_cache_from_thrashing():
    thrashing, recomputed = serve_a_crowd(resume_margin=0.0)
    calm, computed = serve_a_crowd(resume_margin=0.3)
    assert thrashing.book.counters.num_preemptions >= 3 * calm.book.counters.num_preemptions > 0
    assert recomputed >= 1.5 * computed
    # A step costs the same for one row or many: the calm one must not need many more.
    assert calm.steps.num_planned <= 1.15 * thrashing.steps.num_planned
    with_margin, _ = serve_a_crowd(safety_margin=0.2, resume_margin=0.2)
    with_both, _ = serve_a_crowd(safety_margin=0.2, resume_margin=0.3)
    assert with_both.book.counters.num_preemptions <= calm.book.counters.num_preemptions / 2
    assert with_both.steps.num_planned <= 1.02 * with_margin.steps.num_planned


def test_after_a_reset_nobody_starts_before_the_second_mark():
    scheduler = make_scheduler(num_blocks=20, resume_margin=0.5)
    for i in range(3):
        submit(scheduler, i, range(100 * i, 100 * i + 30), max_tokens=60)
    while scheduler.book.counters.num_preemptions == 0:
        step(scheduler)
    submit(scheduler, "small", [5], max_tokens=1)
    while scheduler.memory.blocks.num_available < 10:
        plan, deltas = step(scheduler)
        assert plan.num_rows == plan.num_decode_rows
        assert "small" not in deltas
    assert run(scheduler)["small"][1].finish_reason == "length"


def test_a_held_engine_that_is_empty_starts_whoever_waits():
    scheduler = make_scheduler(num_blocks=8, resume_margin=1.0)
    for i in range(4):
        submit(scheduler, i, range(100 * i, 100 * i + 20), max_tokens=30)
    outputs = run(scheduler)
    assert scheduler.book.counters.num_preemptions > 0
    assert [len(outputs[i][0]) for i in range(4)] == [30] * 4


@pytest.mark.parametrize("scheduler_kind", ["shortest_first", "fifo", "prefill_first", "priority"])
@pytest.mark.parametrize(
    "groups",
    [
        (FULL_ATTENTION,),
        (LayerGroup(window=24),),
        (FULL_ATTENTION, LayerGroup(window=24), LayerGroup(window=24)),
        (FULL_ATTENTION, FULL_ATTENTION, LayerGroup(chunk=16)),
    ],
)
def test_the_longest_request_that_is_taken_ends_under_every_limit(scheduler_kind, groups):
    config = dict(
        groups=groups,
        num_blocks=24,
        max_batch_tokens=24,
        safety_margin=0.5,
        resume_margin=1.0,
        max_prefill_ms=1.0,
        scheduler=scheduler_kind,
    )
    scheduler = make_scheduler(**config)
    bound = min(512, scheduler.config.max_cache_tokens)
    prompt = [*range(100, 100 + bound - 20)]
    refusal = submit(scheduler, "too long", prompt, max_tokens=21)
    assert (refusal.facts.error.code, refusal.facts.error.field) == (
        "context_length_exceeded",
        "max_tokens",
    )
    assert f"the bound is {20}" in refusal.facts.error.message
    refusal = submit(scheduler, "prompt too long", [5] * bound, max_tokens=1)
    assert (refusal.facts.error.field, str(bound - 1) in refusal.facts.error.message) == (
        "prompt",
        True,
    )
    for key in range(3):
        assert submit(scheduler, key, prompt, max_tokens=20) is None
    outputs = run(scheduler)
    assert [len(outputs[key][0]) for key in range(3)] == [20] * 3


def test_a_step_that_fails_leaves_nobody_with_blocks_that_it_did_not_write():
    # Seconds are spent when the second request could start, though it shares what the first writes.
    scheduler = make_scheduler(max_prefill_ms=1.0, num_blocks=200, max_model_len=1024)
    submit(scheduler, "decodes", [5], max_tokens=50)
    for _ in range(3):
        step(scheduler)
    for _ in range(20):
        scheduler.speed.observe(100, 0, 0.003, 100 * 50)
    submit(scheduler, "a", range(100, 132))
    submit(scheduler, "b", [*range(100, 132), 9])
    plan = scheduler.plan(0.0)
    scheduler.fail_step(plan, EngineError("the device is gone"))
    scheduler.check()
    alive = {row["key"]: row["num_computed"] for row in scheduler.snapshot()["rows"]}
    assert all(computed == 0 for computed in alive.values())


# -- ways to end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "token", "reason"),
    [
        ({}, 2, "stop"),
        ({"stop_token_ids": (9,)}, 9, "stop"),
        ({"max_tokens": 1}, 9, "length"),
        ({"max_tokens": 1}, 2, "stop"),
        ({"ignore_eos": True, "max_tokens": 1}, 2, "length"),
    ],
)
def test_the_last_token_is_told_with_the_reason(options, token, reason):
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 110), **options)
    _, deltas = step(scheduler, token)
    delta = deltas["a"]
    assert (delta.token_ids, delta.finish_reason, delta.facts.num_output_tokens) == (
        [token],
        reason,
        1,
    )
    assert delta.facts.num_prompt_tokens == 10
    assert scheduler.memory.blocks.num_in_use == 0
    assert scheduler.plan(0.0) is None


def test_an_earlier_attempts_tokens_count():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 115), max_tokens=6, num_emitted=5, min_tokens=6)
    plan = scheduler.plan(0.0)
    assert plan.sampling.suppressed == ((0, (2,)),)
    (delta,) = scheduler.commit(plan, fill(plan), 0.0)
    assert (delta.index, delta.finish_reason) == (5, "length")
    assert (delta.facts.num_prompt_tokens, delta.facts.num_output_tokens) == (10, 6)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "in flight"])
def test_abort_gives_everything_back_wherever_it_comes(when):
    scheduler = make_scheduler(max_batch_tokens=16)
    submit(scheduler, "a", range(100, 130), max_tokens=9)
    steps = {"waiting": 0, "prefilling": 1, "decoding": 3, "in flight": 3}[when]
    for _ in range(steps):
        step(scheduler)
    plan = scheduler.plan(0.0) if when == "in flight" else None
    delta = scheduler.abort("a")
    told = max(0, steps - 1)
    assert (delta.finish_reason, delta.index, delta.token_ids) == ("abort", told, [])
    assert scheduler.abort("a") is None
    if plan is not None:
        assert list(scheduler.commit(plan, fill(plan), 0.0)) == []
    scheduler.check()
    assert scheduler.memory.blocks.num_in_use == 0
    assert scheduler.plan(0.0) is None


def test_abort_all_ends_everyone_once():
    scheduler = make_scheduler(max_running_requests=2)
    for i in range(4):
        submit(scheduler, i, [100 + i])
    step(scheduler)
    assert sorted(delta.key for delta in scheduler.abort_all()) == [0, 1, 2, 3]
    assert scheduler.abort_all() == []
    scheduler.check()


def test_a_deadline_ends_whoever_still_waits_with_its_reason():
    scheduler = make_scheduler(max_running_requests=1)
    submit(scheduler, "a", range(100, 110), max_tokens=9)
    submit(scheduler, "b", range(200, 210), deadline_s=5.0)
    submit(scheduler, "c", range(300, 310), deadline_s=50.0)
    step(scheduler, now_s=1.0)
    _, deltas = step(scheduler, now_s=5.0)
    assert (deltas["b"].finish_reason, deltas["b"].token_ids) == ("abort", [])
    assert isinstance(deltas["b"].facts.error, DeadlineExceeded)
    assert set(deltas) == {"a", "b"}
    assert "c" in run(scheduler)


def test_a_deadline_that_leaves_nothing_to_do_is_told_without_a_step():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 110), deadline_s=1.0)
    assert scheduler.plan(2.0) is None
    assert [delta.key for delta in scheduler.take_ended()] == ["a"]
    assert scheduler.take_ended() == []


def test_deadlines_of_the_dead_do_not_pile_up():
    scheduler = make_scheduler()
    for i in range(1000):
        submit(scheduler, i, [100], deadline_s=1e9)
        scheduler.abort(i)
    assert len(scheduler.book.deadlines) < 100


def test_a_failed_step_ends_its_rows_and_takes_its_blocks_out_of_the_cache():
    scheduler = make_scheduler(max_batch_tokens=24)
    submit(scheduler, "kept", range(100, 117), max_tokens=1)
    run(scheduler)
    scheduler.events.flush()
    submit(scheduler, "a", [*range(100, 116), *range(500, 516)])
    submit(scheduler, "b", range(600, 640))
    plan = scheduler.plan(0.0)
    error = EngineError("the device is gone")
    deltas = scheduler.fail_step(plan, error)
    assert [(d.key, d.finish_reason, d.facts.error) for d in deltas] == [
        ("a", "error", error),
        ("b", "error", error),
    ]
    scheduler.check()
    assert scheduler.memory.blocks.num_in_use == 0
    submit(scheduler, "again", [*range(100, 116), *range(500, 516)])
    _, told = step(scheduler)
    assert told["again"].facts.num_cached_tokens == 16


def test_a_failed_step_spares_those_who_were_not_in_it():
    scheduler = make_scheduler(max_running_requests=1)
    submit(scheduler, "a", range(100, 110))
    submit(scheduler, "b", range(200, 210))
    plan = scheduler.plan(0.0)
    assert [d.key for d in scheduler.fail_step(plan, EngineError("x"))] == ["a"]
    assert run(scheduler)["b"][1].finish_reason == "length"


@pytest.mark.parametrize("tokens", [[], [7, 7], [-1], [1000]])
def test_a_result_that_cannot_be_right_fails_the_step(tokens):
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 120))
    plan = scheduler.plan(0.0)
    (delta,) = scheduler.commit(plan, StepResult(np.array(tokens, np.int64), 0.1), 0.0)
    assert (delta.finish_reason, delta.facts.error.code) == ("error", "engine_error")
    scheduler.check()
    assert len(scheduler.memory.prefix) == 0


# -- refusals --------------------------------------------------------------------------------------------


def test_a_refusal_is_the_only_delta_and_changes_nothing():
    scheduler = make_scheduler()
    delta = submit(scheduler, "a", [1, 5000])
    assert (delta.key, delta.finish_reason, delta.facts.error.field) == ("a", "error", "prompt")
    assert scheduler.plan(0.0) is None
    assert submit(scheduler, "a", [1, 5]) is None


def test_a_key_in_use_is_refused():
    scheduler = make_scheduler()
    submit(scheduler, ("r", 1), [100])
    assert submit(scheduler, ("r", 1), [100]).facts.error.field == "request_id"
    run(scheduler)
    assert submit(scheduler, ("r", 1), [100]) is None


def test_a_full_queue_says_when_to_come_back():
    scheduler = make_scheduler(max_waiting_requests=2)
    for i in range(2):
        assert submit(scheduler, i, [100]) is None
    error = submit(scheduler, 2, [100]).facts.error
    assert error.code == "overloaded"
    assert "2 requests, the bound is 2 (max_waiting_requests)" in error.message
    assert error.retry_after_s >= 1


def test_two_steps_overlap_at_most_and_are_committed_once_and_in_order():
    scheduler = make_scheduler(max_batch_tokens=16)
    submit(scheduler, "a", range(100, 160))
    plans = [scheduler.plan(0.0), scheduler.plan(0.0)]
    with pytest.raises(RuntimeError, match="step 1 is still in flight"):
        scheduler.plan(0.0)
    with pytest.raises(ValueError, match="step 2 is not the oldest in flight"):
        scheduler.commit(plans[1], fill(plans[1]), 0.0)
    for plan in plans:
        scheduler.commit(plan, fill(plan), 0.0)
    with pytest.raises(ValueError, match="step 2 is not the oldest in flight"):
        scheduler.commit(plans[1], fill(plans[1]), 0.0)


def test_a_step_that_fails_takes_the_one_behind_it_with_it():
    scheduler = make_scheduler(max_batch_tokens=16)
    submit(scheduler, "long", range(100, 140))
    plans = [scheduler.plan(0.0), scheduler.plan(0.0)]
    assert len(scheduler.memory.prefix) == 4, (
        "blocks of the second step continue those of the first"
    )
    (delta,) = scheduler.fail_step(plans[0], EngineError("the device is gone"))
    assert delta.finish_reason == "error"
    assert scheduler.num_in_flight == len(scheduler.memory.prefix) == 0
    scheduler.check()


# -- what is told ----------------------------------------------------------------------------------------


def test_times_are_told_with_the_first_token_and_at_the_end():
    scheduler = make_scheduler(max_batch_tokens=16)
    submit(scheduler, "a", range(100, 130), arrival_s=1.0, max_tokens=2)
    step(scheduler, now_s=3.0)
    _, first = step(scheduler, now_s=4.5)
    _, last = step(scheduler, now_s=9.0)
    for delta in (first["a"], last["a"]):
        assert (delta.facts.queue_s, delta.facts.prefill_s) == (2.0, 1.5)


def test_load_counts_what_is_there():
    scheduler = make_scheduler(max_batch_tokens=16, max_running_requests=2)
    submit(scheduler, "a", range(100, 110), max_tokens=9)
    submit(scheduler, "b", range(200, 230), max_tokens=9)
    submit(scheduler, "c", range(300, 305), max_tokens=9)
    step(scheduler)
    load = scheduler.load()
    assert (load.num_running, load.num_waiting) == (2, 1)
    assert load.queued_prefill_tokens == 24 + 5
    assert load.num_decode_tokens == 10
    assert load.blocks_free + load.blocks_cached + load.blocks_in_use == load.blocks_total == 64
    assert load.num_steps == 1


def test_measured_speed_converges_to_the_truth():
    scheduler = make_scheduler(max_batch_tokens=40, num_blocks=200)
    for i in range(6):
        submit(scheduler, i, np.arange(200) + 97 * i, max_tokens=30, seed=i)
    while (plan := scheduler.plan(0.0)) is not None:
        prefill = plan.num_tokens - plan.num_decode_rows
        duration_s = 0.002 * prefill + (0.01 if plan.num_decode_rows else 0.0)
        scheduler.commit(plan, fill(plan, duration_s=duration_s), 0.0)
    assert scheduler.speed.decode_step_s == pytest.approx(0.01)
    for i in range(40):
        submit(scheduler, i, np.arange(200) + 97 * i + 5, max_tokens=2)
    while (plan := scheduler.plan(0.0)) is not None:
        prefill = plan.num_tokens - plan.num_decode_rows
        duration_s = 0.002 * prefill + (0.01 if plan.num_decode_rows else 0.0)
        scheduler.commit(plan, fill(plan, duration_s=duration_s), 0.0)
    assert scheduler.load().prefill_s_per_token == pytest.approx(0.002, rel=0.05)


def test_clearing_the_cache_spares_those_who_run():
    scheduler = make_scheduler()
    submit(scheduler, "a", range(100, 130), max_tokens=20)
    step(scheduler)
    scheduler.clear_cache()
    scheduler.check()
    submit(scheduler, "b", range(100, 130), max_tokens=20)
    _, deltas = step(scheduler)
    assert deltas["b"].facts.num_cached_tokens == 0
    outputs = run(scheduler)
    assert (len(outputs["a"][0]), len(outputs["b"][0])) == (18, 19)


def test_the_snapshot_is_plain_data():
    scheduler = make_scheduler(max_running_requests=1)
    submit(scheduler, "a", range(100, 110))
    submit(scheduler, "b", range(200, 210))
    step(scheduler)
    snapshot = scheduler.snapshot()
    (row,) = snapshot["rows"]
    assert (row["key"], row["phase"], row["length"], row["num_computed"]) == (
        "a",
        "decoding",
        11,
        10,
    )
    assert snapshot["waiting"] == [{"key": "b", "length": 10}]
    assert sum(snapshot["blocks"][name] for name in ("free", "cached", "in_use")) == 64


def test_the_epoch_names_the_incarnation():
    assert Scheduler(CONFIG, epoch="e1").events.epoch == "e1"
    assert make_scheduler().events.epoch != make_scheduler().events.epoch
