from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.routing_hash import tier_digest
from quire.protos.wire import CacheEvents
from quire.replica.kv_cache.cache_events import EventLog, Tier

HASHES = st.integers(0, 5)
TIERS = st.sampled_from(Tier)


def apply(held, batch):
    """Replay a batch into {tier: hashes}; every event must change something."""
    if batch.cleared:
        for hashes in held.values():
            hashes.clear()
    changes = (
        (Tier.GPU, batch.stored, batch.removed),
        (Tier.HOST, batch.host_stored, batch.host_removed),
    )
    for tier, _, removed in changes:
        assert set(removed.tolist()) <= held[tier]
        held[tier] -= set(removed.tolist())
    for tier, stored, _ in changes:
        assert not set(stored.tolist()) & (held[Tier.GPU] | held[Tier.HOST])
        held[tier] |= set(stored.tolist())


def digest_of(held):
    sums = [0, 0]
    for tier in Tier:
        for value in held[tier]:
            sums[tier] ^= value
    return tier_digest(*sums)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["hold", "drop", "move"]), HASHES, TIERS),
            st.tuples(st.sampled_from(["clear", "flush", "snapshot"]), st.just(0), TIERS),
        ),
        max_size=60,
    )
)
def test_replaying_the_batches_gives_what_each_tier_holds(operations):
    log = EventLog(max_batches=3)
    holders = {tier: Counter() for tier in Tier}
    replayed = {tier: set() for tier in Tier}
    batches = []
    for name, value, tier in [*operations, ("flush", 0, Tier.GPU)]:
        other = Tier(1 - tier)
        if name == "hold":
            log.hold([value], tier)
            holders[tier][value] += 1
        elif name == "drop" and holders[tier][value]:
            log.drop([value], tier)
            holders[tier][value] -= 1
        elif name == "move" and holders[tier][value]:
            log.move([value], tier, other)
            holders[tier][value] -= 1
            holders[other][value] += 1
        elif name == "clear":
            log.clear()
            holders = {tier: Counter() for tier in Tier}
        elif name == "snapshot":
            seq, *hashes = log.snapshot()
            assert seq == len(batches)
            assert [set(of_tier.tolist()) for of_tier in hashes] == list(replayed.values())
        elif name == "flush" and (batch := log.flush()) is not None:
            batches.append(batch)
            apply(replayed, batch)
        gpu = set(+holders[Tier.GPU])
        assert log.held(Tier.GPU) == gpu
        assert log.held(Tier.HOST) == set(+holders[Tier.HOST]) - gpu
        assert log.held() == set(+holders[Tier.HOST]) | gpu
        assert log.num_held == len(log.held())
        assert log.digest == digest_of(replayed)
    assert replayed == {tier: log.held(tier) for tier in Tier}
    assert [batch.seq for batch in batches] == list(range(1, len(batches) + 1))
    assert log.flush() is None


def test_a_hash_that_changes_tier_changes_the_digest():
    log = EventLog()
    log.hold([7])
    log.flush()
    before = log.digest
    log.move([7], Tier.GPU, Tier.HOST)
    batch = log.flush()
    assert (batch.removed.tolist(), batch.host_stored.tolist()) == ([7], [7])
    assert log.digest != before
    assert CacheEvents.from_wire(batch.to_wire()).host_stored.tolist() == [7]


def test_a_hash_is_told_once_however_many_hold_it():
    log = EventLog()
    log.hold([7, 7])
    assert log.flush().stored.tolist() == [7]
    log.drop([7])
    assert log.flush() is None
    log.drop([7])
    assert log.flush().removed.tolist() == [7]


def test_gone_and_back_within_a_batch_is_not_told():
    log = EventLog()
    log.hold([7])
    log.drop([7])
    assert log.flush() is None
    log.hold([7])
    log.flush()
    log.drop([7])
    log.hold([7])
    assert log.flush() is None
    assert log.held() == {7}


def test_parents_are_told_before_children():
    log = EventLog()
    order = [9, 2, 5, 1]
    log.hold(order)
    stored = log.flush().stored
    assert stored.tolist() == order
    assert stored.dtype == np.uint64


def test_a_snapshot_has_parents_before_children():
    log = EventLog()
    chain = np.random.default_rng(0).integers(0, 2**64, 64, dtype=np.uint64)
    log.hold(chain.tolist())
    log.flush()
    log.drop(chain[48:].tolist())
    log.hold(chain[48:].tolist())
    log.flush()
    assert log.snapshot()[1].tolist() == chain.tolist()


def test_hashes_of_the_upper_half_survive():
    log = EventLog()
    top = 2**64 - 1
    log.hold([top, 1])
    batch = log.flush()
    assert batch.stored.tolist() == [top, 1]
    assert log.digest == top ^ 1


def test_the_ring_replays_the_last_batches_and_no_more():
    log = EventLog(max_batches=2)
    batches = []
    for value in range(4):
        log.hold([value])
        batches.append(log.flush())
    assert log.since(4) == []
    assert log.since(3) == batches[3:]
    assert log.since(2) == batches[2:]
    assert log.since(1) is None
    assert log.since(5) is None


def test_a_reset_begins_a_new_epoch_from_nothing():
    log = EventLog()
    log.hold([1])
    log.flush()
    epoch = log.epoch
    log.reset()
    assert log.epoch != epoch
    assert (log.seq, log.digest, log.held(), log.since(0)) == (0, 0, set(), [])
    assert EventLog("named").epoch == "named"


def test_an_empty_ring_is_refused():
    with pytest.raises(ValueError, match="max_batches must be >= 1, got 0"):
        EventLog(max_batches=0)
