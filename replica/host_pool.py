"""The host tier's memory: blocks copied from the device's KV pool, and back.

```
 KVPool.data    [num_blocks + 1, elements of a block]     on the device
      save │ ▲ restore                                    one contiguous copy per block, all layers of its group
           ▼ │
 HostPool.data  [num_host_blocks, elements of a block]    in the host's memory, pinned beside a GPU
```

On the CPU "the host" is the same memory a second time: what is there needs no recomputing, but is outside the pool
that steps read.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

from quire.replica.kv_pool import KVPool


class HostPool:
    """Owns the host tier's memory; who may use which block is `HostTier`'s affair.

    Allocated once. Beside a CPU pool the memory is an anonymous mapping, whose pages are backed when they are first
    written; beside a GPU it is pinned, so that a copy is one DMA.

    Parameters
    ----------
    num_blocks
        Blocks of the tier; 0 = none.
    pool
        The device's pool, with which blocks are exchanged.
    """

    def __init__(self, num_blocks: int, pool: KVPool):
        self.num_blocks = num_blocks
        self._pool = pool
        device = pool.data
        shape = (num_blocks, device.shape[1])
        if device.is_cuda or num_blocks == 0:
            self.data = torch.empty(shape, dtype=device.dtype, pin_memory=device.is_cuda)
        else:
            memory = mmap.mmap(-1, shape[0] * shape[1] * device.dtype.itemsize)
            self.data = torch.frombuffer(memory, dtype=device.dtype).view(shape)

    def save(self, pairs: np.ndarray) -> None:
        """Copy blocks of the device here.

        Parameters
        ----------
        pairs
            [k, 2] integers, (device block, host block); in the order of the device's current stream.
        """
        for block, host_block in pairs.tolist():
            self.data[host_block].copy_(self._pool.data[block], non_blocking=True)

    def restore(self, pairs: np.ndarray) -> None:
        """Copy blocks from here to the device.

        Parameters
        ----------
        pairs
            [k, 2] integers, (host block, device block); in the order of the device's current stream.
        """
        for host_block, block in pairs.tolist():
            self._pool.data[block].copy_(self.data[host_block], non_blocking=True)

    def poison(self) -> None:
        """Fill everything with NaN: a test's proof that nothing unwritten is ever restored."""
        self.data.fill_(float("nan"))
