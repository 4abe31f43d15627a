"""The node's pool: what one member publishes another finds, what is used is not evicted, and its bounds."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from pool_process import LAYOUT, adopt, bytes_of, fill, key_of, open_pool, put

from quire.replica.node_pool import pool_file
from quire.replica.node_pool.node_pool import NodePool, open_node_pool
from quire.replica.node_pool.pool_file import NodePoolError, PoolSlots, pool_name, remove_pools
from quire.replica.node_pool.pool_layout import MAX_MEMBERS, Fact, PoolLayout, State
from quire.replica.node_pool.pool_locks import PoolLocks
from quire.replica.node_pool.slot_content import Content
from quire.replica.node_pool.slot_eviction import choose_victims


def test_a_block_that_one_member_publishes_is_found_by_the_others(tmp_path):
    first, second = open_pool(tmp_path), open_pool(tmp_path)
    assert (first.is_new, second.is_new) == (True, False)
    slots = first.claim(2)
    first.publish([fill(first, slots[0], key_of(1))])
    assert adopt(second, 1)
    assert not adopt(second, 2)
    first.release(slots)
    assert first.counts()[:4] == (LAYOUT.num_slots - 1, 1, 0, 0)
    first.close()
    assert adopt(second, 1), "it outlives the member that published it"
    second.check()


def test_a_leased_slot_is_not_evicted_and_a_cached_one_is(tmp_path):
    pool, other = open_pool(tmp_path), open_pool(tmp_path)
    slots = put(pool, *range(LAYOUT.num_slots))
    other.refresh()
    assert other.lease(slots[:3], [key_of(n) for n in range(3)]) == [True] * 3
    assert len(pool.claim(LAYOUT.num_slots - 3)) == LAYOUT.num_slots - 3
    assert pool.claim(1) is None
    other.refresh()
    assert [adopt(other, n) for n in range(4)] == [True, True, True, False]
    other.release(slots[:3])
    assert len(pool.claim(3)) == 3


def test_the_leaf_of_a_chain_that_was_released_first_is_evicted_first(tmp_path):
    pool = open_pool(tmp_path)
    slots = pool.claim(LAYOUT.num_slots)
    pool.publish([fill(pool, slot, key_of(n)) for n, slot in enumerate(slots)])
    pool.release(slots[::-1])
    pool.claim(4)
    pool.refresh()
    found = [pool.find(key_of(n)) is not None for n in range(LAYOUT.num_slots)]
    assert found == [True] * (LAYOUT.num_slots - 4) + [False] * 4


def test_retained_slots_are_evicted_last(tmp_path):
    pool = open_pool(tmp_path)
    slots = put(pool, *range(LAYOUT.num_slots))
    pool.retain(slots[:2])
    rest = LAYOUT.num_slots - 2
    assert pool.counts().retained == 2
    assert pool.claim(rest + 1, may_evict_retained=False) is None
    assert len(pool.claim(rest, may_evict_retained=False)) == rest
    assert pool.claim(1, may_evict_retained=False) is None
    assert pool.claim(1) is not None
    assert pool.counts().retained == 1


def test_a_payer_with_many_blocks_cannot_evict_those_of_the_others():
    rng = np.random.default_rng(0)
    payer = np.array([1] * 90 + [2] * 10, np.uint64)
    used = rng.permutation(100).astype(np.uint64)
    victims = choose_victims(np.arange(100), used, payer, 64, 0)
    assert len(set(victims.tolist())) == 64
    lost = victims[payer[victims] == 2]
    assert len(lost) <= 64 // 16, "only by the rule that takes the oldest of all"
    own = used[payer == 1]
    assert sorted(used[v] for v in victims if payer[v] == 1) == sorted(own)[: 64 - len(lost)]


def test_dropped_content_is_found_no_more_and_its_slot_is_free_after_the_last_lease(tmp_path):
    pool, other = open_pool(tmp_path), open_pool(tmp_path)
    (slot,) = put(pool, 1)
    other.refresh()
    assert other.lease([slot], [key_of(1)]) == [True]
    pool.drop([slot])
    assert not adopt(other, 1) and other.lease([slot], [key_of(1)]) == [False]
    assert pool.counts().free == LAYOUT.num_slots - 1
    other.release([slot])
    assert pool.counts().free == LAYOUT.num_slots


def test_every_damage_is_found_before_the_block_is_used(tmp_path):
    pool, rng = open_pool(tmp_path, PoolLayout(4, 512)), np.random.default_rng(1)
    views = pool._views
    for n in range(2000):
        (slot,) = put(pool, n)
        kind = ("bytes", "tail", "key", "num_bytes", "checksum", "header_sum", "epoch")[n % 7]
        if kind == "bytes":
            views.slots[slot, rng.integers(512)] ^= np.uint8(1 << rng.integers(8))
        elif kind == "tail":
            begin = rng.integers(512)
            views.slots[slot, begin:] = bytes_of(key_of(n + 1))[begin:]
            if (views.slots[slot] == bytes_of(key_of(n))).all():
                continue
        elif kind == "key":
            views.key[slot] = np.void(key_of(n + 10_000))
        else:
            getattr(views, kind)[slot] += 1 + rng.integers(9)
        pool._index._seen = 0
        assert not adopt(pool, n) and not adopt(pool, n + 10_000), kind
        assert pool.find(key_of(n)) is None or kind == "key"
        pool.drop([slot])
    assert pool.counts().damaged > 1000
    pool.check()


def test_a_member_that_is_stopped_with_the_mutex_does_not_stop_the_others(tmp_path):
    now_s = [0.0]
    pool, stopped = open_pool(tmp_path, clock=lambda: now_s[0]), open_pool(tmp_path)
    slots = put(pool, 1, 2)
    assert pool.lease(slots, [key_of(1), key_of(2)]) == [True, True]
    stopped._locks.lock(0.0)
    assert pool.claim(1) is None
    assert pool.lease(slots, [key_of(1), key_of(2)]) == [False, False]
    assert not pool.publish([])
    pool.release(slots)
    assert pool.num_leased() == 2
    stopped._locks.unlock()
    assert pool.claim(1) is None, "it waits before it tries again"
    now_s[0] += 2
    assert pool.claim(1) is not None
    assert pool.num_leased() == 1


def test_a_member_lives_until_the_last_process_with_its_file_has_ended(tmp_path):
    """As a rank of a replica, which may still write to slots that its leader has leased."""
    pool, other = open_pool(tmp_path), open_pool(tmp_path)
    slots = pool.claim(LAYOUT.num_slots)
    rank = os.dup(pool.file.fd)
    mapped = PoolSlots.of(rank, pool.layout)
    os.close(pool.file.fd)  # the leader is killed
    assert other.claim(1) is None
    mapped.part(1, 2).slots[slots[0]] = 7
    assert other.slots[slots[0], LAYOUT.slot_bytes // 2 :].tolist() == [7] * (
        LAYOUT.slot_bytes // 2
    )
    assert not other.slots[slots[0], : LAYOUT.slot_bytes // 2].any()
    os.close(rank)
    assert other.claim(1) is not None


def test_a_member_that_leaves_releases_the_mutex_though_a_rank_has_its_file(tmp_path):
    pool, other = open_pool(tmp_path), open_pool(tmp_path)
    rank = os.dup(pool.file.fd)
    put(pool, 1)
    pool.close()
    assert adopt(other, 1)
    other.close()
    assert not other.path.exists()
    os.close(rank)


def test_members_are_bounded_and_their_places_are_used_again(tmp_path):
    members = [open_pool(tmp_path) for _ in range(MAX_MEMBERS)]
    with pytest.raises(NodePoolError, match=f"{MAX_MEMBERS} engines use the node pool"):
        open_pool(tmp_path)
    members[3].close()
    assert open_pool(tmp_path)._member == 3


def test_the_last_member_removes_the_file_which_only_its_user_can_read(tmp_path):
    first, second = open_pool(tmp_path), open_pool(tmp_path)
    assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o600
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()


def test_a_pool_that_is_closed_twice_leaves_the_next_one_alone(tmp_path):
    """A replica is closed by Ray, and once more when Python frees it. By then the file's descriptor is reused."""
    first, other = open_pool(tmp_path), open_pool(tmp_path)
    first.close()
    next_one = open_pool(tmp_path)
    first.close()
    assert put(next_one, 1) and adopt(other, 1)
    next_one.check()
    next_one.close()


