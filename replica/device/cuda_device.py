"""The CUDA device: torch's streams, events, pinned memory and graphs behind `Device`.

Buffers that work reads and writes live as long as the engine (static inputs, staging and result rings, the pools), so
no stream needs `record_stream`. What work allocates comes from the compute stream's pool and is freed in its order.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from quire.replica.device.device import NO_MARK, Event, Graph, Stream, Tensors, Work
from quire.replica.device.pinned_memory import HostMapping
from quire.replica.machine import lock_limit_bytes

logger = logging.getLogger(__name__)


# Smaller rings come from torch's own pinned allocator: rounding up to a power of two wastes less than 1 MiB for each,
# and a mapping for each would take whole pages and a call of the driver.
_LEAST_REGISTERED_BYTES = 1 << 20


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
        mapping = HostMapping(num_bytes)
        with torch.cuda.device(self.torch_device):
            refusal = mapping.register(
                torch.cuda.cudart(), self.synchronize, self._forget_last_error
            )
        if refusal is not None:
            self.synchronize()  # raises where the device has failed, rather than refused
            self._report_unpinned(num_bytes, refusal)
        return mapping.data.view(dtype).view(tuple(shape))

    def _report_unpinned(self, num_bytes: int, refusal: str) -> None:
        """Log once that copies are slow: the driver makes those of unpinned memory in pieces, while the host waits."""
        if self._has_reported_unpinned:
            return
        self._has_reported_unpinned = True
        limit = lock_limit_bytes()
        logger.warning(
            "%d bytes of the host's memory are used without being pinned, so copies are slower and hold up the engine: "
            "%s; the process may lock %s (ulimit -l)",
            num_bytes,
            refusal,
            "any number" if limit is None else f"{limit} bytes",
        )

    def _forget_last_error(self) -> None:
        """Reset CUDA's last error: a kernel's launch is checked by asking for it, which resets it."""
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
            # Of an allocator for which a capture has not ended: another device object of this process left it so.
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

        torch raises where its own operations make the host wait for a stream: `item`, `nonzero`, copies that block. It
        does not see, in this mode:

        - waits that are asked for: `torch.cuda.synchronize`, `Stream.synchronize`, `Event.synchronize`;
        - copies with `non_blocking=True` of memory that is not pinned (in a capture torch refuses them itself, before
          CUDA does, which does no harm);
        - calls that go past torch: Triton's driver, `ctypes`, other libraries; `torch.distributed`, `torch.sparse`;
        - work on a stream that does not join the captured one.

        The mode is one of the process: an operation of another thread that waits fails during the rehearsal too. No
        other thread of an engine that serves uses the device.
        """
        previous = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            self.run(Stream.COMPUTE, work, name=name, reads=reads, writes=writes)
        finally:
            _set_sync_debug_mode(previous)
            self.synchronize()  # what was queued before it failed uses the same memory

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        if self.no_graphs_because is not None:
            raise RuntimeError(f"{name} cannot be captured: {self.no_graphs_because}")
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which first gives the allocator's cache back: the next eager step would pay for it.
        on_compute = torch.cuda.stream(self._streams[Stream.COMPUTE])
        with torch.inference_mode(), on_compute, _no_garbage_collection():
            self._record(graph, work, name)
        self._num_graphs += 1
        return CudaGraph(name, graph)

    def _record(self, graph: torch.cuda.CUDAGraph, work: Work, name: str) -> None:
        """Capture; afterwards the graph is whole, or empty, or `_unended`."""
        has_ended = False
        try:
            # In this mode other threads may use the device meanwhile.
            graph.capture_begin(self._graph_pool, capture_error_mode="thread_local")
            try:
                work()
            finally:  # an error of `work` becomes the context of one that is raised here
                graph.capture_end()
                has_ended = True
        except BaseException:
            if has_ended:
                graph.reset()
                self._renew_graph_pool()
            else:
                self._unended = graph  # the allocator keeps a pointer to it
                self._give_up_graphs(name)
            raise

    def _give_up_graphs(self, name: str) -> None:
        """Begin no other capture, and leave the allocator's cache alone.

        torch ends a capture that CUDA refuses to end only in part: its allocator takes it for one that is under way.
        From then on `empty_cache` and every other capture fail an assertion. Eager steps and the graphs that are there
        work on.
        """
        self.no_graphs_because = f"{name} failed in a way that torch does not recover from"
        logger.warning("no graph is captured any more in this process: %s", self.no_graphs_because)

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
        """torch refuses to capture into a pool that its last graph has left."""
        if not self._num_graphs:
            self._graph_pool = torch.cuda.graph_pool_handle()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self, name: str) -> AbstractContextManager[None]:
        return _nvtx_range(name) if self._use_nvtx else NO_MARK


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at the first call that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep finalisers of unrelated objects from running: one that waits for the device would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
