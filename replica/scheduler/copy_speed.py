"""Whether blocks in the host tier are copied back or computed again: what is faster, by what was measured.

```
 seconds    copy back   ___....----      linear in the blocks: one number, the best of the last copies
            compute     ____........     attention makes later tokens dearer: `StepSpeed.prefill_s`
```

A copy that had to wait for others says nothing about bandwidth, so the fastest of the last few counts, once there are
some. While blocks are computed again no copy is measured; the estimate shrinks with every such choice, until one is
tried again.
"""

from __future__ import annotations

from collections import deque

from quire.replica.scheduler.speed import StepSpeed

_NUM_MEASURED = 8
_LEAST_MEASURED = 4
_DOUBT = 0.9  # factor of the estimate for each choice against copying


class CopySpeed:
    """Chooses; owns the measurements of copies to the device.

    Parameters
    ----------
    speed
        Of prefill.
    always_copies
        Whatever is measured.
    """

    def __init__(self, speed: StepSpeed, *, always_copies: bool = False):
        self._speed = speed
        self._always_copies = always_copies
        self._measured: deque[float] = deque(maxlen=_NUM_MEASURED)  # seconds of a block
        self.num_copied = 0  # choices
        self.num_computed = 0

    @property
    def block_s(self) -> float:
        """Seconds of a block; 0 = not yet known."""
        return min(self._measured) if len(self._measured) >= _LEAST_MEASURED else 0.0

    def observe(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied in one run."""
        self._measured.append(seconds / num_blocks)

    def prefers_copy(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        """Whether to copy blocks back; while something is not known yet, yes.

        Parameters
        ----------
        num_blocks
            To copy.
        start, num_tokens
            What must be computed otherwise: so many tokens at positions from `start` on.
        """
        compute_s = self._speed.prefill_s(start, num_tokens)
        copies = self._always_copies or not compute_s or num_blocks * self.block_s <= compute_s
        if copies:
            self.num_copied += 1
        else:
            self.num_computed += 1
            self._measured = deque((s * _DOUBT for s in self._measured), _NUM_MEASURED)
        return copies
