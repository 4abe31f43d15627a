"""Part of the engine's GPU benchmark: blocks that are offloaded to host memory and restored.

```
 round_trip   blocks ──save──▶ host ──restore──▶ other blocks      bit for bit the same, at the link's speed?
 beside       rows decode:  | quiet | moving | quiet | moving | quiet |        how much slower while blocks move?
```

The link's speed is that of one large copy between pinned memory and the device, in the same run. `beside` plans copies
like those of a preempted and restored request, but for blocks that no row uses, so the copies alone slow the decoding
rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.cluster.bench.results import report
from quire.kernels.tuning import BLOCK_SIZE
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.cuda_device import CudaDevice
from quire.replica.device.device import Device
from quire.replica.device.host_pool import HostPool
from quire.replica.device.kv_pool import KVPool, block_elements
from quire.replica.kv_cache.groups import LayerGroup, LayerKind, group_layers
from quire.replica.scheduler.scheduler import Scheduler
from tests.perf.gpu.engine.gpu_crowd import Crowd, Crowds, Reading, random_prompts
from tests.perf.gpu.engine.gpu_engine_steps import DECODE_OPTIONS, EnginePart
from tests.perf.gpu.engine.gpu_models import SMALL, Checkpoint, checkpoint
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, significant, worst

LINK_BYTES = 1 << 30
ROUND_TRIP_BLOCKS = 256  # 2 GiB of an 8B model
REPEATS = 3
ROWS = 64
CONTEXT = 1024
WINDOW = 48  # full turns per window
_NUM_WINDOWS = 5  # quiet, moving, quiet, moving, quiet
_SLACK = 40


def parts(folder: Path) -> list[Part]:
    """The parts, for the models in this folder."""
    offload = Offload(folder, Crowds())
    return [
        EnginePart("offload", points, offload.measure, bars, budget_s=160, crowds=offload.crowds)
    ]


def points(rehearsal: bool) -> list[Point]:
    """The points: every `every` steps a request of this length is preempted, and restored half as many steps later."""
    model = SMALL if rehearsal else "Llama-3.1-8B"
    blocks = 6 if rehearsal else ROUND_TRIP_BLOCKS
    beside = ((2 * BLOCK_SIZE, 2),) if rehearsal else ((1024, 2), (8192, 16))
    return [
        {"what": "round_trip", "model": model, "blocks": blocks},
        *(
            {"what": "beside", "model": model, "victim_tokens": tokens, "every": every}
            for tokens, every in beside
        ),
    ]


@dataclass(frozen=True)
class Offload:
    """Owns what the part measures with."""

    folder: Path
    crowds: Crowds

    def measure(self, session: Session, point: Point) -> Row:
        model = checkpoint(self.folder, point["model"], session)
        if point["what"] == "round_trip":
            self.crowds.close()  # to free the memory of its cache
            return round_trip(session, model, point["blocks"])
        return self.beside(session, model, point)

    def beside(self, session: Session, model: Checkpoint, point: Point) -> Row:
        """Decode throughput that rows lose while a preempted request's blocks are copied.

        Raises
        ------
        RuntimeError
            The rows did not decode together for long enough, or no block was copied.
        """
        rows, context, window = (2, 32, 6) if session.rehearsal else (ROWS, CONTEXT, WINDOW)
        num_blocks = point["victim_tokens"] // BLOCK_SIZE
        block_bytes = block_elements(_groups(model), BLOCK_SIZE) * _element_bytes(model)
        max_tokens = _NUM_WINDOWS * window + _SLACK
        max_model_len = context + max_tokens + 1
        options = DECODE_OPTIONS | dict(
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_running_requests=rows,
            # Room for the preempted request, for all rows, and for the remaining blocks of their first turn; also on
            # the host.
            num_blocks=rows * (-(-max_model_len // BLOCK_SIZE) + 2) + num_blocks,
            node_pool_gib=1.5 * num_blocks * block_bytes / (1 << 30),
        )
        crowd = self.crowds.get(model, session, **options)
        prompts = random_prompts(rows, context, model.vocab_size, rows)
        crowd.serve(prompts, 2)
        mover = Mover(crowd, num_blocks, point["every"], window)
        crowd.serve(prompts, max_tokens, on_full=mover.on_full)
        crowd.engine.check()
        times = mover.seconds()
        quiet, moving = sum(times[0::2]) / 3, sum(times[1::2]) / 2
        moved = mover.num_moved * block_bytes
        saves, restores = link_rates(session)
        return {
            "rows": rows,
            "quiet_ms": significant(1e3 * quiet / window),
            "moving_ms": significant(1e3 * moving / window),
            "drop_percent": significant(100 * (1 - quiet / moving)),
            "moved_blocks": mover.num_moved,
            "moved_gb_per_s": significant(moved / (2 * moving) / 1e9),
            "percent_of_link": significant(100 * moved / (2 * moving) / min(saves, restores)),
        }


class Mover:
    """Plans a preempted request's copies in every other window of full turns.

    Parameters
    ----------
    num_blocks
        Blocks of the request.
    every
        Steps between two preemptions; the blocks are restored half as many steps later.
    window
        Full turns of a window.
    """

    def __init__(self, crowd: Crowd, num_blocks: int, every: int, window: int):
        self._crowd, self._every, self._window = crowd, every, window
        self._num_blocks = num_blocks
        self._device_blocks: list[int] = []
        self._host_blocks: list[int] = []
        self._futures: list[Future[None]] = []
        self._readings: list[Reading] = []
        self.num_moved = 0  # copied blocks, both directions

    def on_full(self, number: int) -> None:
        """Post the copies before the next plan; runs in the engine's thread."""
        index, place = divmod(number, self._window)
        if place == 0 and index <= _NUM_WINDOWS:
            self._readings.append(self._crowd.read())
            if index == 0:
                self._post(self._take)
            elif index == _NUM_WINDOWS:
                self._post(self._give_back)
        if index < _NUM_WINDOWS and index % 2:
            if place % self._every == 0:
                self._post(self._save)
            elif place % self._every == self._every // 2:
                self._post(self._restore)

    def seconds(self) -> list[float]:
        """Throughput of each window."""
        if len(self._readings) < _NUM_WINDOWS + 1:
            raise RuntimeError(
                f"the rows decoded side by side for fewer than {_NUM_WINDOWS * self._window} steps"
            )
        for future in self._futures:
            future.result()
        if not self.num_moved:
            raise RuntimeError("no block moved")
        times = [reading.at_s for reading in self._readings]
        return [after - before for before, after in pairwise(times)]

    def _post(self, action: Callable[[Scheduler], None]) -> None:
        self._futures.append(self._crowd.call(action))

    def _take(self, scheduler: Scheduler) -> None:
        blocks = scheduler.memory.blocks.allocate(self._num_blocks)
        copies = scheduler.memory.host.blocks.allocate(self._num_blocks)
        if blocks is None or copies is None:
            raise RuntimeError(f"no room for a victim of {self._num_blocks} blocks")
        self._device_blocks, self._host_blocks = blocks, copies

    def _save(self, scheduler: Scheduler) -> None:
        for block, copy in zip(self._device_blocks, self._host_blocks, strict=True):
            scheduler.memory.host.save(block, copy)
        self.num_moved += len(self._device_blocks)

    def _restore(self, scheduler: Scheduler) -> None:
        # A restore takes a reference, like that of a restored request.
        scheduler.memory.host.blocks.add_owner(self._host_blocks)
        for block, copy in zip(self._device_blocks, self._host_blocks, strict=True):
            scheduler.memory.host.restore(copy, block)
        self.num_moved += len(self._device_blocks)

    def _give_back(self, scheduler: Scheduler) -> None:
        scheduler.memory.blocks.release(self._device_blocks)
        scheduler.memory.host.blocks.release(self._host_blocks)


