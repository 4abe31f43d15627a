"""Orders in which cached blocks are evicted when no free block is left.

| order | evicts first | suits |
|---|---|---|
| `lru` | the leaf of the chain released longest ago | prompts that are sent again soon |
| `most_recent` | the leaf of the chain released last | prompts sent again much later, output never reused |

A chain is the blocks of one sequence in order; its leaf is the last one. Both orders evict the leaf first, because a
block can only be found through the blocks before it. They rely on two facts. `BlockManager.release` receives the
blocks of a chain leaf first. The owner of a block also owns the full-attention blocks before it in its chain.

`FairLeastRecentlyUsed` is `lru` for several payers (the tenants of keys), so that a payer with many prompts cannot
evict the blocks of all others:

```
 payer   cached blocks, oldest first       evicted next
 a       a0 a1                             a0: every 16th time, as the oldest of all
 b       b0 b1 b2 b3 b4 b5                 b0: otherwise, because b has most blocks
```

Blocks of a sliding-window layer group that fall out of the window ("passed" blocks) are released alone, before the rest
of their chain. For `lru` they are therefore older than the rest. `most_recent` evicts them before all other blocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType


class LeastRecentlyUsed:
    """Evict the block that was released longest ago. Every operation is O(1).

    A block is released after the blocks behind it in its chain, so it is evicted after them.

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
        """Remove and return the block to evict."""
        return self._blocks.popitem(last=False)[0]

    def releasing(self, blocks: Iterable[int], passed: bool) -> Iterable[int]:
        """Observe the blocks of one `BlockManager.release`, and yield them."""
        return blocks

    def renew(self, blocks: Iterable[int]) -> None:
        """Forget the history of these blocks: they get new content."""


class MostRecentlyReleased:
    """Evict the leaf of the chain that was released last. Operations are O(log n) amortised.

    Releases are numbered. A release marks every block of its chain, including blocks that other requests still own,
    with the smallest number among the releases of that block and of the blocks behind it. A shared prefix therefore
    never has a higher number than its continuations, and it comes later among equal numbers. So it is evicted after
    all its continuations, regardless of the order in which its users end.

    Parameters
    ----------
    num_blocks
        Blocks are numbered 0 to num_blocks - 1.
    """

    _NEVER = 1 << 62

    def __init__(self, num_blocks: int):
        # [num_blocks] smallest release number of the block and of the blocks behind it in its chains
        self._release = [self._NEVER] * num_blocks
        # Cached block to its ticket. Tickets are unique; a heap entry with another ticket is out of date.
        self._ticket: dict[int, int] = {}
        # (-release, ticket, block)
        self._heap: list[tuple[int, int, int]] = []
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
        """Remove and return the block to evict."""
        while True:
            _, ticket, block = heapq.heappop(self._heap)
            if self._ticket.get(block) == ticket:
                del self._ticket[block]
                return block

    def releasing(self, blocks: Iterable[int], passed: bool) -> Iterable[int]:
        """Observe the blocks of one `BlockManager.release`, and yield them."""
        if passed:
            # Passed blocks are not marked: they keep `_NEVER`, the highest number, and are evicted first.
            yield from blocks
            return
        self._num_releases += 1
        least = self._num_releases
        for block in blocks:
            least = self._release[block] = min(least, self._release[block])
            yield block

    def renew(self, blocks: Iterable[int]) -> None:
        """Forget the history of these blocks: they get new content."""
        for block in blocks:
            self._release[block] = self._NEVER


class FairLeastRecentlyUsed:
    """Evict the oldest block of the payer with most cached blocks. Operations are O(1), `pop` O(log payers) amortised.

    So a payer loses blocks to others only while no payer has more than it. Every `_OLDEST_EVERY`th eviction takes the
    oldest block of all, so that a payer that has left loses its blocks too.

    Parameters
    ----------
    payer_of
        Returns who pays for a block with known content.
    """

    # So a payer loses all that it has after 16 times as many evictions, if it uses nothing meanwhile.
    _OLDEST_EVERY = 16

    def __init__(self, payer_of: Callable[[int], str]):
        self._payer_of = payer_of
        # Cached block to its payer; oldest first.
        self._blocks: OrderedDict[int, str] = OrderedDict()
        # The blocks of each payer that has some; oldest first.
        self._of_payer: dict[str, OrderedDict[int, None]] = {}
        # Payers whose number of blocks has changed since it was pushed on the heap.
        self._changed: set[str] = set()
        # (-number of blocks, payer). An entry with another number than the payer's is out of date.
        self._heap: list[tuple[int, str]] = []
        self._num_evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int) -> None:
        payer = self._payer_of(block)
        self._blocks[block] = payer
        self._changed.add(payer)
        own = self._of_payer.get(payer)
        if own is None:
            own = self._of_payer[payer] = OrderedDict()
        own[block] = None

    def remove(self, block: int) -> None:
        payer = self._blocks.pop(block)
        self._changed.add(payer)
        own = self._of_payer[payer]
        del own[block]
        if not own:
            del self._of_payer[payer]

    def pop(self) -> int:
        """Remove and return the block to evict."""
        self._num_evicted += 1
        takes_oldest = len(self._of_payer) == 1 or self._num_evicted % self._OLDEST_EVERY == 0
        block = next(iter(self._blocks if takes_oldest else self._of_payer[self._largest()]))
        self.remove(block)
        return block

    def _largest(self) -> str:
        """Return the payer with most blocks."""
        for payer in self._changed:
            heapq.heappush(self._heap, (-self._num_of(payer), payer))
        self._changed.clear()
        if len(self._heap) > 2 * len(self._of_payer) + 64:
            self._heap = [(-len(own), payer) for payer, own in self._of_payer.items()]
            heapq.heapify(self._heap)
        while -self._heap[0][0] != self._num_of(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def _num_of(self, payer: str) -> int:
        return len(self._of_payer.get(payer, ()))

    def releasing(self, blocks: Iterable[int], passed: bool) -> Iterable[int]:
        """Observe the blocks of one `BlockManager.release`, and yield them."""
        return blocks

    def renew(self, blocks: Iterable[int]) -> None:
        """Forget the history of these blocks: they get new content."""


EvictionOrder = LeastRecentlyUsed | MostRecentlyReleased | FairLeastRecentlyUsed

# Value of `EngineConfig.demotion_order` to its class, which is called with the number of blocks.
EVICTION_ORDERS: Mapping[str, Callable[[int], EvictionOrder]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "most_recent": MostRecentlyReleased}
)


def make_order(name: str, num_blocks: int, payer_of: Callable[[int], str] | None) -> EvictionOrder:
    """Make an eviction order by its name. `most_recent` is fair as it is: a flood evicts its own last blocks."""
    if name == "lru" and payer_of is not None:
        return FairLeastRecentlyUsed(payer_of)
    return EVICTION_ORDERS[name](num_blocks)
