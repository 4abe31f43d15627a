"""The deltas of one step, most of them as columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.protos import ragged
from quire.protos.wire import TokenDelta, TokenRecord

_NO_KEYS = np.empty(0, object)
_NO_NUMBERS = np.empty(0, np.int32)
_NO_TOKENS = TokenRecord(np.empty(0, np.int64), _NO_NUMBERS, _NO_NUMBERS)


class DeltaBatch:
    """The deltas of one step: those with facts, and columns for the rows that only got tokens.

    Most rows of a step only got tokens. Creating an object for each of these rows would take longer than the rest of
    `commit`, so their `TokenDelta` objects are created only when the batch is iterated.

    Parameters
    ----------
    whole
        Deltas with facts, for example the first or last of their requests, in the order of events.
    tokens
        New tokens of the other rows, n of them.
    keys, sources
        [n] keys of the requests, and [n] int32, number of the receiving attachment (`Request.source`).
    """

    __slots__ = ("keys", "sources", "tokens", "whole")

    def __init__(
        self,
        whole: list[TokenDelta],
        tokens: TokenRecord = _NO_TOKENS,
        keys: np.ndarray = _NO_KEYS,
        sources: np.ndarray = _NO_NUMBERS,
    ):
        self.whole = whole
        self.tokens = tokens
        self.keys = keys
        self.sources = sources

    def only(self, rows: np.ndarray) -> DeltaBatch:
        """Return the batch with these rows of its columns only, [n] bool."""
        return DeltaBatch(self.whole, self.tokens.select(rows), self.keys[rows], self.sources[rows])

    def __len__(self) -> int:
        return len(self.whole) + len(self.keys)

    def __iter__(self) -> Iterator[TokenDelta]:
        yield from self.whole
        tokens = self.tokens
        token_ids = ragged.lists(tokens.token_ids, tokens.cu)
        yield from map(TokenDelta, self.keys.tolist(), tokens.index.tolist(), token_ids)
