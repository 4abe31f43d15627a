"""Blocks that are given back while a step is in flight: they are not reused before that step has run.

```
 plan N+1 ── launch ─────────────────────┐
 commit N: a row has ended, its blocks   │ N+1 still reads and writes them, in the order of the compute stream;
 plan N+2: they are not available        │ a copy from the host tier would not wait for it
 commit N+1 ◀────────────────────────────┘ they are cached or free
```

Until then the step in flight owns them. For the block manager they are in use, and a request that finds their content
in the prefix index may share them.
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
    """Keep blocks that are given back until the steps in flight have run.

    Parameters
    ----------
    blocks
        The block manager of the device.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        # In the order of their steps.
        self._held: deque[_Held] = deque()
        # Number of the newest step in flight; None: no step is in flight.
        self._newest_step: int | None = None

    @property
    def num_references(self) -> int:
        """References held; a block may have been given back by several requests."""
        return sum(len(held.blocks) for held in self._held)

    def launch(self, step: int) -> None:
        """Count this step as in flight."""
        self._newest_step = step

    def give_back(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Release blocks: now if no step is in flight, else when the newest step in flight has run.

        Parameters
        ----------
        blocks, passed
            See `BlockManager.release`.
        """
        if self._newest_step is None:
            self._blocks.release(blocks, passed=passed)
        elif held := list(blocks):
            self._held.append(_Held(self._newest_step, held, passed))

    def land(self, step: int) -> bool:
        """Release what waits for this step and those before it; returns whether that was anything."""
        if self._newest_step is not None and self._newest_step <= step:
            self._newest_step = None
        released = False
        while self._held and self._held[0].step <= step:
            held = self._held.popleft()
            self._blocks.release(held.blocks, passed=held.passed)
            released = True
        return released

    def num_owners(self) -> np.ndarray:
        """[num_blocks] int64, how many times each block is held."""
        blocks = [block for held in self._held for block in held.blocks]
        return np.bincount(np.array(blocks, np.int64), minlength=self._blocks.num_blocks)
