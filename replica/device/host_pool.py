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

from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from quire.replica.config import SizingError
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Device, Event, Stream
from quire.replica.device.kv_pool import KVPool

NONE = np.empty((0, 2), np.int64)
NONE.setflags(write=False)
# Saved under one event. A step that needs a block of it waits for at most so much: a millisecond of a PCIe 4 link.
_PIECE_BYTES = 32 << 20


class _Restore(NamedTuple):
    """Copies of one step to the device, under way."""

    step: int
    num_blocks: int
    begun: Event
    ended: Event


class HostPool:
    """Owns the host tier's memory; who may use which block is `HostTier`'s affair.

    Allocated once. For a pool on the CPU the memory is an anonymous mapping, whose pages are backed when they are first
    written; for one on a GPU it is pinned, so that a copy is one DMA. Where the system refuses to pin it, copies are
    slower and hold up the engine. They are measured, so `copy_speed.py` has blocks computed again where that is faster.

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
        The host lacks the memory.
    """

    def __init__(self, num_blocks: int, pool: KVPool, device: Device | None = None):
        self.num_blocks = num_blocks
        self._pool = pool
        self._device = CpuDevice() if device is None else device
        self._piece_blocks = max(1, _PIECE_BYTES // max(1, pool.data[0].nbytes))
        self._rest = NONE, NONE  # saves and restores that `move` has left to `move_rest`
        self._saving: deque[tuple[np.ndarray, Event]] = deque()  # device blocks, behind their save
        self._restoring: deque[_Restore] = deque()
        self._newest_step = 0
        self.num_saved = 0  # blocks
        self.num_restored = 0  # blocks, as far as they were measured
        self.restore_s = 0.0
        shape, dtype = (num_blocks, pool.data.shape[1]), pool.data.dtype
        self.data = self._pinned(shape, dtype)

    def _pinned(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._device.pinned(shape, dtype)
        except (RuntimeError, OSError) as error:
            num_bytes = shape[0] * shape[1] * dtype.itemsize
            raise SizingError(
                f"cpu_offload_gib: the host has no {num_bytes} bytes for the host tier: {error}"
            ) from error

    def move(
        self,
        saves: np.ndarray,
        restores: np.ndarray,
        *,
        step: int = 0,
        written: np.ndarray | None = None,
        used_now: bool = True,
    ) -> None:
        """Copy whole blocks between the tiers, first the saves, before and beside a step.

        What the step writes over is saved first, and it waits for no more than that; what it does not read is restored
        beside it, and beside those that follow::

            offload            [ a ][ b ............ ][ restores ............... ]     after a it is `move_rest`
            compute   step N ]─────┴▸[ N + 1 writes a ][ N + 2 ][ N + 3 ]────────┴▸[ N + 4 reads what was restored

        A later step that writes a block of b waits for the piece of b that has it.

        No step in flight writes the blocks that are saved, or uses those that are restored, because blocks that are
        given back stay in quarantine until such a step is over. Saves and restores run in the order of their stream,
        so a host block, or a block that is saved and then restored to, needs no event.

        Parameters
        ----------
        saves
            [k, 2] integers, (device block, host block).
        restores
            [k, 2] integers, (host block, device block).
        step
            The number of the step that comes next, for `restored_step`.
        written
            [m] the device blocks that it writes; None: it may write any, and all copies are queued now.
        used_now
            Whether it uses blocks that this call or an earlier one restores, as far as these may not be there yet.
        """
        # Of a step whose launch has failed: nobody trusts what it would have copied.
        self._rest = NONE, NONE
        self._newest_step = max(self._newest_step, step)
        self._wait_for_saves(written)
        if written is None:
            first, rest = saves, NONE
        else:
            # Leaves are demoted first, so the end of a sequence is what later steps write first.
            is_first = np.isin(saves[:, 0], written)
            first, rest = saves[is_first], saves[~is_first][::-1]
        if len(first):
            self._device.wait(Stream.COMPUTE, self._save(first))
        self._rest = rest, restores
        if written is None or (used_now and len(restores)):
            self.move_rest()
        if used_now and self._restoring:
            self._device.wait(Stream.COMPUTE, self._restoring[-1].ended)

    def move_rest(self) -> None:
        """Queue the copies of `move` that its step need not wait for: by now the device is busy with that."""
        (saves, restores), self._rest = self._rest, (NONE, NONE)
        for begin in range(0, len(saves), self._piece_blocks):
            piece = saves[begin : begin + self._piece_blocks]
            self._saving.append((piece[:, 0], self._save(piece)))
        if len(restores):
            self._restore(restores)

    @property
    def is_saving(self) -> bool:
        """Whether a step may write a block that has not been saved yet."""
        return len(self._saving) > 0

    def _wait_for_saves(self, written: np.ndarray | None) -> None:
        """The compute stream goes on when the blocks written have been saved, and those queued before them."""
        while self._saving and self._saving[0][1].is_done():
            self._saving.popleft()
        for blocks, saved in reversed(self._saving):
            if written is None or np.isin(blocks, written).any():
                self._device.wait(Stream.COMPUTE, saved)
                return

    def _save(self, pairs: np.ndarray) -> Event:
        tier, pool = self.data, self._pool.data
        for block, host_block in pairs.tolist():
            self._device.copy(Stream.OFFLOAD, tier[host_block], pool[block], "save")
        self.num_saved += len(pairs)
        return self._device.record(Stream.OFFLOAD, "blocks saved")

    def _restore(self, pairs: np.ndarray) -> None:
        device, tier, pool = self._device, self.data, self._pool.data
        begun = device.record(Stream.OFFLOAD, "restore begins", timed=True)
        for host_block, block in pairs.tolist():
            device.copy(Stream.OFFLOAD, pool[block], tier[host_block], "restore")
        ended = device.record(Stream.OFFLOAD, "blocks restored", timed=True)
        self._restoring.append(_Restore(self._newest_step, len(pairs), begun, ended))

    def take_measured(self) -> tuple[tuple[int, float], ...]:
        """(blocks, seconds) of the restores that have ended since the last call."""
        measured: list[tuple[int, float]] = []
        while self._restoring and self._restoring[0].ended.is_done():
            ended = self._restoring.popleft()
            seconds = self._device.seconds_between(ended.begun, ended.ended)
            measured.append((ended.num_blocks, seconds))
        self.num_restored += sum(count for count, _ in measured)
        self.restore_s += sum(seconds for _, seconds in measured)
        return tuple(measured)

    @property
    def restored_step(self) -> int:
        """What this step and those before it restore is there, as far as `take_measured` has looked."""
        return self._restoring[0].step - 1 if self._restoring else self._newest_step

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
