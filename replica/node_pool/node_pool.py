"""One engine's membership in the node's pool: claim, publish, find, lease, release and evict slots.

```
            claim                  publish                 release (last lease)
   FREE ───────────▶ HELD ───────────────────▶ COMPLETE ────────────────────────▶ COMPLETE, cached
    ▲                 │                           ▲  │                                  │
    │ release         │                           └──┼────────────── lease ─────────────┤
    ├─────────────────┘                              │ drop                             │
    │                                                ▼                                  │
    ├──────────── last release ──────────────────── HELD                                │
    └──────────────────────────────── evict ────────────────────────────────────────────┘
```

Every change of a header is made under the pool's mutex, which the kernel releases when a process dies. The order of the
writes makes each death harmless: a lease is written before the state that needs it, and a state becomes COMPLETE after
the rest of its header. The leases of a dead member expire when another member sweeps. Slots that only it held are free
again.

A member that is stopped while it holds the mutex must not stop the others. After `_TIMEOUT_S` they do without the pool
for `_PAUSE_S`: nothing is found, nothing is published, and what they release is released later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from quire.replica.node_pool.pool_file import SHM, NodePoolError, PoolFile, make_pool_file
from quire.replica.node_pool.pool_layout import (
    ENGINE,
    MAX_MEMBERS,
    NO_ENGINE,
    Fact,
    PoolLayout,
    State,
)
from quire.replica.node_pool.slot_checks import checksum, header_sum
from quire.replica.node_pool.slot_content import Content
from quire.replica.node_pool.slot_counts import PoolCounts, count_slots, is_used_by
from quire.replica.node_pool.slot_eviction import choose_victims
from quire.replica.node_pool.slot_index import SlotIndex

_TIMEOUT_S = 0.25
_PAUSE_S = 1.0
# Time between two looks for dead members.
_SWEEP_S = 1.0
# Time between two renewals of the file's time; far below the age at which a file is stale.
_TOUCH_S = 60.0
# One eviction frees this part of the pool, because choosing victims reads every header: 350 us of 4,000 slots.
_EVICTED_PART = 1 / 64

# An index by a plain number takes a fraction of the time of one by an enum.
_CHANGE, _CLOCK = int(Fact.CHANGE), int(Fact.CLOCK)
# Comparing with an enum takes as long as the rest of `is_complete`.
_COMPLETE = int(State.COMPLETE)


class NodePool:
    """A member of a node's pool. One thread uses it; `counts` is for any thread.

    Parameters
    ----------
    file
        Result of `make_pool_file`; this opening holds its mutex.
    clock
        Monotonic seconds.
    is_engine
        Whether this member is counted as an engine and may report the node's occupancy.

    Raises
    ------
    NodePoolError
        `MAX_MEMBERS` members use the pool already.
    """

    def __init__(
        self,
        file: PoolFile,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_engine: bool = True,
    ):
        self.layout = file.layout
        self.path = file.path
        self.is_new = file.is_new
        self._file = file
        self._views = file.views
        self._clock = clock
        self._is_engine = is_engine
        self._locks = file.locks
        self._index = SlotIndex(file.views)
        self._is_closed = False
        # The pool is not used before this time, because its mutex was not free.
        self._resumes_s = 0.0
        # Slots that are released once the mutex is free, oldest first.
        self._unreleased: list[int] = []
        self._next_sweep_s = self._next_touch_s = 0.0
        self._free_hint = 0
        self._has_changed = False
        self._own_changes: list[int] = []
        # Slots that this member has evicted or dropped since the last `refresh`.
        self._dropped: list[int] = []
        try:
            self._member = self._join()
        finally:
            self._unlock()

    def _join(self) -> int:
        for member in range(MAX_MEMBERS):
            if self._locks.join(member):
                self._forget_member(member)
                self._views.joined[member] = ENGINE if self._is_engine else NO_ENGINE
                self._sweep(besides=member)
                return member
        raise NodePoolError(f"{self.path}: {MAX_MEMBERS} engines use the node pool already")

    @property
    def num_slots(self) -> int:
        return self.layout.num_slots

    @property
    def slots(self) -> np.ndarray:
        """[num_slots, slot_bytes] uint8, the memory of all slots. A member writes only slots that it has claimed."""
        return self._views.slots

    @property
    def file(self) -> PoolFile:
        """The mapped file, for copies between its slots and the device."""
        return self._file

    # -- finding ---------------------------------------------------------------------------------------------

    def refresh(self) -> list[int]:
        """Follow the other members' changes. Returns the slots that they changed or this one evicted or dropped."""
        now_s = self._clock()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + _SWEEP_S
            if self._unreleased or self._has_dead():
                with self._mutex() as is_locked:
                    if is_locked:
                        self._sweep(besides=self._member)
        if now_s >= self._next_touch_s:
            self._next_touch_s = now_s + _TOUCH_S
            self._file.touch()
        dropped, self._dropped = self._dropped, []
        return dropped + self._index.refresh()

    def find(self, key: bytes) -> int | None:
        """The slot with this content, as of the last `refresh`. Lease it before its use."""
        return self._index.get(key)

    def epoch(self, slot: int) -> int:
        """Number that changes with the slot's content."""
        return int(self._views.epoch[slot])

    def epoch_of(self, slot: int, key: bytes) -> int | None:
        """The epoch of a slot that has this content now; None: it has other content, or none."""
        # The epoch changes before the key, so an epoch that is read first is never newer than the key.
        epoch = self.epoch(slot)
        is_known = self.is_complete(slot) and self._views.key[slot].tobytes() == key
        return epoch if is_known else None

    def routing_hash(self, slot: int, key_ends: Container[bytes]) -> int:
        """The routing hash of a slot with such a key; 0 if it has none."""
        if not self.is_complete(slot) or self._views.key[slot].tobytes()[16:] not in key_ends:
            return 0
        return int(self._views.routing_hash[slot])

    def is_complete(self, slot: int) -> bool:
        """Whether the slot can be found now."""
        return bool(self._views.state[slot] == _COMPLETE)

    # -- leases ----------------------------------------------------------------------------------------------

    def lease(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        """Lease slots that still have this content, so that they are not evicted. Returns which ones were leased."""
        views = self._views
        with self._mutex() as is_locked:
            if not is_locked:
                return [False] * len(slots)
            leased = []
            for slot, key in zip(slots, keys, strict=True):
                is_known = views.state[slot] == _COMPLETE and views.key[slot].tobytes() == key
                if is_known:
                    views.leases[slot, self._member] += 1
                leased.append(bool(is_known))
            return leased

    def verify(self, slot: int) -> bool:
        """Check header and bytes of a leased slot. A damaged slot is counted and dropped; the lease stays."""
        views = self._views
        key, num_bytes = views.key[slot].tobytes(), int(views.num_bytes[slot])
        wanted = int(views.checksum[slot])
        is_sound = (
            num_bytes == self.layout.slot_bytes
            and header_sum(slot, self.epoch(slot), key, num_bytes, wanted) == views.header_sum[slot]
            and checksum(views.slots[slot]) == wanted
        )
        if not is_sound:
            with self._mutex() as is_locked:
                if is_locked:
                    views.facts[Fact.NUM_DAMAGED] += 1
            self.drop([slot])
        return is_sound

    def release(self, slots: Sequence[int]) -> None:
        """Give a lease of each slot back. A chain's slots are given leaf first, so that its leaf is evicted first."""
        self._unreleased += slots
        with self._mutex():
            pass

    def _release_now(self) -> None:
        views, released = self._views, np.array(self._unreleased)
        self._unreleased = []
        slots, counts = np.unique(released, return_counts=True)
        left = views.leases[slots, self._member] - counts
        if left.min() < 0:
            raise AssertionError(f"slots {slots[left < 0]} are released more often than leased")
        views.leases[slots, self._member] = left
        # Of a slot that is released twice, the last tick remains.
        views.used[released] = self._ticks(len(released))
        held = slots[views.state[slots] != State.COMPLETE]
        unused = held[~views.leases[held].any(1)]
        if len(unused):
            self._change(unused)
            views.state[unused] = State.FREE

    def touch(self, slots: Sequence[int]) -> None:
        """Treat complete slots as just used."""
        with self._mutex() as is_locked:
            if is_locked:
                self._views.used[slots] = self._ticks(len(slots))

    def retain(self, slots: Sequence[int], value: bool = True) -> None:
        """Evict these slots after all others, or no longer so. The next owner of the slot starts without."""
        self._views.retained[slots, self._member] = value

    # -- content ---------------------------------------------------------------------------------------------

    def claim(self, count: int, *, may_evict_retained: bool = True) -> list[int] | None:
        """Lease `count` slots with unknown content, which this member may write. None: there are too few."""
        views, own = self._views, self._member
        with self._mutex() as is_locked:
            if not is_locked:
                return None
            free = self._free(count)
            if len(free) < count:
                self._evict(count - len(free), may_evict_retained)
                free = self._free(count)
            if len(free) < count:
                return None
            self._change(free)
            views.epoch[free] += np.uint64(1)
            views.retained[free] = 0
            views.leases[free, own] = 1
            views.state[free] = State.HELD
            return [int(slot) for slot in free]

    def publish(self, contents: Sequence[Content], released: Sequence[int] = ()) -> bool:
        """Let other members find slots that this one has claimed and filled. Returns False if the mutex is not free.

        The slots in `released` are then released, as by `release`.
        """
        views, num_bytes = self._views, self.layout.slot_bytes
        with self._mutex() as is_locked:
            if not is_locked:
                return False
            if not contents:
                return True
            slots = [content.slot for content in contents]
            self._change(slots)
            keys = b"".join(content.key for content in contents)
            views.key[slots] = np.frombuffer(keys, views.key.dtype)
            views.num_bytes[slots] = num_bytes
            views.checksum[slots] = [content.checksum for content in contents]
            views.payer[slots] = [content.payer for content in contents]
            views.routing_hash[slots] = [content.routing_hash for content in contents]
            views.header_sum[slots] = [
                header_sum(c.slot, self.epoch(c.slot), c.key, num_bytes, c.checksum)
                for c in contents
            ]
            views.used[slots] = self._ticks(len(slots))
            # Last: from now on others find them.
            views.state[slots] = State.COMPLETE
            if released:
                self._unreleased += released
                self._release_now()
            return True

    def content(self, slot: int) -> Content:
        """The header of a leased slot."""
        views = self._views
        key, payer = views.key[slot].tobytes(), int(views.payer[slot])
        checksum_, routing_hash = int(views.checksum[slot]), int(views.routing_hash[slot])
        return Content(slot, key, payer, checksum_, routing_hash)

    def checksum(self, slot: int) -> int:
        """The checksum of a slot's bytes, for `Content`. Safe in any thread."""
        return checksum(self._views.slots[slot])

    def drop(self, slots: Sequence[int]) -> None:
        """Let no lookup find these slots again. Their leases stay; a slot without a lease is free."""
        views = self._views
        with self._mutex() as is_locked:
            if not is_locked:
                return
            for slot in slots:
                if views.state[slot] == State.COMPLETE:
                    self._change([slot])
                    self._dropped.append(slot)
                    is_used = views.leases[slot].any()
                    views.state[slot] = State.HELD if is_used else State.FREE

    def drop_cached(self) -> None:
        """Drop the content of every slot, for an engine that clears its cache."""
        self.drop(np.flatnonzero(self._views.state == State.COMPLETE).tolist())

    # -- inspection ------------------------------------------------------------------------------------------

    def counts(self) -> PoolCounts:
        """Count the slots of the whole node. Reads every header; a reading during a change may be off by it."""
        return count_slots(self._views)

    def is_reporter(self) -> bool:
        """Whether this member reports the node's occupancy: the living engine with the lowest number does."""
        lower = np.flatnonzero(self._views.joined[: self._member] == ENGINE).tolist()
        return not any(self._locks.is_alive(member) for member in lower)

    def num_leased(self) -> int:
        """Number of slots that this member uses."""
        return int(np.count_nonzero(self._views.leases[:, self._member]))

    def is_leased(self, slot: int) -> bool:
        return bool(self._views.leases[slot, self._member])

    def check(self) -> None:
        """Raise AssertionError unless every slot is free without a lease, held with one, or complete."""
        views = self._views
        with self._mutex() as is_locked:
            if not is_locked:
                return
            self._sweep(besides=self._member)
            is_used = (views.leases > 0).any(1)
            free, held = views.state == State.FREE, views.state == State.HELD
            wrong = np.flatnonzero((free & is_used) | (held & ~is_used) | (views.state > 2))
            if len(wrong):
                raise AssertionError(f"slots {wrong.tolist()} are lost or used without a lease")

    def close(self) -> None:
        """Give all leases back and leave. The last member removes the file. A second call does nothing."""
        if self._is_closed:
            # Its file descriptor may be another file's by now.
            return
        self._is_closed = True
        if not self._locks.lock(_TIMEOUT_S):
            # The members that stay find this one dead.
            self._file.close(remove=False)
            return
        self._forget_member(self._member)
        self._locks.leave(self._member)
        self._file.close(remove=not self._locks.has_others())

    # -- under the mutex -------------------------------------------------------------------------------------

    @contextmanager
    def _mutex(self) -> Iterator[bool]:
        """Hold the mutex; False if it could not be had, so that nothing may be changed."""
        if self._resumes_s and self._clock() < self._resumes_s:
            yield False
            return
        if not self._locks.lock(_TIMEOUT_S):
            self._resumes_s = self._clock() + _PAUSE_S
            yield False
            return
        self._resumes_s = 0.0
        try:
            if self._unreleased:
                self._release_now()
            yield True
        finally:
            self._unlock()

    def _unlock(self) -> None:
        """Release the mutex; if headers were changed, members read them again from now on."""
        if self._has_changed:
            self._has_changed = False
            facts = self._views.facts
            facts[_CHANGE] = int(facts[_CHANGE]) + 1
            self._index.follow_own(self._own_changes)
            self._own_changes = []
        self._locks.unlock()

    def _change(self, slots: list[int] | np.ndarray) -> None:
        """Number a change of these slots, before it is made.

        A member that dies before `_unlock` leaves slots with the number of the next change, so readers see both.
        """
        self._has_changed = True
        self._own_changes += slots if isinstance(slots, list) else slots.tolist()
        self._views.changed[slots] = int(self._views.facts[_CHANGE]) + 1

    def _ticks(self, count: int) -> np.ndarray:
        """[count] uint64, the numbers of the next uses."""
        facts = self._views.facts
        first = int(facts[_CLOCK]) + 1
        facts[_CLOCK] = first + count - 1
        return np.arange(first, first + count, dtype=np.uint64)

    def _free(self, count: int) -> np.ndarray:
        """At most `count` free slots, searched from where the last search ended."""
        state, hint = self._views.state, self._free_hint
        found = np.flatnonzero(state[hint : hint + 64 * count + 1024] == State.FREE)[:count] + hint
        if len(found) < count:
            found = np.flatnonzero(state == State.FREE)[:count]
        self._free_hint = int(found[-1]) + 1 if len(found) else 0
        return found

    def _evict(self, count: int, may_evict_retained: bool) -> None:
        """Free at least `count` cached slots, or all there are."""
        views = self._views
        if self._has_dead():
            self._sweep(besides=self._member)
        members = np.flatnonzero(views.joined)
        cached = (views.state == State.COMPLETE) & ~is_used_by(views, members)
        retained = cached & (views.retained[:, members] > 0).any(1)
        for candidates in (cached & ~retained, retained):
            if count <= 0 or (candidates is retained and not may_evict_retained):
                return
            found = np.flatnonzero(candidates)
            victims = choose_victims(
                found,
                views.used[found],
                views.payer[found],
                max(count, int(self.num_slots * _EVICTED_PART)),
                views.fact(Fact.NUM_EVICTED),
            )
            self._change(victims)
            views.state[victims] = State.FREE
            self._dropped += victims.tolist()
            views.facts[Fact.NUM_EVICTED] += np.uint64(len(victims))
            count -= len(victims)

    def _has_dead(self) -> bool:
        """Whether a member has died since the last sweep."""
        return any(
            member != self._member and not self._locks.is_alive(member)
            for member in np.flatnonzero(self._views.joined).tolist()
        )

    def _sweep(self, besides: int) -> None:
        """End the leases of dead members, and free the slots that only they held."""
        joined = self._views.joined
        for member in np.flatnonzero(joined).tolist():
            if member != besides and not self._locks.is_alive(member):
                self._forget_member(member)

    def _forget_member(self, member: int) -> None:
        views = self._views
        views.leases[:, member] = 0
        views.retained[:, member] = 0
        # Also those of a member that died in the middle of an earlier sweep.
        orphans = np.flatnonzero((views.state == State.HELD) & ~(views.leases > 0).any(1))
        if len(orphans):
            self._change(orphans)
            views.state[orphans] = State.FREE
        self._has_changed = True
        # Last: a death before this line repeats the sweep.
        views.joined[member] = 0


def open_node_pool(
    name: str,
    wanted: PoolLayout,
    *,
    is_exact: bool = True,
    set_aside: int = 0,
    folder: Path = SHM,
    clock: Callable[[], float] = time.monotonic,
    is_engine: bool = True,
) -> NodePool:
    """Join the node's pool of this name, or make it; parameters as of `make_pool_file` and `NodePool`.

    Raises
    ------
    NodePoolError
        There is too little room, or too many members.
    """
    file = make_pool_file(name, wanted, is_exact=is_exact, set_aside=set_aside, folder=folder)
    try:
        return NodePool(file, clock=clock, is_engine=is_engine)
    except BaseException:
        file.close(remove=False)
        raise
