import numpy as np
import pytest

from quire.replica.kv_cache.blocks import BlockManager, IntegrityError
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.kv_cache.host_tier import HostTier
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import ContentChain

BLOCK_SIZE = 64  # a routing hash for each block


class Cache:
    """Both tiers, without requests."""

    def __init__(self, num_blocks, num_host_blocks):
        self.events = EventLog()
        self.prefix = PrefixCache(
            BLOCK_SIZE, num_blocks, self.events, num_host_blocks=num_host_blocks
        )
        self.host = HostTier(num_host_blocks, self.prefix)
        self.blocks = BlockManager(num_blocks, on_evict=self.host.take_evicted)

    def put(self, start, count):
        """A sequence of `count` blocks that ended: all of them are cached."""
        ids = np.arange(start, start + count * BLOCK_SIZE, dtype=np.int32)
        chain, parent, owned = ContentChain(), None, self.blocks.allocate(count)
        for i, block in enumerate(owned):
            raw = ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE].tobytes()
            parent = self.prefix.register([block], parent, raw, chain, i)
            self.blocks.mark_contents([block])
        self.prefix.hash_new()
        self.blocks.release(reversed(owned))
        return owned

    def find(self, start, count):
        return self.prefix.match(np.arange(start, start + count * BLOCK_SIZE + 1, dtype=np.int32))

    def check(self):
        self.prefix.check()
        self.host.check([])
        self.blocks.check([0] * self.blocks.num_blocks, self.prefix.__contains__)


def test_what_the_device_evicts_is_found_in_the_host_tier():
    cache = Cache(4, 8)
    first = cache.put(0, 3)
    assert cache.find(0, 3).blocks == [first]
    cache.put(1000, 3)  # one block was free
    cache.check()
    hit = cache.find(0, 3)
    assert len(hit.entries) == 3
    assert hit.blocks == [[first[0], None, None]]
    assert (hit.device_blocks, hit.num_host_entries) == (first[:1], 2)
    transfers = cache.host.launch()
    saves = transfers.save_pairs().tolist()
    assert [block for block, _ in saves] == [first[2], first[1]]  # leaf first
    assert [h for _, h in saves] == [e.host_blocks[0] for _, _, e in reversed(hit.to_restore())]
    assert not transfers.restores
    cache.host.land(transfers)
    assert not cache.host.launch()


def test_the_events_tell_which_tier_a_hash_is_in():
    cache = Cache(3, 2)
    cache.put(0, 3)
    stored = cache.events.flush().stored.tolist()
    cache.put(1000, 1)
    batch = cache.events.flush()
    assert batch.removed.tolist() == batch.host_stored.tolist() == stored[2:]
    cache.put(2000, 1)
    cache.put(3000, 1)
    cache.check()
    # The device evicts leaf first, and so does the host tier, which had room for two of three.
    assert cache.events.held(Tier.HOST) == set(stored[:2])
    assert not set(stored[2:]) & cache.events.held()
    assert len(cache.find(0, 3).entries) == 2


def test_a_copy_that_is_there_already_is_not_made_again():
    cache = Cache(2, 4)
    cache.put(0, 2)
    cache.put(1000, 2)
    cache.host.land(cache.host.launch())
    # Back to the device, as a request would bring it.
    hit = cache.find(0, 2)
    entries = [entry for _, _, entry in hit.to_restore()]
    copies = [entry.host_blocks[0] for entry in entries]
    cache.host.blocks.add_owner(copies)
    restored = cache.blocks.allocate(2)
    for entry, copy, block in zip(entries, copies, restored, strict=True):
        cache.host.restore(copy, block)
        cache.prefix.place(entry, 0, block)
        cache.blocks.mark_contents([block])
    with pytest.raises(IntegrityError, match="owners"):
        cache.host.check([0])
    transfers = cache.host.launch()
    assert transfers.restore_pairs().tolist() == [
        list(p) for p in zip(copies, restored, strict=True)
    ]
    assert len(transfers.saves) == 2  # of the other sequence, which gave way
    assert cache.host.blocks.num_in_use == 2
    cache.host.land(transfers)
    assert cache.host.blocks.num_in_use == 0
    cache.blocks.release(reversed(restored))
    cache.check()
    assert cache.events.held(Tier.HOST) == cache.events.held() - set(
        h for entry in entries for h in entry.routing_hashes
    )
    cache.blocks.release(cache.blocks.allocate(2))
    assert not cache.host.launch()
    assert cache.events.held(Tier.GPU) == set()


def test_a_block_that_waits_to_be_restored_is_not_saved():
    cache = Cache(1, 1)
    cache.put(0, 1)
    cache.put(1000, 1)
    cache.host.land(cache.host.launch())
    ((_, _, entry),) = cache.find(0, 1).to_restore()
    cache.host.blocks.add_owner(entry.host_blocks)
    (block,) = cache.blocks.allocate(1)
    cache.host.restore(entry.host_blocks[0], block)
    cache.prefix.place(entry, 0, block)
    cache.blocks.mark_contents([block])
    cache.blocks.release([block])
    cache.blocks.release(cache.blocks.allocate(1))
    transfers = cache.host.launch()
    assert not transfers.saves
    cache.host.land(transfers)
    cache.check()


def test_a_failed_save_is_forgotten():
    cache = Cache(2, 4)
    cache.put(0, 2)
    cache.put(1000, 1)
    transfers = cache.host.launch()
    assert len(transfers.saves) == 1
    cache.host.land(transfers)
    cache.host.forget_saves(transfers)
    cache.check()
    assert cache.host.blocks.num_free == 4
    assert len(cache.find(0, 2).entries) == 1


def test_without_a_tier_what_is_evicted_is_gone():
    cache = Cache(2, 0)
    cache.put(0, 2)
    cache.put(1000, 2)
    cache.check()
    assert cache.find(0, 2).entries == []
    assert not cache.host.launch()


def test_clearing_empties_both_tiers():
    cache = Cache(2, 2)
    cache.put(0, 2)
    cache.put(1000, 1)
    blocks, host_blocks = cache.prefix.clear()
    assert (len(blocks), len(host_blocks)) == (2, 1)
    for block in blocks:
        cache.blocks.forget_content(block)
    for block in host_blocks:
        cache.host.blocks.forget_content(block)
    cache.check()
    assert cache.events.held() == set()
