"""What every device promises, and that the tests' device finds whoever relies on more."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from fake_device import HOST, FakeDevice, FakeEvent, PoisonedRead, is_poisoned, poison
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.cuda_device import CudaEvent
from quire.replica.device.device import Device, Event, Stream
from quire.replica.device.open_device import open_device

SEEDS = range(40)
DEVICES = [
    "cpu",
    *(f"fake{seed}" for seed in range(8)),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request) -> Device:
    name: str = request.param
    return FakeDevice(int(name[4:])) if name.startswith("fake") else open_device(name)


def test_a_stream_runs_its_work_in_order(device):
    x = device.empty((4,), torch.int64)
    device.run(Stream.COMPUTE, lambda: x.fill_(1), name="fill", writes=[x])
    device.run(Stream.COMPUTE, lambda: x.mul_(3), name="triple", reads=[x])
    device.run(Stream.COMPUTE, lambda: x.add_(1), name="add", reads=[x])
    device.record(Stream.COMPUTE, "done").wait()
    assert x.tolist() == [4] * 4


def test_what_is_behind_an_event_is_there_when_it_is_done(device):
    """A round trip over three streams: host → device → host."""
    staging, result = device.pinned((8,), torch.int32), device.pinned((8,), torch.int32)
    x = device.empty((8,), torch.int32)
    staging.copy_(torch.arange(8))
    device.copy(Stream.H2D, x, staging, "up")
    device.wait(Stream.COMPUTE, device.record(Stream.H2D, "is up"))
    device.run(Stream.COMPUTE, lambda: x.mul_(2), name="double", reads=[x])
    device.wait(Stream.D2H, device.record(Stream.COMPUTE, "doubled"))
    device.copy(Stream.D2H, result, x, "down")
    down = device.record(Stream.D2H, "is down")
    down.wait()
    assert down.is_done()
    assert result.tolist() == list(range(0, 16, 2))


def test_an_event_marks_what_was_queued_before_it_and_no_more(device):
    x = device.empty((1,), torch.int64)
    device.run(Stream.COMPUTE, lambda: x.fill_(1), name="one", writes=[x])
    first = device.record(Stream.COMPUTE, "first")
    y = device.empty((1,), torch.int64)
    device.wait(Stream.D2H, first)
    device.run(Stream.D2H, lambda: y.copy_(x), name="read", reads=[x], writes=[y])
    device.wait(Stream.COMPUTE, device.record(Stream.D2H, "read"))
    device.run(Stream.COMPUTE, lambda: x.fill_(2), name="two", writes=[x])
    device.synchronize()
    assert (x.item(), y.item()) == (2, 1)


def test_a_captured_graph_computes_what_its_buffers_hold_when_it_is_replayed(device):
    if device.no_graphs_because is not None:
        for refuse in (device.rehearse, device.capture):
            with pytest.raises(RuntimeError, match=device.no_graphs_because):
                refuse(lambda: None, name="nothing")
        return
    x, y = device.empty((2,), torch.float32), device.empty((2,), torch.float32)
    staging, result = device.pinned((2,), torch.float32), device.pinned((2,), torch.float32)

    def work() -> None:
        torch.mul(x, x, out=y)

    x.fill_(0.0)
    device.rehearse(work, name="rehearsal", reads=[x], writes=[y])
    graph = device.capture(work, name="square", reads=[x], writes=[y])
    for value in (3.0, 5.0):
        staging.fill_(value)
        device.copy(Stream.H2D, x, staging, "up")
        device.wait(Stream.COMPUTE, device.record(Stream.H2D, "is up"))
        device.replay(graph)
        device.wait(Stream.D2H, device.record(Stream.COMPUTE, "squared"))
        device.copy(Stream.D2H, result, y, "down")
        device.record(Stream.D2H, "is down").wait()
        assert result.tolist() == [value * value] * 2


@pytest.mark.gpu
def test_a_large_piece_of_pinned_memory_is_exact_and_copied_while_the_host_goes_on():
    """On a real device: that it is registered, at its size, and that copies of its views do not block."""
    device = open_device("cuda")
    shape, dtype = (3, (5 << 20) + 4), torch.float16  # nowhere near a power of two
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    host = device.pinned(shape, dtype)
    after = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    assert after == before, "it comes from torch's allocator, which rounds up"
    assert (host.shape, host.dtype) == (shape, dtype)
    assert host.untyped_storage().nbytes() == 3 * shape[1] * 2
    assert host.is_pinned() and host[2, 7:].is_pinned()
    view = host[1]
    del host  # the view keeps the memory
    assert view.is_pinned()
    view.copy_(torch.arange(len(view)) % 2048)
    x, down = device.empty(view.shape, dtype), device.pinned(view.shape, dtype)
    # Behind some hundred milliseconds of work a copy that blocks would not return.
    device.run(Stream.H2D, lambda: torch.cuda._sleep(500_000_000), name="sleep")
    device.copy(Stream.H2D, x, view, "up")
    up = device.record(Stream.H2D, "is up")
    assert not up.is_done()
    device.wait(Stream.D2H, up)
    device.copy(Stream.D2H, down, x, "down")
    is_down = device.record(Stream.D2H, "is down")
    assert not is_down.is_done()
    is_down.wait()
    assert torch.equal(down, view)


@pytest.mark.gpu
def test_an_error_that_cuda_returned_is_not_raised_by_the_next_kernel():
    device = open_device("cuda")
    host = device.pinned((1 << 21,), torch.uint8)
    assert int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), 4096, 0))  # it is registered
    device._forget_last_error()
    x = device.empty((4,), torch.float32).fill_(1.0)
    assert x.tolist() == [1.0] * 4


@pytest.mark.gpu
def test_a_rehearsal_refuses_what_makes_the_host_wait_and_a_capture_works_afterwards():
    device = open_device("cuda")
    x = device.empty((4,), torch.float32)
    x.fill_(3.0)
    device.synchronize()
    with pytest.raises(RuntimeError, match="synchronizing"):
        device.rehearse(lambda: x.add_(x[0].item()), name="reads back")
    assert torch.cuda.get_sync_debug_mode() == 0
    assert device.no_graphs_because is None
    torch.empty(
        1 << 26, dtype=torch.uint8, device="cuda"
    )  # freed at once, and kept by the allocator
    reserved = torch.cuda.memory_reserved()
    device.rehearse(lambda: x.mul_(2.0), name="double")
    graph = device.capture(lambda: x.mul_(2.0), name="double")
    assert torch.cuda.memory_reserved() >= reserved, "a capture leaves the allocator's cache alone"
    device.replay(graph)
    device.synchronize()
    assert x.tolist() == [12.0] * 4
    device.release(graph)
    device.trim()
    assert torch.cuda.memory_reserved() < reserved


def test_work_runs_without_gradients_whoever_queued_it(device):
    weight = torch.ones(2, requires_grad=True)
    seen = []
    if device.torch_device.type == "cuda":
        weight = weight.detach().to(device.torch_device).requires_grad_()
    device.run(Stream.COMPUTE, lambda: seen.append((weight * 2).requires_grad), name="double")
    device.synchronize()
    assert seen == [False]


def test_who_waits_for_a_gpu_sleeps(monkeypatch):
    """By default an event's wait spins, on a core that others need."""
    made: list[dict[str, bool]] = []

    class Recorded:
        def __init__(self, **options: bool):
            made.append(options)

        def record(self, stream: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    CudaEvent(None, timed=False)
    assert made == [dict(blocking=True, enable_timing=False)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
)
def test_poison_is_recognised_and_nothing_else_is(dtype):
    x = torch.arange(12).to(dtype)
    assert not is_poisoned(x)
    poison(x[5:6])
    assert is_poisoned(x) and not is_poisoned(x[:5]) and not is_poisoned(x[6:])


def test_bytes_that_were_poisoned_are_poison_as_any_type():
    raw = torch.zeros(64, dtype=torch.uint8)
    poison(raw[16:32])
    for dtype in (torch.int32, torch.int64, torch.float32):
        assert is_poisoned(raw.view(dtype)) and not is_poisoned(raw[:16].view(dtype))


def test_memory_is_allocated_poisoned():
    device = FakeDevice(0)
    assert is_poisoned(device.empty((3,), torch.int32)[2:])
    assert is_poisoned(device.pinned((3,), torch.bfloat16)[2:])


def test_a_wait_that_never_ends_is_an_error_not_a_hang():
    device = FakeDevice(0)
    never = FakeEvent(device, "that nobody records")
    device.wait(Stream.COMPUTE, never)
    with pytest.raises(AssertionError, match="never comes"):
        device.record(Stream.COMPUTE, "behind it").wait()


def test_the_same_seed_gives_the_same_order():
    def order(seed: int) -> list[str]:
        device, ran = FakeDevice(seed), []
        for i, stream in itertools.product(range(5), Stream):
            device.run(stream, lambda n=f"{stream.value}{i}": ran.append(n), name="note")
        device.synchronize()
        return ran

    assert order(7) == order(7)
    assert len({tuple(order(seed)) for seed in SEEDS}) > 30


# -- random programs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """target = 2 * source + number, on a stream."""

    stream: Stream
    source: int
    target: int
    number: int


OPERATIONS = st.lists(
    st.builds(
        Operation,
        st.sampled_from(list(Stream)),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 9),
    ),
    min_size=2,
    max_size=12,
)


