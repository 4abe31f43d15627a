"""Frames to attempts, with a stub for Serve's handle; `tests/system` has the rest of the bus."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from quire.protos.errors import Unavailable
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Facts, Frame, Load, Submit, TokenDelta, TokenRecord
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.transport.bus import Bus
from quire.router.transport.transport import Lost
from tests.perf.router.bus_overhead import StubHandle


def make_bus():
    table = ReplicaTable(PrefixIndex())
    table.add("replica", "epoch")
    return Bus(StubHandle(), "test-bus", "router", table), table


def submit(bus):
    ids = np.arange(4, dtype=np.int32)
    return bus.submit(
        Submit("router", bus.next_stream_id(), "label", ids, SamplingParams()), ["first"]
    )


def columns(*rows):
    ids, index, tokens = zip(*rows, strict=True)
    return TokenRecord(np.array(ids, np.int64), np.array(index, np.int32), np.array(tokens))


def arrive(bus, deltas=(), columns=None):
    frame = Frame("epoch", *Frame.pack(deltas, columns), load=Load(num_running=2))
    bus._on_frame("replica", Frame.decode(frame.encode()))


def test_each_attempt_gets_its_tokens_whichever_way_they_travelled():
    async def main():
        bus, table = make_bus()
        one, two = submit(bus), submit(bus)
        arrive(bus, deltas=[TokenDelta(one.stream_id, 0, [5], Facts(None, 2, 0.5))])
        # 999: a request that this router has given up.
        rows = [(999, 3, 9), (two.stream_id, 0, 6), (one.stream_id, 1, 8)]
        arrive(bus, columns=columns(*rows))
        arrive(
            bus,
            deltas=[TokenDelta(one.stream_id, 2, [4], Facts("stop"))],
            columns=columns((two.stream_id, 1, 7)),
        )
        assert [await one.next() for _ in range(3)] == [
            TokenDelta(one.stream_id, 0, [5], Facts(None, 2, 0.5)),
            TokenDelta(one.stream_id, 1, [8]),
            TokenDelta(one.stream_id, 2, [4], Facts("stop")),
        ]
        assert [await two.next() for _ in range(2)] == [
            TokenDelta(two.stream_id, 0, [6]),
            TokenDelta(two.stream_id, 1, [7]),
        ]
        assert (one.finished, two.finished) == (True, False)
        assert (one.replica, two.replica) == ("replica", "replica")  # not the first of the route
        assert table.statuses(0.0)[0].load == Load(num_running=2)
        await bus.close()

    asyncio.run(main())


def test_a_bus_knows_when_the_first_replica_takes_requests():
    async def main():
        bus, _ = make_bus()
        assert not await bus.first_attached(0.01)
        waiting = asyncio.create_task(bus.first_attached(10.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        arrive(bus)
        assert await waiting
        assert await bus.first_attached(0.0)  # it stays so
        await bus.close()

    asyncio.run(main())


class RecordingHandle:
    """A Serve handle that notes which calls go over gRPC, and lets a test say how they end."""

    def __init__(self, over_grpc=False, calls=None):
        self.over_grpc = over_grpc
        self.calls = [] if calls is None else calls  # (method, over gRPC, its response)

    def options(self, *, _by_reference=True, **_):
        return RecordingHandle(not _by_reference, self.calls)

    def __getattr__(self, method):
        def remote(*_, **__):
            response = asyncio.get_running_loop().create_future()
            self.calls.append((method, self.over_grpc, response))
            return response

        return SimpleNamespace(remote=remote)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_calls_go_over_grpc_unless_they_are_too_long_for_its_messages(monkeypatch):
    async def main():
        handle = RecordingHandle()
        bus = Bus(handle, "test-bus", "router", ReplicaTable(PrefixIndex()))
        submit(bus)
        await settle()
        monkeypatch.setattr("quire.router.transport.bus.MAX_MESSAGE_BYTES", 10)
        submit(bus)
        bus._spawn(bus.snapshot("replica"))
        await settle()
        assert [call[:2] for call in handle.calls] == [
            ("generate", True),
            ("generate", False),
            ("snapshot", False),
        ]
        await bus.close()

    asyncio.run(main())


def test_a_call_that_the_replica_cancels_is_a_lost_replica_and_cancels_nothing_here():
    async def main():
        handle = RecordingHandle()
        bus = Bus(handle, "test-bus", "router", ReplicaTable(PrefixIndex()))
        attempt = submit(bus)
        granting = asyncio.create_task(bus._call("grant", route=["first"]))
        await settle()
        for _, _, response in handle.calls:
            # As Serve raises a gRPC error of the replica: this process has not cancelled the call.
            response.set_exception(asyncio.CancelledError())
        async with asyncio.timeout(30):
            assert isinstance(await attempt.next(), Lost)
        with pytest.raises(Unavailable):
            await granting
        # A cancellation of our own stays one.
        attempt = submit(bus)
        await settle()
        attempt.call.cancel()
        await settle()
        assert attempt.call.cancelled() and handle.calls[-1][2].cancelled()
        await bus.close()

    asyncio.run(main())


class ReplicasHandle:
    """A Serve handle of replicas that answer `metrics_page` as a test says: an answer, an error, or None for never."""

    def __init__(self, answers):
        self.answers = answers
        self.pending = []  # calls that have no answer

    def options(self, **_):
        return self

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *args, route: self._call(method, route))

    def _call(self, method, route):
        response = asyncio.get_running_loop().create_future()
        answer = self.answers[route[0]] if method == "metrics_page" else None
        if isinstance(answer, Exception):
            response.set_exception(answer)
        elif answer is not None:
            response.set_result(answer)
        elif method == "metrics_page":
            self.pending.append(response)
        return response


def test_a_replica_that_is_silent_costs_the_time_limit_and_hides_no_other():
    async def main():
        page = {"quire_requests_running": (b"# HELP", b"")}
        handle = ReplicasHandle(
            {
                "a": ("a", page),
                "silent": None,
                "dead": RuntimeError("the replica died"),
                "full": ("a", page),  # Serve has passed it over
            }
        )
        bus = Bus(handle, "test-bus", "router", ReplicaTable(PrefixIndex()))
        assert await bus.metrics_pages({}, False, 0.05) == ({}, 0)
        bus._members = frozenset(handle.answers)
        began_s = time.monotonic()
        assert await bus.metrics_pages({}, False, 0.05) == ({"a": page}, 3)
        assert 0.04 < time.monotonic() - began_s < 15
        assert [response.cancelled() for response in handle.pending] == [True]
        await bus.close()

    asyncio.run(main())
