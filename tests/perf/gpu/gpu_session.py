"""One run of the GPU benchmark: the machine, its measured roofs, its memory and the remaining time.

A *part* measures one kernel. Its *points* are the shapes; its *rows* are the results: the point's entries with either
numbers or the reason in `skipped`. Rows are plain data, so a run can stop at any time and be resumed.
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
POOL_FRACTION = 0.6  # of the device's free memory; points allocate the rest
MAX_POOL_BYTES = (
    72 << 30
)  # slightly more than 512 rows of 32k tokens with 4 KiB per token and layer
LAYER_BYTES = 256_000_000  # moved by all calls of a candidate together
MAX_LAYERS = 32


class OutOfRoom(Exception):
    """A point needs more memory than the device has."""


@dataclass
class Session:
    """State that all parts share.

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
        """Seconds until the run's deadline."""
        return self.deadline_s - self.clock()

    def end_s(self, budget_s: float) -> float:
        """Deadline on `clock` of a part that starts now with this budget."""
        patience = REHEARSAL_PATIENCE if self.rehearsal else 1.0
        return min(self.deadline_s, self.clock() + patience * budget_s)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Random numbers; with zeros the matrix units and the memory would run faster than in service."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def ids(self, values: Any) -> torch.Tensor:
        """An int32 vector or matrix on the device."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def pool(self, count: int) -> torch.Tensor:
        """[count] bfloat16 random numbers in the same memory for every call.

        Raises
        ------
        OutOfRoom
            The device does not have enough memory.
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
        """Percent of the measured copy bandwidth, for these bytes in this time."""
        return 100.0 * num_bytes / (ms * 1e-3) / self.copy_bytes_per_s

    def layers(self, num_bytes: float) -> int:
        """Number of calls with separate operands that a candidate should make."""
        return 1 if self.rehearsal else min(max(int(LAYER_BYTES / num_bytes), 1), MAX_LAYERS)


@dataclass(frozen=True)
class Part:
    """One kernel: its points, the measurement of a point, and the bars of the rows."""

    name: str
    points: Callable[
        [bool], list[Point]
    ]  # points of a rehearsal or a measurement, the important ones first
    measure: Callable[[Session, Point], Row]
    bars: Callable[[list[Row]], list[report.Bar]] = lambda rows: []
    budget_s: float = 60.0

    def run(self, session: Session, points: list[Point]) -> Iterator[Row]:
        """Measure these points; points without remaining time are skipped."""
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
                # The other points are still measured; the run reports the error and fails at its end.
                yield point | {"error": describe(error)}


def is_final(row: Row) -> bool:
    """Whether a resumed run keeps the row: it was measured, or this machine cannot measure it."""
    return row.get("skipped") != NO_TIME and "error" not in row


def significant(value: float) -> float:
    """A number rounded to significant digits."""
    return float(f"{value:.4g}")


def free_memory() -> None:
    """Free unused memory of the device, because engines are sized by its free memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(error: Exception) -> str:
    """One line that describes an error, for a row."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def worst(
    name: str, rows: list[Row], key: str, unit: str, goal: float, *, at_most: bool = False
) -> report.Bar:
    """The bar that all rows must reach: the value of the worst row, and its point.

    Rows without enough device memory do not count. While rows are missing (no time, or an error), a bar that all other
    rows reach stays undecided: its value is None, and its details have the worst row so far.
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
