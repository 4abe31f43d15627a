"""The block tables of plans, in two buffers: each plan updates the buffer of the plan before the last one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.replica.request_table.decode_rows import DecodeRows

# Number of spare columns of a planned table: the longest row can grow into them before all tables are copied again.
_SPARE_COLUMNS = 8


@dataclass(slots=True)
class _Buffer:
    """The tables of one plan."""

    # [G, n, width + spare]
    tables: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0), np.int32))
    # The rows of these tables; None: the plan had rows other than the decoding rows.
    decodes: DecodeRows | None = None
    # Changes since that plan: arguments of `append`, and rows with blocks that were replaced or freed.
    appended: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    changed: list[np.ndarray] = field(default_factory=list)


class PlannedTables:
    """Two buffers used in turn: the tables of a plan are valid until the second plan after it.

    While no row comes or goes, only changed blocks are copied. Gathering all tables would copy half a megabyte in each
    step for 1,024 rows of 4,096 tokens.

    Parameters
    ----------
    block_tables
        [G, R, max blocks] int32, the tables of all rows; never modified here.
    """

    def __init__(self, block_tables: np.ndarray):
        self._block_tables = block_tables
        self._buffers = [_Buffer(), _Buffer()]

    def append(self, at: np.ndarray, index: np.ndarray, blocks: np.ndarray) -> None:
        """Add new blocks of decoding rows.

        Parameters
        ----------
        at, index
            [n] integers each: indices into the decoding rows, and indices of the blocks in the tables of these rows.
        blocks
            [G, n] int32.
        """
        for buffer in self._buffers:
            buffer.appended.append((at, index, blocks))

    def mark_changed(self, rows: np.ndarray) -> None:
        """Copy the tables of these decoding rows again for the next plans."""
        if len(rows):
            for buffer in self._buffers:
                buffer.changed.append(rows)

    def take(self, rows: np.ndarray, width: int, decodes: DecodeRows | None = None) -> np.ndarray:
        """The rows' tables, [G, rows, width] int32, a view of the buffer that was used longer ago.

        Parameters
        ----------
        decodes
            The same rows as `DecodeRows`, if these are exactly the decoding rows.
        """
        buffer = self._buffers[0]
        self._buffers.reverse()
        tables = buffer.tables
        if decodes is None or buffer.decodes is not decodes or width > tables.shape[2]:
            spare = 0 if decodes is None else _SPARE_COLUMNS
            buffer.tables = tables = self._block_tables[:, :, : width + spare].take(rows, axis=1)
            buffer.decodes = decodes
        else:
            for at, index, blocks in buffer.appended:
                tables[:, at, index] = blocks
            # Copy changed rows after `appended`, because an appended block may have been replaced since.
            for changed in buffer.changed:
                at = np.searchsorted(rows, changed)
                tables[:, at] = self._block_tables[:, changed, : tables.shape[2]]
        buffer.appended.clear()
        buffer.changed.clear()
        return tables[:, :, :width]
