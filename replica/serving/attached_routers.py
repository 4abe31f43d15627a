"""The replica's side of the bus (the connection to the routers): the attached routers and their frames.

```
 engine thread                          event loop of the actor
 step ─▶ LoopOutput ──call_soon_threadsafe──▶ publish ─┬▶ queue of router A ─▶ attach stream A
                                                       └▶ queue of router B ─▶ attach stream B
```

After each step, a router gets one frame with the tokens of its requests and all cache events, unless there are neither.
Then it gets a heartbeat with the load and the cache's digest: `heartbeat_s` after the last frame while the engine runs
steps, and up to `max_heartbeat_s` after it while the engine is idle. Heartbeats show that the replica is alive, and
their digest reveals lost events.

A new report of adapters (`AdapterReport`) travels once in each attach stream, in the next frame.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

import numpy as np

from quire.protos.routing_hash import tier_digest, xor_hashes
from quire.protos.wire import CacheEvents, Facts, Frame, Load, TokenDelta, TokenRecord
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.loop import LoopOutput

# 64 KiB per frame. A router reads a page in 3 ms, in which no other task of its event loop runs.
SNAPSHOT_PAGE_HASHES = 8_192
# A router with a longer queue is detached, and attaches again. This many frames are 80 s of steps of 20 ms.
MAX_QUEUED_FRAMES = 4_096


class _ColumnFilter:
    """Selects the rows of one attachment from the columns of each step.

    While the same rows decode, `DeltaBatch.sources` is the same array object, so the filter is computed only once.
    """

    def __init__(self, source: int):
        self._source = source
        self._sources: np.ndarray | None = None  # the array that `_mine` was computed for
        self._mine: np.ndarray | None = None  # [n] bool; None: all rows
        self._count = 0

    def take(self, deltas: DeltaBatch) -> TokenRecord | None:
        """The tokens of this attachment's streams; None if there are none."""
        sources = deltas.sources
        if sources is not self._sources:
            mine = sources == self._source
            self._count = int(np.count_nonzero(mine))
            self._mine = None if self._count == len(mine) else mine
            self._sources = sources
        if self._count == 0:
            return None
        return deltas.tokens if self._mine is None else deltas.tokens.select(self._mine)


class _Attachment:
    """The queue of frames for one router, and the time of its next heartbeat."""

    def __init__(
        self,
        source: int,
        clock: Callable[[], float],
        heartbeat_s: float,
        max_heartbeat_s: float,
    ):
        self.source = source
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._max_heartbeat_s = max_heartbeat_s
        self._frames: deque[Frame] = deque()
        self._ready = asyncio.Event()
        self._sent_s = clock()
        self._wait_s = heartbeat_s  # from the last frame to the next heartbeat
        self.adapters_seq = 0  # of the last report that was sent
        self.closed = False
        self.columns = _ColumnFilter(source)

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._ready.set()

    def is_too_slow(self) -> bool:
        return len(self._frames) > MAX_QUEUED_FRAMES

    def close(self) -> None:
        self.closed = True
        self._frames.clear()
        self._ready.set()

    def touch(self) -> None:
        """Let the next heartbeat come `heartbeat_s` after the last frame, because the load has changed."""
        if self._wait_s > self._heartbeat_s:
            self._wait_s = self._heartbeat_s
            self._ready.set()

    async def next(self) -> Frame | None:
        """Wait for the next frame; None if a heartbeat is due or the attachment is closed."""
        while not self._frames and not self.closed:
            self._ready.clear()
            left_s = self._sent_s + self._wait_s - self._clock()
            try:
                async with asyncio.timeout(left_s):
                    await self._ready.wait()
            except TimeoutError:
                # Send a frame that arrived at the same time first: the heartbeat's digest already includes its events.
                if self._frames:
                    break
                self._sent_s = self._clock()
                self._wait_s = min(2 * self._wait_s, self._max_heartbeat_s)
                return None
        if self.closed:
            return None
        self._sent_s = self._clock()
        self._wait_s = self._heartbeat_s
        return self._frames.popleft()


