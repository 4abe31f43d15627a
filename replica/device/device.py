"""The interface of a device: streams of queued work, events that order the streams, memory on both sides.

```
 stream    COMPUTE   the model, sampling, changes of the request table
           H2D       a step's inputs: pinned staging buffer ──▶ device
           D2H       a step's tokens: device ──▶ pinned result buffer
           OFFLOAD   whole blocks of KV between the device and the pinned host tier

 run, copy, replay   queue work on a stream and return; a stream runs its work in the order of queueing
 record ──▶ Event    marks a position in a stream; the event is done when all work queued before it has run
 wait                work queued on a stream from now on runs after the event
 Event.wait          the host sleeps until the event is done
```

Only events order two streams, or a stream and the host. `run` also takes the memory that the work reads and writes.
`CpuDevice` and `CudaDevice` ignore these lists; the fake device of the tests uses them to find races.

Queued work is a function that runs device operations. It may read device memory and the values in its closure. It must
not read other state of the host, which may have changed before the work runs, and must not wait for the device. It
returns nothing; its results are in the memory that it writes.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Work = Callable[[], None]
NO_MARK: AbstractContextManager[None] = nullcontext()
Tensors = Sequence[torch.Tensor]


class Stream(enum.Enum):
    """Queues of work that run concurrently."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    OFFLOAD = "offload"


class Event(Protocol):
    """A position in a stream."""

    def is_done(self) -> bool:
        """Return whether all work queued before the event has run."""
        ...

    def wait(self) -> None:
        """Make the host sleep until the event is done. Raises errors of the work before it, or a later call does."""
        ...


class Graph(Protocol):
    """Captured work. `Device.replay` runs it again, on the same memory addresses as in the capture."""

    @property
    def name(self) -> str: ...


class Device(Protocol):
    """The interface of `CpuDevice` and `CudaDevice`."""

    torch_device: torch.device
    # True if work runs when it is queued, so every launched step has already run.
    is_immediate: bool
    # The reason why `capture` is unavailable, or None. A capture that fails may set it.
    no_graphs_because: str | None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate uninitialised device memory."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate uninitialised pinned host memory, which asynchronous copies need.

        If the system refuses to pin it, the device logs one warning and returns pageable memory. Copies then block the
        host, with the same result.

        Raises
        ------
        RuntimeError, OSError
            The host lacks the memory.
        """
        ...

    def pin(self, memory: mmap.mmap) -> torch.Tensor:
        """Pin memory that is mapped already, as long as the result lives: [bytes] uint8, the whole mapping.

        If the system refuses to pin it, the device does as in `pinned`.
        """
        ...

    def free_bytes(self) -> int:
        """Return the free memory of the device. Memory that this process caches for reuse is not free.

        To measure an allocation as the difference of two calls, call `trim` before each; otherwise the difference
        includes changes of the cache.

        Raises
        ------
        RuntimeError
            The device is the CPU, which has no memory of its own.
        """
        ...

    def trim(self) -> None:
        """Return cached memory to the device. No work may be in flight."""
        ...

    def run(
        self, stream: Stream, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()
    ) -> None:
        """Queue work.

        Parameters
        ----------
        work
            Called once in inference mode, now or later.
        name
            Used in profiles and messages.
        reads, writes
            Tensors or views that the work reads, or overwrites, as a whole. Tensors that it accesses in part, such as
            the KV pool, are not listed.
        """
        ...

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        """Queue a copy between tensors of equal shape. A tensor on the host must be pinned."""
        ...

    def record(self, stream: Stream, name: str, *, timed: bool = False) -> Event:
        """Record an event after all work queued on the stream so far; `timed` allows `seconds_between`."""
        ...

    def seconds_between(self, first: Event, second: Event) -> float:
        """Return the device time between two timed events; both must be done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make work queued on the stream from now on run after the event."""
        ...

    def rehearse(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        """Run work on the compute stream and wait for it, before `capture`; arguments as for `run`.

        The first run compiles and loads kernels. It also finds work that cannot be captured.

        Raises
        ------
        RuntimeError
            The work makes the host wait for the device, so its capture would fail.
        """
        ...

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        """Record work of the compute stream without running it. Call `rehearse` first; no work may be in flight.

        Cached memory stays cached, and cannot be trimmed during the capture.

        Raises
        ------
        RuntimeError
            The device has no graphs (see `no_graphs_because`), or the work cannot be captured.
        torch.OutOfMemoryError
            The device has no memory for the graph.
        """
        ...

    def replay(self, graph: Graph) -> None:
        """Queue captured work on the compute stream."""
        ...

    def release(self, graph: Graph) -> None:
        """Free captured work. No replay of it may be in flight, and it must not be replayed again."""
        ...

    def synchronize(self) -> None:
        """Sleep until all queued work has run."""
        ...

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that marks a range of host time for a profiler."""
        ...
