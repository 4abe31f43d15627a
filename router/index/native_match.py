"""The walk of `PrefixIndex.match_into` by the compiled library, over what lies in arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from quire.router import compiled_router
from quire.router.index.holder_map import HolderMap
from quire.router.index.holder_slots import HolderSlots


class NativeMatch:
    """What `quire_match` reads, kept in step with the index.

    Parameters
    ----------
    confirmed
        hash -> holders, as bits of their slots.
    slots
        Which holders a match may find, and their rows.
    """

    def __init__(self, confirmed: HolderMap, slots: HolderSlots):
        self._confirmed, self._slots = confirmed, slots
        self._holders = compiled_router.Holders(
            table=ctypes.addressof(confirmed.table.native),
        )
        self._address = ctypes.addressof(self._holders)
        self._sets: np.ndarray | None = None  # whose address the struct has
        self._make_room(512)  # blocks: most prompts
        # What the arrays below were made from.
        self._live, self._rows = -1, slots.row_by_slot

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
        if self._slots.live is not self._live or self._slots.row_by_slot is not self._rows:
            self._pack_live()
            sets = self._confirmed.sets
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

    def _pack_live(self) -> None:
        """Write the live bits as words, and the address of the rows, to the struct."""
        self._live, self._rows = self._slots.live, self._slots.row_by_slot
        words = -(-self._live.bit_length() // 64)
        self._confirmed.widen(64 * words)
        self._packed = np.frombuffer(self._live.to_bytes(8 * words, "little"), np.uint64)
        self._alive = np.empty(words, np.uint64)
        self._holders.live_words = words
        self._holders.live = compiled_router.address(self._packed)
        self._holders.alive = compiled_router.address(self._alive)
        self._holders.rows = compiled_router.address(self._rows)

    def _make_room(self, num_ends: int) -> None:
        rooms = np.empty(num_ends, np.uint64), *np.empty((2, num_ends), np.int32)
        self._ends = compiled_router.Ends(*map(compiled_router.address, rooms))
        self._ends_address = ctypes.addressof(self._ends)
        self._hashes, self._blocks, self._ids = map(memoryview, rooms)