def round_trip(session: Session, model: Checkpoint, num_blocks: int) -> Row:
    """Save blocks of random bits, restore them to other blocks and compare; report both speeds and the link's."""
    wrong, moved, save_s, restore_s = _move_and_compare(session, model, num_blocks)
    save_rate, restore_rate = moved / save_s, moved / restore_s
    link_save, link_restore = link_rates(session)
    return {
        "wrong_blocks": wrong,
        "save_gb_per_s": significant(save_rate / 1e9),
        "restore_gb_per_s": significant(restore_rate / 1e9),
        "link_save_gb_per_s": significant(link_save / 1e9),
        "link_restore_gb_per_s": significant(link_restore / 1e9),
        "percent_of_link": significant(
            100 * min(save_rate / link_save, restore_rate / link_restore)
        ),
    }


def _move_and_compare(
    session: Session, model: Checkpoint, num_blocks: int
) -> tuple[int, int, float, float]:
    """Run round trips. Returns differing blocks, bytes per direction, seconds of the fastest save and restore."""
    device: Device = CpuDevice() if session.rehearsal else CudaDevice(session.device)
    pool = KVPool(
        2 * num_blocks, _groups(model), BLOCK_SIZE, getattr(torch, model.dtype), session.device.type
    )
    host = HostPool(num_blocks, pool, device)
    rng = np.random.default_rng(0)
    places = rng.permutation(2 * num_blocks)
    sources, targets = places[:num_blocks], places[num_blocks:]
    copies, nothing = rng.permutation(num_blocks), np.empty((0, 2), np.int64)
    saves, restores = np.stack([sources, copies], 1), np.stack([copies, targets], 1)
    bits = pool.data.view(torch.int16)
    bits.random_(-(2**15), 2**15)  # arbitrary bits, NaN included
    expected = bits[torch.from_numpy(sources)].clone()
    save_s, restore_s = [], []
    for _ in range(REPEATS):
        save_s.append(_seconds(device, lambda: host.move(saves, nothing)))
        bits[torch.from_numpy(targets)] = 0
        device.synchronize()
        restore_s.append(_seconds(device, lambda: host.move(nothing, restores)))
    wrong = int((bits[torch.from_numpy(targets)] != expected).any(dim=1).sum())
    moved = num_blocks * pool.data.shape[1] * pool.data.element_size()
    return wrong, moved, min(save_s), min(restore_s)


