"""A hash table of 64-bit hashes to small numbers, in numpy arrays, for millions of entries.

A Python dict of such hashes takes 110 bytes an entry, stops the caller for as long as it takes to grow, and is asked
one hash at a time. This one takes a quarter of that, grows a few buckets at a time, and answers for a whole prompt in
one pass, in which the cache misses overlap.

*Linear hashing* (Litwin 1980). The hashes are uniform as they are, so a bucket is the low bits of the hash; buckets are
split one after the other, and the number of bits goes up when all are:

    level = 4, split = 2        bucket   0   1 | 2   3 | 4   5
                                        split  | not   | what left 0 and 1: bit 2 of the hash was set
    keys  [bucket, 8] uint64    a bucket is one cache line; 0: an empty place
    ids   [bucket, 8] int32     0: an empty place

    bucket of a hash: its low 3 bits, or, when there is no such bucket yet, its low 2

On average a bucket holds 3 of 8. What does not fit, about 1 in 200, is *spilled*: kept in a dict until its bucket is
split. The arrays are as large as they will ever be; the system gives memory to the buckets in use only.

Many hashes are looked up by `native/prefix.c`, if it was compiled, in half the time that numpy takes; what they say is
the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import numpy as np

from quire.router import native_library

_PLACES = 8
_SHIFT = 3
_MEAN_FILL = 3
_FIRST_BUCKETS = 64
_FEW = 16  # absent hashes that are looked for one by one
_LEAST_SPLIT = 64  # buckets: splitting them one at a time costs as much
_U64 = np.uint64
# As arrays of no dimension: an operation takes them as they are, where a number costs it a conversion.
_SHIFTS, _PLACE_BITS = np.array(_SHIFT), np.array(_PLACES - 1)
_SIGN_SHIFTS = np.array(63)

SPILLED = -1  # as a place


class BlockTable:
    """Hash -> positive number below 2^31, for at most `max_entries` hashes.

    Places are positions in the arrays; adding an entry may move others.
    """

    def __init__(self, max_entries: int):
        most = max(_FIRST_BUCKETS, -(-max_entries // _MEAN_FILL))
        self._keys = _zeros(most * _PLACES, _U64).reshape(most, _PLACES)
        self._ids = _zeros(most * _PLACES, np.int32).reshape(most, _PLACES)
        self._has_spilled = np.zeros(most, bool)
        self._spilled: dict[int, int] = {}  # hash -> id
        self._spilled_of: dict[int, list[int]] = {}  # bucket -> its hashes among them
        self._flat_keys, self._flat_ids = self._keys.reshape(-1), self._ids.reshape(-1)
        # Reading one element of a memoryview takes half the time of one of an array.
        self._key_view, self._id_view = memoryview(self._flat_keys), memoryview(self._flat_ids)
        self._size = 0
        self._native = native_library.Table(
            keys=native_library.address(self._keys),
            ids=native_library.address(self._ids),
            has_spilled=native_library.address(self._has_spilled),
        )
        self._native_address = ctypes.addressof(self._native)
        self._said = np.empty((3, 0), np.int32)  # room for what the library says
        self._said_addresses: tuple[int, ...] = ()
        self._room_for(512)  # blocks: what the index asks for at once
        self._set_size(_FIRST_BUCKETS)

    def __len__(self) -> int:
        return self._size

    @property
    def num_spilled(self) -> int:
        """Entries that found their bucket full."""
        return len(self._spilled)

    # ----------------------------------------------------------------------------------- many hashes

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look hashes up.

        Parameters
        ----------
        hashes
            [n] uint64.

        Returns
        -------
        [n] int64 places, `SPILLED` for some, of no meaning for what is absent; [n] int32 ids, 0 where absent.
        """
        library = native_library.load()
        if library is None:
            queries, hits = self._hits(hashes)
            ids, places = np.zeros(len(hashes), np.int32), np.zeros(len(hashes), np.int64)
            ids[queries], places[queries] = self._flat_ids.take(hits), hits
            suspects = (ids == 0).nonzero()[0]
            if self._spilled and len(suspects) > _FEW:
                suspects = suspects[self._has_spilled.take(self._buckets(hashes.take(suspects)))]
        else:
            n, address = len(hashes), native_library.address
            hashes = np.ascontiguousarray(hashes, _U64)
            ids, places = np.empty(n, np.int32), np.empty(n, np.int64)
            where = (address(ids), address(places), self._room_for(n)[2])
            num = library.quire_find_blocks(self._native_address, address(hashes), n, *where)
            suspects = self._said[2, :num]
        if self._spilled and len(suspects):
            for i, key in zip(suspects.tolist(), hashes.take(suspects).tolist(), strict=True):
                if key in self._spilled:
                    places[i], ids[i] = SPILLED, self._spilled[key]
        return places, ids

    def runs(self, hashes: np.ndarray) -> tuple[list[int], list[int]]:
        """Where in a chain of hashes, [n] uint64, the ids change.

        Returns
        -------
        The first hash of each run, ascending; and the id of all in it, 0: absent. That of the next may be the same.
        """
        library = native_library.load()
        if library is None:
            return self._runs_by_numpy(hashes)
        n = len(hashes)
        hashes = np.ascontiguousarray(hashes, _U64)
        where = (native_library.address(hashes), n, *self._room_for(n))
        said = library.quire_find_runs(self._native_address, *where)
        num_runs, num_suspects = said & 0xFFFFFFFF, said >> 32
        starts, ids = self._said[:2, :num_runs].tolist()
        for run in self._said[2, :num_suspects].tolist():
            ids[run] = self._spilled.get(int(hashes[starts[run]]), 0)
        return starts, ids

    def _runs_by_numpy(self, hashes: np.ndarray) -> tuple[list[int], list[int]]:
        if not len(hashes):
            return [], []
        _, hits = self._hits(hashes)
        ids = self._flat_ids.take(hits)
        # A hash of 0 finds empty places, whose id is 0.
        if len(hits) != len(hashes) or not ids[ids.argmin()]:
            ids = self.find(hashes)[1]
        last = (ids[1:] != ids[:-1]).nonzero()[0]  # of each run but the last
        return [0, *(end + 1 for end in last.tolist())], [*ids.take(last).tolist(), int(ids[-1])]

    def _room_for(self, n: int) -> tuple[int, ...]:
        """Addresses of the rows of `_said`, which have room for n."""
        if n > self._said.shape[1]:
            self._said = np.empty((3, n), np.int32)
            self._said_addresses = tuple(map(native_library.address, self._said))
        return self._said_addresses

    def _hits(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where a hash equals what its bucket has: [hits] int64, which hash, ascending; [hits] int64, its place."""
        buckets = self._buckets(hashes)
        hits = (self._keys.take(buckets, axis=0) == hashes[:, None]).ravel().nonzero()[0]
        queries = hits >> _SHIFTS
        hits &= _PLACE_BITS
        hits += buckets.take(queries) << _SHIFTS
        return queries, hits

    def insert(self, hashes: np.ndarray, ids: np.ndarray) -> None:
        """Add entries.

        Parameters
        ----------
        hashes
            [n] uint64, distinct and absent.
        ids
            [n] int32.
        """
        self._grow(len(hashes))
        self._size += len(hashes)
        is_key = hashes != 0
        if not is_key.all():  # 0 marks an empty place
            self._spill_all(hashes[~is_key], ids[~is_key])
            hashes, ids = hashes[is_key], ids[is_key]
        buckets = self._buckets(hashes)
        while len(hashes):
            empty = self._ids.take(buckets, axis=0) == 0
            places = empty.argmax(axis=1)
            is_full = ~empty[np.arange(len(places)), places]
            if is_full.any():
                self._spill_all(hashes[is_full], ids[is_full])
                fits = ~is_full
                hashes, ids, buckets = hashes[fits], ids[fits], buckets[fits]
                places = places[fits]
            places += buckets << _SHIFT
            self._flat_keys[places] = hashes
            # Of those that chose the same place one is there; the others choose again.
            lost = (self._flat_keys.take(places) != hashes).nonzero()[0]
            if not len(lost):
                self._flat_ids[places] = ids
                return
            won = (self._flat_keys.take(places) == hashes).nonzero()[0]
            self._flat_ids[places[won]] = ids[won]
            hashes, ids, buckets = hashes[lost], ids[lost], buckets[lost]

    def set_ids(self, hashes: np.ndarray, places: np.ndarray, ids: np.ndarray) -> None:
        """Change entries to other ids, all > 0; arguments as `find` returned them."""
        spilled = (places == SPILLED).nonzero()[0]
        if len(spilled):
            for i in spilled.tolist():
                self.change(int(hashes[i]), SPILLED, int(ids[i]))
            places, ids = np.delete(places, spilled), np.delete(ids, spilled)
        self._flat_ids[places] = ids

    def remove(self, hashes: np.ndarray, places: np.ndarray) -> None:
        """Remove entries; arguments as `find` returned them."""
        spilled = (places == SPILLED).nonzero()[0]
        if len(spilled):
            for i in spilled.tolist():
                self.delete(int(hashes[i]), SPILLED)
            places = np.delete(places, spilled)
        self._flat_keys[places] = 0
        self._flat_ids[places] = 0
        self._size -= len(places)

    # -------------------------------------------------------------------------------------- one hash

    def locate(self, routing_hash: int) -> tuple[int, int]:
        """Look one hash up.

        Returns
        -------
        Its place, or the one for it, or `SPILLED`; and its id, 0 if it is absent.
        """
        bucket = routing_hash & self._high
        if bucket >= self.num_buckets:
            bucket &= self._low
        start = bucket << _SHIFT
        keys = self._key_view[start : start + _PLACES].tolist()
        if routing_hash:
            if routing_hash in keys:
                place = start + keys.index(routing_hash)
                return place, self._id_view[place]
            place = start + keys.index(0) if 0 in keys else SPILLED
        else:
            place = SPILLED  # 0 marks an empty place
        if bucket in self._spilled_of and routing_hash in self._spilled:
            return SPILLED, self._spilled[routing_hash]
        return place, 0

    def add(self, routing_hash: int, place: int, new_id: int) -> None:
        """Add an entry that `locate` has just not found; the place is from it."""
        if place >= 0:
            self._key_view[place], self._id_view[place] = routing_hash, new_id
        else:
            self._spill(routing_hash, new_id)
        self._size += 1
        if self._size > self._grows_above:
            self._grow(0)

    def change(self, routing_hash: int, place: int, new_id: int) -> None:
        """Give an entry another id; the place is from `locate`."""
        if place >= 0:
            self._id_view[place] = new_id
        else:
            self._spilled[routing_hash] = new_id

    def delete(self, routing_hash: int, place: int) -> None:
        """Remove an entry; the place is from `locate`."""
        self._size -= 1
        if place >= 0:
            self._key_view[place] = self._id_view[place] = 0
            return
        del self._spilled[routing_hash]
        bucket = self._bucket(routing_hash)
        self._spilled_of[bucket].remove(routing_hash)
        if not self._spilled_of[bucket]:
            del self._spilled_of[bucket]
            self._has_spilled[bucket] = False

    # ---------------------------------------------------------------------------------------- a scan

    def scan(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Entries of the buckets [first, last), as hashes, places and ids."""
        start, stop = first << _SHIFT, last << _SHIFT
        places = self._flat_ids[start:stop].nonzero()[0] + start
        hashes, ids = self._flat_keys.take(places), self._flat_ids.take(places)
        spilled = [
            key
            for bucket in (self._has_spilled[first:last].nonzero()[0] + first).tolist()
            for key in self._spilled_of[bucket]
        ]
        if spilled:
            hashes = np.append(hashes, np.array(spilled, _U64))
            places = np.append(places, np.full(len(spilled), SPILLED))
            ids = np.append(ids, np.array([self._spilled[key] for key in spilled], np.int32))
        return hashes, places, ids

    # --------------------------------------------------------------------------------------- buckets

    def _set_size(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self._level = 1 << (num_buckets.bit_length() - 1)
        self._low, self._high = self._level - 1, 2 * self._level - 1
        self._native.num_buckets = num_buckets
        self._native.low, self._native.high = self._low, self._high
        # As arrays for `_buckets`, see `_SHIFTS`.
        self._num, self._low_bits = np.array(num_buckets), np.array(self._low)
        self._high_bits = np.array(self._high, _U64)
        # The bound on the entries holds at the last bucket.
        is_last = num_buckets == len(self._keys)
        self._grows_above = math.inf if is_last else num_buckets * _MEAN_FILL

    def _buckets(self, hashes: np.ndarray) -> np.ndarray:
        """[n] int64."""
        buckets = (hashes & self._high_bits).view(np.int64)
        # All bits of those that are there, the low ones of the others: a sign, spread over the number.
        bits = buckets - self._num
        bits >>= _SIGN_SHIFTS
        bits |= self._low_bits
        buckets &= bits
        return buckets

    def _bucket(self, routing_hash: int) -> int:
        bucket = routing_hash & self._high
        return bucket if bucket < self.num_buckets else routing_hash & self._low

    def _spill(self, routing_hash: int, new_id: int) -> None:
        bucket = self._bucket(routing_hash)
        self._spilled[routing_hash] = new_id
        self._spilled_of.setdefault(bucket, []).append(routing_hash)
        self._has_spilled[bucket] = True

    def _spill_all(self, hashes: np.ndarray, ids: np.ndarray) -> None:
        for routing_hash, new_id in zip(hashes.tolist(), ids.tolist(), strict=True):
            self._spill(routing_hash, new_id)

    def _grow(self, num_new: int) -> None:
        """Split buckets until they are no fuller than they should be with so many more entries."""
        if self._size + num_new <= self._grows_above:
            return
        needed = (self._size + num_new) // _MEAN_FILL
        needed = min(len(self._keys), max(needed, self.num_buckets + _LEAST_SPLIT))
        while self.num_buckets < needed:
            self._split(min(needed, 2 * self._level) - self.num_buckets)

    def _split(self, num: int) -> None:
        """Split the next buckets, not beyond the last of this level."""
        first, level = self.num_buckets - self._level, self._level
        old, new = slice(first, first + num), slice(first + level, first + level + num)
        keys, ids = self._keys[old], self._ids[old]
        moves = (keys & _U64(level)) != 0
        np.multiply(keys, moves, out=self._keys[new])
        np.multiply(ids, moves, out=self._ids[new])
        np.logical_not(moves, out=moves)
        keys *= moves
        ids *= moves
        self._set_size(self.num_buckets + num)
        for bucket in (self._has_spilled[old].nonzero()[0] + first).tolist():
            self._has_spilled[bucket] = False
            again = self._spilled_of.pop(bucket)
            self._size -= len(again)
            for routing_hash in again:
                entry_id = self._spilled.pop(routing_hash)
                self.add(routing_hash, self.locate(routing_hash)[0], entry_id)


def _zeros(size: int, dtype: np.dtype) -> np.ndarray:
    """[size] zeros on huge pages where the system has them: of hundreds of look-ups each goes to another small page,
    and to find these took a third of the time."""
    memory = mmap.mmap(-1, size * np.dtype(dtype).itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)
