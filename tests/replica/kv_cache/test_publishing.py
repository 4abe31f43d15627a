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

    def __init__(self, folder, num_blocks: int = 32):
        self.pool = open_pool(folder, LAYOUT)
        self.events = EventLog()
        self.prefix = PrefixCache(
            BLOCK_SIZE, num_blocks, self.events, num_host_blocks=LAYOUT.num_slots
        )
        prefix = self.prefix
        blocks = PoolBlocks(self.pool, "m", 1, prefix.name_of_host_block, prefix.forget_host)
        self.host = HostTier(LAYOUT.num_slots, prefix, pool_blocks=blocks)
        self.blocks = BlockManager(num_blocks, on_evict=self.host.take_evicted)
        # One block costs 128 KiB and 64 bytes.
        self.publishing = Publishing(prefix, self.host, 64, 4 * ((128 << 10) + 64))

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
        self.publishing.plan(now_s, filling)
        transfers = self.host.launch()
        self.host.land(transfers)
        self.host.seal(transfers.saves)
        self.host.check([])
        return len(transfers.saves)


@pytest.fixture
def engines(tmp_path) -> Iterator[tuple[Engine, Engine]]:
    first, second = Engine(tmp_path), Engine(tmp_path)
    with contextlib.closing(first.pool), contextlib.closing(second.pool):
        yield first, second


def test_the_budget_is_in_bytes_per_second(engines):
    engine, _ = engines
    engine.fill(0, 20)
    # Four blocks a second, of which one may be saved up.
    counts = [engine.step(now_s) for now_s in (0.0, 0.1, 0.25, 0.5, 0.5, 0.75, 5.0, 5.25)]
    assert counts == [1, 0, 1, 1, 0, 1, 1, 1]
    assert len(engine.publishing) == 14


def test_a_block_that_another_engine_has_published_is_not_copied_again(engines):
    first, second = engines
    first.fill(0, 3)
    while len(first.publishing):
        first.publishing.plan(0.0, (), is_idle=True)
        transfers = first.host.launch()
        first.host.land(transfers)
        first.host.seal(transfers.saves)
    assert first.pool.counts().cached == 3
    second.fill(0, 3)
    assert [second.step(float(n)) for n in range(4)] == [0, 0, 0, 0]
    assert second.pool.counts().cached == 3
    assert not second.publishing


def test_blocks_that_are_being_filled_again_are_not_published(engines):
    engine, _ = engines
    (block,) = engine.fill(0, 1)
    assert engine.step(0.0, filling=(block,)) == 0
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
    engine.prefix.check()
    engine.host.check([])


def test_one_engine_of_a_node_reports_the_pool(engines):
    first, second = engines
    first.fill(0, 1)
    first.step(0.0)
    reports = [e.host.pool_blocks._is_reporter for e in engines]
    assert reports == [True, False]
    assert second.host.pool_blocks.occupancy() == (0, 0, 0, 0)
    assert sum(first.host.pool_blocks.occupancy()[:2]) == LAYOUT.num_slots
    first.pool.close()
    assert second.pool.is_reporter()
    first.pool = open_pool(second.pool.path.parent, LAYOUT)
