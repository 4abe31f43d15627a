"""Apply one replica's cache events to the index, in order, over a stream that may lose or delay frames.

A new attach stream begins with a snapshot. After a gap in the batch numbers, or when our digest differs from the
replica's, `EventReplay.take` returns the batch after which to request a resync. The replica answers with the missed
batches, or with a snapshot in pages. Frames with newer batches may arrive before the answer, so the replay keeps all
batches until then. Matches still use the stale index, because it is nearly right after a gap. A new epoch (a restart of
the replica's engine) starts from an empty index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.protos.wire import CacheEvents, Frame
from quire.router.index.prefix_index import PrefixIndex

# Value of `ReplayCheck.resync_from`: request a snapshot.
SNAPSHOT = -1
_NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """Result of comparing the replay with a frame.

    Attributes
    ----------
    agrees
        The replay equals the replica's cache. False with an empty `reason`: this frame cannot be compared.
    reason
        The difference, for the log.
    resync_from
        Request the batches after this one now (`SNAPSHOT`: a snapshot); None: request nothing.
    """

    agrees: bool = False
    reason: str = ""
    resync_from: int | None = None


class EventReplay:
    """Replays the events of one replica. The index must contain the replica.

    Parameters
    ----------
    max_kept_batches
        Bound on the batches kept until a resync arrives. If it is exceeded, they are dropped, and the gap causes
        another resync.
    resync_interval_s
        Shortest time between two resync requests, whether they are answered or not.
    """

    def __init__(
        self, index: PrefixIndex, replica: str, max_kept_batches: int, resync_interval_s: float
    ):
        self._index = index
        self._replica = replica
        self._max_kept_batches = max_kept_batches
        self._resync_interval_s = resync_interval_s
        # A snapshot or missed batches are expected; at first the snapshot of the attach stream.
        self._awaits_resync = True
        # Some pages of a snapshot have arrived, and others follow.
        self._in_snapshot = False
        # Time of the last resync request.
        self._asked_s: float | None = None
        # Batches by sequence number, kept until the resync arrives.
        self._kept: dict[int, CacheEvents] = {}

    def begin_stream(self) -> None:
        """Handle a new attach stream: expect its snapshot."""
        self._asked_s = None
        self._await_resync()

    def begin_epoch(self, epoch: str) -> None:
        """Drop the cache of the replica's former engine. The new one numbers its batches from 1."""
        self._index.reset(self._replica, epoch, 0, _NO_HASHES)
        self.begin_stream()

    def on_first_frame(self, now_s: float) -> None:
        """Count the snapshot that opens the stream as a resync requested now."""
        self._asked_s = now_s

    def expect_no_snapshot(self) -> None:
        """Expect no snapshot after a restart of the engine: the attach stream has already brought its one."""
        self._awaits_resync = False

    def take(self, frame: Frame, now_s: float) -> ReplayCheck:
        """Apply a frame's events and snapshot page to the index, and compare. Call it in the order of arrival."""
        if not self._replay(frame):
            return ReplayCheck()
        seq = self._index.seq(self._replica)
        # The index is newer than the frame: by a snapshot, or by a resync that arrived before the frame.
        if frame.events_seq < seq:
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
        """Apply the batches and pages that can be applied; return False if pages of a snapshot are missing."""
        index = self._index
        if not self._awaits_resync:
            # A page that arrives here belongs to a snapshot that is no longer needed.
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
        """Whether the digests differ. Return False if the index dropped blocks at its bound: nothing to compare."""
        index, replica = self._index, self._replica
        return index.is_complete(replica) and index.digest(replica) != frame.digest
