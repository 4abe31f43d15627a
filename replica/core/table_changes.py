"""Changes of the request table since the last plan. Each plan brings them to the device's copy of the table.

```
 host    claim ──┐                                                     device
         append ─┼─▶ TableJournal ── with the plan ──▶ TableChanges ──▶ the same table, `device_table.py`
         replace ┘
```

Block-table entries that a row gives up are not reported, because they are written again before they are read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.replica.core.sampling_record import RECORD

_NO_PLACES = np.empty(0, np.int64)
_NO_BLOCKS = np.empty(0, np.int32)
_NO_RECORDS = np.empty(0, RECORD)


class TableChanges(NamedTuple):
    """Changes of the request table, in the order in which they were made."""

    # (first layer group, [k] int64 indices into one group's flattened table, blocks). The blocks are [k] int32 for the
    # first group, or [G - first group, k] int32 for that group and all later ones.
    blocks: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()
    claimed: np.ndarray = _NO_PLACES  # [c] int64, unique rows that were given to a request
    sampling: np.ndarray = (
        _NO_RECORDS  # [c] `sampling_record.RECORD`, the sampling parameters of these rows
    )

    def flat(self, group_stride: int) -> tuple[np.ndarray, np.ndarray]:
        """Unique indices into the flattened table [G, rows, max blocks] ([k] int64), and their blocks ([k] int32).

        Parameters
        ----------
        group_stride
            Number of entries in one group's table.
        """
        if not self.blocks:
            return _NO_PLACES, _NO_BLOCKS
        places, values = [], []
        for first, at, blocks in self.blocks:
            for g, own in enumerate(blocks.reshape(-1, len(at)), first):
                places.append(at + g * group_stride)
                values.append(own)
        if len(places) == 1:
            return places[0], values[0]
        # Keep only the last change of each entry, because the device writes the entries in any order.
        place, value = np.concatenate(places)[::-1], np.concatenate(values)[::-1]
        place, index = np.unique(place, return_index=True)
        return place, value[index]


NO_CHANGES = TableChanges()


class TableJournal:
    """Collect the changes between two plans."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._claimed: list[int] = []

    def write(self, at: np.ndarray, blocks: np.ndarray, group: int = 0) -> None:
        """Record changed entries of the block tables.

        Parameters
        ----------
        at
            [k] int64, indices into one group's flattened table.
        blocks
            [k] int32 for `group`, or [G - group, k] int32 for this group and all later ones.
        """
        if len(at):
            self._blocks.append((group, at, blocks))

    def claim(self, row: int) -> None:
        """Record that the row was given to a request."""
        self._claimed.append(row)

    def take(self, sampling: np.ndarray) -> TableChanges:
        """Take all changes since the last call.

        Parameters
        ----------
        sampling
            [R] `sampling_record.RECORD` of all rows.
        """
        if not self._blocks and not self._claimed:
            return NO_CHANGES
        claimed = np.unique(np.array(self._claimed, np.int64))
        changes = TableChanges(tuple(self._blocks), claimed, sampling.take(claimed))
        self._blocks, self._claimed = [], []
        return changes
