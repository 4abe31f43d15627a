"""The block tables of the last two plans, brought up to date for the next but one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.replica.request_table.decode_rows import DecodeRows

# Of a planned table: it is gathered anew when the longest row has so many more blocks.
_SPARE_COLUMNS = 8


@dataclass(slots=True)
class _Buffer:
    """The tables of one plan."""

    # [G, n, width + spare]
    tables: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0), np.int32))
    decodes: DecodeRows | None = None  # whose tables these are; None: of a mixed plan
    # Since then, of these rows: what `append` was given, and rows with other blocks.
    appended: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    changed: list[np.ndarray] = field(default_factory=list)


class PlannedTables:
    """Two buffers in turn: a plan's tables are valid until the second plan after it is made.

    While no row comes or goes only the rows whose blocks changed are copied: gathering all of them would cost
    half a megabyte a step for 1024 rows of 4096 tokens.

    Parameters
    ----------
    block_tables
        [G, R, max blocks] int32, the tables of all rows; read, never written.
    """

    def __init__(self, block_tables: np.ndarray):
        self._block_tables = block_tables
        self._buffers = [_Buffer(), _Buffer()]

    def append(self, at: np.ndarray, index: np.ndarray, blocks: np.ndarray) -> None:
        """The newest blocks of the decoding rows.

        Parameters
        ----------
        at, index
            [n] integers each, places among the decoding rows, and in their tables.
        blocks
            [G, n] int32.
        """
        for buffer in self._buffers:
            buffer.appended.append((at, index, blocks))

    def mark_changed(self, rows: np.ndarray) -> None:
        """These decoding rows have other blocks than the last plans."""
        if len(rows):
            for buffer in self._buffers:
                buffer.changed.append(rows)

    def take(self, rows: np.ndarray, width: int, decodes: DecodeRows | None = None) -> np.ndarray:
        """[G, rows, width] int32, the rows' tables in the older of the two buffers.

        Parameters
        ----------
        decodes
            Given when the rows are exactly these.
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
            for changed in buffer.changed:  # appended blocks may have been exchanged since
                at = np.searchsorted(rows, changed)
                tables[:, at] = self._block_tables[:, changed, : tables.shape[2]]
        buffer.appended.clear()
        buffer.changed.clear()
        return tables[:, :, :width]
