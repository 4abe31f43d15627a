"""A membership of the node's pool for threads that copy blocks in and out; the engine has its own.

A read gives its leases back before it returns, so a slow reader of an export holds no slot. An import keeps its slots
until it ends, so that its last blocks do not evict its first ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from quire.replica.kv_transport.nixl_memory import NixlStuckError
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.node_pool.slot_checks import checksum
from quire.replica.node_pool.slot_content import Content


class SharedPool:
    """Reads and writes blocks of a pool; any thread may call it.

    Parameters
    ----------
    pool
        A member that is no engine; owned by this object from now on.
    """

    def __init__(self, pool: NodePool):
        self.layout = pool.layout
        self._pool = pool
        # A member is for one thread at a time.
        self._lock = threading.Lock()

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that the pool does not have."""
        with self._lock:
            self._pool.refresh()
            return [key for key in keys if self._pool.find(key) is None]

    def read(self, keys: Sequence[bytes]) -> tuple[list[Content], bytes]:
        """Copy those of these blocks that the pool has, after verifying them.

        Returns
        -------
        Their headers, in the order of the keys, and their contents, one after the other.
        """
        with self._lock:
            self._pool.refresh()
            known = [(key, s) for key in keys if (s := self._pool.find(key)) is not None]
            leased = self._pool.lease([s for _, s in known], [key for key, _ in known])
            slots = [s for (_, s), is_leased in zip(known, leased, strict=True) if is_leased]
            try:
                sound = [slot for slot in slots if self._pool.verify(slot)]
                headers = [self._pool.content(slot) for slot in sound]
                return headers, b"".join(self._pool.slots[slot].data for slot in sound)
            finally:
                self._pool.release(slots[::-1])

    def write(self, headers: Sequence[Content], contents: bytes) -> list[int]:
        """Write blocks and publish them.

        Parameters
        ----------
        headers
            Key, payer and checksum of each block; its `slot` means nothing here.
        contents
            The bytes of all.

        Returns
        -------
        The slots of the published blocks, which the caller releases. They are fewer than the headers if a content is
        wrong, or if the pool has no room.
        """
        sound, size = [], self.layout.slot_bytes
        for i, header in enumerate(headers):
            content = np.frombuffer(contents, np.uint8)[i * size : (i + 1) * size]
            if len(content) != size or checksum(content) != header.checksum:
                break
            sound.append(content)

        def fill(slots: list[int]) -> None:
            for slot, content in zip(slots, sound, strict=True):
                self._pool.slots[slot] = content

        return self._put(headers[: len(sound)], fill, is_verified=True)

    def take(self, headers: Sequence[Content], read: Callable[[list[int]], None]) -> list[int]:
        """Let blocks be written into claimed slots, and publish those that are right.

        Parameters
        ----------
        headers
            As of `write`.
        read
            Fills the slots that it gets, one for each header. If it raises `NixlStuckError`, the slots stay leased.

        Returns
        -------
        As of `write`.

        Raises
        ------
        NixlError
            As `read`; nothing is published.
        """
        return self._put(headers, read, is_verified=False)

    def _put(
        self,
        headers: Sequence[Content],
        fill: Callable[[list[int]], None],
        *,
        is_verified: bool,
    ) -> list[int]:
        with self._lock:
            # Other engines' retained blocks are worth more than a copy of what a peer keeps.
            slots = self._pool.claim(len(headers), may_evict_retained=False) if headers else None
        if slots is None:
            return []
        published, is_free = 0, True
        try:
            fill(slots)
            filled = [h._replace(slot=slot) for h, slot in zip(headers, slots, strict=True)]
            if not is_verified:
                is_wrong = (self._pool.checksum(c.slot) != c.checksum for c in filled)
                filled = filled[: next((i for i, wrong in enumerate(is_wrong) if wrong), None)]
            with self._lock:
                # Without the pool's lock nothing is published.
                published = len(filled) if self._pool.publish(filled) else 0
        except NixlStuckError:
            is_free = False
            raise
        finally:
            if is_free and published < len(slots):
                self.release(slots[published:])
        return slots[:published]

    def lend(self, keys: Sequence[bytes]) -> list[Content]:
        """Lease those of these blocks that the pool has, for another node; `release` gives their slots back.

        Returns
        -------
        Their headers with the slots, in the order of the keys. Whoever reads the slots verifies them.
        """
        with self._lock:
            self._pool.refresh()
            known = [(key, s) for key in keys if (s := self._pool.find(key)) is not None]
            leased = self._pool.lease([s for _, s in known], [key for key, _ in known])
            return [
                self._pool.content(s) for (_, s), held in zip(known, leased, strict=True) if held
            ]

    @property
    def slots(self) -> np.ndarray:
        """[num_slots, slot_bytes] uint8, the memory of all slots."""
        return self._pool.slots

    def release(self, slots: Sequence[int]) -> None:
        """Release the slots of one sequence, in its order."""
        with self._lock:
            # A chain's leaf is evicted first.
            self._pool.release(slots[::-1])

    def check(self) -> None:
        """Raise AssertionError if a slot is lost, or leased by this member."""
        with self._lock:
            self._pool.check()
            assert not self._pool.num_leased()

    def close(self) -> None:
        """Leave the pool."""
        with self._lock:
            self._pool.close()
