"""Finds where the last n tokens of a text occurred before: n-grams by hash, in tables without Python objects.

The hash of an n-gram is a polynomial of its tokens modulo 2**64, so it follows from the previous one in three products:

    h(e) = sum of text[e - 1 - j] * B**(j + 1), for j from 0 to n - 1
    h(e + 1) = B * (h(e) + text[e]) - text[e - n] * B**(n + 1)

A table is direct-mapped: the top bits of the hash are the slot, and the slot has the position after the gram's newest
occurrence. Another gram may overwrite it, and the caller compares the tokens, so a table may lose a match and never
invents one.
"""

from __future__ import annotations

import numpy as np

# Sizes of grams, the longest first: a longer match is more often right.
SIZES = (8, 3)
MAX_SIZE = SIZES[0]
# Slots for each token of a text.
_SLOTS_PER_TOKEN = 2
_LEAST_BITS = 8
_MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_POWERS = [pow(_BASE, j + 1, 2**64) for j in range(MAX_SIZE)]
# For each size the factor of the token that leaves a gram.
_LEAVING = tuple(pow(_BASE, n + 1, 2**64) for n in SIZES)

Hashes = tuple[int, ...]


def hashes_at_end(tokens: np.ndarray) -> Hashes:
    """The hashes of the last n tokens, for each n in `SIZES`; there must be `MAX_SIZE` tokens."""
    newest = tokens[: -MAX_SIZE - 1 : -1].tolist()
    terms = [token * power for token, power in zip(newest, _POWERS, strict=True)]
    return tuple(sum(terms[:n]) & _MASK for n in SIZES)


def rolled(hashes: Hashes, entering: int, window: list[int], end: int) -> Hashes:
    """The hashes after one more token; `window[end - n]` leaves the gram of size n."""
    return tuple(
        (_BASE * (old + entering) - window[end - n] * leaving) & _MASK
        for old, n, leaving in zip(hashes, SIZES, _LEAVING, strict=True)
    )


def _all_hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """The hash of each gram of size n, [tokens - n + 1] uint64, by the position of its first token."""
    wide = tokens.astype(np.uint64)
    count = len(wide) - n + 1
    total = np.zeros(count, np.uint64)
    for j, power in enumerate(_POWERS[:n]):
        begin = n - 1 - j
        total += wide[begin : begin + count] * np.uint64(power)
    return total


class GramTables:
    """One table for each size of grams, over a text of up to `num_tokens` tokens.

    A position is that of the token after a gram, counted from the first token of the text; it is never 0.
    """

    def __init__(self, num_tokens: int):
        bits = max(_LEAST_BITS, (_SLOTS_PER_TOKEN * num_tokens - 1).bit_length())
        self._shift = 64 - bits
        self.num_tokens = 2**bits // _SLOTS_PER_TOKEN
        self._slots = [np.zeros(2**bits, np.int32) for _ in SIZES]
        # Python reads and writes one slot of a memoryview in half the time.
        self._views = [memoryview(slots) for slots in self._slots]

    @staticmethod
    def bytes_for(num_tokens: int) -> int:
        """Bytes of the tables for a text of this length."""
        bits = max(_LEAST_BITS, (_SLOTS_PER_TOKEN * num_tokens - 1).bit_length())
        return len(SIZES) * 4 * int(2**bits)

    def put(self, hashes: Hashes, position: int) -> None:
        """Remember the grams that end before `position`."""
        shift = self._shift
        for view, value in zip(self._views, hashes, strict=True):
            view[value >> shift] = position

    def put_all(self, tokens: np.ndarray, first: int = 0) -> None:
        """Remember every gram of a part of the text whose first token has the position `first`."""
        for slots, n in zip(self._slots, SIZES, strict=True):
            if len(tokens) < n:
                continue
            at = _all_hashes(tokens, n) >> np.uint64(self._shift)
            position = np.arange(first + n, first + len(tokens) + 1, dtype=np.int32)
            np.maximum.at(slots, at.astype(np.intp), position)

    def candidate(self, hashes: Hashes, size_index: int) -> int:
        """The position after the newest gram of this size whose hash has the same slot; 0: none."""
        return self._views[size_index][hashes[size_index] >> self._shift]
