"""Publishing filled blocks: in the budget, in order, and each once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from pool_process import open_pool

from quire.replica.kv_cache.blocks import BlockManager
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.kv_cache.host_tier import HostTier
from quire.replica.kv_cache.pool_blocks import PoolBlocks
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import ContentChain
from quire.replica.kv_cache.publishing import Publishing
from quire.replica.node_pool.pool_layout import PoolLayout

BLOCK_SIZE = 64
LAYOUT = PoolLayout(40, 64)


class Engine:
    """The cache of an engine in the node's pool, without requests."""

    def __init__(self, folder, num_blocks: int = 32, name: str = "m"):
        self.pool = open_pool(folder, LAYOUT)
        self.events = EventLog()
        self.prefix = PrefixCache(
            BLOCK_SIZE, num_blocks, self.events, num_host_blocks=LAYOUT.num_slots
        )
        prefix = self.prefix
        blocks = PoolBlocks(
            self.pool, name, 1, prefix.name_of_host_block, prefix.forget_host, self.events
        )
        self.host = HostTier(LAYOUT.num_slots, prefix, pool_blocks=blocks)
        self.blocks = BlockManager(num_blocks, on_evict=self.host.take_evicted)
        # Seconds that sealing a block takes.
        self.block_s = 0.01
        self.now_s = 0.0
        blocks._clock = lambda: self.now_s
        checksum = self.pool.checksum

        def timed_checksum(slot: int) -> int:
            self.now_s += self.block_s
            return checksum(slot)

        self.pool.checksum = timed_checksum
        self.publishing = Publishing(prefix, self.host, blocks, 64, 0.04, lambda: self.now_s)

    def fill(self, start: int, count: int) -> list[int]:
        """A sequence of `count` blocks that a step has filled."""
        ids = np.arange(start, start + count * BLOCK_SIZE, dtype=np.int32)
        chain, parent, owned = ContentChain(), None, self.blocks.allocate(count)
        for i, block in enumerate(owned):
            raw = ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE].tobytes()
            parent = self.prefix.register([block], parent, raw, chain, i)
            self.blocks.mark_contents([block])
        self.prefix.hash_new()
        self.publishing.add(owned)
        return owned

    def step(self, now_s: float, filling: tuple[int, ...] = ()) -> int:
        """Plan and make the copies of a step. Returns their number."""
        self.host.begin_plan()
        if self.publishing.is_due(now_s):
            self.publishing.plan(filling)
        transfers = self.host.launch()
        self.host.land(transfers)
        self.host.end_saves(transfers.saves, are_all=True)
        self.check()
        return len(transfers.saves)

    def check(self) -> None:
        self.prefix.check(self.host.pool_blocks.hashes.hashes())
        self.host.check([])


@pytest.fixture
def engines(tmp_path) -> Iterator[tuple[Engine, Engine]]:
    first, second = Engine(tmp_path), Engine(tmp_path)
    with contextlib.closing(first.pool), contextlib.closing(second.pool):
        yield first, second


def test_the_budget_is_a_share_of_the_time(engines):
    engine, _ = engines
    engine.fill(0, 20)
    # A block takes 10 ms, the budget of a quarter of a second, which is not known at the first batch.
    engine.publishing._cost_s = 0.0008
    assert 5 <= engine.step(0.0) <= 8
    counts = [engine.step(0.01 * n) for n in range(1, 301)]
    assert [2 <= sum(counts[n : n + 100]) <= 5 for n in (0, 100, 200)] == [True] * 3
    assert max(counts) == 1


def test_blocks_are_published_in_batches(engines):
    engine, _ = engines
    engine.block_s = 0.0
    engine.fill(0, 3)
    # A few blocks wait for more, but not for long.
    assert [engine.step(s) for s in (0.0, 0.04, 0.06, 0.07)] == [0, 0, 3, 0]
    engine.fill(9999, 16)
    assert [engine.step(s) for s in (0.08, 0.09)] == [16, 0]


def test_prefill_has_a_budget_of_its_own(engines):
    engine, _ = engines
    engine.fill(0, 3)
    assert engine.step(0.0) + engine.step(1.0) == 3
    for second in range(2, 6):
        # What a prompt computes in half a second may take 25 ms, a block more than the budget of decoding.
        owned = engine.fill(1000 * second, 4)
        engine.publishing.add((), prefill_s=0.5)
        assert engine.step(second) + engine.step(second + 0.06) >= 1
        engine.blocks.release(owned[::-1])
    assert engine.pool.counts().cached >= 3 + 4


def test_large_blocks_are_published_one_by_one(engines):
    engine, _ = engines
    engine.publishing._cost_s = 0.01
    engine.fill(0, 20)
    assert [engine.step(s) for s in (0.0, 0.01)] == [1, 0]


