import asyncio

import numpy as np
import pytest

from quire.protos.wire import CacheEvents, Facts, Frame, Load, TokenDelta, TokenRecord
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.loop import LoopOutput
from quire.replica.serving.attached_routers import AttachedRouters


class Routers:
    """Attached routers; reads what each of them got."""

    def __init__(self, *names):
        self.detached = []
        self.attachments = AttachedRouters("epoch", self.detached.append, heartbeat_s=30.0)
        self.names = names
        self.streams = {}

    async def __aenter__(self):
        for name in self.names:
            await self.attach(name)
        return self

    async def __aexit__(self, *_):
        for stream in self.streams.values():
            await stream.aclose()

    async def attach(self, name):
        self.streams[name] = stream = self.attachments.stream(name, Load)
        # The first frame makes the generator run up to its first wait.
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        self.attachments.send_events(name, [])
        await first

    async def next(self, name):
        return Frame.decode(await asyncio.wait_for(anext(self.streams[name]), 5))

    def batch(self, rows, whole=()):
        """(router, stream id, index, token) of each row that gained a token."""
        keys = np.empty(len(rows), object)
        keys[:] = [(name, stream_id) for name, stream_id, _, _ in rows]
        sources = [self.attachments.source(name) if name in self.names else 99 for name, *_ in rows]
        return DeltaBatch(
            list(whole),
            TokenRecord(
                np.array([row[1] for row in rows], np.int64),
                np.array([row[2] for row in rows], np.int32),
                np.array([row[3] for row in rows], np.int64),
            ),
            keys,
            np.array(sources, np.int32),
        )


def test_each_router_gets_its_own_tokens():
    async def main():
        async with Routers("a", "b") as routers:
            rows = [("a", 1, 5, 50), ("b", 1, 6, 60), ("a", 2, 7, 70), ("gone", 3, 8, 80)]
            whole = [
                TokenDelta(("b", 9), 0, [90], Facts(num_cached_tokens=32, queue_s=0.5)),
                TokenDelta(("a", 8), 3, [], Facts("abort")),
                TokenDelta(("gone", 4), 0, [1]),
            ]
            load = Load(num_running=4)
            output = LoopOutput(routers.batch(rows, whole), None, 3, 77, load)
            routers.attachments.publish(output)
            a, b = await routers.next("a"), await routers.next("b")
            assert list(a.token_deltas()) == [
                TokenDelta(8, 3, [], Facts("abort")),
                TokenDelta(1, 5, [50]),
                TokenDelta(2, 7, [70]),
            ]
            assert list(b.token_deltas()) == [
                TokenDelta(9, 0, [90], Facts(None, 32, 0.5)),
                TokenDelta(1, 6, [60]),
            ]
            assert (a.epoch, a.events_seq, a.digest) == ("epoch", 3, 77)
            assert a.load == load._replace(num_routers=2)

    asyncio.run(main())


def test_the_columns_of_a_step_are_the_frame_of_its_only_router():
    async def main():
        async with Routers("a") as routers:
            batch = routers.batch([("a", i, 2 * i, 3 * i) for i in range(100)])
            routers.attachments.publish(LoopOutput(batch))
            frame = await routers.next("a")
            assert frame.facts == []
            expected = [TokenDelta(i, 2 * i, [3 * i]) for i in range(100)]
            assert list(frame.token_deltas()) == expected

    asyncio.run(main())


def test_cache_events_go_to_everybody_and_tokens_of_others_to_nobody_else():
    async def main():
        async with Routers("a", "b") as routers:
            events = CacheEvents(1, np.array([5], np.uint64), np.array([], np.uint64))
            batch = routers.batch([("a", 1, 0, 7)])
            routers.attachments.publish(LoopOutput(batch, events, 1, 5))
            routers.attachments.publish(LoopOutput(routers.batch([("b", 2, 0, 9)])))
            a, b = await routers.next("a"), await routers.next("b")
            assert [e.seq for e in a.events] == [e.seq for e in b.events] == [1]
            assert list(a.token_deltas()) == [TokenDelta(1, 0, [7])]
            assert b.tokens is None
            assert list((await routers.next("b")).token_deltas()) == [TokenDelta(2, 0, [9])]

    asyncio.run(main())


def test_a_second_attachment_does_not_get_the_tokens_of_the_first_ones_requests():
    async def main():
        async with Routers("a", "b") as routers:
            old = routers.batch([("a", 1, 0, 7)])
            first = routers.streams["a"]
            await routers.attach("a")
            with pytest.raises(StopAsyncIteration):
                await anext(first)
            assert routers.detached == ["a"]
            routers.attachments.publish(LoopOutput(old))
            routers.attachments.publish(LoopOutput(routers.batch([("a", 2, 0, 8)])))
            assert list((await routers.next("a")).token_deltas()) == [TokenDelta(2, 0, [8])]

    asyncio.run(main())


def test_a_router_that_comes_back_after_its_end_is_a_new_source():
    """Its old requests are being aborted: their last tokens must not look like those of new streams."""

    async def main():
        async with Routers("a") as routers:
            source = routers.attachments.source("a")
            await routers.streams["a"].aclose()
            assert routers.detached == ["a"]
            await routers.attach("a")
            assert routers.attachments.source("a") != source

    asyncio.run(main())
