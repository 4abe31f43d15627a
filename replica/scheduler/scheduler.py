"""The scheduler: it decides which tokens of which requests a step computes, and takes in the results.

```
 add ──▶ waiting ──admit──▶ prefilling ──last chunk──▶ decoding ──commit──▶ release
                              ▲   │                        │
                              │   └────────┬───────────────┘        (the cache is full)
                              │            ▼
                              └─────── preempted: its blocks are in the host tier, or it computes its tokens again
```

| noun | module |
|---|---|
| where each request is | `request_book.py` |
| rows and blocks | `engine_memory.py` |
| composing a step | `step_composer.py` |
| committing a step | `step_committer.py` |

One thread owns the scheduler. `plan` and `commit` (or `fail_step`) alternate, or `plan` is one step ahead: it plans a
step while another one is in flight (planned, not yet committed). Then the newest token of each row in flight is not yet
known. A row with a draft in flight is left out, because its length is not known. Blocks that are given back while a
step is in flight are not reused before that step has run (`deferred_frees.py`). A preemption needs the unknown tokens,
so no step that preempts is planned ahead. If the ids that a row may sample depend on the unknown tokens (a grammar, bad
words), the plan is marked `awaits_tokens`, and `complete` adds the rest of its sampling parameters once they are known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from quire.protos.errors import EngineError, InvalidRequest, QuireError
from quire.protos.wire import Load, TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.core.draft_source import DraftSource
from quire.replica.core.request import FinishReason, Request, validate
from quire.replica.core.step_plan import (
    BlockTables,
    CopiesDone,
    SamplingBatch,
    StepPlan,
    StepResult,
)
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.host_tier import Transfers
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.request_table import table_checks
from quire.replica.request_table.sampling_batches import complete_batch
from quire.replica.scheduler.chunking import Chunking
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.request_book import RequestBook
from quire.replica.scheduler.snapshot_plans import SnapshotPlans
from quire.replica.scheduler.speed import CopySpeed, StepSpeed
from quire.replica.scheduler.step_committer import StepCommitter
from quire.replica.scheduler.step_composer import StepComposer
from quire.replica.scheduler.steps_in_flight import StepIndexer, StepsInFlight

MAX_STEPS_IN_FLIGHT = 2
_NO_ROWS = np.empty(0, np.int64)
_NO_COPIES = np.empty((0, 2), np.int64)
# An idle engine looks so often at what others have published in the node's pool.
_FOLLOW_S = 1.0


class Scheduler:
    """Requests, rows, blocks, prefix index and events of one engine.

    A step holds the decoding rows, then the next chunks of running prefills, then chunks of requests that start. The
    work of planning it grows with the number of running requests, not with the number of waiting ones.

    | `config.scheduler` | |
    |---|---|
    | shortest_first | requests start by arrival time plus a multiple of their prefill time (`order.py`) |
    | fifo | requests start in the order of arrival |
    | prefill_first | as fifo; started prompts come before the decoding rows (`Chunking.leaves_out_decodes`) |
    | priority | requests start, and prefills get a step's budget, by priority, deadline, arrival (`order.py`) |

    Parameters
    ----------
    config
        The engine's limits.
    epoch
        Name of this cache's lifetime for the event log; a random one by default.
    max_event_batches
        Number of batches of cache events to keep for routers that missed some.
    node_pool
        The node's pool, which holds the host tier; None: the host tier is private.
    draft_source
        Proposes drafts for decoding rows, unless the model is recurrent. None: no speculation.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        epoch: str | None = None,
        max_event_batches: int = 1024,
        node_pool: NodePool | None = None,
        draft_source: DraftSource | None = None,
    ):
        self.config = config
        self.memory = EngineMemory(config, epoch, max_event_batches, node_pool)
        self.events = self.memory.events
        self.rows = self.memory.rows
        self.speed = StepSpeed()
        self.copies = CopySpeed(self.speed, always_copies=config.restore == "always")
        self.steps = StepsInFlight()
        self.book = RequestBook(config, self.memory, self.copies, self.speed, draft_source)
        self._chunking = Chunking(config, self.speed)
        self._indexer = StepIndexer(config, self.memory)
        self._snapshots = SnapshotPlans(config, self.memory)
        parts = (
            config,
            self.memory,
            self.book,
            self.steps,
            self._indexer,
            self._snapshots,
            self._chunking,
        )
        self._composer = StepComposer(*parts)
        self._committer = StepCommitter(*parts, self.copies)
        self._idle_copies = Transfers()
        self._planned_s = 0.0

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply a configuration that differs in `LIGHT_FIELDS` only; live requests continue under it."""
        self.config = config
        self.book.reconfigure(config)
        self._chunking.reconfigure(config)

    # -- requests ----------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.rows.num_active

    @property
    def num_waiting(self) -> int:
        """Accepted requests without a row: new ones, forks, and preempted ones."""
        return self.book.num_waiting

    def validate(self, request: Request) -> None:
        """Refuse a request that can never be served; safe in any thread.

        Raises
        ------
        InvalidRequest
            A field is out of its bounds (`request.validate`), or the key is that of a live request.
        EngineError
            The request has a grammar that is not compiled yet.
        """
        validate(request, self.config)
        if request.params.grammar is not None and request.grammar is None:
            raise EngineError("the request's grammar has not been compiled")
        if request.key in self.book.requests:
            raise InvalidRequest(f"request_id: {request.key!r} is in use", field="request_id")

    def add(self, request: Request) -> TokenDelta | None:
        """Queue a request and return None. If it is refused, return its only delta, which has the error."""
        try:
            self.validate(request)
            self.book.add(request)
        except QuireError as error:
            return request.refusal(error)
        return None

    def abort(self, key: Hashable) -> TokenDelta | None:
        """End a request, even while its step is in flight, and return its last delta. None if it is not alive."""
        request = self.book.requests.get(key)
        return None if request is None else self.book.release(request, FinishReason.ABORT)

    def abort_all(self) -> list[TokenDelta]:
        """End every request."""
        requests = list(self.book.requests.values())
        return [self.book.release(request, FinishReason.ABORT) for request in requests]

    def pause(self, key: Hashable) -> None:
        """Let a live request compute nothing until `resume`; unknown keys and paused requests are ignored.

        The request keeps its row and blocks until others need them: it is preempted before running requests. A
        paused request that does not run yet does not start, and does not block the requests behind it. A token that
        is being computed still arrives.
        """
        self.book.pause(key)

    def resume(self, key: Hashable) -> None:
        """Let a paused request continue. One that was the head of its queue becomes the head again."""
        self.book.resume(key)

    def grant(self, key: Hashable, credit_end: int) -> None:
        """Let a request run until it has `credit_end` output tokens, those of earlier attempts included.

        Unknown requests, and those that may have as many already, are ignored.
        """
        request = self.book.requests.get(key)
        if request is None or request.credit_end is None or credit_end <= request.credit_end:
            return
        request.credit_end = credit_end
        if request.row >= 0:
            self.rows.set_run_length(request.row, request.run_length)
        self.book.resume(key)

    def drop_retained(self, key: Hashable) -> None:
        """End the retention of an ended request's blocks. For a live request: do not retain them when it ends."""
        request = self.book.requests.get(key)
        if request is not None:
            request.retain_s = 0.0
        else:
            self.memory.retention.drop(key)

    def next_deadline_s(self) -> float | None:
        """The time at which `plan` must be called again after it returned None; None: not before something changes.

        Then a request or a retention ends, or it is time to look into the node's pool.
        """
        follow_s = None if self.memory.host.pool_blocks is None else self._planned_s + _FOLLOW_S
        ends_s = (self.book.deadlines.next_s(), self.memory.retention.next_end_s(), follow_s)
        return min((end_s for end_s in ends_s if end_s is not None), default=None)

    def take_ended(self) -> list[TokenDelta]:
        """Remove and return the deltas of the requests that `plan` ended.

        `commit` and `fail_step` include them in their results, so this is needed only if `plan` returned None.
        """
        return self.book.take_ended()

    # -- steps -------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of steps that have been planned and neither committed nor failed."""
        return len(self.steps)

    @property
    def stream_ids_in_flight(self) -> np.ndarray:
        """[n] int64, `Request.stream_id` of the rows of the steps in flight."""
        rows = [step.rows for step in self.steps]
        return self.rows.stream_ids[np.unique(np.concatenate(rows)) if rows else _NO_ROWS]

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step.

        Returns
        -------
        The plan. None if no request is alive or all are paused, or if the step in flight must be committed first.

        Raises
        ------
        RuntimeError
            `MAX_STEPS_IN_FLIGHT` steps are in flight.
        """
        if len(self.steps) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"step {self.steps[0].number} is still in flight")
        self.memory.host.begin_plan()
        self._planned_s = now_s
        self.book.expire(now_s)
        self.memory.retention.expire(now_s)
        if self.steps and self.book.isolated.any:
            return None
        composed = self._composer.plan(now_s)
        if composed is None:
            return None
        step, plan = composed
        self.steps.launch(step)
        self.memory.launch(step.number)
        if step.duplicates:
            # `adopt` replaces the duplicates in the table; this step still reads and writes them.
            plan = plan._replace(block_tables=BlockTables.of(plan.block_tables.gather()))
            self._indexer.adopt(step)
        return plan

    def publish_soon(self, keys: Iterable[bytes]) -> set[bytes]:
        """Publish blocks that a peer waits for (`Publishing.ask`). Returns those that will be in the pool soon."""
        publishing = self.memory.publishing
        return set() if publishing is None else publishing.ask(keys)

    def plan_idle_copies(self) -> np.ndarray:
        """Plan to publish blocks while the engine is idle. Returns [k, 2] int64 (device block, host block).

        The caller makes the copies at once, then calls `end_idle_copies`.
        """
        publishing = self.memory.publishing
        if publishing is None or not len(publishing) or self.steps:
            return _NO_COPIES
        publishing.plan((), is_idle=True)
        self._idle_copies = self.memory.host.launch()
        return self._idle_copies.save_pairs()

    def end_idle_copies(self) -> None:
        """Record that the copies of `plan_idle_copies` have ended."""
        transfers, self._idle_copies = self._idle_copies, Transfers()
        self.memory.host.land(transfers)
        self.memory.host.end_saves(transfers.saves, are_all=False)

    def note_copies(self, copies: CopiesDone) -> None:
        """Record the copies between the tiers that have ended while no step is in flight."""
        # A failed step may have planned copies that were never queued; it is not waited for.
        self._committer.note_copies(
            copies._replace(restored_step=None) if copies.are_all else copies
        )

    def complete(self, plan: StepPlan) -> SamplingBatch:
        """The complete sampling parameters of a plan with `awaits_tokens`, once the step before is committed."""
        step = self.steps.oldest(plan)
        alive = step.sample_rows[step.is_alive(self.rows, step.sample_rows)]
        return complete_batch(self.rows, plan.sampling, np.isin(plan.sampling.rows, alive))

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> DeltaBatch:
        """Record the sampled tokens, and end and release finished requests.

        A result that cannot be right (wrong length, ids out of the vocabulary) fails the step.

        Returns
        -------
        One delta for each row that sampled, and those of `take_ended`.
        """
        return self._committer.commit(plan, result, now_s)

    def fail_step(self, plan: StepPlan, error: QuireError) -> list[TokenDelta]:
        """End every request of a step that failed, and of the step planned behind it, which reads its output.

        Both tiers of the cache forget the blocks that the steps would have written. If a step would have copied blocks
        of other requests, these requests compute their tokens again.
        """
        return self._committer.fail(plan, error)

    # -- inspection --------------------------------------------------------------------------------------

    def load(self, num_compiles: int = 0, stalled_s: float = 0.0) -> Load:
        """The state that the router's cost function needs. Read from another thread it may be one step old.

        Parameters
        ----------
        num_compiles
            Number of compilations, counted by the runner.
        stalled_s
            Seconds since the last step ended while there is work, measured by the loop.
        """
        memory, counters = self.memory, self.book.counters
        blocks, host = memory.blocks, memory.host.blocks.occupancy()
        num_waiting = self.num_waiting
        return Load(
            num_running=self.rows.num_active,
            num_waiting=num_waiting,
            queued_prefill_tokens=self.book.num_queued_prefill_tokens,
            num_decode_tokens=self.rows.num_decode_tokens,
            blocks_free=blocks.num_free,
            blocks_cached=blocks.num_cached,
            blocks_in_use=blocks.num_in_use,
            blocks_total=blocks.num_blocks,
            prefill_s_per_token=self.speed.prefill_s_per_token,
            decode_step_s=self.speed.decode_step_s,
            num_steps=self.steps.num_planned,
            num_compiles=num_compiles,
            num_preemptions=counters.num_preemptions,
            host_blocks_free=host.free,
            host_blocks_cached=host.cached,
            host_blocks_in_use=host.total - host.free - host.cached,
            host_blocks_total=host.total,
            num_offloads=counters.num_offloads,
            num_restores=counters.num_restores,
            stalled_s=stalled_s,
            num_places=max(0, self.config.max_waiting_requests - num_waiting),
            blocks_retained=blocks.num_retained,
            host_blocks_retained=host.retained,
            num_startable=0 if memory.blocked_head.lacks_blocks else self.rows.num_free,
        )

    def clear_cache(self) -> None:
        """Forget every cached block of both tiers; live requests keep their blocks."""
        self.memory.clear_cache()

    def snapshot(self) -> dict[str, Any]:
        """Blocks, rows and queues as plain data."""
        memory, counters = self.memory, self.book.counters
        return {
            "num_steps": self.steps.num_planned,
            "steps_in_flight": len(self.steps),
            "blocks": memory.blocks.snapshot(),
            "deferred_references": memory.deferred_frees.num_references,
            "host_blocks": memory.host.blocks.snapshot(),
            "retained_sequences": len(memory.retention),
            "prefix": {
                "indexed_blocks": len(memory.prefix),
                "tokens_queried": counters.num_prefix_tokens_queried,
                "tokens_hit": counters.num_prefix_tokens_hit,
                "tokens_hit_on_host": counters.num_prefix_tokens_hit_on_host,
            },
            "events": {"seq": self.events.seq, "held": self.events.num_held},
            "rows": table_checks.snapshot(self.rows),
            **self.book.snapshot(),
        }

    def check_idle(self) -> None:
        """Raise `IntegrityError` if no request is alive and something is still held for one.

        It only compares a few counters, so it is cheap for any cache size; `check` compares all records.
        """
        if self.book.requests or self.steps:
            return
        held = self.memory.counts_in_use() | self.book.counts_held()
        leaked = {name: count for name, count in held.items() if count}
        if leaked:
            raise IntegrityError(f"no request is alive, but these are held: {leaked}")

    def check(self) -> None:
        """Compare all records; raise `IntegrityError` (an AssertionError) where two disagree."""
        num_taken = sum(len(step.taken) for step in self.steps)
        num_ahead = max(0, len(self.steps) - 1)
        self.memory.check(self.book.requests.values(), num_ahead, num_taken)
        self.book.check()
