"""Who owns each block of one tier of the KV cache.

```
            allocate                     release (last owner)
   free ───────────────▶ in use ────────────────────────────────▶ free     content unknown
    ▲                      ▲  │
    │ evict                │  │ release (last owner), content known
    │ (leaf first)         │  ▼
    └─────────────────── cached
                     retain
```

free + cached + in use = total, always. A cached block has no owner but its content is in the prefix index, so
a later request may take it; it is evicted only when the free blocks have run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.replica.kv_cache.block_eviction import EVICTION_ORDERS


class IntegrityError(AssertionError):
    """Bookkeeping that contradicts itself: a defect of the engine, never of a request."""


class BlockManager:
    """Reference counts and the two pools of blocks without an owner. Every operation is O(1) per block.

    `release` takes a request's blocks leaf first, and a block never has more owners than the block before it in
    its chain; so in either order of `block_eviction.py` a cached block is evicted before the blocks that it continues.

    Parameters
    ----------
    num_blocks
        Blocks are numbered 0 to num_blocks - 1; a tier that is off has none.
    on_evict
        Called with each block whose content is about to be evicted.
    order
        One of `block_eviction.EVICTION_ORDERS`.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None], order: str = "lru"):
        if num_blocks < 0:
            raise ValueError(f"num_blocks must be >= 0, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.num_evictions = 0  # blocks that `allocate` has evicted
        self._ref_count = [0] * num_blocks
        self._has_content = bytearray(num_blocks)  # 1: registered in the prefix index
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: warm memory first
        self._cached = EVICTION_ORDERS[order](num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of unknown content with one owner each, or None and nothing changed."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            block = self._cached.pop()
            self._evict(block)
            self._free.append(block)
            self.num_evictions += 1
        split = len(self._free) - count
        blocks = self._free[split:]
        del self._free[split:]
        for block in blocks:
            self._ref_count[block] = 1
        self._cached.renew(blocks)
        return blocks

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of these are cached: `retain` takes them out of what is available."""
        return sum(self._ref_count[block] == 0 for block in blocks)

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these blocks, whose content is known."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._cached.remove(block)
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """One owner fewer for each of these blocks.

        Parameters
        ----------
        blocks
            Of one chain, leaf first.
        passed
            They are blocks of sliding groups instead that fell out of their windows, in any order.
        """
        for block in self._cached.releasing(blocks, passed):
            owners = self._ref_count[block] - 1
            if owners < 0:
                raise IntegrityError(f"block {block} is released more often than it was taken")
            self._ref_count[block] = owners
            if owners == 0:
                if self._has_content[block]:
                    self._cached.add(block)
                else:
                    self._free.append(block)

    def touch(self, block: int) -> None:
        """This block, whose content is known, counts as used now."""
        if block in self._cached:
            self._cached.remove(block)
            self._cached.add(block)

    def mark_contents(self, blocks: Iterable[int]) -> None:
        """The prefix index knows the content of these blocks from now on."""
        for block in blocks:
            self._has_content[block] = 1

    def forget_content(self, block: int) -> None:
        """The prefix index has dropped this block: without an owner it becomes free."""
        self._has_content[block] = 0
        if block in self._cached:
            self._cached.remove(block)
            self._free.append(block)

    def _evict(self, block: int) -> None:
        self._on_evict(block)
        self._has_content[block] = 0

    def has_content(self, block: int) -> bool:
        return bool(self._has_content[block])

    def snapshot(self) -> dict[str, int]:
        """The pools' sizes as plain data."""
        return {
            "free": self.num_free,
            "cached": self.num_cached,
            "in_use": self.num_in_use,
            "total": self.num_blocks,
        }

    def check(self, owners: Iterable[int], is_indexed: Callable[[int], bool] | None = None) -> None:
        """Raise `IntegrityError` unless the pools partition the blocks and the counts are right.

        Parameters
        ----------
        owners
            [num_blocks] owners of each block, found by walking the tables of the live requests.
        is_indexed
            Whether the prefix index has a block: must agree with what the manager was told.
        """
        free, cached = set(self._free), set(self._cached)
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
            if is_indexed is not None and is_indexed(block) != self.has_content(block):
                raise IntegrityError(f"block {block}: pool and prefix index disagree")
