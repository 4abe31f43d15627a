"""The CUDA device: torch's streams, events, pinned memory and graphs behind `Device`.

Buffers that work reads and writes live as long as the engine (static inputs, staging and result rings, the pools), so
no stream needs `record_stream`. What work allocates comes from the compute stream's pool and is freed in its order.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from quire.replica.device import NO_MARK, Event, Graph, Stream, Tensors, Work

logger = logging.getLogger(__name__)


def pin_what_is_asked_for() -> None:
    """From a megabyte on torch shall not round pinned memory up to a power of two.

    Otherwise a host tier of 5 GiB, checked against the cgroup's limit, pins 8.
    """
    try:
        torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")
    except (
        AttributeError,
        RuntimeError,
    ) as error:  # no public interface, so it may go, or not be there yet
        logger.warning(
            "torch %s rounds pinned memory up to a power of two, cpu_offload_gib too: %s",
            torch.__version__,
            error,
        )


class CudaEvent:
    """Waiting sleeps instead of spinning: the router's and the tokenizer's threads need the cores."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool):
        self.event = torch.cuda.Event(blocking=True, enable_timing=timed)
        self.event.record(stream)

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """One captured graph; all share the device's memory pool for graphs."""

    name: str
    graph: torch.cuda.CUDAGraph


class CudaDevice:
    """One GPU.

    Parameters
    ----------
    device
        Its name and index.
    use_nvtx
        Mark what is queued as NVTX ranges; costs about a microsecond for each.
    """

    is_immediate = False
    no_graphs_because = None

    def __init__(self, device: torch.device, *, use_nvtx: bool = False):
        pin_what_is_asked_for()
        self.torch_device = device
        self._use_nvtx = use_nvtx
        self._streams = {name: torch.cuda.Stream(device) for name in Stream}
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._num_graphs = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        self.synchronize()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def trim(self) -> None:
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()

    def run(
        self, stream: Stream, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()
    ) -> None:
        with torch.inference_mode(), self.mark(name), torch.cuda.stream(self._streams[stream]):
            work()

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        with torch.inference_mode(), self.mark(name), torch.cuda.stream(self._streams[stream]):
            target.copy_(source, non_blocking=True)

    def record(self, stream: Stream, name: str, *, timed: bool = False) -> Event:
        return CudaEvent(self._streams[stream], timed=timed)

    def seconds_between(self, first: Event, second: Event) -> float:
        assert isinstance(first, CudaEvent) and isinstance(second, CudaEvent)
        return first.event.elapsed_time(second.event) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, CudaEvent), f"an event of another device: {event!r}"
        self._streams[stream].wait_event(event.event)

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        compute = self._streams[Stream.COMPUTE]
        # Other threads (grammar masks, the loader) may use the device meanwhile.
        recording = torch.cuda.graph(
            graph, self._graph_pool, compute, capture_error_mode="thread_local"
        )
        with torch.inference_mode(), recording:
            work()
        self._num_graphs += 1
        return CudaGraph(name, graph)

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph), f"a graph of another device: {graph!r}"
        with self.mark(graph.name), torch.cuda.stream(self._streams[Stream.COMPUTE]):
            graph.graph.replay()

    def release(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph), f"a graph of another device: {graph!r}"
        graph.graph.reset()
        self._num_graphs -= 1
        # torch lets nobody capture into a pool that its last graph has left.
        if not self._num_graphs:
            self._graph_pool = torch.cuda.graph_pool_handle()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name) if self._use_nvtx else NO_MARK


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
