"""The device as the engine sees it: streams of queued work, events that order them, memory on both sides.

```
 stream    COMPUTE   the model, the sampler, changes of the request table
           H2D       a step's inputs: pinned staging buffer ──▶ device
           D2H       a step's tokens: device ──▶ pinned result buffer
           OFFLOAD   whole blocks of KV between the device and the pinned host tier

 run, copy, replay   queue work on a stream and return; the work of one stream runs in the order it was queued in
 record ──▶ Event    marks a place in a stream: done when everything queued there before it has run
 wait                whatever is queued on a stream from now on runs after the event
 Event.wait          the host sleeps until the event is done
```

Between two streams, and between a stream and the host, nothing but an event makes an order. Whoever queues work says
which memory it reads and writes; that costs nothing here, and lets the tests' device poison and check it.

Work that is queued may read the device's memory and what it closed over, not the host's state: that may be another
by the time it runs. It gives nothing back but what it writes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Work = Callable[[], None]
NO_MARK: AbstractContextManager[None] = nullcontext()
Tensors = Sequence[torch.Tensor]


class Stream(enum.Enum):
    """Queues of work that run beside each other."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    OFFLOAD = "offload"


class Event(Protocol):
    """A place in a stream."""

    def is_done(self) -> bool:
        """Whether everything queued before it has run."""
        ...

    def wait(self) -> None:
        """Sleep until it is done; an error of the work before it is raised here, or later."""
        ...


class Graph(Protocol):
    """Captured work, replayed by `Device.replay` at the addresses that it was captured with."""

    name: str


class Device(Protocol):
    """The interface of `CpuDevice` and `CudaDevice`."""

    torch_device: torch.device
    # Whether work runs when it is queued: then a step in flight is one that has run.
    is_immediate: bool
    # Why `capture` cannot be used; None: it can. A capture that fails may set it.
    no_graphs_because: str | None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory of unknown content."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory of unknown content that copies to and from the device need no stop for.

        Where the system refuses to pin so much the log says so once, and the memory is ordinary: copies then make the
        host wait, and move the same bytes.

        Raises
        ------
        RuntimeError, OSError
            The host lacks the memory.
        """
        ...

    def free_bytes(self) -> int:
        """Memory of the device that any process can take. Memory that this process keeps for reuse is not free.

        A difference of two readings counts that memory too, unless `trim` comes before both.

        Raises
        ------
        RuntimeError
            The device runs work when it is queued: it shares the host's memory, see `sizing`.
        """
        ...

    def trim(self) -> None:
        """Give back what is kept for reuse; nothing may be in flight."""
        ...

    def run(
        self, stream: Stream, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()
    ) -> None:
        """Queue work.

        Parameters
        ----------
        work
            Called in inference mode, now or later, once.
        name
            For profiles and messages.
        reads, writes
            Memory, views included, that it needs whole and that it overwrites whole; what it reads and writes
            beyond that, such as blocks of the KV pool, is left out.
        """
        ...

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        """Queue a copy between tensors of equal shape; a side on the host is pinned."""
        ...

    def record(self, stream: Stream, name: str, *, timed: bool = False) -> Event:
        """An event behind everything that was queued on the stream so far; `timed` for `seconds_between`."""
        ...

    def seconds_between(self, first: Event, second: Event) -> float:
        """What passed on the device between two timed events, both of them done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on runs after the event."""
        ...

    def rehearse(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        """Run work on the compute stream, to its end, before it is captured; arguments as of `run`.

        Builds and loads what the work needs, and finds out whether it may be captured.

        Raises
        ------
        RuntimeError
            The work makes the host wait for the device: its capture would fail.
        """
        ...

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        """Record work for the compute stream without running it; it has been rehearsed, and nothing is in flight.

        What is kept for reuse stays, and cannot be given back meanwhile.

        Raises
        ------
        RuntimeError
            The device has no graphs (`no_graphs_because`), or the work cannot be captured.
        torch.OutOfMemoryError
            The graph's memory is not free.
        """
        ...

    def replay(self, graph: Graph) -> None:
        """Queue captured work on the compute stream."""
        ...

    def release(self, graph: Graph) -> None:
        """Free captured work; it must not be in flight, and is not replayed any more."""
        ...

    def synchronize(self) -> None:
        """Sleep until everything queued has run."""
        ...

    def mark(self, name: str) -> AbstractContextManager[None]:
        """A range of the host's time for a profiler, if there is one."""
        ...
