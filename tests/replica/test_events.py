import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.events import EventLog

HASHES = st.integers(0, 5)


def apply(held, batch):
    if batch.cleared:
        held.clear()
    held -= set(batch.removed.tolist())
    held |= set(batch.stored.tolist())


def fold(hashes):
    digest = 0
    for value in hashes:
        digest ^= value
    return digest


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("hold"), HASHES),
            st.tuples(st.just("drop"), HASHES),
            st.tuples(st.sampled_from(["clear", "flush", "snapshot"]), st.just(0)),
        ),
        max_size=60,
    )
)
def test_replaying_the_batches_gives_what_is_held(operations):
    log = EventLog(max_batches=3)
    holders: dict[int, int] = {}
    replayed: set[int] = set()
    batches = []
    for name, value in [*operations, ("flush", 0)]:
        if name == "hold":
            log.hold([value])
            holders[value] = holders.get(value, 0) + 1
        elif name == "drop" and holders.get(value):
            log.drop([value])
            holders[value] -= 1
        elif name == "clear":
            log.clear()
            holders.clear()
        elif name == "snapshot":
            seq, hashes = log.snapshot()
            assert (seq, set(hashes.tolist())) == (len(batches), replayed)
        elif name == "flush" and (batch := log.flush()) is not None:
            batches.append(batch)
            apply(replayed, batch)
        assert log.held() == {value for value, count in holders.items() if count}
        assert log.digest == fold(replayed)
    assert replayed == log.held()
    assert [batch.seq for batch in batches] == list(range(1, len(batches) + 1))
    assert log.flush() is None


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
