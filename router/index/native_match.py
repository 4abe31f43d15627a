"""The walk of `PrefixIndex.match_into` by the compiled library, over what lies in arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from quire.router import compiled_router
from quire.router.index.holder_map import HolderMap


class NativeMatch:
    """What `quire_match` reads, kept in step with the index.

    Parameters
    ----------
    confirmed
        hash -> holders, as bits of their slots.
    """

    def __init__(self, confirmed: HolderMap):
        self._confirmed = confirmed
        self._holders = compiled_router.Holders(
            table=ctypes.addressof(confirmed.table.native),
        )
        self._address = ctypes.addressof(self._holders)
        self._sets: np.ndarray | None = None  # whose address the struct has
        self._make_room(512)  # blocks: most prompts
        self.set_live(0, np.empty(0, np.int64))

    def set_live(self, live: int, rows: np.ndarray) -> None:
        """Let those be found that have their bits in `live`, and written to the rows of their slots: [slots] int64,
        -1: none, read anew in each call."""
        words = -(-live.bit_length() // 64)
        self._confirmed.widen(64 * words)
        packed = np.frombuffer(live.to_bytes(8 * words, "little"), np.uint64)
        self._live, self._alive, self._rows = packed, np.empty(words, np.uint64), rows
        self._holders.live, self._holders.live_words = compiled_router.address(packed), words
        self._holders.alive = compiled_router.address(self._alive)
        self._holders.rows = compiled_router.address(rows)

    def into(
        self,
        library: ctypes.PyDLL,
        hashes: np.ndarray,
        block: float,
        most: float,
        depths: np.ndarray,
    ) -> tuple[int, list[int]]:
        """As `PrefixIndex.match_into`, bookings aside.

        Returns
        -------
        The longest match, in blocks; and the hashes that some do not hold who hold all before them: `ends` says more
        of them.
        """
        n, sets, address = len(hashes), self._confirmed.sets, compiled_router.address
        if sets is not self._sets:
            self._sets = sets
            self._holders.sets, self._holders.words = address(sets), sets.shape[1]
        if n > len(self._hashes):
            self._make_room(n)
        rows = (address(depths), len(depths))
        said = library.quire_match(
            self._address, address(hashes), n, block, most, *rows, self._ends_address
        )
        return said & 0xFFFFFFFF, self._hashes[: said >> 32].tolist()

    def ends(self, num: int) -> tuple[list[int], list[int]]:
        """The last `into` found so many: their blocks' numbers, ascending, and those of the sets that hold them."""
        return self._blocks[:num].tolist(), self._ids[:num].tolist()

    def _make_room(self, num_ends: int) -> None:
        rooms = np.empty(num_ends, np.uint64), *np.empty((2, num_ends), np.int32)
        self._ends = compiled_router.Ends(*map(compiled_router.address, rooms))
        self._ends_address = ctypes.addressof(self._ends)
        self._hashes, self._blocks, self._ids = map(memoryview, rooms)
