"""Apply one replica's cache events to the index, in order, over a stream that may lose or delay frames.

A new attach stream begins with a snapshot. After a gap in the batch numbers, or when our digest differs from the
replica's, `EventReplay.take` returns the batch after which to request a resync. The answer is the missed batches or a
snapshot in pages. Frames with newer batches may arrive before it, so the replay keeps all batches until then. The stale
index keeps answering matches, since after a gap it is nearly right. A new epoch starts from an empty index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.protos.wire import CacheEvents, Frame
from quire.router.index.prefix_index import PrefixIndex

SNAPSHOT = -1  # as `ReplayCheck.resync_from`: no batches will do
_NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """What a frame showed.

    Attributes
    ----------
    agrees
        Our replay is the replica's cache. Neither this nor a reason: the frame cannot tell.
    reason
        Why it is not.
    resync_from
        It is time to ask for the batches after this one (`SNAPSHOT`: for a snapshot), or None.
    """

    agrees: bool = False
    reason: str = ""
    resync_from: int | None = None


class EventReplay:
    """The replay of one replica; the index must know it.

    Parameters
    ----------
    max_kept_batches
        Bound on the batches kept while a resync is awaited; beyond it they are dropped, and the gap asks for another.
    resync_interval_s
        Least time between two requests, answered or not.
    """

    def __init__(
        self, index: PrefixIndex, replica: str, max_kept_batches: int, resync_interval_s: float
    ):
        self._index = index
        self._replica = replica
        self._max_kept_batches = max_kept_batches
        self._resync_interval_s = resync_interval_s
        self._awaits_resync = True  # the attach stream begins with a snapshot
        self._in_snapshot = False  # some of its pages are there, others follow
        self._asked_s: float | None = None  # when a resync was asked for last
        self._kept: dict[int, CacheEvents] = {}  # by seq, while a resync is awaited

    def begin_stream(self) -> None:
        """A new attach stream is open: a snapshot is on its way."""
        self._asked_s = None
        self._await_resync()

    def begin_epoch(self, epoch: str) -> None:
        """Another engine: nothing of the old one holds. Its batches count from 1."""
        self._index.reset(self._replica, epoch, 0, _NO_HASHES)
        self.begin_stream()

    def on_first_frame(self, now_s: float) -> None:
        """The stream begins: the snapshot that opens it needs no asking."""
        self._asked_s = now_s

    def expect_no_snapshot(self) -> None:
        """The stream has had its snapshot, of an engine that is gone."""
        self._awaits_resync = False

    def take(self, frame: Frame, now_s: float) -> ReplayCheck:
        """Bring the index up to a frame, in the order of arrival."""
        if not self._replay(frame):
            return ReplayCheck()
        seq = self._index.seq(self._replica)
        if frame.events_seq < seq:  # it carries a snapshot, or a resync was faster than it
            return ReplayCheck()
        if frame.events_seq > seq:
            reason, resync_from = f"replica is at batch {frame.events_seq}, replay at {seq}", seq
        elif self._differs(frame):
            reason, resync_from = f"digest differs at batch {seq}", SNAPSHOT
        else:
            self._awaits_resync = False
            self._kept.clear()
            return ReplayCheck(agrees=True)
        if not self._awaits_resync:
            self._await_resync()
            self._kept.update((batch.seq, batch) for batch in frame.events)
        if self._asked_s is not None and now_s - self._asked_s < self._resync_interval_s:
            return ReplayCheck(reason=reason)
        self._asked_s = now_s
        return ReplayCheck(reason=reason, resync_from=resync_from)

    def _await_resync(self) -> None:
        self._awaits_resync = True
        self._in_snapshot = False
        self._kept.clear()

    def _replay(self, frame: Frame) -> bool:
        """Take in what can be; whether the index is at some batch, not within a snapshot."""
        index = self._index
        if not self._awaits_resync:
            # A page here is of a snapshot that something faster has made superfluous.
            for batch in frame.events:
                index.apply(self._replica, frame.epoch, batch)
            return True
        self._kept.update((batch.seq, batch) for batch in frame.events)
        if len(self._kept) > self._max_kept_batches:
            self._kept.clear()
        if frame.snapshot is not None:
            self._take_page(frame, frame.snapshot)
        if self._in_snapshot:
            return False
        while (kept := self._kept.get(index.seq(self._replica) + 1)) is not None:
            index.apply(self._replica, frame.epoch, kept)
        return True

    def _take_page(self, frame: Frame, page: np.ndarray) -> None:
        if not self._in_snapshot:
            self._index.begin_reset(self._replica, frame.epoch, frame.events_seq)
            self._in_snapshot = True
        self._index.extend_reset(self._replica, page, frame.host_snapshot)
        if not frame.snapshot_more:
            self._index.commit_reset(self._replica)
            self._in_snapshot = False

    def _differs(self, frame: Frame) -> bool:
        """A cache that was not stored in full, for the index's bound, has no digest to compare."""
        index, replica = self._index, self._replica
        return index.is_complete(replica) and index.digest(replica) != frame.digest
