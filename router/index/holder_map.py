"""Maps the hash of a block to the set of its holders, as the bits of an int.

A holder is a replica in the index. Blocks with the same holders share one set (hash-consing). The table maps a hash to
the number of its set, so two blocks have the same holders exactly if their numbers are equal. There are never more sets
than blocks, and usually thousands of blocks share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quire.router.index.block_table import BlockTable

# Up to this number, changing hashes one by one is faster than as an array.
_FEW = 16
# Buckets of the table that one step of a sweep visits.
_SWEEP_BUCKETS = 128
_FIRST_SETS = 16


class Change(NamedTuple):
    """The effect of storing or removing a holder's blocks.

    Attributes
    ----------
    xor, num_blocks
        XOR of the hashes with a changed set, and their number.
    has_room
        False if some hashes were not stored because the map is full.
    """

    xor: int
    num_blocks: int
    has_room: bool


class HolderMap:
    """Hash -> mask of holders, for at most `max_blocks` hashes.

    Attributes
    ----------
    table
        hash -> number of its set.
    masks
        The sets by number. Number 0 is the empty set, which all absent hashes have.
    sets
        [numbers, words] uint64, the same sets for the compiled library; written only if `with_sets`. It is replaced by
        a larger array when the sets need more room.
    """

    def __init__(self, max_blocks: int, *, with_sets: bool = False):
        self.table = BlockTable(max_blocks)
        self.masks: list[int] = [0]
        self._max_blocks = max_blocks
        self._with_sets = with_sets
        self._keep_sets(np.zeros((_FIRST_SETS, 1), np.uint64))
        # mask -> number
        self._number_of: dict[int, int] = {0: 0}
        # Number of blocks with each set, by the set's number; the entry of number 0 is not used.
        self._num_blocks_of: list[int] = [0]
        # Numbers whose set no block has.
        self._free: list[int] = []
        # The next bucket of the sweep, and the number of the table's buckets at the last step.
        self._next_bucket = 0
        self._swept_of = 0

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_sets(self) -> int:
        """Number of distinct sets of holders, with the empty one."""
        return len(self._number_of)

    def widen(self, num_bits: int) -> None:
        """Make the rows of `sets` at least `num_bits` long."""
        words = self.sets.shape[1]
        if num_bits > 64 * words:
            wider = np.zeros((len(self.sets), max(2 * words, -(-num_bits // 64))), np.uint64)
            wider[: len(self.masks), :words] = self.sets[: len(self.masks)]
            self._keep_sets(wider)

    def runs(self, hashes: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Cut a chain, [n] uint64, into runs with the same holders: (first, end, number of the set)."""
        starts, numbers = self.table.runs(hashes)
        return zip(starts, [*starts[1:], len(hashes)], numbers, strict=True) if starts else iter(())

    def numbers(self, hashes: np.ndarray) -> np.ndarray:
        """Map hashes ([n] uint64) to the numbers of their sets ([n] int32)."""
        return self.table.find(hashes)[1]

    def store(self, bit: int, hashes: np.ndarray) -> Change:
        """Add a holder to the sets of hashes, [n] uint64, which may contain duplicates."""
        if len(hashes) <= _FEW:
            return self._change_few(hashes, bit, 0)
        hashes = _distinct(hashes)
        places, numbers = self.table.find(hashes)
        room = self._max_blocks - len(self.table)
        absent = (numbers == 0).nonzero()[0]
        has_room = len(absent) <= room
        if not has_room:
            hashes, places, numbers = (
                np.delete(column, absent[room:]) for column in (hashes, places, numbers)
            )
        xor, num_changed = self._change_many(hashes, places, numbers, bit, 0)
        return Change(xor, num_changed, has_room)

    def remove(self, bit: int, hashes: np.ndarray) -> Change:
        """Remove a holder from the sets of hashes, [n] uint64, which may contain duplicates."""
        if len(hashes) <= _FEW:
            return self._change_few(hashes, 0, bit)
        hashes = _distinct(hashes)
        return Change(*self._change_many(hashes, *self.table.find(hashes), 0, bit), True)

    def sweep(self, dead: int) -> bool:
        """Remove dead holders from the sets of the next buckets; return True after the last buckets."""
        num_buckets = self.table.num_buckets
        if not self._next_bucket:
            self._swept_of = num_buckets
        # Add the buckets by which the table has grown since the last step, so that the sweep ends.
        grown, self._swept_of = num_buckets - self._swept_of, num_buckets
        last = min(self._next_bucket + _SWEEP_BUCKETS + grown, num_buckets)
        self._change_many(*self.table.scan(self._next_bucket, last), 0, dead)
        self._next_bucket = last if last < num_buckets else 0
        return not self._next_bucket

    # ----------------------------------------------------------------------------------------- inner

    def _change_few(self, hashes: np.ndarray, added: int, removed: int) -> Change:
        table, num_blocks_of = self.table, self._num_blocks_of
        new_of: dict[int, int] = {}
        xor, num_changed, has_room = 0, 0, True
        for routing_hash in hashes.tolist():
            place, number = table.locate(routing_hash)
            new_number = new_of.get(number)
            if new_number is None:
                new_number = new_of[number] = self._number(self.masks[number] & ~removed | added)
            if new_number == number:
                continue
            if not new_number:
                table.delete(routing_hash, place)
            elif number:
                table.change(place, new_number)
            elif len(table) < self._max_blocks:
                table.add(routing_hash, place, new_number)
            else:
                has_room = False
                continue
            num_blocks_of[new_number] += 1
            num_blocks_of[number] -= 1
            xor ^= routing_hash
            num_changed += 1
        self._release(new_of)
        return Change(xor, num_changed, has_room)

    def _change_many(
        self, hashes: np.ndarray, places: np.ndarray, numbers: np.ndarray, added: int, removed: int
    ) -> tuple[int, int]:
        """Change the sets of distinct hashes at these places; return `Change.xor` and `Change.num_blocks`."""
        distinct, which, counts = _groups(numbers)
        new_of: dict[int, int] = {}
        for number, num_blocks in zip(distinct, counts, strict=True):
            new_number = self._number(self.masks[number] & ~removed | added)
            new_of[number] = new_number
            self._num_blocks_of[new_number] += num_blocks
            self._num_blocks_of[number] -= num_blocks
        new_numbers = np.array(list(new_of.values()), np.int32).take(which)
        changed = new_numbers != numbers
        if not changed.all():
            hashes, places, numbers = hashes[changed], places[changed], numbers[changed]
            new_numbers = new_numbers[changed]
        table, ends = self.table, (numbers if added else new_numbers) == 0
        if not ends.all():
            stays = ~ends
            table.set_ids(places[stays], new_numbers[stays])
        # Inserting moves other entries, so it comes last.
        if added:
            table.insert(hashes[ends], new_numbers[ends])
        else:
            table.remove(hashes[ends], places[ends])
        self._release(new_of)
        return int(np.bitwise_xor.reduce(hashes)), len(hashes)

    def _number(self, mask: int) -> int:
        """Return the number of a set, a new one if needed. `_release` frees it if no block uses it."""
        number = self._number_of.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.masks[number] = mask
            else:
                number = len(self.masks)
                self.masks.append(mask)
                self._num_blocks_of.append(0)
            self._number_of[mask] = number
            if self._with_sets:
                self._write_set(number, mask)
        return number

    def _write_set(self, number: int, mask: int) -> None:
        self.widen(mask.bit_length())
        if number == len(self.sets):
            # Twice the room costs nothing yet: the operating system commits memory of `zeros` only where it is written.
            more = np.zeros((2 * number, self.sets.shape[1]), np.uint64)
            more[:number] = self.sets
            self._keep_sets(more)
        size = self._bytes_of_set
        self._set_view[size * number : size * (number + 1)] = mask.to_bytes(size, "little")

    def _keep_sets(self, sets: np.ndarray) -> None:
        self.sets = sets
        self._bytes_of_set = sets.itemsize * sets.shape[1]
        self._set_view = memoryview(sets.reshape(-1)).cast("B")

    def _release(self, new_of: dict[int, int]) -> None:
        """Free the numbers of those sets of a change (old number -> new number) that no block has any more."""
        for number in {*new_of, *new_of.values()}:
            if number and not self._num_blocks_of[number]:
                del self._number_of[self.masks[number]]
                self.masks[number] = 0
                self._free.append(number)


def _groups(numbers: np.ndarray) -> tuple[list[int], np.ndarray, list[int]]:
    """Return the distinct values of [n] numbers, the index of each number's value among them, and their counts."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])], np.zeros(len(numbers), np.int64), [len(numbers)]
    distinct, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return distinct.tolist(), which, counts.tolist()


def _distinct(hashes: np.ndarray) -> np.ndarray:
    """Remove duplicates, and keep the order of first occurrences."""
    ordered = np.sort(hashes)
    if not (ordered[1:] == ordered[:-1]).any():
        return hashes
    return hashes[np.sort(np.unique(hashes, return_index=True)[1])]
