"""The rows that decode, as the next step finds them.

Every one of them gains one token in every step, so while no row comes or goes nothing about them is looked up
anew: what stays the same was gathered once, and where a row stands follows from where it stood.

```
 block_size = 4        step n        n + 1       n + 2       n + 3
 row 0, offset         2             3 filling   0 begun     1
 row 1, offset         0             1           2           3 filling
```
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_NONE = np.empty(0, np.int64)
_MANY = np.iinfo(np.int32).max
# numpy adds an array in half the time of a Python number.
_ONE, _ONE64 = np.array(1, np.int32), np.array(1, np.int64)


@dataclass(slots=True)
class DecodeRows:
    """D decoding rows. Arrays are replaced, never written to, so plans and delta batches may keep them.

    `locate` sets where the rows stand, and `advance` moves every row on by one token.
    """

    block_size: int
    ids: np.ndarray  # [D] int64
    claims: np.ndarray  # [D] int64, `RowTable.claims`
    cu_q: np.ndarray  # [D + 1] int32
    keys: np.ndarray  # [D] object
    sources: np.ndarray  # [D] int32
    stream_ids: np.ndarray  # [D] int64
    num_prompt_tokens: np.ndarray  # [D] int32
    run_length: np.ndarray  # [D] int32
    temperature: np.ndarray  # [D] float32
    top_k: np.ndarray  # [D] int32
    top_p: np.ndarray  # [D] float32
    seed: np.ndarray  # [D] uint64
    choice: np.ndarray  # [D] int32
    table_begin: np.ndarray  # [D] int64, where the row begins in the flattened tables of a group
    is_plain: bool  # no row has a minimum of tokens, a constraint, a penalty, min_p or log-probs

    # Of the token that the next step computes.
    is_located: bool = False  # the others are valid
    position: np.ndarray = field(default_factory=lambda: _NONE)  # [D] int32
    length: np.ndarray = field(default_factory=lambda: _NONE)  # [D] int32, position + 1
    offset: np.ndarray = field(default_factory=lambda: _NONE)  # [D] int32, in its block
    tail_index: np.ndarray = field(
        default_factory=lambda: _NONE
    )  # [D] int64, in the flattened tails
    # [n] int64 each, in [0, D): rows of which it is the first of its block, and the last
    begun: np.ndarray = field(default_factory=lambda: _NONE)
    filling: np.ndarray = field(default_factory=lambda: _NONE)
    begun_index: np.ndarray = field(default_factory=lambda: _NONE)  # [n] int32, of that block
    num_blocks: int = 0  # of the longest row, with it
    num_left: int = 0  # tokens until the first row reaches its run_length; after that 0 or less
    # [G, D] int64, where the KV of the token before it was written; None: not known
    slots: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def locate(self, num_computed: np.ndarray) -> None:
        """The rows have [D] int32 tokens in the cache."""
        block_index = num_computed // self.block_size
        self.position = num_computed
        self.length = num_computed + 1
        self.offset = num_computed - block_index * self.block_size
        self.tail_index = self.ids * self.block_size + self.offset
        self.begun = (self.offset == 0).nonzero()[0]
        self.begun_index = block_index[self.begun]
        self.filling = (self.offset == self.block_size - 1).nonzero()[0]
        self.num_blocks = int(block_index.max(initial=-1)) + 1
        self.num_left = int((self.run_length - self.length).min(initial=_MANY))
        self.slots = None
        self.is_located = True

    def block_index(self, rows: np.ndarray) -> np.ndarray:
        """[n] int32, in the rows' tables the block of the next token; [n] integers in [0, D)."""
        index: np.ndarray = self.position[rows] // self.block_size
        return index

    def fills(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] int64 rows whose next token fills its block, and [n] int32, of which block in their tables."""
        return self.ids[self.filling], self.block_index(self.filling)

    def take_slots(self, tables: np.ndarray) -> np.ndarray:
        """Where the next step writes KV; call it once for each step.

        Parameters
        ----------
        tables
            [G, any] int32, the flattened block tables of each group.

        Returns
        -------
        [G, D] int64, block * block_size + offset.
        """
        if self.slots is None:
            index = self.table_begin + self.position // self.block_size
            slots: np.ndarray = tables.take(index, axis=1).astype(np.int64)
            slots *= self.block_size
            slots += self.offset
        else:
            slots = self.slots + _ONE64
            if len(self.begun):
                index = self.table_begin[self.begun] + self.begun_index
                slots[:, self.begun] = tables.take(index, axis=1).astype(np.int64) * self.block_size
        self.slots = slots
        return slots

    def advance(self) -> None:
        """The next token has been planned: what is valid from now on is where the one after it goes."""
        filled = self.filling
        self.is_located = True
        self.position = self.length
        self.length = self.length + _ONE
        self.offset = self.offset + _ONE
        self.tail_index = self.tail_index + _ONE64
        self.begun_index = self.block_index(filled)
        if len(filled):
            self.offset[filled] = 0
            self.tail_index[filled] -= self.block_size
            self.num_blocks = max(self.num_blocks, int(np.maximum.reduce(self.begun_index)) + 1)
        self.begun = filled
        self.filling = (self.offset == self.block_size - 1).nonzero()[0]
        self.num_left -= 1
