"""Which steps have a graph: sizes, use, wishes. Policy only; `graph_cache.py` captures.

A step of n rows that decode runs in the graph of the next size, its other rows are padding::

    sizes           1 2 4 8 16 24 ... 64 80 ... 256 288 ... 512 576 ...     of which are captured
    at start        1 2 4 8 16    32 .. 64  128  256    512  ...  largest   powers of two, largest first
    when idle       those that steps would have taken, most often wished for first

So from the start a step finds a graph of less than twice its rows. Attention pads nothing: its kernels read how long
rows are from the device, so one graph serves all lengths.

Mixed steps have graphs only where `MixedShapes` are given, which also says for which steps; what the decodes leave of
the cache at start is filled with theirs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.graphs.mixed_shapes import MixedShapes

# Steps that would have run in a graph before it is captured: the pause for it, when nobody waits, must pay.
LEAST_WISHES = 8


@dataclass(slots=True)
class GraphUse:
    """How steps of one kind fared; items are rows, of mixed steps tokens."""

    num_hits: int = 0  # steps that found a graph
    num_misses: int = 0
    num_items: int = 0  # of the steps that found one
    num_padding: int = 0  # items that they computed beside those

    def add(self, num_items: int, num_computed: int | None) -> None:
        """A step; None: it found no graph."""
        if num_computed is None:
            self.num_misses += 1
            return
        self.num_hits += 1
        self.num_items += num_items
        self.num_padding += num_computed - num_items

    def to_dict(self) -> dict[str, float]:
        """Counts, and the share of padding in what was computed."""
        computed = self.num_items + self.num_padding
        return {
            "num_hits": self.num_hits,
            "num_misses": self.num_misses,
            "num_items": self.num_items,
            "num_padding": self.num_padding,
            "padding": self.num_padding / max(computed, 1),
        }


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


class GraphPolicy:
    """Knows what is captured, by how lately it was used, and what should be.

    Parameters
    ----------
    max_rows
        Of a step.
    max_graphs
        That are kept; the one used longest ago gives way to another.
    mixed
        How mixed steps are padded; None: they have no graphs.
    """

    def __init__(self, max_rows: int, max_graphs: int, mixed: MixedShapes | None = None):
        self._sizes = decode_sizes(max_rows)
        self._max_graphs = max_graphs
        self._mixed = mixed
        self._captured: OrderedDict[GraphKey, None] = OrderedDict()  # used longest ago first
        self._wishes: Counter[GraphKey] = Counter()
        self._refused: set[GraphKey] = set()
        self.decodes = GraphUse()
        self.mixed = GraphUse()

    def first(self) -> list[GraphKey]:
        """What to capture before serving, largest first."""
        largest = self._sizes[-1]
        sizes = [n for n in self._sizes if n == largest or n & (n - 1) == 0]
        decodes = [GraphKey(n, GraphPart.WHOLE) for n in sizes[::-1][: self._max_graphs]]
        mixed = [] if self._mixed is None else self._mixed.first()
        return mixed[: self._max_graphs - len(decodes)] + decodes

    @property
    def has_mixed(self) -> bool:
        """Whether mixed steps have graphs."""
        return self._mixed is not None

    def find(self, num_rows: int, part: GraphPart) -> GraphKey | None:
        """The graph for a step in which every row decodes: less than twice too large, or none."""
        fitting = [size for size in self._sizes if size >= num_rows]
        wanted = GraphKey(fitting[0], part)
        limit = 2 * wanted.num_rows
        usable = (
            GraphKey(size, part) for size in fitting if size < limit or size == wanted.num_rows
        )
        key = self._take(wanted, usable)
        self.decodes.add(num_rows, None if key is None else key.num_rows)
        return key

    def find_mixed(
        self, num_rows: int, num_tokens: int, kv_len: int, part: GraphPart
    ) -> GraphKey | None:
        """The smallest graph that `MixedShapes` has serve a mixed step, or none.

        Parameters
        ----------
        kv_len
            Tokens in the cache of the longest row.
        """
        mixed_shapes = self._mixed
        assert mixed_shapes is not None
        if num_tokens > mixed_shapes.max_graph_tokens:
            self.mixed.add(num_tokens, None)
            return None
        wanted = mixed_shapes.pad(num_rows, num_tokens, kv_len, part)
        usable = sorted(
            (
                key
                for key in self._captured
                if key.part is part and mixed_shapes.serves(key, num_rows, num_tokens, kv_len)
            ),
            key=lambda key: (key.num_tokens, key.num_rows, key.kv_tokens),
        )
        key = self._take(wanted, usable)
        self.mixed.add(num_tokens, None if key is None else key.num_tokens)
        return key

    def _take(self, wanted: GraphKey, usable: Iterable[GraphKey]) -> GraphKey | None:
        """The first of these that is captured, which is in use now."""
        key = next((key for key in usable if key in self._captured), None)
        if key != wanted and wanted not in self._refused:
            self._wishes[wanted] += 1
        if key is not None:
            self._captured.move_to_end(key)
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
