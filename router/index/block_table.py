"""A hash table from 64-bit hashes to small numbers, in one numpy array, for millions of entries.

A Python dict takes 110 bytes per hash, blocks the caller while it grows, and looks up one hash per call. This table
takes less than half of the memory, grows a few buckets at a time, and looks up all hashes of a prompt in one pass, in
which the CPU's cache misses overlap.

A bucket is one cache line, so that a look-up costs one cache miss:

    bytes     0        40       60     64
             | 5 keys | 5 ids  | link |      keys uint64, 0: an empty place; ids int32

    link      index of another line, for entries that did not fit; 0: none

*Linear hashing* (Litwin 1980). The low bits of the mixed hash are the bucket's number. Buckets are split one after the
other. When all are split, the numbers get one more bit:

    level = 4, split = 2        bucket   0   1 | 2   3 | 4   5
                                        split  | not   | entries that left 0 and 1: bit 2 of the mixed hash is set

    bucket of a hash: its low 3 bits, or its low 2 if no such bucket exists yet

A bucket has 1.5 entries in the mean, and up to 3 just before its split. One entry in a hundred lies behind a link.
The array has its final size from the start, with the lines for links; the operating system commits memory only to lines
that were written.

Routing hashes are not secret, so a client could choose prompts whose hashes all fall into one bucket. To prevent this,
the table mixes each hash with a secret number: it multiplies by the secret and takes the high bits (Dietzfelbinger et
al. 1997), in two rounds.

The compiled library (`native/prefix.c`) looks up many hashes in a fraction of numpy's time, with the same results.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import random

import numpy as np

from quire.router import compiled_router

_U64 = np.uint64
_KEYS = 5  # per line
_LINE, _LINE_SHIFT = 8, 3  # uint64 per line, and its logarithm
_FIRST_ID, _LINK = 10, 15  # indices among the 16 int32 of a line
_WORDS_SHIFT = 4
_FIRST_BUCKETS = 64
# Buckets to split at a time; splitting a single one takes the same time.
_MIN_SPLIT = 64
_ALL_BITS = 2**64 - 1
# Zero-dimensional arrays: a numpy operation would have to convert a Python number.
_SIGN_SHIFTS, _HALF = np.array(63), np.array(32, _U64)

# Returned instead of a place when the bucket has no free place, so that the entry needs a new line.
FULL = -1


def _buckets_for(entries: int) -> int:
    """Return the number of buckets with 1.5 entries each."""
    return 2 * entries // 3


class BlockTable:
    """Hash -> positive number below 2^31, for at most `max_entries` hashes.

    A *place* is the position of an entry's key in the array. Adding an entry may move others to other places.
    """

    def __init__(self, max_entries: int):
        # The lines of the buckets come first, then lines behind links, which are freed when empty.
        self._max_buckets = max(_FIRST_BUCKETS, _buckets_for(max_entries + 1))
        # Index of the first line that was never used, and the lines before it that are free again.
        self._next_line = self._max_buckets
        self._free_lines: list[int] = []
        self._lines = _zeros((self._max_buckets + max_entries, _LINE))
        self._words = self._lines.view(np.int32)
        # Views for access to single lines. `take` would copy them whole, since they are not contiguous.
        self._keys, self._ids = self._lines[:, :_KEYS], self._words[:, _FIRST_ID:_LINK]
        self._links = self._words[:, _LINK]
        self._flat_keys, self._flat_words = self._lines.reshape(-1), self._words.reshape(-1)
        # Reading one element of a memoryview takes half the time of reading one of an array.
        self._key_view, self._word_view = memoryview(self._flat_keys), memoryview(self._flat_words)
        self._size = 0
        self._secret = random.SystemRandom().getrandbits(64) | 1
        self._secret_factor = np.array(self._secret, _U64)
        self.native = compiled_router.Table(
            lines=compiled_router.address(self._lines), secret=self._secret
        )
        self._native_address = ctypes.addressof(self.native)
        # Output arrays of `quire_find_runs`, reused by each call.
        self._runs_out = np.empty((2, 0), np.int32)
        self._run_addresses: tuple[int, ...] = ()
        # Enough for the prompts of most calls; a longer one makes room.
        self._room_for_runs(512)
        self._set_size(_FIRST_BUCKETS)

    def __len__(self) -> int:
        return self._size

    @property
    def num_links(self) -> int:
        """Number of lines in use that hold the entries behind links."""
        return self._next_line - self._max_buckets - len(self._free_lines)

    # ----------------------------------------------------------------------------------- many hashes

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look hashes up.

        Parameters
        ----------
        hashes
            [n] uint64.

        Returns
        -------
        [n] int64 places, undefined for absent hashes; [n] int32 ids, 0 for absent hashes.
        """
        n, library = len(hashes), compiled_router.load()
        if library is not None:
            address = compiled_router.address
            hashes = np.ascontiguousarray(hashes, _U64)
            places, ids = np.empty(n, np.int64), np.empty(n, np.int32)
            where = (address(hashes), n, address(ids), address(places))
            library.quire_find_blocks(self._native_address, *where)
            return places, ids
        return self._find_by_numpy(hashes)

    def runs(self, hashes: np.ndarray) -> tuple[list[int], list[int]]:
        """Cut a chain of hashes, [n] uint64, into runs with the same id.

        Returns
        -------
        The index of each run's first hash, ascending; and each run's id, 0 for absent hashes.
        """
        library = compiled_router.load()
        if library is None:
            return self._runs_by_numpy(hashes)
        n = len(hashes)
        hashes = np.ascontiguousarray(hashes, _U64)
        where = (compiled_router.address(hashes), n, *self._room_for_runs(n))
        num_runs = library.quire_find_runs(self._native_address, *where)
        starts, ids = self._runs_out[:, :num_runs].tolist()
        return starts, ids

    def _runs_by_numpy(self, hashes: np.ndarray) -> tuple[list[int], list[int]]:
        if not len(hashes):
            return [], []
        ids = self._find_by_numpy(hashes)[1]
        # The last hash of each run but the last one.
        last = (ids[1:] != ids[:-1]).nonzero()[0]
        return [0, *(end + 1 for end in last.tolist())], [*ids.take(last).tolist(), int(ids[-1])]

    def _find_by_numpy(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n, keys = len(hashes), self._as_keys(hashes)
        lines = self._buckets(keys)
        queries, hits = self._hits(keys, lines)
        found = self._flat_words.take(_id_place(hits))
        if len(hits) == n:
            return hits, found
        places, ids = np.zeros(n, np.int64), np.zeros(n, np.int32)
        places[queries], ids[queries] = hits, found
        links = self._flat_words.take((lines << _WORDS_SHIFT) + _LINK)
        links[queries] = 0
        # About one key in a hundred.
        for i in links.nonzero()[0].tolist():
            places[i], ids[i] = self.locate(int(keys[i]))
        return places, ids

    def _room_for_runs(self, n: int) -> tuple[int, ...]:
        """Give the rows of `_runs_out` room for n runs, and return their addresses."""
        if n > self._runs_out.shape[1]:
            self._runs_out = np.empty((2, n), np.int32)
            self._run_addresses = tuple(map(compiled_router.address, self._runs_out))
        return self._run_addresses

    def _hits(self, keys: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Search each key ([n] uint64) in its line ([n] int64).

        Returns
        -------
        [hits] int64 indices of the keys that were found, ascending; [hits] int64 places.
        """
        equal = self._lines.take(lines, axis=0) == keys[:, None]
        equal[:, _KEYS:] = False
        hits = equal.ravel().nonzero()[0]
        queries = hits >> _LINE_SHIFT
        hits += (lines.take(queries) - queries) << _LINE_SHIFT
        return queries, hits

    def insert(self, hashes: np.ndarray, ids: np.ndarray) -> None:
        """Add entries.

        Parameters
        ----------
        hashes
            [n] uint64, distinct and absent.
        ids
            [n] int32, > 0.
        """
        self._grow(len(hashes))
        self._size += len(hashes)
        keys = self._as_keys(hashes)
        lines = self._buckets(keys)
        while len(keys):
            empty = self._lines.take(lines, axis=0)[:, :_KEYS] == 0
            places = empty.argmax(axis=1)
            is_full = ~empty[np.arange(len(places)), places]
            if is_full.any():
                for key, new_id in zip(keys[is_full].tolist(), ids[is_full].tolist(), strict=True):
                    self._put(key, self.locate(key)[0], new_id)
                fits = ~is_full
                keys, ids, lines, places = keys[fits], ids[fits], lines[fits], places[fits]
            places += lines << _LINE_SHIFT
            self._flat_keys[places] = keys
            # Several keys may have chosen the same place. One of them was written; the others choose again.
            is_lost = self._flat_keys.take(places) != keys
            if not is_lost.any():
                self._flat_words[_id_place(places)] = ids
                return
            won = ~is_lost
            self._flat_words[_id_place(places[won])] = ids[won]
            keys, ids, lines = keys[is_lost], ids[is_lost], lines[is_lost]

    def set_ids(self, places: np.ndarray, ids: np.ndarray) -> None:
        """Set the ids ([n] int32, all > 0) of entries at places that `find` returned."""
        self._flat_words[_id_place(places)] = ids

    def remove(self, hashes: np.ndarray, places: np.ndarray) -> None:
        """Remove entries at places that `find` returned."""
        self._flat_keys[places] = 0
        self._flat_words[_id_place(places)] = 0
        self._size -= len(places)
        behind = (places >= self._max_buckets << _LINE_SHIFT).nonzero()[0]
        if len(behind):
            lines = (places.take(behind) >> _LINE_SHIFT).tolist()
            for line, key in dict(zip(lines, hashes.take(behind).tolist(), strict=True)).items():
                self._free_if_empty(line, key)

    # -------------------------------------------------------------------------------------- one hash

    def locate(self, routing_hash: int) -> tuple[int, int]:
        """Look one hash up.

        Returns
        -------
        The entry's place and its id. For an absent hash: a free place in its bucket, or `FULL`, and the id 0.
        """
        key = routing_hash or self._secret
        line, place = self._bucket(key), FULL
        while True:
            start = line << _LINE_SHIFT
            keys = self._key_view[start : start + _KEYS].tolist()
            if key in keys:
                k = keys.index(key)
                return start + k, self._word_view[2 * start + _FIRST_ID + k]
            if place < 0 and 0 in keys:
                place = start + keys.index(0)
            line = self._word_view[2 * start + _LINK]
            if not line:
                return place, 0

    def add(self, routing_hash: int, place: int, new_id: int) -> None:
        """Add an entry that `locate` did not find, at the place that it returned."""
        self._put(routing_hash or self._secret, place, new_id)
        self._size += 1
        if self._size > self._grows_above:
            self._grow(0)

    def change(self, place: int, new_id: int) -> None:
        """Set the id of an entry at a place that `locate` returned."""
        self._word_view[_id_place(place)] = new_id

    def delete(self, routing_hash: int, place: int) -> None:
        """Remove an entry at a place that `locate` returned."""
        self._size -= 1
        self._key_view[place] = self._word_view[_id_place(place)] = 0
        line = place >> _LINE_SHIFT
        if line >= self._max_buckets:
            self._free_if_empty(line, routing_hash)

    # ---------------------------------------------------------------------------------------- a scan

    def scan(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the entries of the buckets [first, last): keys (the hashes, except for hash 0), places and ids."""
        lines = linked = np.arange(first, last)
        while len(linked):
            links = self._links[linked]
            linked = links[links != 0].astype(np.int64)
            lines = np.append(lines, linked)
        entries = self._words.take(lines, axis=0)[:, _FIRST_ID:_LINK]
        line, k = entries.nonzero()
        places = (lines.take(line) << _LINE_SHIFT) + k
        return self._flat_keys.take(places), places, entries[line, k]

    # --------------------------------------------------------------------------------------- buckets

    def _set_size(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self._level = 1 << (num_buckets.bit_length() - 1)
        self._low, self._high = self._level - 1, 2 * self._level - 1
        self.native.num_buckets = num_buckets
        self.native.low, self.native.high = self._low, self._high
        # Zero-dimensional arrays for `_buckets`, since numpy would have to convert Python numbers.
        self._num, self._low_bits = np.array(num_buckets), np.array(self._low)
        self._high_bits = np.array(self._high, _U64)
        # With all buckets in use the table does not grow; the caller keeps to `max_entries`.
        is_last = num_buckets == self._max_buckets
        self._grows_above = math.inf if is_last else 3 * num_buckets // 2

    def _buckets(self, keys: np.ndarray) -> np.ndarray:
        """Return the buckets of keys ([n] uint64), [n] int64."""
        buckets = (self._mixed(keys) & self._high_bits).view(np.int64)
        # `bits` masks each number: with all bits where the bucket exists (the difference is negative, and the shift
        # spreads its sign over all bits), and with the low bits elsewhere.
        bits = buckets - self._num
        bits >>= _SIGN_SHIFTS
        bits |= self._low_bits
        buckets &= bits
        return buckets

    def _bucket(self, key: int) -> int:
        product = (key ^ (key >> 32) * self._secret & _ALL_BITS) * self._secret & _ALL_BITS
        product = (product ^ product >> 32) * self._secret & _ALL_BITS
        mixed = int.from_bytes(product.to_bytes(8, "little"), "big")
        bucket = mixed & self._high
        return bucket if bucket < self.num_buckets else mixed & self._low

    def _mixed(self, keys: np.ndarray) -> np.ndarray:
        """Mix keys with the secret, [n] uint64; callers use the low bits.

        A bit of a product depends only on the lower bits of the factors, so the highest bits depend on all bits, and
        the byte swap brings them to the low end. The swap keeps the order within a byte, so a second round is needed.
        If the low bits of a key were 0, the product would depend on few bits of the secret. So the key's high bits are
        folded into the low ones first, multiplied by the secret so that a client cannot choose keys that undo the
        folding.
        """
        product = keys >> _HALF
        product *= self._secret_factor
        product ^= keys
        product *= self._secret_factor
        product ^= product >> _HALF
        product *= self._secret_factor
        return product.byteswap(inplace=True)

    def _as_keys(self, hashes: np.ndarray) -> np.ndarray:
        """Replace hash 0, which marks an empty place, by the secret."""
        if len(hashes) and not hashes[hashes.argmin()]:
            return np.where(hashes == 0, self._secret_factor, hashes)
        return hashes

    def _put(self, key: int, place: int, new_id: int) -> None:
        if place == FULL:
            place = self._append_line(self._bucket(key)) << _LINE_SHIFT
        self._key_view[place], self._word_view[_id_place(place)] = key, new_id

    def _append_line(self, line: int) -> int:
        """Append a line to the chain of links that starts at a bucket, and return the new line's index."""
        if self._free_lines:
            new_line = self._free_lines.pop()
        else:
            new_line = self._next_line
            self._next_line += 1
        links = self._links
        while links[line]:
            line = links[line]
        links[line] = new_line
        return new_line

    def _free_if_empty(self, line: int, routing_hash: int) -> None:
        """Free a line if it is empty; it is linked behind the bucket of this hash."""
        if self._ids[line].any():
            return
        links, before = self._links, self._bucket(routing_hash or self._secret)
        while links[before] != line:
            before = links[before]
        links[before] = links[line]
        links[line] = 0
        self._free_lines.append(line)

    def _take_linked(self, bucket: int) -> list[tuple[int, int]]:
        """Remove the entries behind a bucket's link, and return their keys and ids."""
        entries = []
        line, self._links[bucket] = int(self._links[bucket]), 0
        while line:
            keys, ids = self._keys[line].tolist(), self._ids[line].tolist()
            entries += [(key, i) for key, i in zip(keys, ids, strict=True) if i]
            self._free_lines.append(line)
            link = int(self._links[line])
            self._lines[line] = 0
            line = link
        return entries

    def _grow(self, num_new: int) -> None:
        """Split buckets if `num_new` further entries need it. Then buckets have about 1.5 entries in the mean."""
        if self._size + num_new <= self._grows_above:
            return
        needed = max(_buckets_for(self._size + num_new), self.num_buckets + _MIN_SPLIT)
        needed = min(self._max_buckets, needed)
        while self.num_buckets < needed:
            self._split(min(needed, 2 * self._level) - self.num_buckets)

    def _split(self, num: int) -> None:
        """Split the next `num` buckets, which must be of the current level."""
        first, level = self.num_buckets - self._level, self._level
        old, new = slice(first, first + num), slice(first + level, first + level + num)
        keys, ids = self._keys[old], self._ids[old]
        moves = (self._mixed(keys) & _U64(level)) != 0
        np.multiply(keys, moves, out=self._keys[new])
        np.multiply(ids, moves, out=self._ids[new])
        np.logical_not(moves, out=moves)
        keys *= moves
        ids *= moves
        linked = self._links[old].nonzero()[0] + first
        self._set_size(self.num_buckets + num)
        for bucket in linked.tolist():
            for key, entry_id in self._take_linked(bucket):
                self._put(key, self.locate(key)[0], entry_id)


def _id_place(place: np.ndarray | int) -> np.ndarray | int:
    """Return the index of an entry's id in the array as int32."""
    return 2 * place + _FIRST_ID - (place & (_LINE - 1))


def _zeros(shape: tuple[int, int]) -> np.ndarray:
    """Return uint64 zeros, on huge pages where the system has them.

    Hashes are spread over the whole table. With small pages, address translation took a third of a prompt's look-up
    time.
    """
    size = math.prod(shape) * _U64().itemsize
    # Only Linux has `MADV_HUGEPAGE`.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A private mapping: Linux backs shared ones by a file system with small pages.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Some kernels are built without huge pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, _U64).reshape(shape)
