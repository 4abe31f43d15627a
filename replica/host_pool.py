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
import resource
import time
from collections import deque

import numpy as np
import torch

from quire.replica.device import CpuDevice, Device, Event, Stream
from quire.replica.kv_pool import KVPool
from quire.replica.sizing import SizingError


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

    Raises
    ------
    SizingError
        So much memory cannot be pinned.
    """

    def __init__(self, num_blocks: int, pool: KVPool, device: Device | None = None):
        self.num_blocks = num_blocks
        self._pool = pool
        self._device = CpuDevice() if device is None else device
        self._restoring: Event | None = None  # what the step launched last need not read
        self._timed: deque[tuple[int, Event, Event]] = deque()  # blocks, begin, end
        self._measured: list[tuple[int, float]] = []
        self.num_saved = 0  # blocks
        self.num_restored = 0  # blocks, as far as they were measured
        self.restore_s = 0.0
        shape, dtype = (num_blocks, pool.data.shape[1]), pool.data.dtype
        if pool.data.device.type != "cpu" or num_blocks == 0:
            self.data = self._pinned(shape, dtype)
        else:
            memory = mmap.mmap(-1, shape[0] * shape[1] * dtype.itemsize)
            self.data = torch.frombuffer(memory, dtype=dtype).view(shape)

    def _pinned(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._device.pinned(shape, dtype)
        except RuntimeError as error:
            num_bytes = shape[0] * shape[1] * dtype.itemsize
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
            raise SizingError(
                f"cpu_offload_gib: {num_bytes} bytes of the host's memory cannot be pinned; the process may lock "
                f"{limit} (ulimit -l): {error}"
            ) from error

    def move(self, saves: np.ndarray, restores: np.ndarray, *, used_now: bool = True) -> None:
        """Copy whole blocks between the tiers, first the saves.

        What is queued on the compute stream from now on runs after the saves: it may write the blocks that were saved.
        It runs after the restores too, if it is to read them; else what is queued after the next call does::

            offload   [ saves ][ restores ........................ ]
            compute   step N ]─┴▸[ N + 1, which does not read them ]─┴▸[ N + 2, which does

        No step in flight writes the blocks that are saved, or uses those that are restored, because blocks that are
        given back stay in quarantine until such a step is over.

        Parameters
        ----------
        saves
            [k, 2] integers, (device block, host block).
        restores
            [k, 2] integers, (host block, device block).
        used_now
            Whether the step that comes next reads what is restored.
        """
        device, tier, pool = self._device, self.data, self._pool.data
        if self._restoring is not None:
            device.wait(Stream.COMPUTE, self._restoring)
            self._restoring = None
        if len(saves):
            self.num_saved += len(saves)
            for block, host_block in saves.tolist():
                device.copy(Stream.OFFLOAD, tier[host_block], pool[block], "save")
            device.wait(Stream.COMPUTE, device.record(Stream.OFFLOAD, "blocks saved"))
        if not len(restores):
            return
        began_s = time.perf_counter()
        begun = device.record(Stream.OFFLOAD, "restore begins", timed=True)
        for host_block, block in restores.tolist():
            device.copy(Stream.OFFLOAD, pool[block], tier[host_block], "restore")
        name = "blocks restored" if used_now else "blocks restored ahead"
        ended = device.record(Stream.OFFLOAD, name, timed=True)
        if device.is_immediate:
            self._measured.append((len(restores), time.perf_counter() - began_s))
        else:
            self._timed.append((len(restores), begun, ended))
        if used_now:
            device.wait(Stream.COMPUTE, ended)
        else:
            self._restoring = ended

    def take_measured(self) -> tuple[tuple[int, float], ...]:
        """(blocks, seconds) of the restores that have ended since the last call."""
        while self._timed and self._timed[0][2].is_done():
            count, begun, ended = self._timed.popleft()
            self._measured.append((count, self._device.seconds_between(begun, ended)))
        measured, self._measured = tuple(self._measured), []
        self.num_restored += sum(count for count, _ in measured)
        self.restore_s += sum(seconds for _, seconds in measured)
        return measured

    def telemetry(self) -> dict[str, float]:
        """Blocks copied since the start, and how fast those were that have ended."""
        block_bytes = self._pool.data[0].nbytes
        return {
            "num_saved": self.num_saved,
            "num_restored": self.num_restored,
            "block_bytes": block_bytes,
            "restore_s": self.restore_s,
            "restore_gb_per_s": 1e-9 * self.num_restored * block_bytes / max(self.restore_s, 1e-12),
        }

    def poison(self) -> None:
        """Fill everything with NaN: a test's proof that nothing unwritten is ever restored."""
        self.data.fill_(float("nan"))
