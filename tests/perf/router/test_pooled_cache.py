"""The pooled cache hits as many tokens as an engine of its size, request by request, and never fewer."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.scheduler import Scheduler
from tests.perf.router.pooled_cache import PooledCache

BLOCK = 8
NUM_TOKENS = 5  # tokens of every answer
MAX_LEN = 128


def prompts(num: int, seed: int) -> list[list[int]]:
    """Prompts along paths of a binary tree of blocks, most of which end within a block."""
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        blocks = [[rng.randrange(2)] * BLOCK for _ in range(rng.randrange(1, 10))]
        tokens = [10 + token for block in blocks for token in block]
        found.append(tokens[: len(tokens) - rng.randrange(BLOCK)])
    return found


def engine_hits(requests: list[list[int]], num_blocks: int) -> list[int]:
    """Cached tokens of each request in the engine's scheduler, one request after the other."""
    scheduler = Scheduler(
        EngineConfig(
            model_name="m",
            revision="",
            device="cpu",
            dtype="float32",
            vocab_size=100_000,
            eos_token_ids=(2,),
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_batch_tokens=256,
            max_running_requests=4,
            max_waiting_requests=4,
            safety_margin=0.0,
            scheduler="fifo",
            max_prefill_ms=None,
            resume_margin=0.0,
            prefix_caching=True,
            deterministic=True,
            num_threads=1,
        )
    )
    answers = itertools.count(1000)  # no prompt continues an answer
    hits = []
    for i, prompt in enumerate(requests):
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=1)
        assert scheduler.add(Request(("router", i), prompt, params)) is None
        while (plan := scheduler.plan(0.0)) is not None:
            tokens = np.array([next(answers) for _ in plan.sampling.token_index])
            for delta in scheduler.commit(plan, StepResult(tokens, 0.01), 0.0).whole:
                if delta.index == 0:
                    hits.append(delta.facts.num_cached_tokens)
        scheduler.check()
    return hits


def pooled_hits(requests: list[list[int]], num_blocks: int) -> list[int]:
    cache = PooledCache(num_blocks, BLOCK)
    return [cache.serve(prompt, NUM_TOKENS) for prompt in requests]


@pytest.mark.parametrize("seed", range(5))
def test_with_room_for_all_it_hits_what_the_engine_hits(seed):
    requests = prompts(80, seed)
    hits = pooled_hits(requests, 4000)
    assert hits == engine_hits(requests, 4000)
    assert 0 < sum(hits) < sum(map(len, requests))


@pytest.mark.parametrize("seed", range(5))
def test_where_blocks_are_given_up_it_hits_what_the_engine_hits_or_a_little_more(seed):
    """The engine uses one more block at a time, for tokens that do not fill a block."""
    requests = prompts(300, seed)
    ours, theirs = sum(pooled_hits(requests, 40)), sum(engine_hits(requests, 40))
    assert theirs <= ours <= 1.1 * theirs
    assert ours < sum(pooled_hits(requests, 4000)), "nothing was given up"


def test_more_blocks_never_hit_less():
    """A larger LRU cache never has fewer hits."""
    requests = prompts(300, 9)
    totals = [sum(pooled_hits(requests, n)) for n in (12, 20, 40, 80, 160, 4000)]
    assert totals == sorted(totals) and totals[0] < totals[-1]


def test_the_end_of_a_prompt_goes_before_its_beginning():
    cache = PooledCache(4, 2)
    assert cache.serve([1, 1, 2, 2, 3, 3, 4, 4], 0) == 0
    assert cache.serve([9, 9, 8, 8], 0) == 0 and len(cache) == 4
    assert cache.serve([1, 1, 2, 2, 3, 3, 4, 4], 0) == 4


def test_a_hit_leaves_a_token_to_compute():
    cache = PooledCache(10, 4)
    assert [cache.serve([7] * 8, 1) for _ in range(2)] == [0, 4]
    assert cache.serve([7] * 9, 1) == 8


@pytest.mark.parametrize(("blocks", "size", "field"), [(0, 4, "num_blocks"), (4, 0, "block_size")])
def test_sizes_below_one_are_named(blocks, size, field):
    with pytest.raises(ValueError, match=f"{field}: must be >= 1, got 0"):
        PooledCache(blocks, size)
