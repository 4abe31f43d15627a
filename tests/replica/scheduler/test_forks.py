"""A prompt is computed once for all of its forks; nobody but its owner ever writes a block."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_driver import engine_config, make_runner

from quire.protos.errors import DeadlineExceeded, EngineError
from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.core.request import FinishReason, Phase, Request
from quire.replica.runner.runner import Runner
from quire.replica.scheduler.scheduler import Scheduler

BLOCK = 16


@pytest.fixture(scope="module")
def runner(zoo) -> Runner:
    return make_runner(zoo("llama"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


def family(ids: list[int], n: int, **changes) -> list[Request]:
    """A parent "0" and its forks."""
    values = dict(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    params = SamplingParams(**{**values, **changes})
    return [
        Request(
            str(choice),
            ids,
            dataclasses.replace(params, choice=choice),
            fork_of="0" if choice else None,
        )
        for choice in range(n)
    ]


def finish(scheduler: Scheduler, runner: Runner) -> dict[str, list[int]]:
    """Run to the end: every request's tokens, and how many prefill tokens that took in all."""
    tokens: dict[str, list[int]] = {}
    finish.num_prefill_tokens = 0
    while (plan := scheduler.plan(0.0)) is not None:
        finish.num_prefill_tokens += plan.num_tokens - plan.num_decode_rows
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            assert delta.facts.error is None, delta.facts.error
            tokens.setdefault(delta.key, []).extend(delta.token_ids)
        scheduler.check()
    assert scheduler.memory.blocks.num_in_use == 0
    return tokens


def run(runner: Runner, requests: list[Request], **changes) -> dict[str, list[int]]:
    runner.pool.poison()
    scheduler = Scheduler(dataclasses.replace(runner.config, **changes))
    for request in requests:
        assert scheduler.add(request) is None
    return finish(scheduler, runner)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    length=st.integers(1, 3 * BLOCK + 1),
    caching=st.booleans(),
    budget=st.sampled_from([7, 64]),
    n=st.integers(2, 5),
)
def test_a_prompt_is_computed_once_for_all_choices(runner, length, caching, budget, n):
    ids = prompt(length)
    changes = dict(prefix_caching=caching, max_batch_tokens=budget)
    tokens = run(runner, family(ids, n), **changes)
    assert finish.num_prefill_tokens == length + n - 1
    for request in family(ids, n):
        request.fork_of = None
        assert run(runner, [request], **changes)[request.key] == tokens[request.key]
    if length > 1:
        assert len(set(map(tuple, tokens.values()))) > 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_windows_and_chunks_of_attention_are_shared_too(zoo, name, caching):
    model = make_runner(zoo(name))
    # At 64 and 65 the parent's next query sees a block less than the prompt's last one.
    for length in (9, 63, 64, 65, 80):
        ids = prompt(length)
        tokens = run(model, family(ids, 3), prefix_caching=caching)
        assert finish.num_prefill_tokens == length + 2, length
        for request in family(ids, 3):
            request.fork_of = None
            assert run(model, [request])[request.key] == tokens[request.key]


def test_forks_wait_outside_the_queue_and_come_first_after_it(runner):
    scheduler = Scheduler(dataclasses.replace(runner.config, max_batch_tokens=16))
    parent, *forks = family(prompt(40), 3)
    other = Request("other", prompt(5, seed=9), SamplingParams(max_tokens=2))
    for request in (parent, *forks, other):
        assert scheduler.add(request) is None
    assert scheduler.num_waiting == 4
    for _ in range(3):  # 16 + 16 + 8 and the other's 5: forks never hold it up
        plan = scheduler.plan(0.0)
        assert [fork.phase for fork in forks] == [Phase.PENDING] * 2
        scheduler.commit(plan, runner.run(plan), 0.0)
    assert (parent.phase, other.phase) == (Phase.DECODING, Phase.DECODING)
    late = Request("late", prompt(5, seed=8), SamplingParams(max_tokens=2))
    scheduler.add(late)
    plan = scheduler.plan(0.0)
    assert plan.num_tokens - plan.num_decode_rows == 2 + 5
    assert plan.copies  # 39 tokens end inside a block
    assert len({target for _, target in plan.copies}) == 2
    scheduler.commit(plan, runner.run(plan), 0.0)
    assert [fork.phase for fork in forks] == [Phase.DECODING] * 2
    finish(scheduler, runner)


def test_a_waiting_fork_ends_by_abort_and_by_its_deadline(runner):
    scheduler = Scheduler(dataclasses.replace(runner.config, max_batch_tokens=16))
    parent, aborted, late = family(prompt(60), 3)
    late.deadline_s = 1.0
    for request in (parent, aborted, late):
        scheduler.add(request)
    plan = scheduler.plan(0.0)
    assert scheduler.abort(aborted.key).finish_reason == FinishReason.ABORT
    scheduler.commit(plan, runner.run(plan), 0.0)
    plan = scheduler.plan(2.0)
    (told,) = scheduler.commit(plan, runner.run(plan), 2.0)
    assert told.key == late.key and isinstance(told.facts.error, DeadlineExceeded)
    assert list(finish(scheduler, runner)) == [parent.key]


