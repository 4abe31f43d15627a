"""The decoding rows (rows of the request table that get one token in each step), gathered for the next step.

While no row comes or goes, the constant columns are reused, and the positions are those of the step before plus 1.
`begun` are the rows with a next token that is the first of its block, `filling` those with one that is the last.

```
 block_size = 4        step n        n + 1       n + 2       n + 3
 row 0, offset         2             3 filling   0 begun     1
 row 1, offset         0             1           2           3 filling
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.replica.request_table.row_columns import RowColumns

_NONE = np.empty(0, np.int64)
_MANY = np.iinfo(np.int32).max
# Constants as numpy arrays: numpy adds an array in half the time of a Python number.
_ONE, _ONE64 = np.array(1, np.int32), np.array(1, np.int64)


class Draft(NamedTuple):
    """Tokens that may come next for a decoding row; the next step computes and verifies them."""

    row: int
    owner: int  # `RowTable.owners` of the row
    start: int  # position of the row's newest token, which the step computes first
    token_ids: np.ndarray  # [d] int32, d > 0


@dataclass(slots=True)
class DecodeRows:
    """D decoding rows. Arrays are replaced and never modified, so plans and delta batches may keep them.

    `locate` sets the positions of the rows, and `advance` moves every row by one token.
    """

    block_size: int
    ids: np.ndarray  # [D] int64
    columns: RowColumns  # those with `in_decodes`, [D] each
    token_ids: (
        np.ndarray
    )  # [D] int32, -1 - row: the token is the one that was last sampled for the row
    cu_q: np.ndarray  # [D + 1] int32
    num_sampled: np.ndarray  # [D] int32, 1 each
    table_begin: np.ndarray  # [D] int64, offset of the row in the flattened tables of a group
    # Whether no row has a minimum of tokens, a constraint, a penalty or log-probabilities.
    is_plain: bool

    # The fields below describe the token that each row computes in the next step.
    # Whether the fields below are up to date.
    is_located: bool = False
    position: np.ndarray = field(default_factory=lambda: _NONE)  # [D] int32
    length: np.ndarray = field(default_factory=lambda: _NONE)  # [D] int32, position + 1
    offset: np.ndarray = field(default_factory=lambda: _NONE)  # [D] int32, in the token's block
    # [D] int64, index of the token in `RowTable`'s flattened tails (the tokens of each row's newest block)
    tail_index: np.ndarray = field(default_factory=lambda: _NONE)
    # [n] int64 in [0, D): rows with a token that is the first of its block, and rows with one that is the last
    begun: np.ndarray = field(default_factory=lambda: _NONE)
    filling: np.ndarray = field(default_factory=lambda: _NONE)
    # [n] int32, index of the new block of each row in `begun` in the row's tables
    begun_index: np.ndarray = field(default_factory=lambda: _NONE)
    # Number of blocks of the longest row, including the block of this token.
    num_blocks: int = 0
    # Smallest number of tokens after this one until a row reaches its `run_length`; 0 or less if one has reached it.
    num_left: int = 0
    # [G, D] int64, slots to which the KV of the token before was written; None: not known
    slots: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def locate(self, num_computed: np.ndarray) -> None:
        """Set the positions of the rows.

        Parameters
        ----------
        num_computed
            [D] int32, number of computed tokens of each row.
        """
        block_index = num_computed // self.block_size
        self.position = num_computed
        self.length = num_computed + 1
        self.offset = num_computed - block_index * self.block_size
        self.tail_index = self.ids * self.block_size + self.offset
        self.begun = (self.offset == 0).nonzero()[0]
        self.begun_index = block_index[self.begun]
        self.filling = (self.offset == self.block_size - 1).nonzero()[0]
        self.num_blocks = int(block_index.max(initial=-1)) + 1
        self.num_left = int((self.columns.run_length - self.length).min(initial=_MANY))
        self.slots = None
        self.is_located = True

    def block_index(self, rows: np.ndarray) -> np.ndarray:
        """Table index of the next token's block, [n] int32, for `rows`, [n] integers in [0, D)."""
        index: np.ndarray = self.position[rows] // self.block_size
        return index

    def fills(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows with a next token that fills its block ([n] int64), and the block's table index ([n] int32)."""
        return self.ids[self.filling], self.block_index(self.filling)

    def take_slots(self, tables: np.ndarray) -> np.ndarray:
        """The slots to which the next step writes KV; call it once for each step.

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
        """Move every row on by one token, because the step with the present one is planned."""
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
