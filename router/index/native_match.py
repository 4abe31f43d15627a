"""Runs the match of `PrefixIndex.match_into` in the compiled library."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from quire.router import compiled_router
from quire.router.index.holder_map import HolderMap
from quire.router.index.holder_slots import HolderSlots


class FoundMatch(NamedTuple):
    """The longest match of a chain of hashes, and the blocks at which shorter matches end.

    Attributes
    ----------
    num_blocks
        Blocks of the longest match.
    end_hashes, end_blocks, end_sets
        One entry for each block at which the match of some replica ends, because the replica has all blocks before it
        but not this one: the block's hash, its index in the chain (ascending), and the number of its set of holders.
    """

    num_blocks: int
    end_hashes: list[int]
    end_blocks: list[int]
    end_sets: list[int]


class NativeMatch:
    """The arguments of the library's `quire_match`, kept up to date with the index.

    Parameters
    ----------
    confirmed
        Maps a hash to its holders, a set of replicas as bits of an int; the number of a bit is the replica's slot.
    slots
        The holders that a match may find, and the row of each in the output.
    """

    def __init__(self, confirmed: HolderMap, slots: HolderSlots):
        self._confirmed, self._slots = confirmed, slots
        self._holders = compiled_router.Holders(
            table=ctypes.addressof(confirmed.table.native),
        )
        self._address = ctypes.addressof(self._holders)
        # The array that `_holders.sets` points to.
        self._sets: np.ndarray | None = None
        # Enough for the blocks of most prompts.
        self._make_room(512)
        # The values of `slots.live` and `slots.row_by_slot` that `_holders` was last written from.
        self._live, self._rows = -1, slots.row_by_slot

    def into(
        self,
        library: ctypes.CDLL,
        hashes: np.ndarray,
        block: float,
        most: float,
        depths: np.ndarray,
    ) -> FoundMatch:
        """Do the work of `PrefixIndex.match_into`, which describes the parameters, without bookings."""
        address = compiled_router.address
        if self._slots.live is not self._live or self._slots.row_by_slot is not self._rows:
            self._pack_live()
        sets = self._confirmed.sets
        if sets is not self._sets:
            self._sets = sets
            self._holders.sets, self._holders.words = address(sets), sets.shape[1]
        n = len(hashes)
        if n > len(self._hashes):
            self._make_room(n)
        rows = (address(depths), len(depths))
        packed = library.quire_match(
            self._address, address(hashes), n, block, most, *rows, self._ends_address
        )
        num_blocks, num_ends = packed & 0xFFFFFFFF, packed >> 32
        return FoundMatch(
            num_blocks,
            self._hashes[:num_ends].tolist(),
            self._blocks[:num_ends].tolist(),
            self._ids[:num_ends].tolist(),
        )

    def _pack_live(self) -> None:
        """Write the live bits as 64-bit words, and the address of the rows, to `_holders`."""
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
        hashes = np.empty(num_ends, np.uint64)
        blocks, ids = np.empty((2, num_ends), np.int32)
        self._ends = compiled_router.Ends(
            *(compiled_router.address(room) for room in (hashes, blocks, ids))
        )
        self._ends_address = ctypes.addressof(self._ends)
        self._hashes, self._blocks = memoryview(hashes), memoryview(blocks)
        self._ids = memoryview(ids)
