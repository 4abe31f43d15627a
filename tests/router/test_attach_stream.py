"""A stream that one call after the other carries: nothing lost, no call longer than the bound, none left open."""

from __future__ import annotations

import asyncio

import pytest

from quire.protos.parts import Part
from quire.router import attach_stream as attach_stream_module
from quire.router.attach_stream import AttachStream
from quire.router.calls import CallEnded

BOUND = 4


class Producer:
    """A replica: its messages go to the call that came last."""

    def __init__(self) -> None:
        self.calls: list[ScriptedCall] = []
        self.is_passed_over = False
        self.num_sent = 0

    def call(self, continues: bool) -> ScriptedCall:
        assert continues == bool(self.calls)
        call = ScriptedCall()
        call.put("other" if self.is_passed_over else "right")
        if not self.is_passed_over:
            if self.calls:
                self.calls[-1].put(None)
            self.calls.append(call)
        return call

    def send(self, number: int) -> None:
        for _ in range(number):
            self.calls[-1].put(self.num_sent)
            self.num_sent += 1


class ScriptedCall:
    def __init__(self) -> None:
        self._items: asyncio.Queue = asyncio.Queue()
        self.num_items = 0
        self.cancelled = self.ended = False

    def put(self, item: object) -> None:
        self._items.put_nowait(item)
        self.num_items += 1

    async def __anext__(self) -> object:
        item = await self._items.get()
        if item is None:
            self.ended = True
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture(autouse=True)
def bound(monkeypatch):
    monkeypatch.setattr(attach_stream_module, "MAX_CALL_FRAMES", BOUND)


def make(producer: Producer, may_call=lambda: True) -> AttachStream:
    return AttachStream(
        producer.call, asyncio.create_task, is_right=lambda data: data == "right", may_call=may_call
    )


async def read(stream: AttachStream, number: int) -> list[object]:
    async with asyncio.timeout(5):  # Python 3.11's `wait_for` may lose a cancellation
        return [await anext(stream) for _ in range(number)]


def test_one_call_after_the_other_carries_the_stream():
    async def main():
        producer = Producer()
        stream = make(producer)
        assert await read(stream, 1) == ["right"]
        seen = []
        for _ in range(50):
            producer.send(3)
            seen += await read(stream, 3)
            await asyncio.sleep(0)
        assert seen == list(range(150))
        assert len(producer.calls) > 150 // (2 * BOUND)
        # So many are read when the next call is made, and three more are sent until it is there.
        assert max(call.num_items for call in producer.calls) <= BOUND + 2 * 3 + 1
        assert len(stream._open) <= 2
        assert all(call.ended for call in producer.calls[:-2])
        stream.cancel()
        assert producer.calls[-1].cancelled

    asyncio.run(main())


def test_a_call_that_serve_gives_to_another_replica_changes_nothing():
    async def main():
        producer = Producer()
        stream = make(producer)
        producer.is_passed_over = True
        producer.send(3 * BOUND)
        assert (await read(stream, 3 * BOUND + 1))[1:] == list(range(3 * BOUND))
        assert len(producer.calls) == 1 and len(stream._open) == 1
        producer.is_passed_over = False
        producer.send(BOUND)
        await read(stream, BOUND)
        await asyncio.sleep(0.01)
        producer.send(1)
        assert await read(stream, 1) == [4 * BOUND]
        assert len(producer.calls) == 2

    asyncio.run(main())


def test_nothing_is_called_where_serve_brings_no_calls():
    async def main():
        producer = Producer()
        stream = make(producer, may_call=lambda: False)
        producer.send(5 * BOUND)
        await read(stream, 5 * BOUND)
        assert len(producer.calls) == 1

    asyncio.run(main())


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_the_stream_ends_as_its_last_call_does(how):
    async def main():
        producer = Producer()
        stream = make(producer)
        producer.send(BOUND)
        await read(stream, BOUND)
        await asyncio.sleep(0.01)
        assert len(producer.calls) == 2
        producer.calls[-1].put(None if how == "ends" else ConnectionError("gone"))
        with pytest.raises(StopAsyncIteration if how == "ends" else ConnectionError):
            await read(stream, 3)

    asyncio.run(main())


def test_a_call_that_fails_to_take_over_leaves_the_stream_to_the_one_before():
    async def main():
        producer = Producer()
        stream = make(producer)
        failing = ScriptedCall()
        failing.put(ConnectionError("not now"))
        producer.send(2 * BOUND)
        right, stream._call = stream._call, lambda continues: failing
        await read(stream, BOUND)
        await asyncio.sleep(0.01)
        assert failing.cancelled and stream._open == producer.calls
        stream._call = right
        assert (await read(stream, BOUND + 1))[-1] == 2 * BOUND - 1
        await asyncio.sleep(0.01)
        assert len(producer.calls) == 2

    asyncio.run(main())


@pytest.mark.parametrize("is_at_once", [True, False], ids=["at once", "after its reader"])
@pytest.mark.parametrize("answers", [True, False], ids=["answered", "not answered"])
def test_cancel_ends_every_call_at_any_moment(is_at_once, answers):
    """Also one that is on its way, and while the end of the call before it is waited for."""

    async def main(num_turns: int) -> None:
        producer = Producer()
        stream = make(producer)
        opened: list[ScriptedCall] = []

        def call(continues: bool) -> ScriptedCall:
            opened.append(producer.call(continues) if answers else ScriptedCall())
            return opened[-1]

        stream._call = call
        first = producer.calls[0]
        producer.send(BOUND)
        reading = asyncio.create_task(read(stream, BOUND + 2))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        reading.cancel()
        if not is_at_once:
            await asyncio.gather(reading, return_exceptions=True)
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(0)
        for one in (first, *opened):
            assert one.cancelled or one.ended
        assert stream._next is None or stream._next.done()

    for num_turns in range(12):
        asyncio.run(main(num_turns))


def test_a_frame_in_parts_is_one_frame():
    async def main():
        producer = Producer()
        stream = make(producer)
        call = producer.calls[0]
        for item in (b"one", Part(b"t", False), Part(b"wo", True), b"three"):
            call.put(item)
        assert await read(stream, 4) == ["right", b"one", b"two", b"three"]

    asyncio.run(main())


def test_a_replica_that_cancels_a_takeover_is_asked_again_later():
    async def main():
        producer = Producer()
        stream = make(producer)
        real_call, stream._call = stream._call, lambda continues: cancelled
        cancelled = ScriptedCall()
        cancelled.put(asyncio.CancelledError())  # as Serve raises what came over gRPC
        producer.send(2 * BOUND)
        await read(stream, BOUND)
        async with asyncio.timeout(5):
            while not cancelled.cancelled:
                await asyncio.sleep(0)
        stream._call = real_call
        assert await read(stream, BOUND + 1) == list(range(BOUND - 1, 2 * BOUND))
        await asyncio.sleep(0)
        assert len(producer.calls) == 2

    asyncio.run(main())


def test_a_stream_that_the_replica_cancels_ends_with_an_error_and_no_cancellation():
    async def main():
        producer = Producer()
        stream = make(producer)
        producer.calls[0].put(asyncio.CancelledError())
        assert await read(stream, 1) == ["right"]
        with pytest.raises(CallEnded):
            await read(stream, 1)

    asyncio.run(main())
