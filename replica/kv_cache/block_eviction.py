"""Which cached block is given up first, when the free ones have run out.

Both orders are leaf-first: a block goes before those that it continues, without which it could not be found. Both rest
on the same facts: `BlockManager.release` is given a chain leaf first, and whoever owns a block owns those of full
attention before it in its chain. The blocks of a sliding group that fell out of its window are released alone, before
the rest of their chain; so they are the older ones for `lru`, and `most_recent` gives them up before all others.

| order | the first to go | for |
|---|---|---|
| `lru` | the leaf of the chain released longest ago | prompts that come back |
| `most_recent` | the leaf of the chain released last | prompts of long ago that come back, output that does not |
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType


class LeastRecentlyUsed:
    """Cached blocks, the one released longest ago first. Every operation is O(1).

    A block is released after those that continue it, so it is the younger one and goes later.

    Parameters
    ----------
    num_blocks
        Blocks are numbered 0 to num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        """Take out the block that goes first."""
        return self._blocks.popitem(last=False)[0]

    def releasing(self, blocks: Iterable[int], passed: bool) -> Iterable[int]:
        """See the blocks that a release is about to give back; see `BlockManager.release`."""
        return blocks

    def renew(self, blocks: Iterable[int]) -> None:
        """These blocks get new content: what was known of them is void."""


class MostRecentlyReleased:
    """Cached blocks, the one of the chain released last first; of a chain the leaf. O(log n) amortised.

    Each release has a number, and every block of its chain, also one that others still own, is marked with the least
    number that it or a block behind it was released with. So a prefix that is shared never has a higher number than
    what continues it, and among equal ones it comes later: whichever of its users ends last, it goes after all of
    them.

    Parameters
    ----------
    num_blocks
        Blocks are numbered 0 to num_blocks - 1.
    """

    _NEVER = 1 << 62

    def __init__(self, num_blocks: int):
        # [num_blocks] of each block the least number of it and of what continues it
        self._release = [self._NEVER] * num_blocks
        self._ticket: dict[int, int] = {}  # of each cached block
        self._heap: list[tuple[int, int, int]] = []  # (-release, ticket, block)
        self._num_releases = 0
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, block: int) -> bool:
        return block in self._ticket

    def __iter__(self) -> Iterator[int]:
        return iter(self._ticket)

    def add(self, block: int) -> None:
        ticket, self._num_tickets = self._num_tickets, self._num_tickets + 1
        self._ticket[block] = ticket
        heapq.heappush(self._heap, (-self._release[block], ticket, block))

    def remove(self, block: int) -> None:
        del self._ticket[block]
        if len(self._heap) > 2 * len(self._ticket) + 64:
            self._heap = [entry for entry in self._heap if self._ticket.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        """Take out the block that goes first."""
        while True:
            _, ticket, block = heapq.heappop(self._heap)
            if self._ticket.get(block) == ticket:
                del self._ticket[block]
                return block

    def releasing(self, blocks: Iterable[int], passed: bool) -> Iterable[int]:
        """See the blocks that a release is about to give back; see `BlockManager.release`."""
        if passed:
            yield from blocks  # with the number that is higher than all
            return
        self._num_releases += 1
        least = self._num_releases
        for block in blocks:
            least = self._release[block] = min(least, self._release[block])
            yield block

    def renew(self, blocks: Iterable[int]) -> None:
        """These blocks get new content: what was known of them is void."""
        for block in blocks:
            self._release[block] = self._NEVER


EvictionOrder = LeastRecentlyUsed | MostRecentlyReleased

# By `EngineConfig.demotion_order`; made from the number of blocks.
EVICTION_ORDERS: Mapping[str, Callable[[int], EvictionOrder]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "most_recent": MostRecentlyReleased}
)