class AttachedRouters:
    """The attached routers of one replica. Lives in the actor's event loop; not thread-safe.

    Parameters
    ----------
    epoch
        Id of the engine instance; each frame contains it.
    on_detach
        Called with a router's id when its attachment ends for any reason; the router's present requests have lost
        their reader. If a router attaches again, the call for the old attachment precedes the new one, so it does not
        affect later requests.
    """

    def __init__(
        self,
        epoch: str,
        on_detach: Callable[[str], None],
        *,
        heartbeat_s: float = 0.1,
        max_heartbeat_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._epoch = epoch
        self._on_detach = on_detach
        self._heartbeat_s = heartbeat_s
        self._max_heartbeat_s = max_heartbeat_s
        self._clock = clock
        self._by_router: dict[str, _Attachment] = {}
        self._sources = itertools.count(1)
        self._last = LoopOutput()

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._by_router

    def __len__(self) -> int:
        return len(self._by_router)

    def source(self, router_id: str) -> int:
        """Number of a router's current attachment; new requests of the router get it as `Request.source`.

        The columns of a request from an earlier attachment match no attachment and are dropped.
        """
        return self._by_router[router_id].source

    def publish(self, output: LoopOutput) -> None:
        """Queue the results of a step: each router gets its own deltas, and all get the events and the load.

        The keys of the deltas are (router_id, stream_id). Deltas of a detached router are dropped, because its requests
        were aborted.
        """
        self._last = output
        by_router: dict[str, list[TokenDelta]] = {}
        for delta in output.deltas.whole:
            router_id, stream_id = delta.key
            mine = TokenDelta(stream_id, delta.index, delta.token_ids, delta.facts)
            by_router.setdefault(router_id, []).append(mine)
        events = [] if output.events is None else [output.events]
        adapters_seq = 0 if output.adapters is None else output.adapters.seq
        for router_id, attachment in list(self._by_router.items()):
            deltas = by_router.get(router_id, [])
            tokens = attachment.columns.take(output.deltas)
            is_reported = attachment.adapters_seq == adapters_seq
            if deltas or tokens is not None or events or not is_reported:
                attachment.put(self._frame(events, Frame.pack(deltas, tokens)))
            else:
                attachment.touch()
            if attachment.is_too_slow():
                self._detach(router_id, attachment)

    def send_events(self, router_id: str, events: list[CacheEvents]) -> None:
        """Queue event batches that the router has missed; does nothing if the router is detached."""
        attachment = self._by_router.get(router_id)
        if attachment is not None:
            attachment.put(self._frame(events))

    def send_snapshot(self, router_id: str, seq: int, gpu: np.ndarray, host: np.ndarray) -> None:
        """Queue a snapshot: the routing hashes on the device ([n] uint64) and in host memory ([m]) at batch `seq`.

        Does nothing if the router is detached.
        """
        attachment = self._by_router.get(router_id)
        if attachment is not None:
            for frame in self._snapshot_frames(seq, gpu, host):
                attachment.put(frame)

    async def stream(self, router_id: str, load: Callable[[], Load]) -> AsyncGenerator[bytes, None]:
        """Attach a router and yield encoded frames until it detaches. An earlier attachment of the router ends.

        Parameters
        ----------
        load
            Returns the load for a heartbeat; must be cheap and safe to call outside of the engine's thread.
        """
        attachment = self._by_router.get(router_id)
        if attachment is not None:
            self._detach(router_id, attachment)
        attachment = _Attachment(
            next(self._sources), self._clock, self._heartbeat_s, self._max_heartbeat_s
        )
        self._by_router[router_id] = attachment
        try:
            while True:
                frame = await attachment.next()
                if attachment.closed:
                    return
                frame = frame or self._frame([], load=load())
                yield self._with_adapters(frame, attachment).encode()
        finally:
            self._detach(router_id, attachment)

    def _detach(self, router_id: str, attachment: _Attachment) -> None:
        """End an attachment; does nothing if it has already ended."""
        attachment.close()
        if self._by_router.get(router_id) is attachment:
            del self._by_router[router_id]
            self._on_detach(router_id)

    def detach(self, router_id: str) -> None:
        """End a router's attachment; does nothing if it has none."""
        attachment = self._by_router.get(router_id)
        if attachment is not None:
            self._detach(router_id, attachment)

    def close(self) -> None:
        for attachment in self._by_router.values():
            attachment.close()

    def _frame(
        self,
        events: list[CacheEvents],
        new: tuple[TokenRecord | None, list[Facts]] = (None, []),
        load: Load | None = None,
    ) -> Frame:
        return Frame(
            self._epoch,
            *new,
            events,
            self._last.events_seq,
            self._last.digest,
            self._shared(self._last.load if load is None else load),
        )

    def _with_adapters(self, frame: Frame, attachment: _Attachment) -> Frame:
        """`frame`, with the newest report of adapters if its router has not had it yet."""
        report = self._last.adapters
        if report is None or report.seq == attachment.adapters_seq:
            return frame
        attachment.adapters_seq = report.seq
        return dataclasses.replace(frame, adapters=report)

    def _shared(self, load: Load) -> Load:
        """`load` with the number of attached routers."""
        num_routers = len(self._by_router)
        return load if num_routers <= 1 else load._replace(num_routers=num_routers)

    def _snapshot_frames(self, seq: int, gpu: np.ndarray, host: np.ndarray) -> list[Frame]:
        digest = tier_digest(xor_hashes(gpu), xor_hashes(host))
        num_hashes = len(gpu) + len(host)
        frames = []
        for start in range(0, max(num_hashes, 1), SNAPSHOT_PAGE_HASHES):
            end = start + SNAPSHOT_PAGE_HASHES
            frames.append(
                Frame(
                    self._epoch,
                    events_seq=seq,
                    digest=digest,
                    load=self._shared(self._last.load),
                    snapshot=gpu[start:end],
                    snapshot_more=end < num_hashes,
                    host_snapshot=host[max(0, start - len(gpu)) : max(0, end - len(gpu))],
                )
            )
        return frames
