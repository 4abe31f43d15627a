"""Slots of snapshots: which entries have one, where prompts get one, and in which order they are evicted."""

from __future__ import annotations

import numpy as np
import pytest

from quire.protos.routing_hash import RoutingHasher, state_marks
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.cache_events import EventLog
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import ContentChain

BLOCK = 32


def index(num_slots: int, num_host_slots: int = 0) -> PrefixCache:
    return PrefixCache(BLOCK, 64, EventLog("epoch"), snapshots=(10, num_slots, num_host_slots, 100))


def register(prefix: PrefixCache, tokens: np.ndarray, first_block: int = 0) -> list:
    """Index all full blocks of a sequence."""
    chain, entries, parent = ContentChain(), [], None
    for i in range(len(tokens) // BLOCK):
        raw = tokens[i * BLOCK : (i + 1) * BLOCK].tobytes()
        parent = prefix.register([first_block + i], parent, raw, chain, i)
        entries.append(parent)
    return entries


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_a_hit_ends_at_the_deepest_snapshot_and_tells_what_is_known():
    prefix, tokens = index(num_slots=2), tokens_of(6 * BLOCK)
    entries = register(prefix, tokens)
    prompt = np.append(tokens, 7)
    assert (len(prefix.match(prompt).entries), prefix.match(prompt).num_known) == (0, 6)
    prefix.snapshots.attach(prefix.snapshots.take(), entries[1])
    prefix.snapshots.attach(prefix.snapshots.take(), entries[3])
    for length, num_hit in ((6 * BLOCK + 1, 4), (4 * BLOCK + 1, 4), (4 * BLOCK, 2), (2 * BLOCK, 0)):
        hit = prefix.match(prompt[:length])
        assert (len(hit.entries), hit.num_known) == (num_hit, (length - 1) // BLOCK), length


@pytest.mark.parametrize(
    ("start", "end", "num_tokens", "num_known", "lengths"),
    [
        (0, 100, 100, 0, [96]),  # the last block that leaves a token
        (0, 96, 96, 0, [64]),
        (0, 64, 100, 0, []),  # a later chunk takes it
        (64, 100, 100, 0, [96]),
        (0, 330, 330, 64, [64, 128, 256, 320]),  # the end of what is known, and each four blocks
        (64, 330, 330, 64, [128, 256, 320]),
        (0, 20, 20, 0, []),
    ],
)
def test_a_prompt_gets_snapshots_where_they_will_be_needed(
    start, end, num_tokens, num_known, lengths
):
    prefix = PrefixCache(BLOCK, 8, EventLog("epoch"), snapshots=(0, 1, 0, 4))
    assert prefix.snapshots.places(start, end, num_tokens, num_known, BLOCK) == lengths


def test_the_snapshot_used_longest_ago_moves_to_the_host_and_is_dropped_there():
    prefix = index(num_slots=2, num_host_slots=1)
    entries, snapshots = register(prefix, tokens_of(4 * BLOCK)), prefix.snapshots
    for entry in entries[:2]:
        snapshots.attach(snapshots.take(), entry)
    snapshots.load(entries[0], row=3)
    snapshots.attach(snapshots.take(), entries[2])
    # Slots 10 and 11 are on the device, 12 is on the host.
    assert [entry.snapshot for entry in entries] == [10, 12, 11, None]
    assert snapshots.launch() == ([(10, 3)], [(11, 12)])
    snapshots.load(entries[1], row=4)
    snapshots.attach(snapshots.take(), entries[3])
    assert [entry.snapshot for entry in entries] == [12, None, 11, 10]
    # The row loads before the slot of the host gets another snapshot.
    assert snapshots.launch() == ([(12, 4)], [(10, 12)])
    prefix.check()
    snapshots.check(prefix.entries(), 0)


def test_the_snapshot_of_a_retained_sequence_is_evicted_after_others():
    prefix = index(num_slots=2)
    entries, snapshots = register(prefix, tokens_of(3 * BLOCK)), prefix.snapshots
    for entry in entries[:2]:
        snapshots.attach(snapshots.take(), entry)
    entries[0].num_retained[0] = 1
    snapshots.attach(snapshots.take(), entries[2])
    assert [entry.snapshot is None for entry in entries] == [False, True, False]


def test_a_moving_snapshot_stays_where_another_request_has_used_it():
    prefix = index(num_slots=3)
    entries, snapshots = register(prefix, tokens_of(3 * BLOCK)), prefix.snapshots
    for entry in entries[:2]:
        snapshots.attach(snapshots.take(), entry)
    snapshots.load(entries[0], row=0)
    for entry in (*entries, None):
        snapshots.move_from(entry)
    assert [entry.snapshot is None for entry in entries] == [False, True, True]


def test_an_entry_loses_its_snapshot_when_it_leaves_the_index_or_the_cache_is_cleared():
    prefix = index(num_slots=2)
    entries, snapshots = register(prefix, tokens_of(2 * BLOCK)), prefix.snapshots
    for entry in entries:
        snapshots.attach(snapshots.take(), entry)
    prefix.forget(1)
    assert len(snapshots) == 1
    prefix.clear()
    assert len(snapshots) == 0
    slot = snapshots.take()
    snapshots.attach(slot, entries[0])
    assert entries[0].snapshot is None and len(snapshots) == 0
    snapshots.check((), 0)
    with pytest.raises(IntegrityError, match="no snapshot"):
        snapshots.load(entries[0], row=0)


def test_routers_are_told_the_routing_blocks_at_which_a_hit_may_end():
    prefix, tokens = index(num_slots=3), tokens_of(5 * BLOCK)
    entries, snapshots = register(prefix, tokens), prefix.snapshots
    prefix.hash_new()
    hashes = RoutingHasher("", "").hashes(tokens)
    marks = state_marks(hashes).tolist()
    held = prefix._routing._events.held
    assert held() == set(hashes.tolist())
    # A block is half a routing block: the snapshot after three blocks counts for the first routing block.
    for entry, told in ((entries[0], set()), (entries[2], {marks[0]}), (entries[3], {*marks})):
        snapshots.attach(snapshots.take(), entry)
        assert held() - set(hashes.tolist()) == told
    prefix.check()
    snapshots.drop(entries[3])
    assert held() == {*hashes.tolist(), marks[0]}
    prefix.check()
