"""Frames to several routers: who gets what, heartbeats, slow and returning routers, snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protos.wire import AdapterReport, CacheEvents, Facts, Frame, Load, TokenDelta
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.loop import LoopOutput
from quire.replica.serving import attached_routers as attachments_module
from quire.replica.serving.attached_routers import AttachedRouters
from quire.router.fleet.replicas import ReplicaTable
from quire.router.fleet.tracked_replica import ReplicaState
from quire.router.index.prefix_index import PrefixIndex

EPOCH = "epoch-1"
HOUR_S = 3600.0
HEARTBEAT_S, MAX_HEARTBEAT_S = 0.05, 0.2
EARLY_S, LATE_S = 0.01, 0.15  # how far from its time a heartbeat may be seen on a busy machine


def make(*, quiet: bool = True) -> tuple[AttachedRouters, list[str]]:
    """AttachedRouters and the list of detached routers; quiet ones send no heartbeat within a test."""
    detached: list[str] = []
    times = (HOUR_S, HOUR_S) if quiet else (HEARTBEAT_S, MAX_HEARTBEAT_S)
    attachments = AttachedRouters(
        EPOCH, detached.append, heartbeat_s=times[0], max_heartbeat_s=times[1]
    )
    return attachments, detached


class Router:
    """Reads the attach stream of one router as its frames come."""

    def __init__(self, attachments: AttachedRouters, router_id: str):
        self.frames: list[Frame] = []
        self.times_s: list[float] = []
        self.began_s = time.monotonic()
        self.stream: AsyncIterator[bytes] = attachments.stream(router_id, lambda: Load(num_steps=9))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for data in self.stream:
            self.frames.append(Frame.decode(data))
            self.times_s.append(time.monotonic() - self.began_s)

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def wait_for(self, num_frames: int) -> None:
        async with asyncio.timeout(10):
            while len(self.frames) < num_frames:
                await asyncio.sleep(5e-3)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.stream.aclose()


def output(deltas: list[TokenDelta], *rest: object) -> LoopOutput:
    return LoopOutput(DeltaBatch(deltas), *rest)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def delta(router_id: str, stream_id: int, index: int, reason: str | None = None) -> TokenDelta:
    return TokenDelta((router_id, stream_id), index, [index + 100], Facts(reason))


def events(seq: int, *stored: int) -> CacheEvents:
    return CacheEvents(seq, np.array(stored, np.uint64), np.empty(0, np.uint64))


def test_each_router_gets_its_own_tokens_and_all_events():
    async def run() -> None:
        attachments, detached = make()
        a, b = Router(attachments, "a"), Router(attachments, "b")
        await settle()
        assert "a" in attachments and "b" in attachments and len(attachments) == 2
        load = Load(num_running=3)
        mixed = [delta("a", 1, 0), delta("b", 1, 7), delta("gone", 1, 0), delta("a", 2, 4, "stop")]
        attachments.publish(output(mixed, events(1, 5, 6), 1, 3, load))
        attachments.publish(output([delta("b", 1, 8)], None, 1, 3, load))
        await settle()
        (first,) = a.frames
        assert [(d.key, d.index, d.token_ids, d.finish_reason) for d in first.token_deltas()] == [
            (1, 0, [100], None),
            (2, 4, [104], "stop"),
        ]
        assert [[d.index for d in f.token_deltas()] for f in b.frames] == [[7], [8]]
        for frame in (first, b.frames[0]):
            assert (frame.epoch, frame.events_seq, frame.digest) == (EPOCH, 1, 3)
            assert frame.events[0].stored.tolist() == [5, 6]
            assert frame.load == load._replace(num_routers=2)
        assert b.frames[1].events == []
        for router in (a, b):
            await router.leave()
        assert detached == ["a", "b"]
        assert len(attachments) == 0

    asyncio.run(run())


def test_a_report_of_adapters_is_sent_once_in_each_attach_stream():
    def report(seq: int) -> AdapterReport:
        keys = np.array([seq], np.uint64)
        return AdapterReport(seq, keys, keys, slots=2, slots_in_use=1)

    async def run() -> None:
        attachments, _ = make()
        a = Router(attachments, "a")
        await settle()
        attachments.publish(output([], None, 0, 0, Load(), report(1)))
        for i in range(3):
            attachments.publish(output([delta("a", 1, i)], None, 0, 0, Load(), report(1)))
        await settle()
        b = Router(attachments, "b")
        await settle()
        attachments.send_snapshot("b", 0, np.empty(0, np.uint64), np.empty(0, np.uint64))
        attachments.publish(output([], events(1, 5), 1, 3, Load(), report(1)))
        attachments.publish(output([], None, 1, 3, Load(), report(2)))
        await settle()

        def seqs(router: Router) -> list[int]:
            return [0 if f.adapters is None else f.adapters.seq for f in router.frames]

        assert seqs(a) == [1, 0, 0, 0, 2, 0]
        assert seqs(b) == [2, 0, 0]
        assert a.frames[0].adapters.on_device.tolist() == [1]
        again = Router(attachments, "a")
        await settle()
        attachments.publish(output([delta("a", 1, 3)], None, 1, 3, Load(), report(2)))
        await settle()
        assert seqs(again) == [2]
        for router in (a, b, again):
            await router.leave()

    asyncio.run(run())


def test_a_heartbeat_does_not_overtake_a_frame_of_the_same_moment():
    """It says how many events there are: the router would ask for those that are on their way."""

    async def run() -> None:
        attachments, _ = make(quiet=False)
        router = Router(attachments, "a")
        await settle()
        publish = (attachments.publish, output([], events(1, 5), 1, 3, Load()))
        asyncio.get_running_loop().call_later(1.5 * HEARTBEAT_S, *publish)
        time.sleep(2 * HEARTBEAT_S)  # both are due when the loop goes on, the heartbeat first
        await router.wait_for(2)
        await router.leave()
        assert [(f.events_seq, len(f.events)) for f in router.frames[:2]] == [(1, 1), (1, 0)]

    asyncio.run(run())


steps = st.sampled_from(("a", "b", "nobody", "snapshot", "again", "heartbeat"))


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=40))
def test_no_router_ever_misses_an_event(happens):
    """Whatever a step has for it, and when a snapshot or what it asked for again comes between: no gap, and the
    digest is right."""

    async def run() -> None:
        detached: list[str] = []
        beats_s = 1e-3 if "heartbeat" in happens else HOUR_S
        attachments = AttachedRouters(
            EPOCH, detached.append, heartbeat_s=beats_s, max_heartbeat_s=beats_s
        )
        log = EventLog(EPOCH)
        routers = {name: Router(attachments, name) for name in "ab"}
        await settle()
        for name in "ab":
            attachments.send_snapshot(name, *log.snapshot())
        for number, what in enumerate(happens):
            if what in ("a", "b", "nobody"):
                log.hold([number + 1])
                deltas = [] if what == "nobody" else [delta(what, 1, number)]
                attachments.publish(output(deltas, log.flush(), log.seq, log.digest, Load()))
            elif what == "snapshot":
                attachments.send_snapshot("a", *log.snapshot())
            elif what == "again":
                attachments.send_events("b", log.since(max(0, log.seq - 2)))
            else:
                await asyncio.sleep(2e-3)
        await settle()
        for router in routers.values():
            table = ReplicaTable(PrefixIndex(), resync_interval_s=0.0)
            table.add("r", EPOCH)
            for frame in router.frames:
                assert table.on_frame("r", frame, 0.0).resync_from is None
            assert table.statuses(0.0)[0].indexed_blocks == log.num_held
            await router.leave()

    asyncio.run(run())


def test_heartbeats_back_off_while_nothing_happens():
    async def run() -> None:
        attachments, _ = make(quiet=False)
        attachments.publish(output([], events(4, 1), 4, 77, Load()))
        router = Router(attachments, "a")
        await router.wait_for(4)
        await router.leave()
        for wait_s, gap_s in zip(
            [0.05, 0.1, 0.2, 0.2], np.diff([0.0, *router.times_s]), strict=True
        ):
            assert wait_s - EARLY_S < gap_s < wait_s + LATE_S
        for frame in router.frames:
            assert (frame.tokens, frame.events) == (None, [])
            assert (frame.events_seq, frame.digest) == (4, 77)
            assert frame.load.num_steps == 9  # asked for when the heartbeat is due

    asyncio.run(run())


@pytest.mark.parametrize("activity", ["frame", "load"])
def test_activity_brings_the_fast_heartbeat_back(activity):
    """After a frame of its own, and after a step that only changed the load (another router's tokens)."""

    async def run() -> None:
        attachments, _ = make(quiet=False)
        router = Router(attachments, "a")
        await router.wait_for(4)  # the next is MAX_HEARTBEAT_S after the fourth
        await asyncio.sleep(0.07)
        assert len(router.frames) == 4
        key = "a" if activity == "frame" else "b"
        attachments.publish(output([delta(key, 1, 0)], None, 0, 0, Load()))
        at_s = time.monotonic() - router.began_s
        await router.wait_for(6)
        await router.leave()
        waits_s = np.diff([at_s, *router.times_s[4:6]])
        # The frame at once and the fast heartbeat after it; or, overdue, a heartbeat at once and the slower one.
        assert [len(f.facts) for f in router.frames[4:6]] == [int(activity == "frame"), 0]
        second_s = HEARTBEAT_S if activity == "frame" else 2 * HEARTBEAT_S
        assert waits_s[0] < MAX_HEARTBEAT_S - 0.07 - EARLY_S
        assert second_s - EARLY_S < waits_s[1] < second_s + LATE_S

    asyncio.run(run())


def test_frames_in_a_row_delay_the_heartbeat():
    async def run() -> None:
        attachments, _ = make(quiet=False)
        router = Router(attachments, "a")
        await settle()
        for i in range(8):
            attachments.publish(output([delta("a", 1, i)], None, 0, 0, Load()))
            await asyncio.sleep(0.02)
        await router.leave()
        assert [d.index for f in router.frames for d in f.token_deltas()] == list(range(8))
        for frame, gap_s in zip(router.frames[1:], np.diff(router.times_s), strict=True):
            assert frame.tokens is not None or gap_s > HEARTBEAT_S - EARLY_S

    asyncio.run(run())


def test_a_slow_router_is_cut_off_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(attachments_module, "MAX_QUEUED_FRAMES", 5)

    async def run() -> None:
        attachments, detached = make()
        fast = Router(attachments, "fast")
        slow = attachments.stream("slow", Load)
        reading = asyncio.ensure_future(anext(slow))
        await settle()
        for i in range(7):
            both = [delta("fast", 1, i), delta("slow", 1, i)]
            attachments.publish(output(both, None, 0, 0, Load()))
            await settle()
        # It took one frame, five waited, the seventh was too many: at once, its reader being stuck.
        assert detached == ["slow"] and "slow" not in attachments
        assert len(await reading) > 0
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
        assert detached == ["slow"]
        for i in range(7, 9):
            attachments.publish(output([delta("fast", 1, i)], None, 0, 0, Load()))
        await settle()
        assert [f.tokens.index[0] for f in fast.frames] == list(range(9))
        again = Router(attachments, "slow")
        await settle()
        attachments.publish(output([delta("slow", 2, 0)], None, 0, 0, Load()))
        await settle()
        assert len(again.frames) == 1
        for router in (again, fast):
            await router.leave()

    asyncio.run(run())


def test_a_second_attachment_ends_the_first_and_only_the_firsts_requests():
    """The first's requests lost frames and would show a gap; those sent after the second began go on."""

    async def run() -> None:
        attachments, detached = make()
        first = Router(attachments, "a")
        await settle()
        second = attachments.stream("a", Load)
        reading = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        assert detached == ["a"]  # already: before a request can follow the second attachment
        await settle()
        assert first.ended and first.frames == []
        await first.leave()
        assert detached == ["a"]  # the first's end does not touch the second
        assert "a" in attachments
        attachments.publish(output([delta("a", 9, 0)], None, 0, 0, Load()))
        assert Frame.decode(await reading).tokens.stream_ids[0] == 9
        await second.aclose()
        assert detached == ["a", "a"]

    asyncio.run(run())


def test_close_ends_all_streams():
    async def run() -> None:
        attachments, detached = make()
        routers = [Router(attachments, name) for name in "ab"]
        await settle()
        attachments.close()
        await settle()
        assert all(router.ended for router in routers)
        assert sorted(detached) == ["a", "b"]

    asyncio.run(run())


@pytest.mark.parametrize("num_hashes", [0, 1, 4, 5, 8, 11])
def test_a_paged_snapshot_gives_the_router_the_whole_cache(monkeypatch, num_hashes):
    monkeypatch.setattr(attachments_module, "SNAPSHOT_PAGE_HASHES", 4)

    async def run() -> None:
        attachments, _ = make()
        log = EventLog(EPOCH)
        log.hold(range(1, num_hashes + 1))
        log.move([h for h in range(1, num_hashes + 1) if h % 3 == 0], Tier.GPU, Tier.HOST)
        log.flush()
        router = Router(attachments, "a")
        await settle()
        # A batch overtakes the snapshot, as it may between the engine's thread and the event loop.
        snapshot = log.snapshot()
        log.hold([1000])
        attachments.publish(output([], log.flush(), log.seq, log.digest, Load()))
        attachments.send_snapshot("a", *snapshot)
        attachments.send_snapshot("gone", *snapshot)
        # The replay agrees with the first frame that is not older than it.
        attachments.publish(output([delta("a", 1, 0)], None, log.seq, log.digest, Load()))
        await settle()
        pages = [f for f in router.frames if f.snapshot is not None]
        assert len(pages) == max(1, -(-num_hashes // 4))
        assert [f.snapshot_more for f in pages] == [True] * (len(pages) - 1) + [False]
        table = ReplicaTable(PrefixIndex())
        table.add("r", EPOCH)
        for frame in router.frames:
            assert table.on_frame("r", frame, 0.0).resync_from is None
        assert table.state("r") is ReplicaState.ATTACHED
        assert table.statuses(0.0)[0].indexed_blocks == num_hashes + 1
        await router.leave()

    asyncio.run(run())


def test_a_router_that_missed_batches_gets_them_again():
    async def run() -> None:
        attachments, _ = make()
        log = EventLog(EPOCH)
        router = Router(attachments, "a")
        await settle()
        attachments.send_snapshot("a", *log.snapshot())
        for routing_hash in range(1, 5):
            log.hold([routing_hash])
            attachments.publish(output([], log.flush(), log.seq, log.digest, Load()))
        await settle()
        table = ReplicaTable(PrefixIndex(), resync_interval_s=0.0)
        table.add("r", EPOCH)
        actions = [
            table.on_frame("r", frame, float(i))
            for i, frame in enumerate(router.frames)
            if i not in (2, 3)  # lost on the way
        ]
        assert actions[-1].resync_from == 1
        router.frames.clear()
        attachments.send_events("a", log.since(1))
        attachments.send_events("gone", log.since(1))
        await settle()
        (frame,) = router.frames
        assert [batch.seq for batch in frame.events] == [2, 3, 4]
        assert table.on_frame("r", frame, 9.0).reason == ""
        assert table.statuses(9.0)[0].indexed_blocks == 4
        await router.leave()

    asyncio.run(run())
