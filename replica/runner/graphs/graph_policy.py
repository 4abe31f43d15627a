"""Decides which graphs exist, which one serves a step, and which to capture next. `graph_cache.py` captures them.

A step of n decoding rows runs in the graph of the next larger size; the other rows are padding::

    sizes           1 2 4 8 16 24 ... 64 80 ... 256 288 ... 512 576 ...
    at start        1 2 4 8 16    32 .. 64  128  256    512  ...  largest   powers of two, largest first
    when idle       sizes that steps have missed, most often missed first

So every step finds a graph of less than twice its rows. Attention needs no padding: its kernels read the lengths of
rows from device memory, so one graph serves all lengths.

Mixed steps (with prefill) have graphs only if `MixedShapes` is given; it also decides which of these steps have one. At
start, graphs of mixed steps fill the part of the cache that decode graphs leave free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.graphs.mixed_shapes import MixedShapes

# A graph is captured, while the engine is idle, only after steps have missed it this often: a capture takes time and
# memory.
LEAST_WISHES = 8


@dataclass(slots=True)
class GraphUse:
    """Use of graphs by one kind of step. Items are rows, or tokens for mixed steps."""

    num_hits: int = 0  # steps that found a graph
    num_misses: int = 0
    num_items: int = 0  # of steps that found a graph
    num_padding: int = 0  # padding items of these steps

    def add(self, num_items: int, num_computed: int | None) -> None:
        """Count a step; `num_computed` is None if it found no graph."""
        if num_computed is None:
            self.num_misses += 1
            return
        self.num_hits += 1
        self.num_items += num_items
        self.num_padding += num_computed - num_items

    def to_dict(self) -> dict[str, float]:
        """Counts, and the share of padding in the computed items."""
        computed = self.num_items + self.num_padding
        return {
            "num_hits": self.num_hits,
            "num_misses": self.num_misses,
            "num_items": self.num_items,
            "num_padding": self.num_padding,
            "padding": self.num_padding / max(computed, 1),
        }


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Sizes of decode graphs in rows, ascending; the last is `max_rows`."""
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


class GraphPolicy:
    """Tracks captured graphs by last use, and counts misses.

    Parameters
    ----------
    max_rows
        Largest number of rows of a step.
    max_graphs
        Number of graphs that are kept; the least recently used one is freed for another.
    mixed
        Padding of mixed steps; None: they have no graphs.
    """

    def __init__(self, max_rows: int, max_graphs: int, mixed: MixedShapes | None = None):
        self._sizes = decode_sizes(max_rows)
        self._max_graphs = max_graphs
        self._mixed = mixed
        self._captured: OrderedDict[GraphKey, None] = OrderedDict()  # least recently used first
        self._wishes: Counter[GraphKey] = Counter()
        self._refused: set[GraphKey] = set()
        self.decodes = GraphUse()
        self.mixed = GraphUse()

    def first(self) -> list[GraphKey]:
        """Graphs to capture before serving, largest first."""
        largest = self._sizes[-1]
        sizes = [n for n in self._sizes if n == largest or n & (n - 1) == 0]
        decodes = [GraphKey(n, GraphPart.WHOLE) for n in sizes[::-1][: self._max_graphs]]
        mixed = [] if self._mixed is None else self._mixed.first()
        return mixed[: self._max_graphs - len(decodes)] + decodes

    @property
    def has_mixed(self) -> bool:
        """Whether mixed steps have graphs."""
        return self._mixed is not None

    def find(self, num_rows: int, part: GraphPart, *, is_adapted: bool = False) -> GraphKey | None:
        """Return the smallest captured graph for `num_rows` decoding rows.

        None if it has at least twice the rows of the smallest size that fits.
        """
        fitting = [size for size in self._sizes if size >= num_rows]
        wanted = GraphKey(fitting[0], part, is_adapted=is_adapted)
        limit = 2 * wanted.num_rows
        usable = (
            wanted._replace(num_rows=size)
            for size in fitting
            if size < limit or size == wanted.num_rows
        )
        key = self._take(wanted, usable)
        self.decodes.add(num_rows, None if key is None else key.num_rows)
        return key

    def find_mixed(
        self,
        num_rows: int,
        num_tokens: int,
        kv_len: int,
        part: GraphPart,
        *,
        is_adapted: bool = False,
    ) -> GraphKey | None:
        """Return the smallest graph that serves a mixed step (`MixedShapes.serves`), or None.

        Parameters
        ----------
        kv_len
            Cached tokens of the longest row, after this step.
        """
        mixed_shapes = self._mixed
        assert mixed_shapes is not None
        if num_tokens > mixed_shapes.max_graph_tokens:
            self.mixed.add(num_tokens, None)
            return None
        wanted = mixed_shapes.pad(num_rows, num_tokens, kv_len, part)
        wanted = wanted._replace(is_adapted=is_adapted)
        usable = sorted(
            (
                key
                for key in self._captured
                if (key.part, key.is_adapted) == (part, is_adapted)
                and mixed_shapes.serves(key, num_rows, num_tokens, kv_len)
            ),
            key=lambda key: (key.num_tokens, key.num_rows, key.kv_tokens),
        )
        key = self._take(wanted, usable)
        self.mixed.add(num_tokens, None if key is None else key.num_tokens)
        return key

    def _take(self, wanted: GraphKey, usable: Iterable[GraphKey]) -> GraphKey | None:
        """Return the first captured key of `usable` and mark it as used. Count a miss if it is not `wanted`."""
        key = next((key for key in usable if key in self._captured), None)
        if key != wanted and wanted not in self._refused:
            self._wishes[wanted] += 1
        if key is not None:
            self._captured.move_to_end(key)
        return key

    def wish(self) -> GraphKey | None:
        """Return the most often missed graph, if it was missed at least `LEAST_WISHES` times."""
        if not self._wishes:
            return None
        key, count = self._wishes.most_common(1)[0]
        return key if count >= LEAST_WISHES else None

    def victim(self) -> GraphKey | None:
        """Return the graph to free before another is captured, if the cache is full."""
        return next(iter(self._captured)) if len(self._captured) >= self._max_graphs else None

    def add(self, key: GraphKey) -> None:
        """Add a captured graph."""
        self._captured[key] = None
        del self._wishes[key]

    def remove(self, key: GraphKey) -> None:
        """Remove a freed graph."""
        del self._captured[key]

    def refuse(self, key: GraphKey) -> None:
        """Never propose a graph again, because its capture failed."""
        self._refused.add(key)
        del self._wishes[key]