def link_rates(session: Session) -> tuple[float, float]:
    """Bytes per second of one large copy to the host, and from it; the fastest of several."""
    size = 1 << 20 if session.rehearsal else LINK_BYTES
    device: Device = CpuDevice() if session.rehearsal else CudaDevice(session.device)
    there = torch.ones(size, dtype=torch.uint8, device=session.device)
    here = device.pinned((size,), torch.uint8)
    to_host = min(_seconds(device, lambda: here.copy_(there)) for _ in range(REPEATS))
    to_device = min(_seconds(device, lambda: there.copy_(here)) for _ in range(REPEATS))
    return size / to_host, size / to_device


def _seconds(device: Device, work: Callable[[], Any]) -> float:
    device.synchronize()
    began = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - began


def _groups(model: Checkpoint) -> tuple[LayerGroup, ...]:
    """Layer groups of the model's shape; all its layers have full attention."""
    shape = model.shape
    return group_layers(
        [LayerKind(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)] * shape.num_layers
    )


def _element_bytes(model: Checkpoint) -> int:
    return getattr(torch, model.dtype).itemsize


def bars(rows: list[Row]) -> list[report.Bar]:
    trips = [row for row in rows if row["what"] == "round_trip"]
    beside = [row for row in rows if row["what"] == "beside"]
    return [
        worst("gpu/engine/offload_wrong_blocks", trips, "wrong_blocks", "blocks", 0, at_most=True),
        worst("gpu/engine/offload_percent_of_link", trips, "percent_of_link", "%", 80),
        worst("gpu/engine/offload_drop_percent", beside, "drop_percent", "%", 5, at_most=True),
    ]
