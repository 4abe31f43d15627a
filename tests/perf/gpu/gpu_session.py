"""One run of the GPU benchmark: the machine, its measured roof, its memory and the time that is left.

A *part* measures one kernel. Its *points* are the shapes, its *rows* what was found at them: the point's own entries
and either numbers or `skipped`, with the reason. Rows are plain data, so a run can stop anywhere and be resumed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.cluster.bench.results import report
from tests.perf.gpu.gpu_run import REHEARSAL_PATIENCE
from tests.perf.gpu.gpu_timing import Timer

Point = dict[str, Any]
Row = dict[str, Any]

NO_TIME = "time"
POOL_FRACTION = 0.6  # of the device's free memory: the rest is for what a point allocates
MAX_POOL_BYTES = 72 << 30  # 512 rows of 32k tokens, 4 KiB a token and layer, and a little
LAYER_BYTES = 256_000_000  # that the calls of a candidate move together
MAX_LAYERS = 32


class OutOfRoom(Exception):
    """A point needs more memory than the device has for it."""


@dataclass
class Session:
    """What the parts measure with.

    The copy bandwidth and GEMM rate come from the part `machine`, which runs first in every session.
    """

    device: torch.device
    rehearsal: bool
    deadline_s: float  # of `clock`
    clock: Callable[[], float] = time.monotonic
    copy_bytes_per_s: float = 0.0
    gemm_flops_per_s: float = 0.0
    _pool: torch.Tensor | None = None
    timer: Timer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = Timer(self.device)

    def left_s(self) -> float:
        """Seconds until the run has to end."""
        return self.deadline_s - self.clock()

    def end_s(self, budget_s: float) -> float:
        """When a part that begins now with this budget has to end, on `clock`."""
        patience = REHEARSAL_PATIENCE if self.rehearsal else 1.0
        return min(self.deadline_s, self.clock() + patience * budget_s)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random numbers: zeros would let matrix units and memory run faster than they do in service."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def ids(self, values: Any) -> torch.Tensor:
        """int32 vector or matrix on the device."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def pool(self, count: int) -> torch.Tensor:
        """[count] bfloat16 random numbers, the same memory at every call.

        Raises
        ------
        OutOfRoom
            The device has no room for that many.
        """
        if self._pool is None or (self.device.type == "cpu" and self._pool.numel() < count):
            self._pool = torch.empty(
                self._pool_size(count), dtype=torch.bfloat16, device=self.device
            ).normal_()
        if self._pool.numel() < count:
            room_gb = 2 * self._pool.numel() / 1e9
            raise OutOfRoom(f"memory: needs {2 * count / 1e9:.1f} GB, room for {room_gb:.1f}")
        return self._pool[:count]

    def _pool_size(self, count: int) -> int:
        if self.device.type == "cpu":
            return count
        free = torch.cuda.mem_get_info(self.device)[0]
        return min(int(free * POOL_FRACTION), MAX_POOL_BYTES) // 2

    def percent_of_copy(self, num_bytes: float, ms: float) -> float:
        """Share of the measured copy bandwidth at which so many bytes moved in that time."""
        return 100.0 * num_bytes / (ms * 1e-3) / self.copy_bytes_per_s

    def layers(self, num_bytes: float) -> int:
        """Calls with operands of their own that a candidate should make."""
        return 1 if self.rehearsal else min(max(int(LAYER_BYTES / num_bytes), 1), MAX_LAYERS)


@dataclass(frozen=True)
class Part:
    """One kernel: its shapes, how to measure one, and what the issue asks of the results."""

    name: str
    points: Callable[
        [bool], list[Point]
    ]  # of a rehearsal, or of a measurement; the important first
    measure: Callable[[Session, Point], Row]
    bars: Callable[[list[Row]], list[report.Bar]] = lambda rows: []
    budget_s: float = 60.0

    def run(self, session: Session, points: list[Point]) -> Iterator[Row]:
        """Rows of these points; those for which no time is left are skipped."""
        end_s = session.end_s(self.budget_s)
        for point in points:
            if session.clock() >= end_s:
                yield point | {"skipped": NO_TIME}
                continue
            try:
                yield point | self.measure(session, point)
            except (OutOfRoom, torch.OutOfMemoryError) as error:
                yield point | {"skipped": str(error).splitlines()[0]}
            except Exception as error:
                if session.rehearsal:
                    raise
                # The other points may still be measured; the run reports it and fails at its end.
                yield point | {"error": describe(error)}


def is_final(row: Row) -> bool:
    """Whether a resumed run can keep the row: it was measured, or its machine can never measure it."""
    return row.get("skipped") != NO_TIME and "error" not in row


def significant(value: float) -> float:
    """A number as it is written down."""
    return float(f"{value:.4g}")


def free_memory() -> None:
    """What has gone out of use goes back to the device: engines are sized by what is free there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(error: Exception) -> str:
    """One line of an error, for a row."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def worst(
    name: str, rows: list[Row], key: str, unit: str, goal: float, *, at_most: bool = False
) -> report.Bar:
    """The bar that all rows must reach: the worst of them, and where it was.

    Rows that the device has no memory for do not count. While rows are missing, for lack of time or after an error,
    a bar that all others reach is not decided: its value is None and the details have what was found.
    """
    found = [row for row in rows if key in row]
    missing = sum(not is_final(row) for row in rows)
    if not found:
        return report.Bar(name, None, unit, goal, at_most, {"missing": missing})
    row = (max if at_most else min)(found, key=lambda row: row[key])
    where = {k: v for k, v in row.items() if isinstance(v, str | int | float) and k != key}
    details = {"points": len(found), "missing": missing, "at": where}
    bar = report.Bar(name, row[key], unit, goal, at_most, details)
    if missing and bar.holds:
        return report.Bar(name, None, unit, goal, at_most, details | {"so_far": row[key]})
    return bar
