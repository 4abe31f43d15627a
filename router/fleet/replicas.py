"""What this router knows of each replica: its cache, its load, our own requests on the way to it.

The table is fed with frames (`on_frame`) and asked for the fleet as a policy sees it (`fleet`); it
starts nothing and reads no clock. The life of a replica here:

    add ──▶ SYNCING ──replay agrees──▶ ATTACHED ──set_draining──▶ DRAINING ──▶ remove
              ▲  ▲                        │
              │  └──gap, other digest─────┤
              └──add── LOST ◀──set_lost───┘

How the replay comes to agree, and what is asked of the replica when it does not: `router/fleet/event_replay.py`.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS
from quire.protos.wire import Frame, Load
from quire.router.fleet.demand import HORIZON_S, DemandMeter, Followers
from quire.router.fleet.event_replay import Replay
from quire.router.fleet.speeds import MeasuredSpeed, believed
from quire.router.index.prefix_index import Booking, PrefixIndex
from quire.router.policy import columns
from quire.router.policy.columns import ReplicaColumns
from quire.router.policy.fleet_view import Fleet, prefill_work
from quire.router.policy.policy import Ranking
from quire.router.types import ReplicaStatus

_EVICTION_HORIZON_S = 10.0
_SPEEDS_PERIOD_S = 0.2


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


@dataclass(frozen=True, slots=True)
class FrameAction:
    """What the caller has to do after a frame.

    Attributes
    ----------
    became_ready
        The replica takes requests from now on: this is the first frame of its attach stream.
    resync_from
        Ask the replica for the event batches after this one (`replay.SNAPSHOT`: for a snapshot), or None.
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
    """One request of ours on one replica, from decision to end; see `ReplicaTable.book`."""

    replica: str
    epoch: str
    prompt_tokens: int
    prefill_tokens: int  # of them, those that it must prefill, by our prediction
    work: float
    booked_s: float
    index_booking: Booking
    answered: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Replica:
    name: str
    epoch: str
    replay: Replay
    state: ReplicaState = ReplicaState.SYNCING
    draining: bool = False  # stays so over a loss of its stream
    load: Load = field(default_factory=Load)
    report_s: float | None = None  # when `load` arrived
    seen_s: float | None = None  # last frame of this attach stream
    row: int = -1  # in `ReplicaColumns`
    block_tokens: int = 0  # of its KV blocks; 0: not known
    weights: str = ""  # `Hello.weights`
    bookings: dict[RequestBooking, None] = field(default_factory=dict)  # newer than the report
    unanswered: dict[RequestBooking, None] = field(default_factory=dict)  # without a first token
    head_s: float = 0.0  # since when the first of `unanswered` is that
    booked_work: float = 0.0  # sums over `bookings` and `unanswered`
    unanswered_work: float = 0.0
    unanswered_tokens: int = 0
    num_ours: int = 0  # requests of this router in flight on it
    speed: MeasuredSpeed = field(default_factory=MeasuredSpeed)
    believed_s_per_work: float = (
        0.0  # of `speed`, at the last look at all of them; 0: not yet known
    )
    mean_kv_tokens: float = 0.0  # by the reports of the last half minute
    removed_per_s: float = 0.0  # routing blocks that its cache evicts
    num_removed: int = 0  # of them, by the last report

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
        self.seen_s = None
        self.replay.begin_stream()

    def average_load(self, load: Load, elapsed_s: float | None) -> None:
        """Take a report into the mean; `elapsed_s` after the one before, None: it is the first."""
        part = 1.0 if elapsed_s is None else 1.0 - math.exp(-max(0.0, elapsed_s) / HORIZON_S)
        self.mean_kv_tokens += part * (load.num_decode_tokens - self.mean_kv_tokens)

    def forget_bookings(self) -> None:
        self.bookings.clear()
        self.unanswered.clear()
        self.num_ours = 0
        self.sum_bookings()

    def sum_bookings(self) -> None:
        """Anew rather than by differences, which would drift."""
        self.booked_work = sum(booking.work for booking in self.bookings)
        self.unanswered_work = sum(booking.work for booking in self.unanswered)
        self.unanswered_tokens = sum(booking.prompt_tokens for booking in self.unanswered)


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
    routing_block_tokens
        Tokens that one hash stands for.
    attention_context_tokens
        Context at which attention costs as much as everything else of a token's prefill: the ratio
        of their operations, 2 x parameters of a layer / (4 x width of its heads). 27,000 for an 8B
        Llama, and much the same for others.
    host_copy_s_per_token
        To bring a token's KV from host memory to the device.
    max_sessions
        Sessions whose last replica is remembered; the least recent go first.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        submit_lag_s: float = 0.01,
        lost_after_s: float = 10.0,
        resync_interval_s: float = 1.0,
        max_kept_batches: int = 10_000,
        routing_block_tokens: int = ROUTING_BLOCK_TOKENS,
        attention_context_tokens: float = 30_000.0,
        host_copy_s_per_token: float = 1e-5,
        max_sessions: int = 65_536,
    ):
        self.index = index
        self._submit_lag_s = submit_lag_s
        self.lost_after_s = lost_after_s
        self._resync_interval_s = resync_interval_s
        self._max_kept_batches = max_kept_batches
        self._routing_block_tokens = routing_block_tokens
        self._attention_context_tokens = attention_context_tokens
        self._host_copy_s_per_token = host_copy_s_per_token
        self._max_sessions = max_sessions
        self._replicas: dict[str, _Replica] = {}
        self._num_with_weights: Counter[str] = Counter()  # replicas by `Hello.weights`
        self._columns = ReplicaColumns()
        # [rows] float64, read-only, another array when they change: see `router/fleet/speeds.py`; 0: not yet known
        self._s_per_work = np.zeros(0)
        self._prior_s_per_work = 0.0
        self._speeds_of = 0  # replicas
        self._speeds_until_s = 0.0
        self._num_ours = 0  # our requests in flight
        self._demand = DemandMeter()
        self._followers = Followers()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    # ---------------------------------------------------------------------------------- membership

    def add(self, replica: str, epoch: str, block_tokens: int = 0, weights: str = "") -> None:
        """An attach stream to a replica, new or lost, is open; its first frame makes it ready.

        Parameters
        ----------
        block_tokens
            Tokens in one of its KV blocks, 0 if not known.
        weights
            `Hello.weights`: requests that began elsewhere may continue on it if theirs are equal.
        """
        entry = self._replicas.get(replica)
        if entry is None:
            replay = Replay(self.index, replica, self._max_kept_batches, self._resync_interval_s)
            entry = self._replicas[replica] = _Replica(replica, epoch, replay)
            entry.row = self._columns.add(replica)
            entry.block_tokens, entry.weights = block_tokens, weights
            self._num_with_weights[weights] += 1
            replay.begin_epoch(epoch)
            self.index.set_row(replica, entry.row)
            self._write_row(entry)
            self._set_speeds()
            return
        entry.resume()
        entry.block_tokens = block_tokens
        self._forget_weights(entry)
        entry.weights = weights
        self._num_with_weights[weights] += 1
        if epoch != entry.epoch:
            self._begin_epoch(entry, epoch)
        self._write_row(entry)

    def remove(self, replica: str) -> None:
        """A replica left for good; unknown ones are ignored."""
        entry = self._replicas.pop(replica, None)
        if entry is None:
            return
        self._forget_weights(entry)
        self.index.remove_replica(replica)
        self._num_ours -= entry.num_ours
        name = self._columns.remove(entry.row)
        if name is not None:
            moved = self._replicas[name]
            moved.row = entry.row
            self.index.set_row(name, entry.row)
            self._write_row(moved)
        self._set_speeds()

    def set_draining(self, replica: str) -> None:
        """No new requests, those in flight go on; an unknown replica is ignored."""
        entry = self._replicas.get(replica)
        if entry is not None:
            entry.draining = True
            entry.move_to(ReplicaState.DRAINING)
            self._write_row(entry)

    def set_lost(self, replica: str) -> None:
        """Its attach stream ended; an unknown replica is ignored."""
        entry = self._replicas.get(replica)
        if entry is not None:
            entry.move_to(ReplicaState.LOST)
            self._write_row(entry)

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
            entry.replay.on_first_frame(now_s)
        entry.seen_s = now_s
        new_epoch = frame.epoch != entry.epoch
        if new_epoch:
            self._begin_epoch(entry, frame.epoch)
            entry.replay.expect_no_snapshot()
        self._take_report(entry, frame.load, now_s)
        found = entry.replay.take(frame, now_s)
        if found.agrees and entry.state is ReplicaState.SYNCING:
            entry.move_to(ReplicaState.ATTACHED)
        elif found.reason and entry.state is ReplicaState.ATTACHED:
            entry.move_to(ReplicaState.SYNCING)
        self._write_row(entry)
        became_ready = _is_ready(entry) and not was_ready
        return FrameAction(became_ready, found.resync_from, new_epoch, found.reason)

    def _begin_epoch(self, entry: _Replica, epoch: str) -> None:
        """Another engine: nothing of the old one holds."""
        entry.epoch = epoch
        entry.replay.begin_epoch(epoch)
        self._num_ours -= entry.num_ours
        entry.forget_bookings()
        entry.mean_kv_tokens = 0.0

    def _take_report(self, entry: _Replica, load: Load, now_s: float) -> None:
        if entry.report_s is not None and now_s > entry.report_s:
            elapsed_s = now_s - entry.report_s
            keep = math.exp(-elapsed_s / _EVICTION_HORIZON_S)
            num_removed = self.index.num_removed(entry.name)
            rate = max(0, num_removed - entry.num_removed) / elapsed_s  # a new epoch counts anew
            entry.removed_per_s = keep * entry.removed_per_s + (1.0 - keep) * rate
            entry.num_removed = num_removed
        entry.speed.take(load.prefill_s_per_token, now_s)
        entry.average_load(load, None if entry.report_s is None else now_s - entry.report_s)
        if load.num_steps != entry.load.num_steps:
            self._demand.on_step(load.num_decode_tokens, load.decode_step_s)
        entry.load = load
        entry.report_s = now_s
        contained_s = now_s - self._submit_lag_s
        num_bookings = len(entry.bookings)
        while entry.bookings:
            booking = next(iter(entry.bookings))
            if booking.booked_s > contained_s:
                break  # in order of time
            del entry.bookings[booking]
        if len(entry.bookings) != num_bookings:
            entry.sum_bookings()

    # ------------------------------------------------------------------------------------ bookings

    def book(
        self,
        ranking: Ranking,
        hashes: Sequence[int] | np.ndarray,
        num_prompt_tokens: int,
        now_s: float,
        session: str = "",
    ) -> RequestBooking:
        """Count a request that was just sent to the best of a ranking.

        Until its first token (`answered`) its blocks count as cached and its prefill as queued. Call
        `on_frame` with the frame that carries the token first: then its events have taken the
        booking's place. Every booking is given back with `end`.
        """
        best, fleet = ranking[0], ranking.fleet
        cached = best.cached_tokens + best.host_tokens
        to_come = hashes[cached // self._routing_block_tokens :]  # the others it holds already
        booking = self._book(best.replica, to_come, num_prompt_tokens, cached, now_s)
        missing, work = booking.prefill_tokens, booking.work
        self._demand.on_decision(best.prefill_s, missing, work, self._share_of_requests(), now_s)
        if fleet.longest_prefix is not None:
            self._followers.add(fleet.longest_prefix, now_s)
        if session:
            self._sessions[session] = best.replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return booking

    def book_fork(self, parent: RequestBooking, now_s: float) -> RequestBooking:
        """Count a request with the prompt of one that is booked, sent to the same replica as its fork: it computes
        the prompt's last token only. Its blocks are the parent's."""
        num_tokens = parent.prompt_tokens
        return self._book(parent.replica, (), num_tokens, num_tokens - 1, now_s)

    def _book(
        self,
        replica: str,
        hashes: Sequence[int] | np.ndarray,
        num_prompt_tokens: int,
        cached: int,
        now_s: float,
    ) -> RequestBooking:
        entry = self._replicas[replica]
        missing = num_prompt_tokens - cached
        booking = RequestBooking(
            entry.name,
            entry.epoch,
            num_prompt_tokens,
            missing,
            prefill_work(missing, cached, self._attention_context_tokens),
            now_s,
            self.index.book(entry.name, hashes),
        )
        if not entry.unanswered:
            entry.head_s = now_s
        entry.bookings[booking] = None
        entry.unanswered[booking] = None
        entry.num_ours += 1
        self._num_ours += 1
        entry.sum_bookings()
        self._write_row(entry)
        return booking

    def answered(self, booking: RequestBooking, now_s: float) -> None:
        """Its first token is here: the replica's own reports and events tell from now on."""
        if booking.answered:
            return
        booking.answered = True
        self.index.unbook(booking.index_booking)
        entry = self._booked_on(booking)
        if entry is not None:
            entry.bookings.pop(booking, None)
            entry.unanswered.pop(booking, None)
            entry.speed.answered(booking.prefill_tokens, booking.work)
            # One after the other: the next is prefilled from now on.
            entry.head_s = now_s
            entry.sum_bookings()
            self._write_row(entry)

    def end(self, booking: RequestBooking, now_s: float, num_output_tokens: int = 0) -> None:
        """Give a booking back, with or without an answer; a second time does nothing."""
        self.answered(booking, now_s)
        if booking.ended:
            return
        booking.ended = True
        if num_output_tokens:
            self._demand.on_output(num_output_tokens)
        entry = self._booked_on(booking)
        if entry is not None:
            entry.num_ours -= 1
            self._num_ours -= 1

    def _booked_on(self, booking: RequestBooking) -> _Replica | None:
        entry = self._replicas.get(booking.replica)
        return entry if entry is not None and entry.epoch == booking.epoch else None

    def _share_of_requests(self) -> float:
        """Of the requests in flight, how many are this router's."""
        known = float(self._columns.columns[columns.NUM_REQUESTS].sum())
        return min(1.0, (self._num_ours + 1) / (known + 1))

    # --------------------------------------------------------------------------------------- views

    @property
    def is_mixed(self) -> bool:
        """Whether replicas differ in their weights, as during an update to another model."""
        return len(self._num_with_weights) > 1

    def _forget_weights(self, entry: _Replica) -> None:
        self._num_with_weights[entry.weights] -= 1
        if not self._num_with_weights[entry.weights]:
            del self._num_with_weights[entry.weights]

    def fleet(
        self,
        hashes: Sequence[int] | np.ndarray,
        num_prompt_tokens: int,
        now_s: float,
        session: str = "",
        avoid: Set[str] = frozenset(),
        weights: str | None = None,
    ) -> Fleet:
        """The replicas that can take a request with these routing hashes, as a policy sees them. Those that would
        refuse it are among them only if all would.

        Parameters
        ----------
        weights
            Only replicas with these; None: with any.
        avoid
            Replicas to leave out, unless that leaves none.
        """
        self._look_at_speeds(now_s)
        names, rows = self._columns.names, self._columns.columns
        held, longest = self._held_tokens(hashes, num_prompt_tokens)
        heard_s = now_s - self.lost_after_s
        speeds, some_below = self._s_per_work, self._columns.some_below
        is_mixed = weights is not None and self._num_with_weights[weights] < len(self._replicas)
        # Usually no replica is left out.
        if names and (
            avoid
            or is_mixed
            or some_below(columns.NUM_PLACES, 1)
            or some_below(columns.SEEN_S, heard_s)
        ):
            full, out = rows[columns.NUM_PLACES] < 1, rows[columns.SEEN_S] < heard_s
            foreign = np.zeros(len(names), bool)
            if is_mixed:
                own = (self._replicas[name].weights == weights for name in names)
                foreign = ~np.fromiter(own, bool, len(names))
            if avoid:
                avoided = out | np.fromiter((name in avoid for name in names), bool, len(names))
                out = out if (avoided | foreign).all() else avoided
            full |= out
            out = out if (full | foreign).all() else full
            kept = (~(out | foreign)).nonzero()[0]
            rows = rows.take(
                kept, axis=1
            )  # where `rows[:, kept]` would lay a replica's columns side by side
            held, speeds = held.take(kept, axis=1), speeds[kept]
            names = [names[row] for row in kept.tolist()]
        prefix = int(hashes[longest - 1]) if longest else None
        return Fleet(
            replicas=names,
            columns=rows,
            held=held,
            prefill_s_per_work=speeds,
            now_s=now_s,
            work_per_token=self._demand.work_per_token,
            prior_s_per_work=self._prior_s_per_work,
            demand=self._demand.demand(max(1, len(names)), now_s),
            attention_context_tokens=self._attention_context_tokens,
            longest_prefix=prefix,
            followers=0.0 if prefix is None else self._followers.count(prefix, now_s),
            session_row=self._session_row(session, names) if session else -1,
        )

    def _held_tokens(
        self, hashes: Sequence[int] | np.ndarray, num_prompt_tokens: int
    ) -> tuple[np.ndarray, int]:
        """What each row holds of a prompt.

        Returns
        -------
        [2, rows] float64, tokens on its device, and further ones in host memory; and the blocks of the longest match.
        """
        index, block = self.index, self._routing_block_tokens
        held = np.zeros((2, len(self._columns)))
        tokens = held[0]
        # The last prompt token is always computed: its logits give the first output token.
        most = max(0, num_prompt_tokens - 1)
        if not index.num_host_blocks:
            longest = index.match_into(hashes, tokens, block, most) if len(hashes) else 0
            return held, longest
        longest = index.match_into(hashes, tokens)
        host = held[1]
        index.host_blocks_into(hashes, tokens, host)
        host *= block
        tokens *= block
        np.minimum(tokens, most, out=tokens)
        np.minimum(host, tokens, out=host)
        tokens -= host
        return held, longest

    def _look_at_speeds(self, now_s: float) -> None:
        """Bring what is believed of the replicas' speeds up to date, once in a while."""
        if now_s < self._speeds_until_s and len(self._columns) == self._speeds_of:
            return
        entries = list(self._replicas.values())
        measured = np.array([entry.speed.s_per_work for entry in entries])
        age_s = now_s - np.array([entry.speed.measured_s for entry in entries])
        speeds, self._prior_s_per_work = believed(measured, age_s)
        for entry, speed in zip(entries, speeds.tolist(), strict=True):
            entry.believed_s_per_work = speed
        self._set_speeds()
        self._speeds_of = len(self._columns)
        # Until one is known each look may find the first.
        self._speeds_until_s = now_s + (_SPEEDS_PERIOD_S if self._prior_s_per_work else 0.0)

    def _set_speeds(self) -> None:
        """Bring the speeds in the order of the rows."""
        speeds = np.empty(len(self._columns))
        for entry in self._replicas.values():
            speeds[entry.row] = entry.believed_s_per_work
        speeds.setflags(write=False)
        self._s_per_work = speeds

    def _session_row(self, session: str, names: Sequence[str]) -> int:
        replica = self._sessions.get(session)
        entry = self._replicas.get(replica) if replica is not None else None
        if entry is None:
            return -1
        if names is self._columns.names:  # nobody is left out
            return entry.row
        return names.index(entry.name) if entry.name in names else -1

    def _write_row(self, entry: _Replica) -> None:
        """Bring a replica's columns up to what is known of it."""
        load, unanswered = entry.load, entry.unanswered
        evicted_s = entry.removed_per_s
        # Little's law: what stays a while in a full cache is what it holds over what leaves it.
        age_s = self.index.num_blocks(entry.name) / evicted_s if evicted_s > 1e-3 else math.inf
        block = entry.block_tokens
        free = (load.blocks_free + load.blocks_cached) * block if load.blocks_total else math.inf
        values = (
            entry.seen_s if _is_ready(entry) else -math.inf,
            -math.inf if entry.report_s is None else entry.report_s,
            load.queued_prefill_tokens,
            entry.booked_work,
            entry.unanswered_work,
            next(iter(unanswered)).work if unanswered else 0.0,
            entry.head_s,
            load.num_running + load.num_waiting + len(entry.bookings),
            load.num_decode_tokens + entry.unanswered_tokens,
            age_s,
            free if block else math.inf,
            load.blocks_in_use * block,
            self._host_copy_s_per_token,
            # What came during a step waits for its end, not for a place.
            max(0, load.num_waiting - load.num_startable),
            entry.mean_kv_tokens,
            _num_places(entry),
        )
        self._columns.write(entry.row, values)

    def num_routers(self) -> int:
        """That share the replicas, as these report it; this one at least."""
        return max((entry.load.num_routers for entry in self._replicas.values()), default=1)

    def statuses(self, now_s: float) -> list[ReplicaStatus]:
        """Every replica, also those that take no requests."""
        return [
            ReplicaStatus(
                replica=entry.name,
                epoch=entry.epoch,
                load=entry.load,
                report_age_s=_age(entry.report_s, now_s) or 0.0,
                attached=_is_ready(entry) and not self._is_silent(entry, now_s),
                indexed_blocks=self.index.num_blocks(entry.name),
            )
            for entry in self._replicas.values()
        ]

    def _is_silent(self, entry: _Replica, now_s: float) -> bool:
        return entry.seen_s is not None and now_s - entry.seen_s > self.lost_after_s


def _is_ready(entry: _Replica) -> bool:
    """Before the first frame of the attach stream its tokens have no way to us."""
    return entry.state in (ReplicaState.SYNCING, ReplicaState.ATTACHED) and entry.seen_s is not None


def _num_places(entry: _Replica) -> float:
    """Requests of ours that the replica takes before it refuses one, as far as can be known.

    What was sent since its report waits there too. And never are more of ours without a first token than this
    router's share of its bound: in a long step nothing is taken in, so that a report may not know what came long
    before it, and what other routers have just sent no report knows.
    """
    load = entry.load
    if load.num_places is None:
        return math.inf
    share = max(1, (load.num_places + load.num_waiting) // load.num_routers)
    return min(load.num_places - len(entry.bookings), share - len(entry.unanswered))


def _age(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else max(0.0, now_s - then_s)