@pytest.mark.parametrize("how", ["abort pending", "abort prefilling", "fail"])
def test_when_a_parent_ends_early_the_first_fork_takes_its_place(runner, how):
    runner.pool.poison()
    config = dataclasses.replace(runner.config, max_batch_tokens=16, prefix_caching=False)
    scheduler = Scheduler(config)
    ids = prompt(40)
    parent, *forks = family(ids, 4)
    for request in (parent, *forks):
        scheduler.add(request)
    if how != "abort pending":
        plan = scheduler.plan(0.0)
        if how == "fail":
            (delta,) = scheduler.fail_step(plan, EngineError("the device is gone"))
            assert delta.key == parent.key
        else:
            scheduler.commit(plan, runner.run(plan), 0.0)
    if how != "fail":
        assert scheduler.abort(parent.key).finish_reason == FinishReason.ABORT
    scheduler.check()
    tokens = finish(scheduler, runner)
    assert finish.num_prefill_tokens == 40 + 2
    for request in family(ids, 4)[1:]:
        request.fork_of = None
        assert run(runner, [request])[request.key] == tokens[request.key]


def test_a_fork_of_what_has_ended_or_never_was_is_an_ordinary_request(runner):
    ids = prompt(40)
    (expected,) = run(runner, family(ids, 1)).values()
    runner.pool.poison()
    scheduler = Scheduler(dataclasses.replace(runner.config, prefix_caching=True))
    for key in ("first", "second"):  # the parent is unknown, then it has ended
        (request,) = family(ids, 1)
        request.key, request.fork_of = key, "first" if key == "second" else "nobody"
        assert scheduler.add(request) is None
        assert finish(scheduler, runner) == {key: expected}
    assert finish.num_prefill_tokens == 40 - 32  # the prefix cache's two blocks


def test_a_fork_of_a_parent_that_decodes_starts_at_once(runner):
    scheduler = Scheduler(dataclasses.replace(runner.config, prefix_caching=False))
    parent, fork = family(prompt(40), 2, max_tokens=40)
    scheduler.add(parent)
    for _ in range(20):
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, runner.run(plan), 0.0)
    scheduler.add(fork)
    plan = scheduler.plan(0.0)
    assert plan.num_tokens == 2
    scheduler.commit(plan, runner.run(plan), 0.0)
    fork_of_fork = dataclasses.replace(fork.params, choice=2)
    scheduler.add(Request("2", prompt(40), fork_of_fork, fork_of=fork.key))
    finish(scheduler, runner)
    assert finish.num_prefill_tokens == 1


@pytest.mark.parametrize("change", ["prompt", "tenant"])
def test_a_fork_of_another_prompt_or_tenant_is_refused(runner, change):
    scheduler = Scheduler(runner.config)
    parent, fork = family(prompt(20), 2)
    scheduler.add(parent)
    ids = prompt(20, seed=1) if change == "prompt" else prompt(20)
    tenant = "other" if change == "tenant" else ""
    refusal = scheduler.add(Request("1", ids, fork.params, tenant=tenant, fork_of="0"))
    assert (refusal.facts.error.code, refusal.facts.error.field) == ("invalid_request", "fork_of")
    rest = Request("2", prompt(20), fork.params, num_emitted=3, fork_of="0")
    assert scheduler.add(rest).facts.error.field == "fork_of"
    scheduler.check()


def test_forks_count_for_the_queues_bound_and_the_load(runner):
    scheduler = Scheduler(dataclasses.replace(runner.config, max_waiting_requests=3))
    *taken, surplus = family(prompt(20), 4)
    for request in taken:
        assert scheduler.add(request) is None
    assert scheduler.add(surplus).facts.error.code == "overloaded"
    load = scheduler.load()
    assert (load.num_waiting, load.queued_prefill_tokens) == (3, 22)
    assert scheduler.snapshot()["waiting_forks"] == 2


def test_forks_live_through_soft_resets(runner):
    """A pool of 10 blocks of 16 for four outputs of 60 tokens."""
    ids, changes = prompt(40), dict(max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.5)
    expected = run(runner, family(ids, 4, **changes), num_blocks=64)
    runner.pool.poison()
    config = dataclasses.replace(runner.config, num_blocks=10, safety_margin=0.0)
    scheduler = Scheduler(config)
    for request in family(ids, 4, **changes):
        scheduler.add(request)
    assert finish(scheduler, runner) == expected
    assert scheduler.book.counters.num_preemptions > 0


def test_greedy_forks_are_equal_and_have_the_parents_log_probabilities(zoo):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    runner = Runner.from_config(engine_config(spec), spec)
    scheduler = Scheduler(runner.config)
    told: dict[str, list] = {"0": [], "1": [], "2": []}
    for request in family(prompt(37), 3, temperature=0.0, logprobs=3):
        scheduler.add(request)
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            told[delta.key] += [(delta.token_ids, delta.facts.logprobs)]
    assert told["0"] == told["1"] == told["2"]
