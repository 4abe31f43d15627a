"""Blocks that were given back while a step was in flight: nobody gets them before that step has run.

```
 plan N+1 ── launch ─────────────────────┐
 commit N: a row has ended, its blocks   │ N+1 still reads and writes them, in the order of the compute stream;
 plan N+2: they are not available        │ a copy from the host tier would not wait for it
 commit N+1 ◀────────────────────────────┘ they are cached or free
```

The step in flight is their owner until then: to the block manager they are in use, and whoever finds their content in
the prefix index may share them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.replica.kv_cache.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class _Held:
    step: int
    blocks: list[int]
    passed: bool


class DeferredFrees:
    """Holds blocks for the steps in flight.

    Parameters
    ----------
    blocks
        Of the device's tier.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._held: deque[_Held] = deque()  # by step

    @property
    def num_references(self) -> int:
        """References held; a block may have been given back by several requests."""
        return sum(len(held.blocks) for held in self._held)

    def give_back(self, blocks: Iterable[int], step: int | None, *, passed: bool = False) -> None:
        """Release blocks once a step has run.

        Parameters
        ----------
        blocks, passed
            As of `BlockManager.release`.
        step
            The newest step in flight; None: there is none, they are released now.
        """
        if step is None:
            self._blocks.release(blocks, passed=passed)
        elif held := list(blocks):
            self._held.append(_Held(step, held, passed))

    def land(self, step: int) -> bool:
        """This step and those before it have run; returns whether that released anything."""
        released = False
        while self._held and self._held[0].step <= step:
            held = self._held.popleft()
            self._blocks.release(held.blocks, passed=held.passed)
            released = True
        return released

    def num_owners(self) -> np.ndarray:
        """[num_blocks] int64, how often each block is held."""
        blocks = [block for held in self._held for block in held.blocks]
        return np.bincount(np.array(blocks, np.int64), minlength=self._blocks.num_blocks)