def test_stale_files_are_removed_at_the_start(tmp_path, monkeypatch):
    def leave(name: str, slot_bytes: int = 512):
        pool = pool_file.make_pool_file(
            name, PoolLayout(4, slot_bytes), is_exact=True, folder=tmp_path
        )
        pool.close(remove=False)
        return pool.path

    other_kind, other_app, old_app = leave("test", 256), leave("other"), leave("old")
    os.utime(old_app, (0, 0))
    used = open_pool(tmp_path, PoolLayout(4, 128))
    pool = open_pool(tmp_path)
    assert not other_kind.exists() and not old_app.exists()
    assert other_app.exists() and used.path.exists() and pool.path.exists()


def test_the_pools_of_an_ended_session_are_removed_and_those_in_use_kept(tmp_path):
    def path_of(application: str, *, is_used: bool, session: str = "session_1-2") -> Path:
        name = pool_name(session, application)
        pool = open_node_pool(name, LAYOUT, folder=tmp_path)
        put(pool, 1)
        if is_used:
            used.append(pool)
        else:
            pool._file.close(remove=False)
        return pool.path

    used: list[NodePool] = []
    killed = path_of("a", is_used=False)
    kept = [path_of("b", is_used=True), path_of("a", is_used=False, session="session_1-20")]
    remove_pools("session_1-2", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept) and killed not in kept
    used[0].refresh()
    assert adopt(used[0], 1)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_member_that_starts_while_its_file_is_removed_has_a_pool(tmp_path, monkeypatch, moment):
    """The removal comes before the start has the mutex, or between the mutex and the membership."""
    name = pool_name("session")
    open_node_pool(name, LAYOUT, folder=tmp_path)._file.close(remove=False)
    owner, method = {"before": (PoolLocks, "lock"), "after": (NodePool, "_join")}[moment]
    original, removals = getattr(owner, method), []

    def with_removal(self: object, *arguments: float) -> object:
        if not removals:
            removals.append(moment)
            remove_pools("session", tmp_path)
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, with_removal)
    first = open_node_pool(name, LAYOUT, folder=tmp_path)
    monkeypatch.undo()
    assert removals and first.is_new == (moment == "before")
    put(first, 1)
    second = open_node_pool(name, LAYOUT, folder=tmp_path)
    assert adopt(second, 1), "both use one file"


