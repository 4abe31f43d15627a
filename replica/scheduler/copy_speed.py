"""The choice between copying blocks back from the host tier and computing them again, by measured speeds.

```
 seconds    copy back   ___....----      linear in the blocks: the best of the last copies
            compute     ____........     attention makes later tokens slower: `StepSpeed.prefill_s`
```

A copy that had to wait for other copies does not show the bandwidth, so the fastest of the last few copies counts.
While blocks are computed again, no copy is measured. So each such choice lowers the estimate, until a copy is tried
again.
"""

from __future__ import annotations

from collections import deque

from quire.replica.scheduler.speed import StepSpeed

_NUM_MEASURED = 8
_LEAST_MEASURED = 4
# Factor of the estimate for each choice against copying.
_DOUBT = 0.9


class CopySpeed:
    """Measure copies to the device, and choose between copying and computing.

    Parameters
    ----------
    speed
        The measured speed of prefill.
    always_copies
        Choose to copy regardless of the measurements.
    """

    def __init__(self, speed: StepSpeed, *, always_copies: bool = False):
        self._speed = speed
        self._always_copies = always_copies
        # Seconds per block of the last copies.
        self._measured: deque[float] = deque(maxlen=_NUM_MEASURED)
        # Choices for copying and for computing.
        self.num_copied = 0
        self.num_computed = 0

    @property
    def block_s(self) -> float:
        """Seconds to copy a block; 0: not known yet."""
        return min(self._measured) if len(self._measured) >= _LEAST_MEASURED else 0.0

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Measure a copy of `num_blocks` blocks."""
        self._measured.append(seconds / num_blocks)

    def prefers_copy(self, num_blocks: int, start: int, num_tokens: int) -> bool:
        """Whether to copy blocks back; true while a speed is not known.

        Parameters
        ----------
        num_blocks
            Blocks to copy.
        start, num_tokens
            Otherwise `num_tokens` tokens, which begin at position `start`, must be computed.
        """
        compute_s = self._speed.prefill_s(start, num_tokens)
        copies = self._always_copies or not compute_s or num_blocks * self.block_s <= compute_s
        if copies:
            self.num_copied += 1
        else:
            self.num_computed += 1
            self._measured = deque((s * _DOUBT for s in self._measured), _NUM_MEASURED)
        return copies
