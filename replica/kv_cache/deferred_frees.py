"""Hold blocks that are given back while a step is in flight (launched, not yet committed) until that step has run.

```
 plan N+1 ── launch ────────────────────────────────┐
 commit N: a row has ended and gives back blocks    │ step N+1 still reads and writes these blocks
 plan N+2: these blocks are not available           │
 commit N+1 ◀───────────────────────────────────────┘ these blocks become cached or free
```

Later work on the compute stream could reuse the blocks safely, because it runs after step N+1. A copy from the host
tier (KV blocks in host memory) runs on another stream and could overwrite them too early.

Until the step has run, the block manager counts held blocks as in use. A request that finds their content in the
prefix index may share them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.replica.kv_cache.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class _Held:
    # Number of the step that must run before the blocks are released.
    step: int
    blocks: list[int]
    # The blocks fell out of a sliding window (`BlockManager.release`).
    passed: bool


class DeferredFrees:
    """Hold blocks that are given back until the steps in flight have run.

    Parameters
    ----------
    blocks
        The block manager of the device.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        # Held blocks, in the order of the steps that they wait for.
        self._held: deque[_Held] = deque()
        # Number of the newest step in flight; None: no step is in flight.
        self._newest_step: int | None = None

    @property
    def num_references(self) -> int:
        """Number of references that are held. A block counts once for each request that gave it back."""
        return sum(len(held.blocks) for held in self._held)

    def launch(self, step: int) -> None:
        """Record that this step is in flight."""
        self._newest_step = step

    def give_back(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Release blocks: now if no step is in flight, else when the newest step in flight has run.

        Parameters
        ----------
        blocks
            Blocks of one sequence, last block first.
        passed
            The blocks fell out of a sliding window while their request runs on; they may have any order.
        """
        if self._newest_step is None:
            self._blocks.release(blocks, passed=passed)
        elif held := list(blocks):
            self._held.append(_Held(self._newest_step, held, passed))

    def land(self, step: int) -> bool:
        """Release the blocks that wait for this step or an earlier one. Returns whether there were any."""
        if self._newest_step is not None and self._newest_step <= step:
            self._newest_step = None
        released = False
        while self._held and self._held[0].step <= step:
            held = self._held.popleft()
            self._blocks.release(held.blocks, passed=held.passed)
            released = True
        return released

    def num_owners(self) -> np.ndarray:
        """Number of references that are held to each block, [num_blocks] int64."""
        blocks = [block for held in self._held for block in held.blocks]
        return np.bincount(np.array(blocks, np.int64), minlength=self._blocks.num_blocks)
