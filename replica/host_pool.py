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

from quire.replica.device import CpuDevice, Device, Stream
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
    device
        Whose offload stream copies; the CPU by default.
    """

    def __init__(self, num_blocks: int, pool: KVPool, device: Device | None = None):
        self.num_blocks = num_blocks
        self._pool = pool
        self._device = CpuDevice() if device is None else device
        shape, dtype = (num_blocks, pool.data.shape[1]), pool.data.dtype
        if pool.data.device.type != "cpu" or num_blocks == 0:
            self.data = self._device.pinned(shape, dtype)
        else:
            memory = mmap.mmap(-1, shape[0] * shape[1] * dtype.itemsize)
            self.data = torch.frombuffer(memory, dtype=dtype).view(shape)

    def move(self, saves: np.ndarray, restores: np.ndarray) -> None:
        """Copy whole blocks between the tiers, first the saves; what is queued on the compute stream from now on
        runs after that.

        Nothing is waited for here: no step in flight writes the blocks that are saved, or uses those that are
        restored, because blocks that are given back stay in quarantine until such a step is over.

        Parameters
        ----------
        saves
            [k, 2] integers, (device block, host block).
        restores
            [k, 2] integers, (host block, device block).
        """
        if not len(saves) and not len(restores):
            return
        device, tier, pool = self._device, self.data, self._pool.data
        for block, host_block in saves.tolist():
            device.copy(Stream.OFFLOAD, tier[host_block], pool[block], "save")
        for host_block, block in restores.tolist():
            device.copy(Stream.OFFLOAD, pool[block], tier[host_block], "restore")
        device.wait(Stream.COMPUTE, device.record(Stream.OFFLOAD, "blocks moved"))

    def poison(self) -> None:
        """Fill everything with NaN: a test's proof that nothing unwritten is ever restored."""
        self.data.fill_(float("nan"))
