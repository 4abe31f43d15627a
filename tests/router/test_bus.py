"""Frames to attempts, with a stub for Serve's handle; `tests/system` has the rest of the bus."""

import asyncio

import numpy as np

from quire.bench.bus_overhead import StubHandle
from quire.protos.wire import Frame, Load, SamplingParams, Submit, TokenColumns, TokenDelta
from quire.router.bus import Bus
from quire.router.index import PrefixIndex
from quire.router.replicas import ReplicaTable


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
    return TokenColumns(np.array(ids, np.int64), np.array(index, np.int32), np.array(tokens))


def arrive(bus, **fields):
    frame = Frame("epoch", load=Load(num_running=2), **fields)
    bus._on_frame("replica", Frame.decode(frame.encode()))


def test_each_attempt_gets_its_tokens_whichever_way_they_travelled():
    async def main():
        bus, table = make_bus()
        one, two = submit(bus), submit(bus)
        arrive(bus, deltas=[TokenDelta(one.stream_id, 0, [5], None, 2, 0.5)])
        # 999: a request that this router has given up.
        rows = [(999, 3, 9), (two.stream_id, 0, 6), (one.stream_id, 1, 8)]
        arrive(bus, columns=columns(*rows))
        arrive(
            bus,
            deltas=[TokenDelta(one.stream_id, 2, [4], "stop")],
            columns=columns((two.stream_id, 1, 7)),
        )
        assert [await one.next() for _ in range(3)] == [
            TokenDelta(one.stream_id, 0, [5], None, 2, 0.5),
            TokenDelta(one.stream_id, 1, [8]),
            TokenDelta(one.stream_id, 2, [4], "stop"),
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
