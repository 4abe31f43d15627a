"""What this router knows of each replica: its cache, its load, our own requests on the way to it.

The table is fed with frames (`on_frame`) and asked for views (`views`); it starts nothing and reads
no clock. The life of a replica here:

    add ──▶ SYNCING ──replay agrees──▶ ATTACHED ──set_draining──▶ DRAINING ──▶ remove
              ▲  ▲                        │
              │  └──gap, other digest─────┤
              └──add── LOST ◀──set_lost───┘

Synchronising. A new attach stream brings a snapshot by itself; after a gap in seq, or when our
digest is not the replica's, `on_frame` says from where to ask for a resync. The answer is the
missed batches or a snapshot in pages, and it may come after frames with newer batches: while it is
awaited all batches are kept. The stale index goes on answering, since after a gap it is nearly
right. A new epoch starts from nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.protos.wire import CacheEvents, Frame, Load
from quire.router.index import Booking, PrefixIndex
from quire.router.policy import ReplicaView
from quire.router.types import ReplicaStatus

_NO_HASHES = np.empty(0, np.uint64)


class ReplicaState(enum.Enum):
    SYNCING = "syncing"
    ATTACHED = "attached"
    DRAINING = "draining"
    LOST = "lost"


_TRANSITIONS: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.SYNCING: frozenset(
        {ReplicaState.ATTACHED, ReplicaState.DRAINING, ReplicaState.LOST}
    ),
    ReplicaState.ATTACHED: frozenset(
        {ReplicaState.SYNCING, ReplicaState.DRAINING, ReplicaState.LOST}
    ),
    ReplicaState.DRAINING: frozenset({ReplicaState.LOST}),
    ReplicaState.LOST: frozenset({ReplicaState.SYNCING, ReplicaState.DRAINING}),
}


SNAPSHOT = -1  # as `FrameAction.resync_from`: no batches will do


@dataclass(frozen=True, slots=True)
class FrameAction:
    """What the caller has to do after a frame.

    Attributes
    ----------
    became_ready
        The replica takes requests from now on: this is the first frame of its attach stream.
    resync_from
        Ask the replica for the event batches after this one (`SNAPSHOT`: for a snapshot), or None.
    new_epoch
        The engine behind the replica is another one: requests sent to the old one get no answer.
    reason
        Why our replay is not the replica's cache, for the log; empty when it is.
    """

    became_ready: bool = False
    resync_from: int | None = None
    new_epoch: bool = False
    reason: str = ""


@dataclass(slots=True, eq=False)
class RequestBooking:
    """One request of ours on one replica, from decision to first token; see `ReplicaTable.book`."""

    replica: str
    prefill_tokens: int
    booked_s: float
    index_booking: Booking


@dataclass(slots=True)
class _Replica:
    name: str
    epoch: str
    state: ReplicaState = ReplicaState.SYNCING
    draining: bool = False  # stays so over a loss of its stream
    load: Load = field(default_factory=Load)
    report_s: float | None = None  # when `load` arrived
    seen_s: float | None = None  # last frame of this attach stream
    bookings: dict[RequestBooking, None] = field(default_factory=dict)  # newer than the report
    booked_tokens: int = 0  # sum over `bookings`
    awaits_resync: bool = True  # the attach stream begins with a snapshot
    in_snapshot: bool = False  # some of its pages are there, others follow
    asked_s: float | None = None  # when a resync was asked for last
    kept: dict[int, CacheEvents] = field(default_factory=dict)  # by seq, while a resync is awaited

    def move_to(self, state: ReplicaState) -> None:
        if state is self.state:
            return
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(
                f"replica {self.name}: {self.state.value} cannot become {state.value}"
            )
        self.state = state

    def resume(self) -> None:
        """A new attach stream: a snapshot is on its way."""
        self.move_to(ReplicaState.DRAINING if self.draining else ReplicaState.SYNCING)
        self.seen_s = self.asked_s = None
        self.await_resync()

    def await_resync(self) -> None:
        self.awaits_resync = True
        self.in_snapshot = False
        self.kept.clear()

    def forget_bookings(self) -> None:
        self.bookings.clear()
        self.booked_tokens = 0


class ReplicaTable:
    """All replicas of one router, and the index. Times are the caller's monotonic clock.

    Parameters
    ----------
    submit_lag_s
        A report cannot contain a request that we booked less than this long before the report
        arrived: the time of the submit call and of the frame's way back.
    lost_after_s
        A replica that sends no frame for so long is lost. An idle one sends a heartbeat each
        second; a busy one is silent during a step, and a step of a large chunk on a slow CPU takes
        seconds.
    resync_interval_s
        Least time between two resync requests to one replica, answered or not.
    max_kept_batches
        Event batches kept for one replica while a resync is awaited; beyond it they are dropped,
        and the gap asks for another.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        submit_lag_s: float = 0.01,
        lost_after_s: float = 10.0,
        resync_interval_s: float = 1.0,
        max_kept_batches: int = 10_000,
    ):
        self._index = index
        self._submit_lag_s = submit_lag_s
        self._lost_after_s = lost_after_s
        self._resync_interval_s = resync_interval_s
        self._max_kept_batches = max_kept_batches
        self._replicas: dict[str, _Replica] = {}

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    # ---------------------------------------------------------------------------------- membership

    def add(self, replica: str, epoch: str) -> None:
        """An attach stream to a replica, new or lost, is open; its first frame makes it ready."""
        entry = self._replicas.get(replica)
        if entry is None:
            self._replicas[replica] = _Replica(replica, epoch)
            self._index.reset(replica, epoch, 0, _NO_HASHES)
            return
        entry.resume()
        if epoch != entry.epoch:
            self._begin_epoch(entry, epoch)

    def remove(self, replica: str) -> None:
        """A replica left for good; unknown ones are ignored."""
        if self._replicas.pop(replica, None) is not None:
            self._index.remove_replica(replica)

    def set_draining(self, replica: str) -> None:
        """No new requests, those in flight go on; an unknown replica is ignored."""
        entry = self._replicas.get(replica)
        if entry is not None:
            entry.draining = True
            entry.move_to(ReplicaState.DRAINING)

    def set_lost(self, replica: str) -> None:
        """Its attach stream ended; an unknown replica is ignored."""
        entry = self._replicas.get(replica)
        if entry is not None:
            entry.move_to(ReplicaState.LOST)

    def expire(self, now_s: float) -> list[str]:
        """Mark the replicas that have been silent for too long as lost, and name them."""
        silent = [
            entry.name
            for entry in self._replicas.values()
            if entry.state is not ReplicaState.LOST and self._is_silent(entry, now_s)
        ]
        for name in silent:
            self.set_lost(name)
        return silent

    def state(self, replica: str) -> ReplicaState:
        return self._replicas[replica].state

    def num_ready(self) -> int:
        """Replicas that take requests, silence aside."""
        return sum(_is_ready(entry) for entry in self._replicas.values())

    # -------------------------------------------------------------------------------------- frames

    def on_frame(self, replica: str, frame: Frame, now_s: float) -> FrameAction:
        """Take in the events, load and snapshot page of a frame; its tokens are not looked at.

        Call it in the order of arrival. A frame of an unknown replica is ignored.
        """
        entry = self._replicas.get(replica)
        if entry is None:
            return FrameAction()
        if entry.state is ReplicaState.LOST:  # only silent: its stream is the same
            entry.resume()
        was_ready = _is_ready(entry)
        if entry.seen_s is None:
            entry.asked_s = now_s  # the snapshot that opens an attach stream needs no asking
        entry.seen_s = now_s
        new_epoch = frame.epoch != entry.epoch
        if new_epoch:
            self._begin_epoch(entry, frame.epoch)
            entry.awaits_resync = False  # this stream has had its snapshot; batches count from 1
        self._take_report(entry, frame.load, now_s)
        reason, resync_from = self._take_events(entry, frame)
        if reason and not self._lose_sync(entry, frame, now_s):
            resync_from = None
        return FrameAction(_is_ready(entry) and not was_ready, resync_from, new_epoch, reason)

    def _begin_epoch(self, entry: _Replica, epoch: str) -> None:
        """Another engine: nothing of the old one holds. Its batches count from 1."""
        entry.epoch = epoch
        entry.asked_s = None
        entry.await_resync()
        entry.forget_bookings()
        self._index.reset(entry.name, epoch, 0, _NO_HASHES)

    def _take_report(self, entry: _Replica, load: Load, now_s: float) -> None:
        entry.load = load
        entry.report_s = now_s
        contained_s = now_s - self._submit_lag_s
        for booking in list(entry.bookings):
            if booking.booked_s > contained_s:
                break  # in order of time
            del entry.bookings[booking]
            entry.booked_tokens -= booking.prefill_tokens

    def _take_events(self, entry: _Replica, frame: Frame) -> tuple[str, int | None]:
        """Bring the index up to the frame; see `_compare`."""
        if entry.awaits_resync:
            entry.kept.update((batch.seq, batch) for batch in frame.events)
            if len(entry.kept) > self._max_kept_batches:
                entry.kept.clear()
            if frame.snapshot is not None:
                self._take_page(entry, frame)
            if entry.in_snapshot:
                return "", None
            while (batch := entry.kept.get(self._index.seq(entry.name) + 1)) is not None:
                self._index.apply(entry.name, frame.epoch, batch)
        else:
            # A page here is of a snapshot that something faster has made superfluous.
            for batch in frame.events:
                self._index.apply(entry.name, frame.epoch, batch)
        return self._compare(entry, frame)

    def _take_page(self, entry: _Replica, frame: Frame) -> None:
        if not entry.in_snapshot:
            self._index.begin_reset(entry.name, frame.epoch, frame.events_seq)
            entry.in_snapshot = True
        self._index.extend_reset(entry.name, frame.snapshot, frame.host_snapshot)
        if not frame.snapshot_more:
            self._index.commit_reset(entry.name)
            entry.in_snapshot = False

    def _compare(self, entry: _Replica, frame: Frame) -> tuple[str, int | None]:
        """Whether our replay agrees with what the replica says of itself.

        Returns
        -------
        Why not, or an empty string; and the batch from which a resync would heal it.
        """
        seq = self._index.seq(entry.name)
        if frame.events_seq < seq:  # it carries a snapshot, or a resync was faster than it
            return "", None
        if frame.events_seq > seq:
            return f"replica is at batch {frame.events_seq}, replay at {seq}", seq
        complete = self._index.is_complete(entry.name)
        if complete and self._index.digest(entry.name) != frame.digest:
            return f"digest differs at batch {seq}", SNAPSHOT
        entry.awaits_resync = False
        entry.kept.clear()
        if entry.state is ReplicaState.SYNCING:
            entry.move_to(ReplicaState.ATTACHED)
        return "", None

    def _lose_sync(self, entry: _Replica, frame: Frame, now_s: float) -> bool:
        """Our replay is not the replica's cache; whether it is time to ask for a resync."""
        if entry.state is ReplicaState.ATTACHED:
            entry.move_to(ReplicaState.SYNCING)
        if not entry.awaits_resync:
            entry.await_resync()
            entry.kept.update((batch.seq, batch) for batch in frame.events)
        if entry.asked_s is not None and now_s - entry.asked_s < self._resync_interval_s:
            return False
        entry.asked_s = now_s
        return True

    # ------------------------------------------------------------------------------------ bookings

    def book(
        self, replica: str, hashes: Sequence[int] | np.ndarray, prefill_tokens: int, now_s: float
    ) -> RequestBooking:
        """Count a request that was just sent: its blocks as cached, its prefill as queued.

        Give it back with `unbook` at its first token, or when it ends without one. Call `on_frame`
        with the frame that carries the token first: then its events have taken the booking's place.

        Parameters
        ----------
        prefill_tokens
            Prompt tokens that the replica must compute by our prediction.
        """
        entry = self._replicas[replica]
        index_booking = self._index.book(replica, hashes)
        booking = RequestBooking(replica, prefill_tokens, now_s, index_booking)
        entry.bookings[booking] = None
        entry.booked_tokens += prefill_tokens
        return booking

    def unbook(self, booking: RequestBooking) -> None:
        """Give a booking back; a second time, or after the replica went, does nothing."""
        self._index.unbook(booking.index_booking)
        entry = self._replicas.get(booking.replica)
        if entry is not None and booking in entry.bookings:
            del entry.bookings[booking]
            entry.booked_tokens -= booking.prefill_tokens

    # --------------------------------------------------------------------------------------- views

    def views(self, hashes: Sequence[int] | np.ndarray, now_s: float) -> list[ReplicaView]:
        """The replicas that can take a request with these routing hashes, as a policy sees them."""
        depths = self._index.match(hashes)
        views = []
        for entry in self._replicas.values():
            if not _is_ready(entry) or self._is_silent(entry, now_s):
                continue
            load = entry.load
            views.append(
                ReplicaView(
                    replica=entry.name,
                    matched_blocks=depths.get(entry.name, 0),
                    reported_prefill_tokens=load.queued_prefill_tokens,
                    booked_prefill_tokens=entry.booked_tokens,
                    num_requests=load.num_running + load.num_waiting + len(entry.bookings),
                    prefill_s_per_token=load.prefill_s_per_token,
                    report_age_s=_age(entry.report_s, now_s),
                )
            )
        return views

    def statuses(self, now_s: float) -> list[ReplicaStatus]:
        """Every replica, also those that take no requests."""
        return [
            ReplicaStatus(
                replica=entry.name,
                epoch=entry.epoch,
                load=entry.load,
                report_age_s=_age(entry.report_s, now_s) or 0.0,
                attached=_is_ready(entry) and not self._is_silent(entry, now_s),
                indexed_blocks=self._index.num_blocks(entry.name),
            )
            for entry in self._replicas.values()
        ]

    def _is_silent(self, entry: _Replica, now_s: float) -> bool:
        return entry.seen_s is not None and now_s - entry.seen_s > self._lost_after_s


def _is_ready(entry: _Replica) -> bool:
    """Before the first frame of the attach stream its tokens have no way to us."""
    return entry.state in (ReplicaState.SYNCING, ReplicaState.ATTACHED) and entry.seen_s is not None


def _age(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else max(0.0, now_s - then_s)
