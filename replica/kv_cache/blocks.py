"""Ownership of the blocks of one tier of the KV cache.

```
            allocate                     release (last owner)
   free ───────────────▶ in use ────────────────────────────────▶ free     content unknown
    ▲                      ▲  │
    │ evict                │  │ release (last owner), content known
    │ (leaf first)         │  ▼
    └─────────────────── cached
                    add_owner
```

Always free + cached + in use = total. A cached block has no owner, but the prefix index knows its content, so a later
request may take it. A cached block is evicted only when no free block is left. Some cached blocks are retained
(`retention.py`): they are evicted only when no other cached block is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.replica.kv_cache.block_eviction import EvictionOrder, LeastRecentlyUsed, make_order


class IntegrityError(AssertionError):
    """Records of the engine contradict each other: a defect of the engine, never of a request."""


class Occupancy(NamedTuple):
    """Blocks of a tier that are free, cached, and retained among these; and all of its blocks."""

    free: int
    cached: int
    retained: int
    total: int


class BlockManager:
    """Reference counts of a tier's blocks, and its free and cached blocks.

    Operations are O(1) per block, except that the order `most_recent` needs O(log n) for cached blocks. A chain is the
    blocks of one sequence in order; its leaf is the last one. `release` receives a request's blocks leaf first, and a
    block never has more owners than the block before it in its chain. So every eviction order evicts a cached block
    before the blocks that precede it in its chain.

    Parameters
    ----------
    num_blocks
        Blocks are numbered 0 to num_blocks - 1; 0 blocks turn a tier off.
    on_evict
        Called with each block before it is evicted.
    order
        Eviction order of cached blocks: `lru` or `most_recent` (`block_eviction.py`).
    payer_of
        Returns who pays for a block with known content, so that `lru` is fair to payers. None: one pays for all.
    max_retained
        Maximum number of cached blocks that are retained. Beyond it, the block retained longest becomes an ordinary
        cached block.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None],
        order: str = "lru",
        payer_of: Callable[[int], str] | None = None,
        *,
        max_retained: int = 0,
    ):
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be >= 0, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.num_evictions = 0
        self._ref_count = [0] * num_blocks
        # 1: the prefix index knows the block's content.
        self._has_content = bytearray(num_blocks)
        # A stack: the block that was freed last is allocated first.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Cached blocks that are not retained.
        self._ordinary = make_order(order, num_blocks, payer_of)
        # 1: the block is retained. While it has owners, this takes effect when the last one releases it.
        self._is_retained = bytearray(num_blocks)
        # Cached blocks that are retained.
        self._retained = LeastRecentlyUsed(num_blocks)
        self.max_retained = max_retained

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._ordinary) + len(self._retained)

    @property
    def num_retained(self) -> int:
        """Number of cached blocks that are retained."""
        return len(self._retained)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return: free and cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    def occupancy(self) -> Occupancy:
        return Occupancy(self.num_free, self.num_cached, self.num_retained, self.num_blocks)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self, count: int, *, may_evict_retained: bool = True) -> list[int] | None:
        """Take `count` blocks, each with one owner and unknown content. If too few are available, return None."""
        spared = 0 if may_evict_retained else self.num_retained
        if count > self.num_available - spared:
            return None
        while len(self._free) < count:
            block = (self._ordinary if len(self._ordinary) else self._retained).pop()
            self._evict(block)
            self._free.append(block)
            self.num_evictions += 1
        split = len(self._free) - count
        # As popped one by one: fresh blocks ascend, as the slots of the node's pool do. Runs of both are one copy.
        blocks = self._free[split:][::-1]
        del self._free[split:]
        for block in blocks:
            self._ref_count[block] = 1
        self._ordinary.renew(blocks)
        return blocks

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that are available now and would not be after `add_owner`."""
        return sum(self._ref_count[block] == 0 for block in blocks)

    def add_owner(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these blocks, which must be in use or cached."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._order_of(block).remove(block)
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Remove an owner from each of these blocks.

        Parameters
        ----------
        blocks
            Blocks of one chain, leaf first.
        passed
            The blocks belong to sliding-window layer groups and fell out of the window; they may have any order.
        """
        for block in self._ordinary.releasing(blocks, passed):
            owners = self._ref_count[block] - 1
            if owners < 0:
                raise IntegrityError(f"block {block} is released more often than it was taken")
            self._ref_count[block] = owners
            if owners == 0:
                if self._has_content[block]:
                    self._add_cached(block)
                else:
                    self._free.append(block)

    def touch(self, block: int) -> None:
        """Treat a cached block as just used, so that `lru` evicts it later. No effect if it is not cached."""
        order = self._order_of(block)
        if block in order:
            order.remove(block)
            order.add(block)

    def retain(self, blocks: Iterable[int]) -> None:
        """Evict these blocks after all that are not retained, until `end_retention`. Their content is known.

        Blocks of one chain are given leaf first, up to the chain's first block. So a retained block is evicted before
        the blocks that precede it, as other cached blocks are. No effect if no block may be retained.
        """
        if not self.max_retained:
            return
        for block in blocks:
            if self._ref_count[block] == 0:
                self._order_of(block).remove(block)
                self._is_retained[block] = 1
                self._add_cached(block)
            else:
                self._is_retained[block] = 1

    def end_retention(self, blocks: Iterable[int]) -> None:
        """Make retained blocks ordinary ones. Blocks of one chain are given leaf first."""
        for block in blocks:
            if self._is_retained[block]:
                self._is_retained[block] = 0
                if self._ref_count[block] == 0:
                    self._retained.remove(block)
                    self._ordinary.add(block)

    def _order_of(self, block: int) -> EvictionOrder:
        return self._retained if self._is_retained[block] else self._ordinary

    def _add_cached(self, block: int) -> None:
        """Add a block without owners to its eviction order."""
        self._order_of(block).add(block)
        if len(self._retained) > self.max_retained:
            self.end_retention([next(iter(self._retained))])

    def mark_contents(self, blocks: Iterable[int]) -> None:
        """Record that the prefix index knows the content of these blocks."""
        for block in blocks:
            self._has_content[block] = 1

    def forget_content(self, block: int) -> None:
        """Record that the prefix index has dropped this block; a cached block becomes free."""
        self._has_content[block] = 0
        order = self._order_of(block)
        self._is_retained[block] = 0
        if block in order:
            order.remove(block)
            self._free.append(block)

    def _evict(self, block: int) -> None:
        self._on_evict(block)
        self._has_content[block] = 0
        self._is_retained[block] = 0

    def is_retained(self, block: int) -> bool:
        """Whether the block is retained, or will be when its last owner releases it."""
        return bool(self._is_retained[block])

    def has_content(self, block: int) -> bool:
        return bool(self._has_content[block])

    def snapshot(self) -> dict[str, int]:
        """The number of blocks in each state; `retained` ones are a part of the `cached` ones."""
        return {
            "free": self.num_free,
            "cached": self.num_cached,
            "retained": self.num_retained,
            "in_use": self.num_in_use,
            "total": self.num_blocks,
        }

    def check(self, owners: Iterable[int], is_indexed: Callable[[int], bool] | None = None) -> None:
        """Raise `IntegrityError` unless each block is in exactly one state and its reference count is right.

        Parameters
        ----------
        owners
            [num_blocks] number of owners of each block, counted by the caller independently of this class.
        is_indexed
            Returns whether the prefix index knows a block; it must agree with `has_content`.
        """
        free, retained = set(self._free), set(self._retained)
        cached = retained.union(self._ordinary)
        if len(cached) != self.num_cached or len(retained) > self.max_retained:
            raise IntegrityError(
                f"{len(retained)} cached blocks are retained, at most {self.max_retained} may be, or one is cached "
                "twice"
            )
        if len(free) != len(self._free) or free & cached:
            raise IntegrityError("a block is in the free pool twice, or free and cached at once")
        for block, count in enumerate(owners):
            if count != self._ref_count[block]:
                raise IntegrityError(
                    f"block {block} has {count} owners and a reference count of {self._ref_count[block]}"
                )
            pooled = block in free or block in cached
            if pooled == (count > 0):
                raise IntegrityError(f"block {block} has {count} owners; in a pool: {pooled}")
            if pooled and self.has_content(block) != (block in cached):
                raise IntegrityError(f"block {block} is in the wrong pool for its content")
            if block in cached and self.is_retained(block) != (block in retained):
                raise IntegrityError(f"block {block} is in the wrong eviction order")
            if self.is_retained(block) and not self.has_content(block):
                raise IntegrityError(f"block {block} is retained without known content")
            if is_indexed is not None and is_indexed(block) != self.has_content(block):
                raise IntegrityError(f"block {block}: pool and prefix index disagree")
