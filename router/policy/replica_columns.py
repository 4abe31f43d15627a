"""The values that a policy may use of each replica: a matrix with one row per column below and one entry per replica.

    column          replica:  0       1       2
    seen_s                    103.2   103.9   -inf
    report_s                  103.2   103.9   97.0
    ...

A decision reads the columns in place. It copies them only when it must leave out some replicas.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class PerColumn(NamedTuple, Generic[T]):
    """One value for each column, in the order of the matrix. This is the columns' only declaration."""

    # Time of the last frame; -inf: the replica takes no requests.
    seen_s: T
    # Time of the last report; -inf: never.
    report_s: T
    # Tokens to prefill, by the last report.
    queued_tokens: T
    # Work of our requests that the report cannot contain.
    booked_work: T
    # Work of all our requests without a first token.
    unanswered_work: T
    # Work of the oldest of those.
    head_work: T
    # Time since which it has been the oldest.
    head_s: T
    # Requests in flight: running and waiting by the report, and booked.
    num_requests: T
    # KV tokens of the decoding requests, and of ours without a first token.
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

# Unused values at the end of each column. At a distance of a power of two bytes, columns would compete for the same
# sets of the processor's cache.
_APART = 8


class ReplicaColumns:
    """The matrix and the replicas' rows in it. Rows are dense: the last one moves into the gap when one is removed.

    Attributes
    ----------
    names
        The replicas by row. Each change makes a new list, so that earlier decisions keep theirs.
    matrix
        [NUM_COLUMNS, rows] float64, a view of the values that `write` sets; its rows are contiguous.
    columns
        Its rows by name.
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
        """Add a replica and return its row."""
        row = len(self.names)
        self.names = [*self.names, name]
        if row == self._values.shape[1] - _APART:
            self._values = np.hstack([self._values, np.zeros((NUM_COLUMNS, row))])
        self._view()
        return row

    def remove(self, row: int) -> str | None:
        """Remove a row. Return the replica that moved to it, which the caller must write again, or None."""
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
