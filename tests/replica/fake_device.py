"""A device that runs queued work in any order that its events allow, chosen by a seed.

Two streams are related by events only, so whatever else is between them is drawn: one may be starved while another
runs ahead, and nothing need run before somebody waits for it. Each piece of work has a begin and an end, between which
work of other streams may run::

    queued ──▶ begun: what it overwrites is poisoned ──▶ ended: what it reads is checked, then it runs

So memory is poisoned from the moment a real device might begin to write it to the moment it has been written.
Poison is NaN in floating-point memory and `POISON` in any other: work that says it reads it fails with `PoisonedRead`,
what reads it unsaid computes nonsense.
"""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from quire.replica.device.device import NO_MARK, Event, Graph, Stream, Tensors, Work

_POISON_BYTE = 0xA5  # as an integer a negative one, no id of anything
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HOST = "host"


class PoisonedRead(AssertionError):
    """Work ran that reads memory which has not been written."""


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with what nobody may read."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.copy_(_pattern(tensor.dtype).expand(tensor.shape))


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether any element is poison, written as this type or as bytes."""
    pattern = _pattern(_BITS[tensor.element_size()])
    if tensor.is_floating_point():
        return bool((tensor.isnan() | (tensor.view(pattern.dtype) == pattern)).any())
    return bool((tensor.view(pattern.dtype) == pattern).any())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((dtype.itemsize,), _POISON_BYTE, dtype=torch.uint8).view(dtype)


class FakeEvent:
    """See `Event`; done when the device has come by it."""

    def __init__(self, device: FakeDevice, name: str):
        self._device = device
        self.name = name
        self.has_passed = False
        self.passed_at = 0  # pieces of work that had run by then

    def is_done(self) -> bool:
        self._device.progress()
        return self.has_passed

    def wait(self) -> None:
        self._device.host_wait(self)


@dataclass(slots=True)
class FakeGraph:
    """Captured work. A replay calls it again: unlike a real one it follows a buffer that was replaced since."""

    name: str
    work: Work
    reads: Tensors
    writes: Tensors
    is_released: bool = False


@dataclass(slots=True)
class _Item:
    """One piece of a stream's queue."""

    name: str
    run: Work
    reads: Tensors = ()
    writes: Tensors = ()
    awaits: FakeEvent | None = None
    has_begun: bool = False


@dataclass(slots=True)
class _Pace:
    """How this device behaves, drawn once: devices that are always random in the same way find less."""

    weights: dict[Stream, float] = field(default_factory=dict)
    eagerness: float = 0.0  # chance to run one more piece at each call

    @classmethod
    def draw(cls, rng: random.Random) -> _Pace:
        # A stream of weight 0.01 runs only when no other can.
        weights = {stream: rng.choice((0.01, 1.0, 1.0, 100.0)) for stream in Stream}
        return cls(weights, rng.choice((0.0, 0.3, 0.7, 0.95)))


