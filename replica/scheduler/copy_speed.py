"""The choice between copying blocks back from the host tier (host memory) and computing them again.

The estimates of both times come from measured speeds:

```
 seconds    copy back   ___....----      linear in the number of blocks, at the speed of the fastest recent copy
            compute     ____........     attention makes later tokens slower: `StepSpeed.prefill_s`
```

A copy that had to wait for other copies does not show the bandwidth, so the fastest of the last few copies counts. A
choice to compute yields no new measurement of a copy. So each such choice lowers the estimated time of a copy a little,
until a copy is tried again.
"""

from __future__ import annotations

from collections import deque

from quire.replica.scheduler.speed import StepSpeed

_NUM_MEASURED = 8
_LEAST_MEASURED = 4
# Each choice to compute multiplies the estimated time of a copy by this factor.
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
        # Number of choices to copy, and number of choices to compute.
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
        """Choose: true to copy the blocks back, false to compute them. True while a speed is not known.

        Parameters
        ----------
        num_blocks
            Number of blocks to copy.
        start, num_tokens
            The tokens to compute instead: `num_tokens` tokens from position `start`.
        """
        compute_s = self._speed.prefill_s(start, num_tokens)
        copies = self._always_copies or not compute_s or num_blocks * self.block_s <= compute_s
        if copies:
            self.num_copied += 1
        else:
            self.num_computed += 1
            self._measured = deque((s * _DOUBT for s in self._measured), _NUM_MEASURED)
        return copies
