"""Which decode steps have a graph: sizes, use, wishes. Policy only; `graph_cache.py` captures.

A step of n rows runs in the graph of the next size, its other rows are padding::

    sizes           1 2 4 8 16 24 ... 64 80 ... 256 288 ... 512 576 ...     of which are captured
    at start        1 2 4 8 16    32 .. 64  128  256    512  ...  largest   powers of two, largest first
    when idle       those that steps would have taken, most often wished for first

So from the start a step finds a graph of less than twice its rows. Attention pads nothing: its kernels read how long
rows are from the device, so one graph serves all lengths.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from typing import NamedTuple

# Steps that would have run in a graph before it is captured: the pause for it, when nobody waits, must pay.
LEAST_WISHES = 8


class GraphPart(enum.Enum):
    """How much of a decode step a graph holds."""

    WHOLE = "step"  # from the last tokens to the next ones
    FORWARD = "forward"  # to the logits: the host has a say in what is drawn from them


class GraphKey(NamedTuple):
    """What a graph was captured for."""

    num_rows: int  # padding included
    part: GraphPart


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for, ascending, the last one `max_rows`."""
    sizes = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 256, 16),
        *range(256, 512, 32),
        *range(512, max_rows, 64),
    ]
    return (*(size for size in sizes if size < max_rows), max_rows)


class GraphShelf:
    """Knows what is captured, by how lately it was used, and what should be.

    Parameters
    ----------
    max_rows
        Of a step.
    max_graphs
        That are kept; the one used longest ago gives way to another.
    """

    def __init__(self, max_rows: int, max_graphs: int):
        self._sizes = decode_sizes(max_rows)
        self._max_graphs = max_graphs
        self._captured: OrderedDict[GraphKey, None] = OrderedDict()  # used longest ago first
        self._wishes: Counter[GraphKey] = Counter()
        self._refused: set[GraphKey] = set()
        self.num_hits = 0  # steps that found a graph
        self.num_misses = 0
        self.num_rows = 0  # of the steps that found one
        self.num_padding_rows = 0  # that they computed beside those

    def first(self) -> list[GraphKey]:
        """What to capture before serving, largest first."""
        largest = self._sizes[-1]
        sizes = [n for n in self._sizes if n == largest or n & (n - 1) == 0]
        return [GraphKey(n, GraphPart.WHOLE) for n in sizes[::-1][: self._max_graphs]]

    def find(self, num_rows: int, part: GraphPart) -> GraphKey | None:
        """The graph for a step that is about to run: less than twice too large, or none."""
        fitting = [size for size in self._sizes if size >= num_rows]
        wanted = GraphKey(fitting[0], part)
        limit = 2 * wanted.num_rows
        for size in fitting:
            key = GraphKey(size, part)
            if key in self._captured and (size < limit or size == wanted.num_rows):
                break
        else:
            key = None
        if key != wanted and wanted not in self._refused:
            self._wishes[wanted] += 1
        if key is None:
            self.num_misses += 1
            return None
        self._captured.move_to_end(key)
        self.num_hits += 1
        self.num_rows += num_rows
        self.num_padding_rows += key.num_rows - num_rows
        return key

    def wish(self) -> GraphKey | None:
        """What to capture next, if anything is worth it."""
        if not self._wishes:
            return None
        key, count = self._wishes.most_common(1)[0]
        return key if count >= LEAST_WISHES else None

    def victim(self) -> GraphKey | None:
        """What must give way before one more is captured."""
        return next(iter(self._captured)) if len(self._captured) >= self._max_graphs else None

    def add(self, key: GraphKey) -> None:
        """It is captured."""
        self._captured[key] = None
        del self._wishes[key]

    def remove(self, key: GraphKey) -> None:
        """It is no more."""
        del self._captured[key]

    def refuse(self, key: GraphKey) -> None:
        """It cannot be captured: nobody wishes for it again."""
        self._refused.add(key)
        del self._wishes[key]
