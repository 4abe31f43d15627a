"""`Device` for CUDA: torch's streams, events, pinned memory and graphs.

Buffers that work reads and writes (static inputs, staging and result rings, the pools) live as long as the engine, so
no tensor needs `record_stream`. Tensors that queued work allocates belong to the compute stream; torch reuses their
memory in the order of this stream.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import mmap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from quire.replica.device.device import NO_MARK, Event, Graph, Stream, Tensors, Work
from quire.replica.device.pinned_memory import HostMapping
from quire.replica.host_machine import lock_limit_bytes, no_collections

logger = logging.getLogger(__name__)


# Smaller buffers come from torch's pinned allocator. It rounds sizes up to a power of two, which wastes less than 1 MiB
# for these; a mapping for each buffer would take whole pages and a driver call.
_LEAST_REGISTERED_BYTES = 1 << 20


class CudaEvent:
    """A CUDA event. `wait` sleeps instead of spinning, because other threads need the cores."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool):
        self.event = torch.cuda.Event(blocking=True, enable_timing=timed)
        self.event.record(stream)

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A captured graph. All graphs share the device's memory pool for graphs."""

    name: str
    graph: torch.cuda.CUDAGraph


class CudaDevice:
    """One GPU.

    Parameters
    ----------
    device
        Its type and index.
    use_nvtx
        Mark queued work as NVTX ranges; each costs about 1 us.
    """

    is_immediate = False

    def __init__(self, device: torch.device, *, use_nvtx: bool = False):
        self.torch_device = device
        self.no_graphs_because: str | None = None
        self._unended: torch.cuda.CUDAGraph | None = None
        self._has_reported_unpinned = False
        self._use_nvtx = use_nvtx
        self._streams = {name: torch.cuda.Stream(device) for name in Stream}
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._num_graphs = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_REGISTERED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return self._register(HostMapping(num_bytes)).view(dtype).view(tuple(shape))

    def pin(self, memory: mmap.mmap) -> torch.Tensor:
        return self._register(HostMapping(len(memory), memory))

    def _register(self, mapping: HostMapping) -> torch.Tensor:
        with torch.cuda.device(self.torch_device):
            refusal = mapping.register(
                torch.cuda.cudart(), self.synchronize, self._forget_last_error
            )
        if refusal is not None:
            self.synchronize()  # raises if the device has failed, which is not a refusal
            self._report_unpinned(mapping.data.nbytes, refusal)
        return mapping.data

    def _report_unpinned(self, num_bytes: int, refusal: str) -> None:
        """Warn once that memory is not pinned. The driver copies pageable memory in pieces while the host waits."""
        if self._has_reported_unpinned:
            return
        self._has_reported_unpinned = True
        limit = lock_limit_bytes()
        logger.warning(
            "could not pin %d bytes of host memory, so copies are slower and block the engine: %s; the process may "
            "lock %s (ulimit -l)",
            num_bytes,
            refusal,
            "any number" if limit is None else f"{limit} bytes",
        )

    def _forget_last_error(self) -> None:
        """Reset CUDA's last error by launching a kernel: the launch checks the last error and clears it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.torch_device).fill_(0.0)

    def free_bytes(self) -> int:
        self.synchronize()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def trim(self) -> None:
        gc.collect()
        self.synchronize()
        if self.no_graphs_because is not None:
            return
        try:
            if hasattr(torch.accelerator, "empty_host_cache"):  # newer than torch 2.11
                torch.accelerator.empty_host_cache()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # A capture by another device object of this process has left torch's allocator in capture mode.
            if "INTERNAL ASSERT" not in str(error):
                raise
            self._give_up_graphs("another capture of this process")

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

    def rehearse(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        """See `Device.rehearse`.

        Uses torch's sync debug mode: torch raises if one of its operations makes the host wait for a stream (`item`,
        `nonzero`, blocking copies). The mode does not detect:

        - explicit waits: `torch.cuda.synchronize`, `Stream.synchronize`, `Event.synchronize`;
        - copies of pageable memory with `non_blocking=True` (in a capture torch refuses them before CUDA does, which is
          harmless);
        - calls outside torch: Triton's driver, `ctypes`, other libraries; `torch.distributed`, `torch.sparse`;
        - work on a stream that is not joined with the captured stream.

        The mode applies to the whole process, so a waiting operation of another thread fails during the rehearsal too.
        In a serving engine no other thread uses the device.
        """
        previous = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            self.run(Stream.COMPUTE, work, name=name, reads=reads, writes=writes)
        finally:
            _set_sync_debug_mode(previous)
            self.synchronize()  # work queued before a failure still uses the same memory

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        if self.no_graphs_because is not None:
            raise RuntimeError(f"{name} cannot be captured: {self.no_graphs_because}")
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` is not used, because it empties the allocator's cache first: the next step without a graph
        # would have to allocate again.
        on_compute = torch.cuda.stream(self._streams[Stream.COMPUTE])
        # A finaliser that waits for the device would break a capture.
        with torch.inference_mode(), on_compute, no_collections():
            self._record(graph, work, name)
        self._num_graphs += 1
        return CudaGraph(name, graph)

    def _record(self, graph: torch.cuda.CUDAGraph, work: Work, name: str) -> None:
        """Capture work into `graph`. On failure the graph is reset, or kept as `_unended` if the capture cannot end."""
        has_ended = False
        try:
            # This mode lets other threads use the device during the capture.
            graph.capture_begin(self._graph_pool, capture_error_mode="thread_local")
            try:
                work()
            finally:  # an error of `work` becomes the `__context__` of an error raised here
                graph.capture_end()
                has_ended = True
        except BaseException:
            if has_ended:
                graph.reset()
                self._renew_graph_pool()
            else:
                self._unended = graph  # torch's allocator keeps a pointer to it
                self._give_up_graphs(name)
            raise

    def _give_up_graphs(self, name: str) -> None:
        """Disable further captures and trimming after a capture that could not be ended.

        If CUDA refuses to end a capture, torch's allocator stays in capture mode. From then on `empty_cache` and every
        other capture fail an assertion. Eager steps and existing graphs still work.
        """
        self.no_graphs_because = f"{name} failed in a way that torch does not recover from"
        logger.warning("this process captures no more graphs: %s", self.no_graphs_because)

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph), f"a graph of another device: {graph!r}"
        with self.mark(graph.name), torch.cuda.stream(self._streams[Stream.COMPUTE]):
            graph.graph.replay()

    def release(self, graph: Graph) -> None:
        assert isinstance(graph, CudaGraph), f"a graph of another device: {graph!r}"
        graph.graph.reset()
        self._num_graphs -= 1
        self._renew_graph_pool()

    def _renew_graph_pool(self) -> None:
        """If no graph is left, take a new memory pool for graphs: torch refuses to capture into the old one."""
        if not self._num_graphs:
            self._graph_pool = torch.cuda.graph_pool_handle()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name) if self._use_nvtx else NO_MARK


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