class FakeDevice:
    """See `Device`; memory is the CPU's, allocated poisoned.

    Parameters
    ----------
    seed
        Of the order.
    ignored_waits
        Defects to insert: (stream or `HOST`, name of the event) of waits that do nothing.
    no_graphs_because
        As of a device that cannot capture.
    total_bytes
        Of its memory: what it allocates beyond is an error.
    graph_bytes
        That each graph takes, beside memory that all graphs share: `SCRATCH` times the inputs of the largest.
    keeps_workspace
        Whether computing takes memory, `WORKSPACE` times what the work says it reads, and the allocator keeps it for
        reuse, until `trim` or until an allocation outside a capture lacks it.
    breaks_after
        A capture after so many that succeeded fails in a way that the device does not recover from.
    """

    WORKSPACE = 30

    SCRATCH = 20

    torch_device = torch.device("cpu")
    is_immediate = False

    def __init__(
        self,
        seed: int,
        *,
        ignored_waits: Iterable[tuple[str, str]] = (),
        no_graphs_because: str | None = None,
        total_bytes: int = 1 << 60,
        graph_bytes: int = 0,
        keeps_workspace: bool = False,
        breaks_after: int | None = None,
    ):
        self.no_graphs_because = no_graphs_because
        self.waits: set[tuple[str, str]] = set()  # that were asked for
        self.num_copies = 0
        self.num_replays = 0
        self.marks: list[str] = []
        self.num_pieces = 0  # that have run
        self._total_bytes = total_bytes
        self._held_bytes = 0
        self._graph_bytes = graph_bytes
        self._scratch_bytes = 0
        self._num_graphs = 0
        self._keeps_workspace = keeps_workspace
        self._kept_bytes = 0
        self._breaks_after = breaks_after
        self._is_rehearsing = False
        self._rehearsed: Work | None = None
        self.num_broken_captures = 0
        self._rng = random.Random(seed)
        self._pace = _Pace.draw(self._rng)
        self._ignored = frozenset(ignored_waits)
        self._queues: dict[Stream, deque[_Item]] = {stream: deque() for stream in Stream}

    def ignore(self, waits: Iterable[tuple[str, str]]) -> None:
        """From now on these waits do nothing, as `ignored_waits`."""
        self._ignored = frozenset(waits)

    # -- memory ------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = self.pinned(shape, dtype)
        self.hold(tensor)
        return tensor

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        poison(tensor)
        return tensor

    def pin(self, memory: mmap.mmap) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count memory that was not allocated here as this device's, as long as the tensor lives."""
        self._take(tensor.nbytes)
        weakref.finalize(tensor, self._take, -tensor.nbytes)

    def free_bytes(self) -> int:
        return self._total_bytes - self._held_bytes - self._kept_bytes

    def trim(self) -> None:
        gc.collect()
        self._kept_bytes = 0

    def _compute_with_workspace(self, reads: Tensors) -> None:
        needed = self.WORKSPACE * sum(tensor.nbytes for tensor in reads)
        if needed > self._kept_bytes:
            self._kept_bytes = 0
            self._take(needed)
            self._held_bytes -= needed
            self._kept_bytes = needed

    def _take(self, num_bytes: int, *, is_capturing: bool = False) -> None:
        if num_bytes > self.free_bytes() and not is_capturing:
            self._kept_bytes = 0
        if num_bytes > self.free_bytes():
            raise torch.OutOfMemoryError(f"{num_bytes} bytes, {self.free_bytes()} are free")
        self._held_bytes += num_bytes

    # -- queueing ----------------------------------------------------------------------------------------

    def run(
        self, stream: Stream, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()
    ) -> None:
        self._put(stream, _Item(name, work, tuple(reads), tuple(writes)))

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        if target.shape != source.shape:
            raise ValueError(f"{name}: {tuple(source.shape)} does not fit {tuple(target.shape)}")
        self.num_copies += 1
        self._put(stream, _Item(name, lambda: _copy(target, source), (), (target,)))

    def record(self, stream: Stream, name: str, *, timed: bool = False) -> Event:
        event = FakeEvent(self, name)

        def pass_by() -> None:
            event.has_passed = True
            event.passed_at = self.num_pieces

        self._put(stream, _Item(name, pass_by))
        return event

    def seconds_between(self, first: Event, second: Event) -> float:
        """A second for each piece of work that ran between them, on any stream.

        A real device raises where one has not passed; here it is 0, so that a wait that is left out must show in
        what the step computes.
        """
        assert isinstance(first, FakeEvent) and isinstance(second, FakeEvent)
        return max(0.0, float(second.passed_at - first.passed_at))

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        if not self._is_ignored(stream.value, event):
            self._put(stream, _Item(f"wait for {event.name}", lambda: None, awaits=event))

    def rehearse(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        self._is_rehearsing = True
        try:
            self.run(Stream.COMPUTE, work, name=name, reads=reads, writes=writes)
            self.synchronize()
        except Exception:
            self._queues[Stream.COMPUTE].popleft()  # where work that raises stays
            raise
        finally:
            self._is_rehearsing = False
            self.synchronize()
        self._rehearsed = work

    def make_host_wait(self) -> None:
        """What work does where it reads the device's memory from the host, as `item` does."""
        if self._is_rehearsing:
            raise RuntimeError("called a synchronizing operation")

    def capture(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> Graph:
        if self.no_graphs_because is not None:
            raise RuntimeError(f"{name} cannot be captured: {self.no_graphs_because}")
        if any(self._queues.values()):
            raise RuntimeError(f"{name} is captured while work is in flight")
        if work is not self._rehearsed:
            raise AssertionError(f"{name} is captured without a rehearsal")
        if self._breaks_after == 0:
            self.num_broken_captures += 1
            self.no_graphs_because = "a capture of this process has failed"
            raise RuntimeError("the capture was invalidated")
        if self._breaks_after is not None:
            self._breaks_after -= 1
        scratch = self.SCRATCH * sum(tensor.nbytes for tensor in reads) if self._graph_bytes else 0
        needed = self._graph_bytes + max(0, scratch - self._scratch_bytes)
        self._take(needed, is_capturing=True)
        self._scratch_bytes = max(self._scratch_bytes, scratch)
        self._num_graphs += 1
        return FakeGraph(name, work, tuple(reads), tuple(writes))

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, FakeGraph)
        if graph.is_released:
            raise RuntimeError(f"{graph.name} is replayed after it was freed")
        self.num_replays += 1
        self.run(
            Stream.COMPUTE, graph.work, name=graph.name, reads=graph.reads, writes=graph.writes
        )

    def release(self, graph: Graph) -> None:
        assert isinstance(graph, FakeGraph)
        if any(self._queues.values()):
            raise RuntimeError(f"{graph.name} is freed while work is in flight")
        graph.is_released = True
        self._num_graphs -= 1
        self._take(-self._graph_bytes)
        if not self._num_graphs:
            self._take(-self._scratch_bytes)
            self._scratch_bytes = 0

    def _put(self, stream: Stream, item: _Item) -> None:
        self._queues[stream].append(item)
        self.progress()

    def _is_ignored(self, waiter: str, event: FakeEvent) -> bool:
        self.waits.add((waiter, event.name))
        return (waiter, event.name) in self._ignored

    def mark(self, name: str) -> AbstractContextManager[None]:
        self.marks.append(name)
        return NO_MARK

    # -- running -----------------------------------------------------------------------------------------

    def host_wait(self, event: FakeEvent) -> None:
        """Run in some order until the event is done."""
        if not self._is_ignored(HOST, event):
            self._run_until(lambda: event.has_passed)

    def synchronize(self) -> None:
        self._run_until(lambda: not any(self._queues.values()))

    def progress(self) -> None:
        """Run none, some or many of the pieces that could run now."""
        while self._rng.random() < self._pace.eagerness and self._run_one():
            pass

    def _run_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if not self._run_one():
                raise AssertionError("the device waits for an event that never comes")

    def _run_one(self) -> bool:
        """Begin or end one piece of work; returns whether there was one that may run."""
        ready = [stream for stream in Stream if self._is_ready(stream)]
        if not ready:
            return False
        weights = [self._pace.weights[stream] for stream in ready]
        queue = self._queues[self._rng.choices(ready, weights)[0]]
        item = queue[0]
        if not item.has_begun:
            item.has_begun = True
            for tensor in item.writes:
                poison(tensor)
            return True
        for i, tensor in enumerate(item.reads):
            if is_poisoned(tensor):
                raise PoisonedRead(f"{item.name} reads poison in its input {i}: {tensor}")
        if self._keeps_workspace:
            self._compute_with_workspace(item.reads)
        with torch.inference_mode():
            item.run()
        queue.popleft()
        self.num_pieces += 1
        return True

    def _is_ready(self, stream: Stream) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (queue[0].awaits is None or queue[0].awaits.has_passed)
