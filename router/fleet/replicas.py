"""The replicas that one router knows: their caches, their loads, and this router's own requests on them.

`on_frame` takes in the frames that replicas send after each step, and `fleet` returns the view that a policy decides
from. The table starts no task and reads no clock. `router/fleet/tracked_replica.py` draws a replica's states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import numpy as np

from quire.protos.adapter_ref import AdapterRef
from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS
from quire.protos.wire import Frame, Load
from quire.router.fleet.adapter_costs import adapter_seconds
from quire.router.fleet.block_peers import BlockPeers
from quire.router.fleet.demand import DemandMeter, Followers
from quire.router.fleet.event_replay import EventReplay
from quire.router.fleet.frame_action import FrameAction
from quire.router.fleet.prefill_pool import PrefillPool
from quire.router.fleet.prefill_speeds import FleetSpeeds
from quire.router.fleet.request_bookings import RequestBooking, exact_work
from quire.router.fleet.sessions import Sessions
from quire.router.fleet.tracked_replica import ReplicaState, TrackedReplica
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.fleet_view import FleetView, PrefillRows, prefill_work
from quire.router.policy.policy import Ranking
from quire.router.policy.replica_columns import COLUMN, PerColumn, ReplicaColumns
from quire.router.status_types import ReplicaStatus


class ReplicaTable:
    """All replicas of one router, and the prefix index. Times are of the caller's monotonic clock.

    Parameters
    ----------
    submit_lag_s
        Time for a submit call to reach a replica and for a frame to come back. A report cannot contain a request that
        was booked less than this before the report arrived.
    lost_after_s
        Silence after which a replica is lost. An idle replica sends a heartbeat each second. A busy one is silent
        during a step, and a step with a large chunk takes seconds on a slow CPU.
    resync_interval_s
        Shortest time between two resync requests to one replica, answered or not.
    max_kept_batches
        Bound on the event batches kept for one replica until a resync arrives. If it is exceeded, they are dropped, and
        the gap causes another resync.
    routing_block_tokens
        Tokens of a routing block.
    attention_context_tokens
        Context at which the attention of one token takes as many operations as the rest of its prefill: 2 x parameters
        of a layer / (4 x width of its heads). It is 27,000 for an 8B Llama, and similar for other models.
    host_copy_s_per_token
        Seconds to copy a token's KV from host memory to the device.
    max_sessions
        Number of sessions whose last replica is remembered; the least recently used are dropped first.
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
        self._replicas: dict[str, TrackedReplica] = {}
        # `Hello.weights` -> number of replicas.
        self._num_with_weights: Counter[str] = Counter()
        self._columns = ReplicaColumns()
        self._speeds = FleetSpeeds()
        # Requests of this router that are in flight on any replica.
        self._num_ours = 0
        self._demand = DemandMeter()
        self._followers = Followers()
        self.peers = BlockPeers()
        self.prefill_pool = PrefillPool(self.peers)
        self.sessions = Sessions(max_sessions)

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    # ---------------------------------------------------------------------------------- membership

    def add(
        self,
        replica: str,
        epoch: str,
        block_tokens: int = 0,
        weights: str = "",
        has_states: bool = False,
    ) -> None:
        """Add a replica after an attach stream to it was opened. It takes requests after its first frame.

        Parameters
        ----------
        replica
            A new replica, or one in the state LOST.
        block_tokens
            Tokens in one of its KV blocks, 0 if not known.
        weights
            `Hello.weights`: model, revision and number format. A request that started on another replica may continue
            here only if they are equal.
        has_states
            Whether its model is recurrent: its hits end at snapshots.
        """
        entry = self._replicas.get(replica)
        if entry is None:
            replay = EventReplay(
                self.index, replica, self._max_kept_batches, self._resync_interval_s
            )
            row = self._columns.add(replica)
            entry = self._replicas[replica] = TrackedReplica(replica, epoch, replay, row)
            replay.begin_epoch(epoch)
            self.index.set_row(replica, row)
            self._speeds.expire()
        else:
            entry.resume()
            self._forget_weights(entry)
            if epoch != entry.epoch:
                self._begin_epoch(entry, epoch)
        entry.block_tokens, entry.weights = block_tokens, weights
        self.index.set_states(replica, has_states)
        self._num_with_weights[weights] += 1
        self._write_row(entry)

    def remove(self, replica: str) -> None:
        """Remove a replica; an unknown one is ignored."""
        entry = self._replicas.pop(replica, None)
        if entry is None:
            return
        self._forget_weights(entry)
        self.peers.remove(replica)
        self.index.remove_replica(replica)
        self._num_ours -= entry.bookings.num_in_flight
        name = self._columns.remove(entry.row)
        if name is not None:
            moved = self._replicas[name]
            moved.row = entry.row
            self.index.set_row(name, entry.row)
            self._write_row(moved)
        self._speeds.expire()

    def set_draining(self, replica: str) -> None:
        """Stop sending new requests to the replica; an unknown one is ignored."""
        entry = self._replicas.get(replica)
        if entry is not None:
            entry.draining = True
            entry.move_to(ReplicaState.DRAINING)
            self._write_row(entry)

    def set_lost(self, replica: str) -> None:
        """Mark a replica as lost after its attach stream ended; an unknown one is ignored."""
        entry = self._replicas.get(replica)
        if entry is not None:
            entry.move_to(ReplicaState.LOST)
            self._write_row(entry)

    def expire(self, now_s: float) -> list[str]:
        """Mark the replicas that have been silent for `lost_after_s` as lost, and return their names."""
        silent = [
            entry.name
            for entry in self._replicas.values()
            if entry.state is not ReplicaState.LOST and entry.is_silent(now_s, self.lost_after_s)
        ]
        for name in silent:
            self.set_lost(name)
        return silent

    def state(self, replica: str) -> ReplicaState:
        return self._replicas[replica].state

    def num_ready(self) -> int:
        """Return the number of replicas that take requests, including silent ones that are not marked as lost yet."""
        return sum(entry.is_ready() for entry in self._replicas.values())

    # -------------------------------------------------------------------------------------- frames

    def on_frame(self, replica: str, frame: Frame, now_s: float) -> FrameAction:
        """Take in a frame's events, load and snapshot page. The caller handles its tokens.

        Call it in the order of arrival. A frame of an unknown replica is ignored.
        """
        entry = self._replicas.get(replica)
        if entry is None:
            return FrameAction()
        # The replica was lost by its silence, but its attach stream has not ended.
        if entry.state is ReplicaState.LOST:
            entry.resume()
        was_ready = entry.is_ready()
        if entry.seen_s is None:
            entry.replay.on_first_frame(now_s)
        entry.seen_s = now_s
        new_epoch = frame.epoch != entry.epoch
        if new_epoch:
            self._begin_epoch(entry, frame.epoch)
            entry.replay.expect_no_snapshot()
        self._take_report(entry, frame.load, now_s)
        if frame.adapters is not None:
            entry.adapters.take(frame.adapters)
        found = entry.replay.take(frame, now_s)
        if found.agrees and entry.state is ReplicaState.SYNCING:
            entry.move_to(ReplicaState.ATTACHED)
        elif found.reason and entry.state is ReplicaState.ATTACHED:
            entry.move_to(ReplicaState.SYNCING)
        self._write_row(entry)
        became_ready = entry.is_ready() and not was_ready
        return FrameAction(became_ready, found.resync_from, new_epoch, found.reason)

    def _begin_epoch(self, entry: TrackedReplica, epoch: str) -> None:
        """Drop the state of the replica's former engine."""
        self._num_ours -= entry.bookings.num_in_flight
        entry.begin_epoch(epoch)

    def _take_report(self, entry: TrackedReplica, load: Load, now_s: float) -> None:
        if load.num_steps != entry.load.num_steps:
            self._demand.on_step(load.num_decode_tokens, load.decode_step_s)
        entry.take_load(load, self.index.num_removed(entry.name), now_s)
        entry.bookings.report(now_s - self._submit_lag_s)

    # ------------------------------------------------------------------------------------ bookings

    def book(
        self,
        ranking: Ranking,
        hashes: Sequence[int] | np.ndarray,
        num_prompt_tokens: int,
        now_s: float,
        session: str = "",
        adapter: AdapterRef | None = None,
    ) -> RequestBooking:
        """Count a request that was just sent to the best replica of a ranking.

        Until its first token (`answered`), its blocks count as cached and its prefill as queued. Before `answered`,
        call `on_frame` with the frame that has the token, so that the frame's events replace the booked blocks. Call
        `end` for each booking.
        """
        best, fleet = ranking[0], ranking.fleet
        cached = best.cached_tokens + best.host_tokens
        # Book only the blocks that the replica does not hold yet.
        to_come = hashes[cached // self._routing_block_tokens :]
        booking = self._book(best.replica, to_come, num_prompt_tokens, best.held_tokens, now_s)
        missing, work = booking.prefill_tokens, booking.work
        self._demand.on_decision(best.prefill_s, missing, work, self._share_of_requests(), now_s)
        if fleet.longest_prefix is not None:
            self._followers.add(fleet.longest_prefix, now_s)
        if session:
            self.sessions.set_replica(session, best.replica)
        if adapter is not None:
            self._replicas[best.replica].adapters.book(adapter, now_s)
        return booking

    def book_cached(
        self, replica: str, hashes: Sequence[int] | np.ndarray, num_tokens: int, now_s: float
    ) -> RequestBooking:
        """Count a request on a replica that shares or gets all blocks but the last; `hashes` names those to come."""
        return self._book(replica, hashes, num_tokens, num_tokens - 1, now_s)

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
            replica=entry.name,
            epoch=entry.epoch,
            prompt_tokens=num_prompt_tokens,
            prefill_tokens=missing,
            work=exact_work(prefill_work(missing, cached, self._attention_context_tokens)),
            booked_s=now_s,
            index_booking=self.index.book(entry.name, hashes),
        )
        entry.bookings.add(booking)
        self._num_ours += 1
        self._write_row(entry)
        return booking

    def answered(self, booking: RequestBooking, now_s: float) -> None:
        """Remove a request's booked prefill and blocks at its first token: reports and events contain them now."""
        if booking.answered:
            return
        booking.answered = True
        self.index.unbook(booking.index_booking)
        entry = self._booked_on(booking)
        if entry is not None:
            entry.bookings.answer(booking, now_s)
            entry.speed.answered(booking.prefill_tokens, booking.work)
            self._write_row(entry)

    def end(self, booking: RequestBooking, now_s: float, num_output_tokens: int = 0) -> None:
        """End a booking, with or without an answer; a second call does nothing."""
        self.answered(booking, now_s)
        if booking.ended:
            return
        booking.ended = True
        if num_output_tokens:
            self._demand.on_output(num_output_tokens)
        entry = self._booked_on(booking)
        if entry is not None:
            entry.bookings.end()
            self._num_ours -= 1

    def _booked_on(self, booking: RequestBooking) -> TrackedReplica | None:
        entry = self._replicas.get(booking.replica)
        return entry if entry is not None and entry.epoch == booking.epoch else None

    def _share_of_requests(self) -> float:
        """Return this router's part of the fleet's requests in flight, 0 to 1."""
        known = float(self._columns.columns.num_requests.sum())
        return min(1.0, (self._num_ours + 1) / (known + 1))

    # --------------------------------------------------------------------------------------- views

    @property
    def is_mixed(self) -> bool:
        """Whether replicas have different weights, as during an update to another model."""
        return len(self._num_with_weights) > 1

    def _forget_weights(self, entry: TrackedReplica) -> None:
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
        adapter: AdapterRef | None = None,
    ) -> FleetView:
        """Return the replicas that can take a request, as a policy sees them.

        Replicas that would refuse the request are left out, unless all would refuse it.

        Parameters
        ----------
        hashes
            Routing hashes of the prompt.
        avoid
            Replicas to leave out, unless there are no others.
        weights
            Return only replicas with these weights; None: with any weights.
        """
        names, columns = self._columns.names, self._columns.columns
        if self._speeds.is_stale(now_s):
            self._speeds.update((self._replicas[name].speed for name in names), now_s)
        speeds = self._speeds.s_per_work
        held, longest = self._held_tokens(hashes, num_prompt_tokens)
        kept = self._kept_rows(now_s, avoid, weights)
        if kept is not None:
            # `take` gives contiguous columns, `matrix[:, kept]` does not.
            columns = PerColumn(*self._columns.matrix.take(kept, axis=1))
            held, speeds = held.take(kept, axis=1), speeds[kept]
            names = [names[row] for row in kept.tolist()]
        prefix = int(hashes[longest - 1]) if longest else None
        demand = self._demand.demand(max(1, len(names)), now_s)
        adapter_s = None
        if adapter is not None:
            entries = [self._replicas[name] for name in names]
            adapter_s = adapter_seconds(entries, adapter, demand.output_tokens, now_s)
        return FleetView(
            replicas=names,
            columns=columns,
            gpu_tokens=held[0],
            host_tokens=held[1],
            prefill_s_per_work=speeds,
            now_s=now_s,
            work_per_token=self._demand.work_per_token,
            prior_s_per_work=self._speeds.prior_s_per_work,
            demand=demand,
            attention_context_tokens=self._attention_context_tokens,
            longest_prefix=prefix,
            followers=0.0 if prefix is None else self._followers.count(prefix, now_s),
            session_row=self._session_row(session, names) if session else -1,
            peers=self.peers.prefixes(names, held, now_s),
            prefill=self._prefill_rows(names, now_s, weights),
            adapter_s=adapter_s,
        )

    def _prefill_rows(
        self, names: Sequence[str], now_s: float, weights: str | None
    ) -> PrefillRows | None:
        """Return the replicas of a view that only compute prompts; None: none does."""
        if not self.prefill_pool.share:
            return None
        ready = [
            entry.name
            for entry in self._replicas.values()
            if weights in (None, entry.weights)
            and entry.is_ready()
            and not entry.is_silent(now_s, self.lost_after_s)
        ]
        return self.prefill_pool.rows(names, ready, now_s)

    def _kept_rows(self, now_s: float, avoid: Set[str], weights: str | None) -> np.ndarray | None:
        """Return the rows of the replicas that `fleet` returns, ascending; None: all rows."""
        names, columns = self._columns.names, self._columns.columns
        some_below = self._columns.some_below
        heard_s = now_s - self.lost_after_s
        is_mixed = weights is not None and self._num_with_weights[weights] < len(self._replicas)
        if not names or not (
            avoid
            or is_mixed
            or some_below(COLUMN.num_places, 1)
            or some_below(COLUMN.seen_s, heard_s)
        ):
            return None
        # Masks of the replicas that would refuse the request (`full`), that take no requests (`out`), and that have
        # other weights (`foreign`).
        full, out = columns.num_places < 1, columns.seen_s < heard_s
        foreign = np.zeros(len(names), bool)
        if is_mixed:
            own = (self._replicas[name].weights == weights for name in names)
            foreign = ~np.fromiter(own, bool, len(names))
        if avoid:
            avoided = out | np.fromiter((name in avoid for name in names), bool, len(names))
            out = out if (avoided | foreign).all() else avoided
        full |= out
        out = out if (full | foreign).all() else full
        kept: np.ndarray = (~(out | foreign)).nonzero()[0]
        return kept

    def _held_tokens(
        self, hashes: Sequence[int] | np.ndarray, num_prompt_tokens: int
    ) -> tuple[np.ndarray, int]:
        """Match a prompt with the cache of each replica.

        Returns
        -------
        [2, rows] float64, prompt tokens on the device and further ones in host memory; and the number of blocks of the
        longest match.
        """
        index, block = self.index, self._routing_block_tokens
        held = np.zeros((2, len(self._columns)))
        tokens = held[0]
        # The last prompt token is always computed: its logits give the first output token.
        most = max(0, num_prompt_tokens - 1)
        if not (index.num_host_blocks or index.has_states):
            longest = index.match_into(hashes, tokens, block, most) if len(hashes) else 0
            return held, longest
        longest = index.match_into(hashes, tokens)
        if index.has_states:
            index.cut_to_states(hashes, tokens)
        host = held[1]
        index.host_blocks_into(hashes, tokens, host)
        host *= block
        tokens *= block
        np.minimum(tokens, most, out=tokens)
        np.minimum(host, tokens, out=host)
        tokens -= host
        return held, longest

    def _session_row(self, session: str, names: Sequence[str]) -> int:
        replica = self.sessions.replica(session)
        entry = self._replicas.get(replica) if replica is not None else None
        if entry is None:
            return -1
        # With the same list, no replica is left out, so its row in the table is its row in the view.
        if names is self._columns.names:
            return entry.row
        return names.index(entry.name) if entry.name in names else -1

    def _write_row(self, entry: TrackedReplica) -> None:
        """Write a replica's current values to the columns."""
        num_blocks = self.index.num_blocks(entry.name)
        self._columns.write(entry.row, entry.columns(num_blocks, self._host_copy_s_per_token))

    def num_routers(self) -> int:
        """Return the number of routers that share the replicas, from the replicas' reports; at least 1."""
        return max((entry.load.num_routers for entry in self._replicas.values()), default=1)

    def statuses(self, now_s: float) -> list[ReplicaStatus]:
        """Return the status of every replica, including those that take no requests."""
        return [
            entry.status(self.index.num_blocks(entry.name), now_s, self.lost_after_s)
            for entry in self._replicas.values()
        ]
