"""The values that a policy may use of each replica, in a matrix.

The matrix has one line per value, called a column, and one entry per replica:

    column          replica:  0       1       2
    seen_s                    103.2   103.9   -inf
    report_s                  103.2   103.9   97.0
    ...

A decision reads the columns in place. It copies them only when it must leave out some replicas. A replica's index in
each column is its *row*.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class PerColumn(NamedTuple, Generic[T]):
    """One value for each column, in the order of the matrix. The columns are declared only here."""

    # Time of the replica's last frame (what it sends after a step); -inf: the replica takes no requests.
    seen_s: T
    # Arrival time of its last load report; -inf: never.
    report_s: T
    # Tokens still to prefill, by the last report.
    queued_tokens: T
    # Prefill work of this router's requests that were sent too late for the report to contain them.
    booked_work: T
    # Prefill work of all this router's requests without a first token.
    unanswered_work: T
    # Prefill work of the oldest request without a first token.
    head_work: T
    # Time at which that request became the oldest.
    head_s: T
    # Requests in flight: running and waiting by the report, and ours that it cannot contain.
    num_requests: T
    # KV tokens of the decoding requests, and prompt tokens of our requests without a first token.
    kv_tokens: T
    # Seconds for which a block stays cached; inf: no evictions.
    cache_age_s: T
    # Tokens of KV memory that are free or evictable; inf: not known.
    free_tokens: T
    # Tokens of KV memory of running requests.
    used_tokens: T
    # Seconds to copy a token's KV from host memory to the device.
    host_copy_s_per_token: T
    # Requests that wait for a row, by the last report.
    num_waiting: T
    # KV tokens of the decoding requests, mean of the last half minute.
    mean_kv_tokens: T
    # Further requests of ours until the replica refuses one; inf: no bound.
    num_places: T


NUM_COLUMNS = len(PerColumn._fields)
COLUMN: PerColumn[int] = PerColumn(*range(NUM_COLUMNS))
"""Each column's index in the matrix."""

# Unused values at the end of each column. If columns lay a power of two bytes apart, they would compete for the same
# sets of the CPU cache.
_APART = 8


class ReplicaColumns:
    """The matrix and the replicas' rows in it. Rows are dense: when one is removed, the last replica takes its row.

    Attributes
    ----------
    names
        The replicas by row. Each change makes a new list, because earlier decisions still use the old one.
    matrix
        [NUM_COLUMNS, rows] float64, a view of the values that `write` sets; each column is contiguous.
    columns
        The columns of `matrix` by name.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        # [column, row]; rows beyond the names are unused.
        self._values = np.zeros((NUM_COLUMNS, 16 + _APART))
        # Lower bounds of these columns; they usually let `some_below` skip the scan.
        self._least = {COLUMN.seen_s: math.inf, COLUMN.num_places: math.inf}
        self._view()

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str) -> int:
        """Add a replica and return its row. The caller must write its values."""
        row = len(self.names)
        self.names = [*self.names, name]
        if row == self._values.shape[1] - _APART:
            self._values = np.hstack([self._values, np.zeros((NUM_COLUMNS, row))])
        self._view()
        return row

    def remove(self, row: int) -> str | None:
        """Remove a row. Return the replica that moved to it, or None; the caller must write its values again."""
        *names, last = self.names
        moved = None
        if row < len(names):
            names[row] = moved = last
        self.names = names
        self._view()
        return moved

    def write(self, row: int, values: PerColumn[float]) -> None:
        """Set a replica's values."""
        self._values[:, row] = values
        for column, least in self._least.items():
            if values[column] < least:
                self._least[column] = values[column]

    def some_below(self, column: int, bound: float) -> bool:
        """Whether a replica's value in this column, `seen_s` or `num_places`, is below the bound."""
        if self._least[column] >= bound or not self.names:
            return False
        values = self.matrix[column]
        least = self._least[column] = float(values[values.argmin()])
        return least < bound

    def _view(self) -> None:
        n = len(self.names)
        self.matrix = self._values[:, :n]
        self.columns: PerColumn[np.ndarray] = PerColumn(*self.matrix)
