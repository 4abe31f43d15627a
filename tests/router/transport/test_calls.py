"""Replies of a replica: whole messages, and the end of a replica is not taken for a cancellation in this process."""

from __future__ import annotations

import asyncio

import pytest

from quire.protos.wire_codec import MAX_MESSAGE_BYTES, Part, parts_of
from quire.router.transport.calls import CallEnded, answer_of, next_message


class ScriptedCall:
    """A streaming call with these messages; an exception is raised in its turn."""

    def __init__(self, *items: object):
        self._items = list(items)

    async def __anext__(self) -> object:
        await asyncio.sleep(0)
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._items.clear()


async def read(call: ScriptedCall) -> list[bytes]:
    messages = []
    while True:
        try:
            messages.append(await next_message(call))
        except StopAsyncIteration:
            return messages


def test_a_message_in_parts_is_one_message():
    call = ScriptedCall(b"one", Part(b"t", False), Part(b"wo", True), b"three")
    assert asyncio.run(read(call)) == [b"one", b"two", b"three"]


def test_a_message_in_parts_arrives_whole():
    long = bytes(range(256)) * (2 * MAX_MESSAGE_BYTES // 256 + 1)
    assert asyncio.run(read(ScriptedCall(*parts_of(long), *parts_of(b"short")))) == [long, b"short"]


@pytest.mark.parametrize("before", [(), (Part(b"t", False),)], ids=["between", "within"])
def test_a_stream_that_the_replica_cancels_ends_with_an_error_and_no_cancellation(before):
    async def main() -> None:
        call = ScriptedCall(b"right", *before, asyncio.CancelledError())
        assert await next_message(call) == b"right"
        with pytest.raises(CallEnded):
            await next_message(call)
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_an_error_comes_as_it_was_raised():
    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(read(ScriptedCall(b"one", ConnectionError("gone"))))


def test_our_own_cancellation_stays_one():
    async def main() -> None:
        waiting = asyncio.create_task(answer_of(asyncio.Event().wait()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()

    asyncio.run(main())