def test_a_block_that_another_engine_has_published_is_not_copied_again(engines):
    first, second = engines
    first.fill(0, 3)
    while len(first.publishing):
        first.publishing.plan((), is_idle=True)
        transfers = first.host.launch()
        first.host.land(transfers)
        first.host.end_saves(transfers.saves, are_all=True)
    assert first.pool.counts().cached == 3
    second.fill(0, 3)
    assert [second.step(float(n)) for n in range(4)] == [0, 0, 0, 0]
    assert second.pool.counts().cached == 3
    assert not second.publishing


def test_blocks_that_are_being_filled_again_are_not_published(engines):
    engine, _ = engines
    (block,) = engine.fill(0, 1)
    assert [engine.step(s, filling=(block,)) for s in (0.0, 1.0)] == [0, 0]
    assert not engine.publishing


def test_what_another_engine_evicts_is_reported_and_computed_again(engines):
    engine, rival = engines
    owned = engine.fill(0, 2)
    assert engine.step(0.0) + engine.step(1.0) == 2
    engine.blocks.release(owned[::-1])
    engine.blocks.allocate(32)
    assert len(engine.events.held(Tier.HOST)) == 2
    assert rival.pool.claim(LAYOUT.num_slots) is not None
    engine.host.begin_plan()
    assert not engine.events.held()
    engine.check()


def test_routers_learn_what_other_engines_have_published(engines):
    first, second = engines
    owned = first.fill(0, 3)
    assert first.step(0.0) + first.step(1.0) == 3
    names = first.events.held(Tier.GPU)
    assert len(names) == 3 and not second.events.held()
    second.step(0.0)
    assert second.events.held(Tier.HOST) == names
    assert set(second.events.flush().host_stored.tolist()) == names
    # A cleared cache still finds them in the pool.
    second.prefix.clear()
    second.host.pool_blocks.hashes.hold_again()
    assert second.events.held(Tier.HOST) == names
    # It has the blocks on the device as well, then no longer.
    mine = second.fill(0, 3)
    second.check()
    assert second.events.held(Tier.GPU) == names
    second.blocks.release(mine[::-1])
    second.blocks.allocate(32)
    assert second.events.held(Tier.HOST) == names
    second.check()
    first.pool.drop(first.pool.find(k) for k in list(first.pool._index._slots)[:2])
    second.host.begin_plan()
    assert len(second.events.held(Tier.HOST)) == 1
    first.blocks.release(owned[::-1])


def test_blocks_of_another_model_are_not_reported(engines, tmp_path):
    first, _ = engines
    first.fill(0, 3)
    assert first.step(0.0) + first.step(1.0) == 3
    other = Engine(tmp_path, name="another model")
    with contextlib.closing(other.pool):
        other.host.begin_plan()
        assert not other.events.held()


def test_an_engine_that_starts_reports_the_pool(engines, tmp_path):
    first, _ = engines
    first.fill(0, 3)
    assert first.step(0.0) + first.step(1.0) == 3
    third = Engine(tmp_path)
    with contextlib.closing(third.pool):
        third.host.begin_plan()
        assert third.events.held(Tier.HOST) == first.events.held(Tier.GPU)
        third.check()


def test_one_engine_of_a_node_reports_the_pool(engines):
    first, second = engines
    first.fill(0, 1)
    assert first.step(0.0) + first.step(1.0) == 1
    reports = [e.host.pool_blocks._is_reporter for e in engines]
    assert reports == [True, False]
    assert second.host.pool_blocks.occupancy() == (0, 0, 0, 0)
    assert sum(first.host.pool_blocks.occupancy()[:2]) == LAYOUT.num_slots
    first.pool.close()
    assert second.pool.is_reporter()
    first.pool = open_pool(second.pool.path.parent, LAYOUT)


def test_what_a_peer_asks_for_is_published_before_all_others_and_without_budget(engines):
    engine, other = engines
    engine.fill(0, 12)
    asked = engine.fill(5000, 6)
    places = [engine.prefix.place_of(block) for block in asked]
    keys = [engine.host.pool_blocks.key(entry.digest, g) for entry, g in places]
    engine.publishing.max_share = 0.001
    unknown = [bytes(16) + keys[0][16:], keys[0][:16] + bytes(16)]
    assert engine.publishing.ask([*unknown, *keys]) == set(keys)
    assert engine.publishing.ask(keys) == set(keys), "another peer needs them, too"
    # A step that still fills the first of them keeps it waiting, not its followers.
    published, steps = 0, 0
    while published < 5:
        published += engine.step(0.0, (asked[0],))
        steps += 1
        assert steps < 20
    assert engine.host.pool_blocks.pool.find(keys[0]) is None
    assert engine.step(0.0) == 1
    other.pool.refresh()
    assert all(other.pool.find(key) is not None for key in keys)
    assert engine.publishing.ask(keys) == set(keys), "their copies may not have ended"
    assert engine.step(0.0) == 0, "no peer asks for the others"
