"""One replica as this router sees it: its state, its last report, and this router's requests on it.

    add ──▶ SYNCING ──replay agrees──▶ ATTACHED ──set_draining──▶ DRAINING ──▶ remove
              ▲  ▲                        │
              │  └──gap, other digest─────┤
              └──add── LOST ◀──set_lost───┘

The router replays each replica's cache events. In SYNCING, its replay does not equal the replica's cache yet, and the
replica takes requests all the same. `router/fleet/event_replay.py` compares the replay with the replica's digest, and
asks for a resync if they differ.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from quire.protos.wire import Load
from quire.router.fleet.demand import HORIZON_S
from quire.router.fleet.event_replay import EventReplay
from quire.router.fleet.held_adapters import HeldAdapters
from quire.router.fleet.prefill_speeds import MeasuredSpeed
from quire.router.fleet.request_bookings import ReplicaBookings
from quire.router.policy.replica_columns import PerColumn
from quire.router.status_types import ReplicaStatus

_EVICTION_HORIZON_S = 10.0


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


@dataclass(slots=True)
class TrackedReplica:
    """One replica of a `ReplicaTable`.

    Attributes
    ----------
    row
        Its index in the columns of `ReplicaColumns`.
    draining
        Set by the first move to DRAINING and never cleared, so that a new attach stream returns to that state.
    load, report_s
        The last report, and the time of its arrival; None: never.
    seen_s
        Time of the last frame of this attach stream; None: no frame yet.
    block_tokens
        Tokens in one of its KV blocks; 0: not known.
    weights
        `Hello.weights`: model, revision and number format.
    mean_kv_tokens
        KV tokens of the decoding requests, mean over the reports of the last half minute.
    removed_per_s, num_removed
        Routing blocks that its cache evicts: the average rate, and the total in this epoch at the last report.
    """

    name: str
    epoch: str
    replay: EventReplay
    row: int
    state: ReplicaState = ReplicaState.SYNCING
    draining: bool = False
    load: Load = field(default_factory=Load)
    report_s: float | None = None
    seen_s: float | None = None
    block_tokens: int = 0
    weights: str = ""
    bookings: ReplicaBookings = field(default_factory=ReplicaBookings)
    speed: MeasuredSpeed = field(default_factory=MeasuredSpeed)
    adapters: HeldAdapters = field(default_factory=HeldAdapters)
    mean_kv_tokens: float = 0.0
    removed_per_s: float = 0.0
    num_removed: int = 0

    def move_to(self, state: ReplicaState) -> None:
        if state is self.state:
            return
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(
                f"replica {self.name}: {self.state.value} cannot become {state.value}"
            )
        self.state = state

    def resume(self) -> None:
        """Start with a new attach stream, which begins with a snapshot."""
        self.move_to(ReplicaState.DRAINING if self.draining else ReplicaState.SYNCING)
        self.seen_s = None
        self.replay.begin_stream()

    def begin_epoch(self, epoch: str) -> None:
        """Drop the state of the replica's former engine, after a restart."""
        self.epoch = epoch
        self.replay.begin_epoch(epoch)
        self.bookings.clear()
        self.adapters = HeldAdapters()
        self.mean_kv_tokens = 0.0

    def is_ready(self) -> bool:
        """Whether it takes requests. Tokens could not reach this router before the attach stream's first frame."""
        return self.seen_s is not None and self.state in (
            ReplicaState.SYNCING,
            ReplicaState.ATTACHED,
        )

    def is_silent(self, now_s: float, lost_after_s: float) -> bool:
        return self.seen_s is not None and now_s - self.seen_s > lost_after_s

    def report_age_s(self, now_s: float) -> float:
        """Return the age of the last report; 0 if there is none."""
        return 0.0 if self.report_s is None else max(0.0, now_s - self.report_s)

    def shown_state(self, now_s: float, lost_after_s: float) -> ReplicaState:
        """Return its state; LOST for a silent one that is not marked as lost yet."""
        return ReplicaState.LOST if self.is_silent(now_s, lost_after_s) else self.state

    def status(self, num_blocks: int, now_s: float, lost_after_s: float) -> ReplicaStatus:
        """Return its status; `num_blocks` is as in `columns`."""
        return ReplicaStatus(
            replica=self.name,
            epoch=self.epoch,
            load=self.load,
            report_age_s=self.report_age_s(now_s),
            attached=self.is_ready() and not self.is_silent(now_s, lost_after_s),
            indexed_blocks=num_blocks,
            state=self.shown_state(now_s, lost_after_s).value,
        )

    def take_load(self, load: Load, num_removed: int, now_s: float) -> None:
        """Take in a report.

        Parameters
        ----------
        num_removed
            Routing blocks that the replica has evicted in this epoch.
        """
        elapsed_s = math.inf if self.report_s is None else max(0.0, now_s - self.report_s)
        if 0.0 < elapsed_s < math.inf:
            keep = math.exp(-elapsed_s / _EVICTION_HORIZON_S)
            # Not negative: a new epoch counts from 0.
            rate = max(0, num_removed - self.num_removed) / elapsed_s
            self.removed_per_s = keep * self.removed_per_s + (1.0 - keep) * rate
            self.num_removed = num_removed
        part = 1.0 - math.exp(-elapsed_s / HORIZON_S)
        self.mean_kv_tokens += part * (load.num_decode_tokens - self.mean_kv_tokens)
        self.speed.take(load.prefill_s_per_token, now_s)
        self.load = load
        self.report_s = now_s

    def columns(self, num_blocks: int, host_copy_s_per_token: float) -> PerColumn[float]:
        """Return its values in `ReplicaColumns`.

        Parameters
        ----------
        num_blocks
            Number of routing blocks in its cache, by the index.
        """
        load, ours = self.load, self.bookings
        evicted_s = self.removed_per_s
        # Little's law: in a full cache, a block stays cached for the number of blocks divided by the eviction rate.
        age_s = num_blocks / evicted_s if evicted_s > 1e-3 else math.inf
        block = self.block_tokens
        free = (load.blocks_free + load.blocks_cached) * block if load.blocks_total else math.inf
        return PerColumn(
            seen_s=-math.inf if self.seen_s is None or not self.is_ready() else self.seen_s,
            report_s=-math.inf if self.report_s is None else self.report_s,
            queued_tokens=load.queued_prefill_tokens,
            booked_work=ours.unreported_work,
            unanswered_work=ours.unanswered_work,
            head_work=ours.head_work,
            head_s=ours.head_s,
            num_requests=load.num_running + load.num_waiting + ours.num_unreported,
            kv_tokens=load.num_decode_tokens + ours.unanswered_tokens,
            cache_age_s=age_s,
            free_tokens=free if block else math.inf,
            used_tokens=load.blocks_in_use * block,
            host_copy_s_per_token=host_copy_s_per_token,
            # Leave out requests that can start in the next step: they wait for the end of the running step, not for a
            # row.
            num_waiting=max(0, load.num_waiting - load.num_startable),
            mean_kv_tokens=self.mean_kv_tokens,
            num_places=self._num_places(),
        )

    def _num_places(self) -> float:
        """Estimate how many further requests of ours the replica takes before it refuses one.

        Requests sent since its last report take places too. During a long step the replica takes in no requests, so its
        report may lack requests that were sent long before. No report contains the requests that other routers have
        just sent. So this router also keeps its requests without a first token there below its share of the replica's
        bound.
        """
        load = self.load
        if load.num_places is None:
            return math.inf
        share = max(1, (load.num_places + load.num_waiting) // load.num_routers)
        return min(
            load.num_places - self.bookings.num_unreported,
            share - self.bookings.num_unanswered,
        )
