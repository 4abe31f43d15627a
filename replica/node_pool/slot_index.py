"""A member's own index of the pool: key to slot. It follows the headers, which may change under it at any time.

An index is a hint. A lease (`NodePool.lease`) compares the key again while nobody can change the header.
"""

from __future__ import annotations

import numpy as np

from quire.replica.node_pool.pool_layout import Fact, PoolViews, State

_NO_SLOTS = np.empty(0, np.int64)


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

    def refresh(self) -> np.ndarray:
        """Follow the changes since the last call.

        Returns
        -------
        [n] int64 slots whose header has changed.
        """
        views = self._views
        # A change is numbered in its slots first and in the facts last, so none is missed; some are seen twice.
        newest = views.fact(Fact.CHANGE)
        if newest == self._seen:
            return _NO_SLOTS
        changed = np.flatnonzero(views.changed > self._seen)
        self._seen = newest
        complete = views.state[changed] == State.COMPLETE
        for slot, is_complete in zip(changed.tolist(), complete.tolist(), strict=True):
            old = self._keys.pop(slot, None)
            if old is not None and self._slots.get(old) == slot:
                del self._slots[old]
            if is_complete:
                key = views.key[slot].tobytes()
                self._slots[key] = slot
                self._keys[slot] = key
        return changed