def conflict(a: Operation, b: Operation) -> bool:
    """Whether the order of the two matters."""
    return a.target in (b.source, b.target) or b.target == a.source


def play(
    device: Device, operations: list[Operation], dropped: tuple[int, int] | None = None
) -> list[int]:
    """Run the program with an event for each pair whose order matters, but one if told; the three buffers."""
    buffers = [device.empty((2,), torch.int64) for _ in range(3)]
    for i, buffer in enumerate(buffers):
        buffer.fill_(i)
    events: list[Event] = []
    for later, op in enumerate(operations):
        source, target = buffers[op.source], buffers[op.target]
        for earlier, other in enumerate(operations[:later]):
            is_needed = other.stream is not op.stream and conflict(other, op)
            if is_needed and (earlier, later) != dropped:
                device.wait(op.stream, events[earlier])

        def work(op: Operation = op, x: torch.Tensor = source, y: torch.Tensor = target) -> None:
            torch.add(x, x + op.number, out=y)

        # In place it reads what it overwrites, so there is nothing to poison.
        writes = [] if op.source == op.target else [target]
        device.run(op.stream, work, name=f"operation {later}", reads=[source], writes=writes)
        events.append(device.record(op.stream, f"after {later}"))
    device.synchronize()
    return [int(buffer[0]) for buffer in buffers]


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(0, 1000))
def test_with_all_its_waits_a_program_computes_the_same_in_any_order(operations, seed):
    expected = play(CpuDevice(), operations)
    assert play(FakeDevice(seed), operations) == expected


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(itertools.permutations(Stream, 2))),
    st.sampled_from(["read after write", "write after read", "write after write"]),
    st.integers(0, 3),
)
def test_a_program_that_lacks_a_wait_is_found_out(streams, hazard, num_others):
    """The two operations of the hazard, and others beside them that are none of its business."""
    first, second = streams
    a, b = {
        "read after write": (Operation(first, 0, 1, 5), Operation(second, 1, 2, 3)),
        "write after read": (Operation(first, 1, 2, 5), Operation(second, 0, 1, 3)),
        "write after write": (Operation(first, 0, 1, 5), Operation(second, 0, 1, 3)),
    }[hazard]
    before = [Operation(first, 0, 0, i) for i in range(num_others)]
    operations = [*before, a, b]
    expected = play(CpuDevice(), operations)
    dropped = (len(before), len(before) + 1)
    found = 0
    for seed in SEEDS:
        try:
            found += play(FakeDevice(seed), operations, dropped) != expected
        except PoisonedRead:
            found += 1
    assert found >= 3


def test_an_ignored_wait_of_the_host_reads_what_has_not_come():
    def read(seed: int, **defect) -> int:
        device = FakeDevice(seed, **defect)
        x, result = device.empty((1,), torch.int64), device.pinned((1,), torch.int64)
        device.run(Stream.D2H, lambda: x.fill_(1), name="fill", writes=[x])
        device.copy(Stream.D2H, result, x, "down")
        device.record(Stream.D2H, "result").wait()
        return int(result[0])

    assert all(read(seed) == 1 for seed in SEEDS)
    assert any(read(seed, ignored_waits=[(HOST, "result")]) != 1 for seed in SEEDS)
