"""A payer's flood of prompts evicts its own blocks, and not those that others have cached."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_config import small_config

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.kv_cache.block_eviction import FairLeastRecentlyUsed
from quire.replica.scheduler.scheduler import Scheduler

NUM_BLOCKS = 24


@given(
    st.lists(st.sampled_from("aaabc"), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    st.lists(st.integers(-2, NUM_BLOCKS - 1), max_size=200),
)
def test_it_evicts_as_its_rule_says(payers, operations):
    """A number adds or removes that block; a negative one evicts."""
    order = FairLeastRecentlyUsed(payers.__getitem__)
    cached: list[int] = []  # oldest first
    num_evicted = 0
    for block in operations:
        if block >= 0 and block in cached:
            cached.remove(block)
            order.remove(block)
        elif block >= 0:
            cached.append(block)
            order.add(block)
        elif cached:
            num_evicted += 1
            counts = Counter(payers[b] for b in cached)
            largest = max(counts.values())
            evicted = order.pop()
            if num_evicted % 16 == 0:
                assert evicted == cached[0]
            else:
                assert counts[payers[evicted]] == largest
                assert evicted == next(b for b in cached if payers[b] == payers[evicted])
            cached.remove(evicted)
        assert list(order) == cached and len(order) == len(cached)
        assert all((b in order) == (b in cached) for b in range(NUM_BLOCKS))


class Cache:
    """A scheduler with 64 device blocks of 8 tokens; a prompt has 4 full blocks."""

    def __init__(self, **changes):
        self.scheduler = Scheduler(small_config(**changes))
        self.num = 0

    def ask(self, payer: str, prompt: int) -> int:
        """Serve the prompt with this number; returns how many of its tokens were cached."""
        self.num += 1
        ids = [prompt + 2] * 33
        # A salt for each prompt: one payer may have many scopes.
        request = Request(
            self.num, ids, SamplingParams(max_tokens=1), tenant=f"{payer}/{prompt % 3}", payer=payer
        )
        self.scheduler.add(request)
        cached = 0
        while (plan := self.scheduler.plan(0.0)) is not None:
            result = StepResult(np.full(len(plan.sampling.token_index), 7), 0.01)
            for delta in self.scheduler.commit(plan, result, 0.0):
                cached = delta.facts.num_cached_tokens
        self.scheduler.check()
        return cached

    def hit_ratio(self, payer: str, prompts: range) -> float:
        return sum(self.ask(payer, p) for p in prompts) / (32 * len(prompts))


@pytest.mark.parametrize("order", ["lru", "most_recent"])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_flood_leaves_the_others_hits(order: str, num_host_blocks: int):
    cache = Cache(demotion_order=order, num_host_blocks=num_host_blocks)
    own = range(6)  # 24 of 64 blocks
    for prompt in own:
        cache.ask("a", prompt)
    for round_ in range(8):  # Each is nearly twice the cache, while `a` thinks.
        for i in range(30):
            cache.ask("b", 100 + round_ * 30 + i)
        assert cache.hit_ratio("a", own) >= 0.7
    assert cache.scheduler.memory.blocks.num_evictions > 500


def test_without_keys_one_payer_has_all():
    cache = Cache()
    for prompt in range(6):
        cache.ask("", prompt)
    for prompt in range(100, 130):
        cache.ask("", prompt)
    assert cache.hit_ratio("", range(6)) == 0.0


def test_what_a_payer_has_left_behind_goes_in_the_end():
    cache = Cache()
    for prompt in range(6):
        cache.ask("gone", prompt)
    for prompt in range(100, 260):
        cache.ask("b", prompt)
    blocks, prefix = cache.scheduler.memory.blocks, cache.scheduler.memory.prefix
    payers = {prefix.payer_of_block(block) for block in range(64) if blocks.has_content(block)}
    assert payers == {"b"}
