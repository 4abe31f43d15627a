"""The holders of blocks (replicas in the index), and the slot (bit number) of each in all sets of holders.

    take ──▶ make_live ──▶ retire ──▶ swept out of all sets ──▶ free, taken again
    (staged)               (dead)

A retired holder's bit stays in the sets until the sweep, which clears dead bits a few buckets at a time. It is not in
`live`, so no match finds it. So dropping a holder, or all its blocks, is O(1).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.router.index.booked_blocks import Counts
from quire.router.index.holder_map import HolderMap


@dataclass(slots=True, eq=False)
class Holder:
    """One epoch of a replica: the time between two restarts of its engine.

    Attributes
    ----------
    bit
        1 << slot, the holder in a mask.
    gpu_xor, host_xor
        XOR of the confirmed hashes in the replica's `gpu` tier, and in its `host` tier.
    num_removed
        Routing blocks evicted from its `gpu` tier, by its cache events.
    complete
        False if some block was not stored because the index was full.
    booked
        Its booked blocks: hash -> number of bookings (`booked_blocks.Counts`).
    begun
        Bookings by their first hash; of several with the same first hash, the latest.
    row
        Index that `PrefixIndex.match_into` writes to; -1: none.
    has_states
        Whether its model is recurrent.
    """

    replica: str
    epoch: str
    seq: int
    slot: int
    bit: int
    gpu_xor: int = 0
    host_xor: int = 0
    num_blocks: int = 0
    num_removed: int = 0
    complete: bool = True
    booked: Counts = field(default_factory=dict)
    begun: dict[int, Booking] = field(default_factory=dict)
    alive: bool = True
    row: int = -1
    has_states: bool = False


@dataclass(slots=True, eq=False)
class Booking:
    """The blocks that one request will bring to one replica. They count as held until `PrefixIndex.unbook`.

    Attributes
    ----------
    hashes
        The hashes of the booked blocks.
    chain
        The same hashes as an array, [blocks] uint64, for comparison with a prompt's hashes.
    """

    holder: Holder
    hashes: Sequence[int]
    chain: np.ndarray
    active: bool = True


class HolderSlots:
    """Assign slots to holders, and remove dead holders from the sets of `maps`.

    Attributes
    ----------
    live
        Bits of the holders that a match may find.
    row_by_slot
        [slots] int64, `Holder.row` of the live holders; a new array when it grows.
    num_slots
        Number of distinct slots assigned so far.
    """

    def __init__(self, maps: Sequence[HolderMap]):
        self.live = 0
        self.row_by_slot = np.full(64, -1, np.int64)
        self.num_slots = 0
        self._maps = maps
        self._by_slot: dict[int, Holder] = {}
        # Free slots, a heap.
        self._free: list[int] = []
        # Dead bits for the next sweep; dead bits of the current sweep; and the maps that the current sweep has not
        # finished.
        self._retired = 0
        self._sweeping = 0
        self._unswept: list[HolderMap] = []

    def take(self) -> int:
        """Take the lowest free slot."""
        if self._free:
            return heapq.heappop(self._free)
        self.num_slots += 1
        return self.num_slots - 1

    def new_holder(self, replica: str, epoch: str, seq: int) -> Holder:
        """Return a holder with a slot, not yet live."""
        slot = self.take()
        return Holder(replica, epoch, seq, slot, 1 << slot)

    def make_live(self, holder: Holder) -> None:
        """Add a holder to those that matches find."""
        while holder.slot >= len(self.row_by_slot):
            more = np.full(len(self.row_by_slot), -1, np.int64)
            self.row_by_slot = np.concatenate([self.row_by_slot, more])
        self._by_slot[holder.slot] = holder
        self.row_by_slot[holder.slot] = holder.row
        self.live |= holder.bit

    def retire(self, holder: Holder) -> None:
        """Retire a live holder's slot. The caller may give the holder another one."""
        del self._by_slot[holder.slot]
        self.live &= ~holder.bit
        self._retired |= holder.bit

    def retire_staged(self, holder: Holder) -> None:
        """Retire the slot of a holder that was never live."""
        self._retired |= holder.bit

    def set_row(self, holder: Holder, row: int) -> None:
        holder.row = row
        self.row_by_slot[holder.slot] = row

    def holders(self, mask: int) -> Iterator[Holder]:
        """Iterate over the live holders with these bits."""
        while mask:
            bit = mask & -mask
            yield self._by_slot[bit.bit_length() - 1]
            mask ^= bit

    def rows(self, mask: int) -> np.ndarray:
        """Return the rows of many live holders, [rows] int64; holders without a row are left out."""
        packed = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        rows = self.row_by_slot[bits.nonzero()[0]]
        return rows[rows >= 0]

    def sweep_step(self) -> None:
        """Clear the dead bits of the next buckets; after the last buckets, free their slots."""
        if not self._sweeping:
            self._sweeping, self._retired = self._retired, 0
            self._unswept = list(self._maps) if self._sweeping else []
        while self._unswept:
            if not self._unswept[-1].sweep(self._sweeping):
                return
            self._unswept.pop()
        dead, self._sweeping = self._sweeping, 0
        while dead:
            bit = dead & -dead
            heapq.heappush(self._free, bit.bit_length() - 1)
            dead ^= bit