def test_the_size_of_an_existing_pool_is_kept_while_somebody_uses_it(tmp_path):
    pool = open_pool(tmp_path)
    larger = PoolLayout(2 * LAYOUT.num_slots, LAYOUT.slot_bytes)
    assert open_pool(tmp_path, larger).layout == LAYOUT
    pool._file.close(remove=False)


def test_another_size_makes_a_new_pool_when_nobody_uses_the_old_one(tmp_path):
    larger = PoolLayout(2 * LAYOUT.num_slots, LAYOUT.slot_bytes)
    open_pool(tmp_path)._file.close(remove=False)
    again = open_pool(tmp_path, larger, is_exact=False)
    assert (again.layout, again.is_new) == (LAYOUT, False)
    again._file.close(remove=False)
    assert open_pool(tmp_path, larger).layout == larger


def test_an_incomplete_file_is_made_again(tmp_path):
    pool = open_pool(tmp_path)
    put(pool, 1)
    pool._views.facts[Fact.MAGIC] = 0
    pool._file.close(remove=False)
    again = open_pool(tmp_path)
    assert again.is_new and not adopt(again, 1)


def test_too_little_room_is_an_error_with_the_numbers(tmp_path):
    stat_ = os.statvfs(tmp_path)
    free = stat_.f_bavail * stat_.f_frsize
    with pytest.raises(
        NodePoolError, match=r"needs .* bytes .* has .* free, .* Ray's object store"
    ):
        open_pool(tmp_path, set_aside=free)
    with pytest.raises(NodePoolError, match="lower node_pool_gib or enlarge"):
        open_pool(tmp_path, PoolLayout(1 << 20, free >> 10))
    assert not list(tmp_path.iterdir())


def test_two_applications_have_two_names():
    names = [pool_name(*pair) for pair in (("a", "b"), ("a-b", ""), ("a/b", ""), ("a_b", "c" * 99))]
    assert len(set(names)) == 4
    assert all("/" not in name for name in names)


def test_a_layout_takes_at_most_its_bytes():
    for num_bytes in (20_000, 1 << 20, 3 << 28):
        layout = PoolLayout.that_fits(num_bytes, 24 << 10)
        assert layout.num_bytes <= num_bytes
        more = PoolLayout(layout.num_slots + 1, 24 << 10)
        assert not layout.num_slots or more.num_bytes > num_bytes - (16 << 10)


def test_an_index_follows_every_change(tmp_path):
    first, second = open_pool(tmp_path), open_pool(tmp_path)
    for n in range(200):
        put(first if n % 3 else second, n)
        second.refresh()
        complete = np.flatnonzero(second._views.state == State.COMPLETE).tolist()
        assert sorted(second._index._slots.values()) == complete
        assert all(second.find(second._views.key[s].tobytes()) == s for s in complete)


def test_a_published_slot_needs_no_second_copy(tmp_path):
    pool = open_pool(tmp_path)
    (slot,) = pool.claim(1)
    content = fill(pool, slot, key_of(1))
    assert isinstance(content, Content) and pool.publish([content])
    assert pool.is_complete(slot)
    pool.release([slot])
    assert pool.num_leased() == 0
