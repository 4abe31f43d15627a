"""Blocks that were given back wait for the newest step that may use them, and for no later one."""

from __future__ import annotations

from quire.replica.kv_cache.blocks import BlockManager
from quire.replica.kv_cache.deferred_frees import DeferredFrees


def test_blocks_are_free_when_the_step_that_was_newest_has_run_and_not_before():
    blocks = BlockManager(6, on_evict=lambda block: None)
    deferred_frees = DeferredFrees(blocks)
    first, second, third = (blocks.allocate(2) for _ in range(3))
    deferred_frees.launch(1)
    deferred_frees.give_back(first)
    deferred_frees.launch(2)
    deferred_frees.give_back(second)
    deferred_frees.give_back([])
    assert deferred_frees.num_references == 4 and blocks.allocate(1) is None
    assert deferred_frees.land(1)
    assert deferred_frees.num_references == 2
    assert sorted(blocks.allocate(2)) == sorted(first) and blocks.allocate(1) is None
    assert deferred_frees.land(2) and not deferred_frees.land(3)
    assert sorted(blocks.allocate(2)) == sorted(second)
    deferred_frees.give_back(third)
    assert sorted(blocks.allocate(2)) == sorted(third) and deferred_frees.num_references == 0
