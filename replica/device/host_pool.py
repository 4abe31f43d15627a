"""Memory of the host tier: blocks offloaded from the device's KV pool and restored to it.

```
 KVPool.data    [num_blocks + 1, elements of a block]     on the device
      save │ ▲ restore                                    one contiguous copy per block, all layers of its group
           ▼ │
 HostPool.data  [num_host_blocks, elements of a block]    in host memory, pinned if the device is a GPU
```

A tier is a place for blocks: the device, or the host's memory. On the CPU device the host tier is another part of the
same memory; its blocks need not be recomputed, but steps cannot read them in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.huge_pages import back_with_memory
from quire.replica.config import SizingError
from quire.replica.core.step_plan import CopiesDone
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Device, Event, Stream
from quire.replica.device.kv_pool import KVPool
from quire.replica.node_pool.pool_file import PoolSlots

NONE = np.empty((0, 2), np.int64)
NONE.setflags(write=False)
# Saves of about this number of bytes share one event. A step that overwrites one of these blocks waits for all:
# about 1 ms over PCIe 4.
_PIECE_BYTES = 32 << 20


class _Restore(NamedTuple):
    """Copies to the device that one step has queued."""

    step: int
    num_blocks: int
    begun: Event
    ended: Event
    arrived: Event  # `ended`, on all ranks


class HostPool:
    """Owns the memory of the host tier. `HostTier` decides which block has which contents.

    The memory is allocated once, by `Device.pinned`: on a GPU it is pinned, so a copy is one DMA transfer. If the
    system refuses to pin it, copies are slower and block the engine. Restores are timed; by these times,
    `speed.py` decides whether blocks are restored or recomputed.

    Parameters
    ----------
    num_blocks
        Blocks of the tier; 0 disables it.
    pool
        The device's KV pool.
    device
        Its offload stream runs the copies; the CPU by default.
    pool_slots
        The tier's blocks are these slots of the node's pool, or this rank's part of them. None: the memory is private.

    Raises
    ------
    SizingError
        The host does not have the memory.

    Attributes
    ----------
    on_all_ranks
        Returns the event that the copies before an event have ended on all ranks; by default the same event. It is
        called once for each group of copies, in the order of the offload stream.
    """

    def __init__(
        self,
        num_blocks: int,
        pool: KVPool,
        device: Device | None = None,
        pool_slots: PoolSlots | None = None,
    ):
        self.num_blocks = num_blocks
        self._pool = pool
        self._device = CpuDevice() if device is None else device
        self._piece_blocks = max(1, _PIECE_BYTES // max(1, pool.data[0].nbytes))
        self._rest = NONE, NONE  # saves and restores that `move` left for `move_rest`
        self._saving: deque[tuple[np.ndarray, Event]] = (
            deque()
        )  # device blocks, event after their save
        self._restoring: deque[_Restore] = deque()
        self._newest_step = 0
        self.on_all_ranks: Callable[[Event], Event] = lambda event: event
        self.num_saved = 0  # blocks
        self.num_restored = 0  # blocks, by timed restores
        self.restore_s = 0.0
        # Host block to the event after its newest save on all ranks, until `take_saved` has returned the block.
        self._unsaved: dict[int, Event] = {}
        shape, dtype = (num_blocks, pool.data.shape[1]), pool.data.dtype
        if pool_slots is None:
            self.data = self._pinned(shape, dtype)
        else:
            self._mapping = self._device.pin(pool_slots.memory)
            # Otherwise the first copy to each page waits for this process's page table.
            back_with_memory(self._mapping)
            self.data = torch.from_numpy(pool_slots.slots).view(dtype)
        self._is_whole = self.data.is_contiguous() and pool.data.is_contiguous()

    def _pinned(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._device.pinned(shape, dtype)
        except (RuntimeError, OSError) as error:
            num_bytes = shape[0] * shape[1] * dtype.itemsize
            raise SizingError(
                f"node_pool_gib: the host has no {num_bytes} bytes for the host tier: {error}"
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
        """Queue copies of whole blocks between the tiers for a step: saves, then restores.

        The step waits only for the saves of blocks that it overwrites. Other saves, and restores of blocks that it does
        not read, run concurrently with it and with later steps::

            offload            [ a ][ b ............ ][ restores ............... ]     after a it is `move_rest`
            compute   step N ]─────┴▸[ N + 1 writes a ][ N + 2 ][ N + 3 ]────────┴▸[ N + 4 reads what was restored

        A later step that overwrites a block of b waits for the piece of b that contains it.

        No step in flight writes a block that is saved, or uses a block that is restored, because freed blocks are
        reused only after the steps in flight have ended (`deferred_frees.py`). Saves and restores share a stream, so no
        event orders a save before a restore of the same block.

        Parameters
        ----------
        saves
            [k, 2] integers, (device block, host block).
        restores
            [k, 2] integers, (host block, device block).
        step
            Number of the step, for `restored_step`.
        written
            [m] device blocks that the step writes. None: it may write any block, so all copies are queued now.
        used_now
            Whether the step reads blocks that this call or an earlier one restores.
        """
        # Copies left here belong to a step whose launch failed. The scheduler has discarded them.
        self._rest = NONE, NONE
        for host_block in saves[:, 1].tolist():
            # A failed step may have saved another block there.
            self._unsaved.pop(host_block, None)
        self._newest_step = max(self._newest_step, step)
        self._wait_for_saves(written)
        if written is None:
            first, rest = saves, NONE
        else:
            # Reversed, because later steps reuse the blocks at the end of this list first: leaves are offloaded first.
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
        """Queue the copies that `move` has left because its step does not need them, after the step is queued."""
        (saves, restores), self._rest = self._rest, (NONE, NONE)
        for begin in range(0, len(saves), self._piece_blocks):
            piece = saves[begin : begin + self._piece_blocks]
            self._saving.append((piece[:, 0], self._save(piece)))
        if len(restores):
            self._restore(restores)

    @property
    def is_saving(self) -> bool:
        """Whether some queued saves may not have ended."""
        return len(self._saving) > 0

    def _wait_for_saves(self, written: np.ndarray | None) -> None:
        """Make the compute stream wait for the saves of the blocks that a step writes."""
        while self._saving and self._saving[0][1].is_done():
            self._saving.popleft()
        for blocks, saved in reversed(self._saving):
            if written is None or np.isin(blocks, written).any():
                self._device.wait(Stream.COMPUTE, saved)
                return

    def _save(self, pairs: np.ndarray) -> Event:
        for blocks, host_blocks in self._runs(pairs):
            source, target = self._pool.data[blocks], self.data[host_blocks]
            self._device.copy(Stream.OFFLOAD, target, source, "save")
        self.num_saved += len(pairs)
        saved = self._device.record(Stream.OFFLOAD, "blocks saved")
        on_all = self.on_all_ranks(saved)
        self._unsaved.update(dict.fromkeys(pairs[:, 1].tolist(), on_all))
        return saved

    def _runs(self, pairs: np.ndarray) -> Iterator[tuple[slice, slice]]:
        """Consecutive blocks of [k, 2] pairs, which are one copy if the memory of both tiers is whole.

        Each copy gives up the interpreter's lock, so in a busy process many small ones take long.
        """
        pairs = pairs[np.argsort(pairs[:, 0])]
        is_end = (np.diff(pairs, axis=0) != 1).any(1) | (not self._is_whole)
        begin = 0
        for end in [*(np.flatnonzero(is_end) + 1).tolist(), len(pairs)]:
            (first, second), count = pairs[begin].tolist(), end - begin
            yield slice(first, first + count), slice(second, second + count)
            begin = end

    def save_now(self, pairs: np.ndarray) -> None:
        """Save blocks while no step is in flight, and wait. `pairs` is [k, 2] integers, (device block, host block)."""
        self._save(pairs)
        for host_block in pairs[:, 1].tolist():
            self._unsaved.pop(host_block).wait()

    def take_saved(self) -> tuple[int, ...]:
        """Return the host blocks with saves that have ended since the last call."""
        done = tuple(block for block, saved in self._unsaved.items() if saved.is_done())
        for block in done:
            del self._unsaved[block]
        return done

    def _restore(self, pairs: np.ndarray) -> None:
        device = self._device
        begun = device.record(Stream.OFFLOAD, "restore begins", timed=True)
        for host_blocks, blocks in self._runs(pairs):
            source, target = self.data[host_blocks], self._pool.data[blocks]
            device.copy(Stream.OFFLOAD, target, source, "restore")
        ended = device.record(Stream.OFFLOAD, "blocks restored", timed=True)
        arrived = self.on_all_ranks(ended)
        self._restoring.append(_Restore(self._newest_step, len(pairs), begun, ended, arrived))

    def take_measured(self) -> tuple[tuple[int, float], ...]:
        """Return (number of blocks, seconds) of each restore that has ended since the last call."""
        measured: list[tuple[int, float]] = []
        while self._restoring and self._restoring[0].arrived.is_done():
            restore = self._restoring.popleft()
            seconds = self._device.seconds_between(restore.begun, restore.ended)
            measured.append((restore.num_blocks, seconds))
        self.num_restored += sum(count for count, _ in measured)
        self.restore_s += sum(seconds for _, seconds in measured)
        return tuple(measured)

    @property
    def restored_step(self) -> int:
        """Number of the last step for which all restores up to this step had ended at the last `take_measured`."""
        return self._restoring[0].step - 1 if self._restoring else self._newest_step

    def take_done(self) -> CopiesDone:
        """Return which copies have ended since the last call."""
        restores, saved = self.take_measured(), self.take_saved()
        are_all = not self._restoring and not self._unsaved
        return CopiesDone(restores, self.restored_step, saved, are_all)

    def telemetry(self) -> dict[str, float]:
        """Blocks copied since the start, and the speed of the restores."""
        block_bytes = self._pool.data[0].nbytes
        return {
            "num_saved": self.num_saved,
            "num_restored": self.num_restored,
            "block_bytes": block_bytes,
            "restore_s": self.restore_s,
            "restore_gb_per_s": 1e-9 * self.num_restored * block_bytes / max(self.restore_s, 1e-12),
        }

    def poison(self) -> None:
        """Fill the tier with NaN, so that tests detect restores of unwritten memory."""
        self.data.fill_(float("nan"))
