"""A member's own index of the pool: key to slot. It follows the headers, which may change under it at any time.

An index is a hint. A lease (`NodePool.lease`) compares the key again while no process can change the header.
"""

from __future__ import annotations

import numpy as np

from quire.replica.node_pool.pool_layout import Fact, PoolViews, State

# A comparison with a plain number takes a fraction of the time of one with an enum.
_CHANGE, _COMPLETE = int(Fact.CHANGE), int(State.COMPLETE)


class SlotIndex:
    """Slots with complete content, by key.

    Parameters
    ----------
    views
        The pool's arrays; read without a lock.
    """

    def __init__(self, views: PoolViews):
        self._views = views
        self._slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # slot to the key under which it is indexed
        self._seen = 0  # number of the last change that is in the index

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, key: bytes) -> int | None:
        return self._slots.get(key)

    def refresh(self) -> list[int]:
        """Follow the changes since the last call. Returns the slots with a header that another member has changed."""
        views = self._views
        # A change is numbered in its slots first and in the facts last, so none is missed; some are seen twice.
        newest = int(views.facts[_CHANGE])
        if newest == self._seen:
            return []
        found: list[int] = np.flatnonzero(views.changed > self._seen).tolist()
        self._seen = newest
        self._follow(found)
        return found

    def follow_own(self, slots: list[int]) -> None:
        """Follow a change that this member has just finished; the mutex is still held."""
        if int(self._views.facts[_CHANGE]) == self._seen + 1:
            # No other member has changed anything, so the headers need not be searched.
            self._seen += 1
            self._follow(slots)

    def _follow(self, slots: list[int]) -> None:
        views = self._views
        for slot in slots:
            old = self._keys.pop(slot, None)
            if old is not None and self._slots.get(old) == slot:
                del self._slots[old]
            if views.state[slot] == _COMPLETE:
                key = views.key[slot].tobytes()
                self._slots[key] = slot
                self._keys[slot] = key
