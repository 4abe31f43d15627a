"""`Device` for the CPU: work runs when it is queued."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from quire.kernels.huge_pages import ask_for_huge_pages
from quire.replica.device.device import NO_MARK, Event, Graph, Stream, Tensors, Work


class CpuEvent:
    """An event that is done as soon as it is recorded."""

    def __init__(self, recorded_s: float = 0.0):
        self.recorded_s = recorded_s  # 0 if not timed

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice:
    """The CPU as a device. Work runs when it is queued, so streams and waits do nothing."""

    torch_device = torch.device("cpu")
    is_immediate = True
    no_graphs_because: str | None = "the CPU has no graphs"

    def __init__(self) -> None:
        self._done = CpuEvent()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def pin(self, memory: mmap.mmap) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8)

    def free_bytes(self) -> int:
        raise RuntimeError("the CPU's memory is the host's")

    def trim(self) -> None:
        pass

    @torch.inference_mode()
    def run(
        self, stream: Stream, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()
    ) -> None:
        work()

    @torch.inference_mode()
    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        target.copy_(source)

    def record(self, stream: Stream, name: str, *, timed: bool = False) -> Event:
        return CpuEvent(time.perf_counter()) if timed else self._done

    def seconds_between(self, first: Event, second: Event) -> float:
        assert isinstance(first, CpuEvent) and isinstance(second, CpuEvent)
        return second.recorded_s - first.recorded_s

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def rehearse(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        raise RuntimeError(f"{name} cannot be rehearsed: {self.no_graphs_because}")

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        raise RuntimeError(f"{name} cannot be captured: {self.no_graphs_because}")

    def replay(self, graph: Graph) -> None:
        raise RuntimeError(f"{graph.name} cannot be replayed: {self.no_graphs_because}")

    def release(self, graph: Graph) -> None:
        raise RuntimeError(f"{graph.name} cannot be freed: {self.no_graphs_because}")

    def synchronize(self) -> None:
        pass

    def mark(self, name: str) -> AbstractContextManager[None]:
        return NO_MARK


def zero_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros. A page takes no memory until it is written.

    `torch.zeros` would write every page. An anonymous mapping is zero without being written; it lives as long as the
    tensor.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE)
    data = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    ask_for_huge_pages(data)
    return data
