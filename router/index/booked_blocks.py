"""Booked blocks: blocks that a replica does not hold yet, but will hold after the prefill of a request sent to it.

A holder is a replica in the index; its bit stands for it in masks (sets of holders as ints). Bookings are counted for
each (holder, hash), and a match reads them as hash -> mask of holders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Counts = dict[int, int]
"""One holder's booked blocks: hash -> number of bookings."""


class BookedBlocks:
    """The booked blocks of all holders. The caller keeps each holder's counts and bit.

    Parameters
    ----------
    max_pairs
        Bound on (holder, hash) pairs. At the bound only the first blocks of a request are booked.

    Attributes
    ----------
    masks
        hash -> mask of the holders with a booking of this hash, never 0.
    """

    def __init__(self, max_pairs: int):
        self.masks: dict[int, int] = {}
        self._max_pairs = max_pairs
        self._num_pairs = 0

    def __len__(self) -> int:
        """Return the number of booked (holder, hash) pairs."""
        return self._num_pairs

    def add(self, counts: Counts, bit: int, hashes: Sequence[int]) -> Sequence[int]:
        """Book blocks for a holder. Return the booked ones: all, or at the bound only the first."""
        masks = self.masks
        for num_taken, routing_hash in enumerate(hashes):
            count = counts.get(routing_hash, 0)
            if not count:
                if self._num_pairs >= self._max_pairs:
                    return hashes[:num_taken]
                self._num_pairs += 1
                masks[routing_hash] = masks.get(routing_hash, 0) | bit
            counts[routing_hash] = count + 1
        return hashes

    def give_back(self, counts: Counts, bit: int, hashes: Sequence[int]) -> None:
        """Undo `add`, given the blocks that it returned."""
        for routing_hash in hashes:
            count = counts[routing_hash] - 1
            if count:
                counts[routing_hash] = count
            else:
                del counts[routing_hash]
                self._forget(routing_hash, bit)

    def drop(self, counts: Counts, bit: int) -> None:
        """Drop all bookings of a holder. Its counts are not updated."""
        for routing_hash in counts:
            self._forget(routing_hash, bit)

    def move(self, counts: Counts, bit: int, new_bit: int) -> None:
        """Replace a holder's bit by another one."""
        for routing_hash in counts:
            self.masks[routing_hash] = self.masks[routing_hash] & ~bit | new_bit

    def _forget(self, routing_hash: int, bit: int) -> None:
        self._num_pairs -= 1
        mask = self.masks[routing_hash] & ~bit
        if mask:
            self.masks[routing_hash] = mask
        else:
            del self.masks[routing_hash]


def num_common(booked: np.ndarray, rest: np.ndarray) -> int:
    """Return how many blocks at the start of `rest` (not empty) follow each other in `booked`, in the same order."""
    if booked[0] != rest[0]:
        start = int((booked == rest[0]).argmax())
        # `argmax` found no True.
        if not start:
            return 0
        booked = booked[start:]
    num = min(len(booked), len(rest))
    differs = booked[:num] != rest[:num]
    end = int(differs.argmax())
    return end if differs[end] else num
