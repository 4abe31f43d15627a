"""Tokens and log-probs are equal bit for bit after a request's blocks went to the host tier and back, and after a
soft reset. What nobody owns is NaN at every step, in both tiers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from step_driver import make_runner

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.device.host_pool import HostPool
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.runner.runner import Runner
from quire.replica.scheduler.scheduler import Scheduler

BLOCK_SIZE = 8
LENGTHS = (30, 23, 17, 9)
NEW_TOKENS = 20  # with the prompts beyond the windows of 20, 24 and 40
STEP_TOKENS = 24


@pytest.fixture(scope="module")
def runners(zoo):
    cache: dict[str, Runner] = {}

    def get(name: str) -> Runner:
        if name not in cache:
            cache[name] = make_runner(
                zoo(name), block_size=BLOCK_SIZE, num_blocks=400, max_batch_tokens=STEP_TOKENS
            )
        return cache[name]

    return get


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab_size, n).tolist() for n in LENGTHS]


def params(temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=temperature,
        top_p=0.9,
        seed=seed,
        ignore_eos=True,
        logprobs=3,
        repetition_penalty=1.1,
    )


def blocks_of_one(runner: Runner) -> int:
    """The smallest cache that the longest of the requests can run in."""
    return sequence_blocks(runner.config.groups, max(LENGTHS) + NEW_TOKENS, 1, BLOCK_SIZE)


def run(runner: Runner, prompts: list[list[int]], temperature: float, **changes):
    """Outputs of the prompts side by side, [(token, log-prob, likeliest ids, theirs)] each; and the scheduler."""
    scheduler = Scheduler(dataclasses.replace(runner.config, safety_margin=0.0, **changes))
    runner.pool.poison()
    runner.host_pool = HostPool(scheduler.config.num_host_blocks, runner.pool)
    runner.host_pool.poison()
    told: list[list[tuple]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        assert scheduler.add(Request(i, prompt, params(temperature, seed=i))) is None
    num_computed = 0
    while (plan := scheduler.plan(0.0)) is not None:
        poison_what_nobody_may_read(scheduler, plan, runner)
        num_computed += plan.num_tokens
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            assert delta.facts.error is None
            told[delta.key].append((delta.token_ids[0], *delta.facts.logprobs[0]))
        scheduler.check()
    return told, scheduler, num_computed


def poison_what_nobody_may_read(scheduler, plan, runner):
    snapshot = scheduler.snapshot()
    kept = {b for row in snapshot["rows"] for b in row["blocks"]}
    kept |= set((plan.slots // BLOCK_SIZE).ravel().tolist()) | set(plan.saves[:, 0].tolist())
    for block in range(scheduler.config.num_blocks):
        if block not in kept and not scheduler.memory.blocks.has_content(block):
            runner.pool.data[block] = float("nan")
    offloaded = {b for entry in snapshot["returning"] for b in entry.get("host_blocks", ())}
    offloaded |= set(plan.restores[:, 0].tolist())
    for block in range(scheduler.config.num_host_blocks):
        if block not in offloaded and not scheduler.memory.host.blocks.has_content(block):
            runner.host_pool.data[block] = float("nan")


@pytest.mark.parametrize(("temperature", "prefix_caching"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_bits_are_equal_after_offload_and_after_soft_reset(
    runners, name, temperature, prefix_caching
):
    runner = runners(name)
    prompts = prompts_of(runner.spec.vocab_size)
    alone = [run_alone(runner, i, prompts, temperature) for i in range(len(prompts))]
    small = dict(
        num_blocks=blocks_of_one(runner) + 6, prefix_caching=prefix_caching, restore="always"
    )

    told, scheduler, num_computed = run(runner, prompts, temperature, num_host_blocks=200, **small)
    assert told == alone
    counters = scheduler.book.counters
    assert counters.num_restores == counters.num_offloads == counters.num_preemptions > 0
    # Nothing is computed twice: every prompt token once, every output token but the last.
    assert num_computed == sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)
    assert scheduler.memory.host.blocks.num_in_use == scheduler.memory.blocks.num_in_use == 0

    told, scheduler, num_computed = run(runner, prompts, temperature, **small)
    assert told == alone
    assert scheduler.book.counters.num_preemptions > scheduler.book.counters.num_offloads == 0


def run_alone(runner: Runner, i: int, prompts: list[list[int]], temperature: float) -> list[tuple]:
    """One prompt alone with the seed that it has among the others."""
    scheduler = Scheduler(dataclasses.replace(runner.config, prefix_caching=False))
    runner.pool.poison()
    assert scheduler.add(Request(i, prompts[i], params(temperature, seed=i))) is None
    told = []
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            told.append((delta.token_ids[0], *delta.facts.logprobs[0]))
    return told


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize(
    ("has_small_tier", "retain_s", "is_found"),
    [(False, 0.0, True), (True, 9.0, True), (True, 0.0, False)],
    ids=["large tier", "retained", "not retained"],
)
def test_a_prefix_that_went_to_the_host_tier_is_found_there_bit_for_bit(
    runners, name, has_small_tier, retain_s, is_found
):
    """The last token of the first request again. The tier holds everything, or less than the others have."""
    runner = runners(name)
    prompts = prompts_of(runner.spec.vocab_size)
    num_host_blocks = blocks_of_one(runner) if has_small_tier else 400
    scheduler = Scheduler(
        dataclasses.replace(
            runner.config,
            prefix_caching=True,
            num_blocks=blocks_of_one(runner),
            num_host_blocks=num_host_blocks,
            session_max_share=1.0,
            safety_margin=0.0,
            restore="always",
        )
    )
    runner.pool.poison()
    runner.host_pool = HostPool(num_host_blocks, runner.pool)
    runner.host_pool.poison()
    outputs = []
    requests = [
        Request(i, prompt, params(1.0, seed=i), retain_s=0.0 if i else retain_s)
        for i, prompt in enumerate(prompts)
    ]
    for i in range(len(prompts) + 1):
        if i == len(prompts):
            known = [token for token, *_ in outputs[0][:-1]]
            ids = [*prompts[0], *known]
            requests.append(Request(i, ids, params(1.0, seed=0), num_emitted=len(known)))
        assert scheduler.add(requests[i]) is None
        told, num_computed = [], 0
        while (plan := scheduler.plan(0.0)) is not None:
            num_computed += plan.num_tokens
            poison_what_nobody_may_read(scheduler, plan, runner)
            for delta in scheduler.commit(plan, runner.run(plan), 0.0):
                told.append((delta.token_ids[0], *delta.facts.logprobs[0]))
            scheduler.check()
        outputs.append(told)
    assert outputs[-1] == outputs[0][-1:]
    in_part_of_a_block = (LENGTHS[0] + NEW_TOKENS - 1) % BLOCK_SIZE
    assert (num_computed == in_part_of_a_block) == is_found
    assert requests[-1].num_host_cached_tokens > 0 or not is_found


def test_blocks_survive_the_round_trip(runners):
    runner = runners("llama")
    pool = runner.pool
    pool.data.normal_()
    before = pool.data.clone()
    host = HostPool(5, pool)
    host.poison()
    none = np.empty((0, 2), np.int64)
    host.move(np.array([(3, 0), (7, 4)]), none)
    pool.poison()
    host.move(none, np.array([(4, 1), (0, 2)]))
    assert torch.equal(pool.data[1], before[7])
    assert torch.equal(pool.data[2], before[3])
    assert host.data[1:4].isnan().all()
    assert pool.data[3:].isnan().all()
    host.move(none, none)
