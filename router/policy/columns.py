"""What a policy may know of each replica, in columns that are written as frames and bookings come.

    column                rows of the replicas: 0       1       2
    SEEN_S                                      103.2   103.9   -inf
    REPORT_S                                    103.2   103.9   97.0
    ...

A decision reads the columns where they lie: no replica is looked at by itself, and nothing is copied unless
some replicas must be left out.
"""

from __future__ import annotations

import math

import numpy as np

SEEN_S = 0  # last frame; -inf: takes no requests
REPORT_S = 1  # -inf: has never reported
QUEUED_TOKENS = 2
BOOKED_WORK = 3
UNANSWERED_WORK = 4
HEAD_WORK = 5
HEAD_S = 6
NUM_REQUESTS = 7
KV_TOKENS = 8
CACHE_AGE_S = 9
FREE_TOKENS = 10
USED_TOKENS = 11
HOST_COPY_S_PER_TOKEN = 12
NUM_WAITING = 13
MEAN_KV_TOKENS = 14
NUM_PLACES = 15
NUM_COLUMNS = 16

# Unused numbers at the end of a column: columns a power of two of bytes apart fall on the same lines of a cache.
_APART = 8


class ReplicaColumns:
    """One row of float64 for each replica; rows are dense, so the last one moves when another goes.

    Attributes
    ----------
    names
        The replicas by row. A change makes another list: a decision goes on naming those that it was about.
    columns
        [NUM_COLUMNS, rows] float64, a view of what `write` writes; its rows are contiguous.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._values = np.zeros(
            (NUM_COLUMNS, 16 + _APART)
        )  # [column, row], rows beyond the names unused
        # Not above the smallest of these columns: mostly it tells, and no row is looked at.
        self._least = {SEEN_S: math.inf, NUM_PLACES: math.inf}
        self._view()

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str) -> int:
        """The row of a replica that was not there."""
        row = len(self.names)
        self.names = [*self.names, name]
        if row == self._values.shape[1] - _APART:
            self._values = np.hstack([self._values, np.zeros((NUM_COLUMNS, row))])
        self._view()
        return row

    def remove(self, row: int) -> str | None:
        """Give a row up; names the replica that has it now, for its row to be written, or None."""
        *names, last = self.names
        moved = None
        if row < len(names):
            names[row] = moved = last
        self.names = names
        self._view()
        return moved

    def write(self, row: int, values: tuple[float, ...]) -> None:
        """Set a replica's `NUM_COLUMNS` values, in their order."""
        self._values[:, row] = values
        for column, least in self._least.items():
            if values[column] < least:
                self._least[column] = values[column]

    def some_below(self, column: int, bound: float) -> bool:
        """Whether some replica's value of `SEEN_S` or `NUM_PLACES` is."""
        if self._least[column] >= bound or not self.names:
            return False
        values = self.columns[column]
        least = self._least[column] = float(values[values.argmin()])
        return least < bound

    def _view(self) -> None:
        n = len(self.names)
        self.columns = self._values[:, :n]
