"""The live requests and the stage of each. The request book owns all queues and moves requests between them.

```
 add ──▶ FORK ──▶ WAITING ──┐
 add ──▶ WAITING ───────────┤ start
 add ──▶ ISOLATED ──────────┼───────▶ PREFILLING ──first token──▶ DECODING
            ┌──▶ RETURNING ─┘              │                         │
            │                              └────────┬────────────────┘
            └────────────── preempt ────────────────┘

 pause   WAITING (at the head), ISOLATED, RETURNING ──▶ PAUSED         a running request keeps its row
 resume  PAUSED ──▶ WAITING (in front), or RETURNING if it was preempted
 release any stage ──▶ gone
```

`Request.phase` says what a client may observe; the stage says which collection holds the request.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from quire.protos.errors import DeadlineExceeded, Overloaded, QuireError
from quire.protos.wire import TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.draft_source import DraftSource
from quire.replica.core.request import FinishReason, Phase, Request
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.request_table.drafting import Drafting
from quire.replica.scheduler.admission import Admission
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.forks import Sharing, WaitingForks, find_parent
from quire.replica.scheduler.offload import Offload, PendingRestores
from quire.replica.scheduler.order import POLICIES
from quire.replica.scheduler.preemption import ReturnQueue
from quire.replica.scheduler.queues import (
    Deadlines,
    IsolatedRequests,
    KeyedRequests,
    RequestCollection,
)
from quire.replica.scheduler.speed import CopySpeed, StepSpeed


class Stage(enum.Enum):
    """The stage of a live request: it says which collection holds the request."""

    # In the waiting queue, ordered by `config.scheduler`.
    WAITING = "waiting"
    # Outside the queue, until its parent has its first token.
    FORK = "fork"
    # Outside the queue, until it may run alone.
    ISOLATED = "isolated"
    # Preempted: starts again before every request that waits.
    RETURNING = "returning"
    # Paused without a row, taken out of its queue so that it does not block it. A paused request further back in
    # the waiting queue stays there until it becomes the head.
    PAUSED = "paused"
    # Has a row; some of its known tokens are not computed yet.
    PREFILLING = "prefilling"
    # Has a row; gets one token in each step.
    DECODING = "decoding"


_WITHOUT_ROW = frozenset(Stage) - {Stage.PREFILLING, Stage.DECODING}
# From every stage a request may also be released.
TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.PREFILLING, Stage.PAUSED}),
    Stage.FORK: frozenset({Stage.WAITING}),
    Stage.ISOLATED: frozenset({Stage.PREFILLING, Stage.PAUSED}),
    Stage.RETURNING: frozenset({Stage.PREFILLING, Stage.PAUSED}),
    Stage.PAUSED: frozenset({Stage.WAITING, Stage.RETURNING}),
    Stage.PREFILLING: frozenset({Stage.DECODING, Stage.RETURNING, Stage.PAUSED}),
    Stage.DECODING: frozenset({Stage.RETURNING, Stage.PAUSED}),
}


@dataclass(slots=True)
class Counters:
    """Numbers of events and tokens since the start."""

    num_preemptions: int = 0
    num_offloads: int = 0
    num_restores: int = 0
    num_prefix_tokens_queried: int = 0
    num_prefix_tokens_hit: int = 0
    num_prefix_tokens_hit_on_host: int = 0


class RequestBook:
    """Every live request and its stage.

    It also owns the parts that start and stop requests: admission, offloading, forks, pending restores, drafting.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: EngineMemory,
        copies: CopySpeed,
        speed: StepSpeed,
        draft_source: DraftSource | None = None,
    ):
        self._config = config
        self._memory = memory
        self._speed = speed
        self.admission = Admission(config, memory, copies)
        self.offload = Offload(config, memory, self.admission, copies)
        self.sharing = Sharing(config, memory)
        self.restores = PendingRestores(memory)
        self.drafting = Drafting(config, memory.rows, memory.blocks, draft_source)
        self.counters = Counters()
        # Every live request by key.
        self.requests: dict[Hashable, Request] = {}
        self._stages: dict[Hashable, Stage] = {}
        self.waiting = POLICIES[config.scheduler].make_queue(self._estimated_prefill_s)
        self.forks = WaitingForks()
        self.isolated = IsolatedRequests()
        self.returning = ReturnQueue()
        self._paused = KeyedRequests()
        # Prefilling requests in order of admission.
        self.prefilling = KeyedRequests()
        # There is no collection for DECODING: the request table holds those requests.
        self._collections: dict[Stage, RequestCollection] = {
            Stage.WAITING: self.waiting,
            Stage.FORK: self.forks,
            Stage.ISOLATED: self.isolated,
            Stage.RETURNING: self.returning,
            Stage.PAUSED: self._paused,
            Stage.PREFILLING: self.prefilling,
        }
        self.deadlines = Deadlines()
        self._num_submitted = 0
        self._ended: list[TokenDelta] = []
        # Keys of the requests that started since the last plan: their blocks are not filled yet.
        self._unfilled: set[Hashable] = set()
        # Parents that got their first token since the last plan.
        self._fresh_parents: list[Request] = []

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply the limits of another configuration. Queued requests stay queued even above a smaller limit."""
        self._config = config
        self.admission.reconfigure(config)
        self._memory.blocked_head.unblock()

    def _estimated_prefill_s(self, request: Request) -> float:
        """Seconds of prefill that a waiting request needs; 0 while the speed is not known."""
        num_missing = request.num_missing_tokens
        return self._speed.prefill_s(request.num_tokens - num_missing, num_missing)

    @property
    def num_waiting(self) -> int:
        """Live requests without a row."""
        return len(self.requests) - self._memory.rows.num_active

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Tokens that waiting and running requests must compute before they generate. A fork computes one."""
        queued = self.waiting.num_missing_tokens + self.returning.num_tokens + len(self.forks)
        return queued + self._memory.rows.num_missing_tokens

    def stage(self, request: Request) -> Stage:
        return self._stages[request.key]

    # -- moving requests ---------------------------------------------------------------------------------

    def _move(self, request: Request, stage: Stage, *, to_front: bool = False) -> None:
        """Take a request out of the collection that holds it and put it into another one."""
        before = self._stages[request.key]
        if stage not in TRANSITIONS[before]:
            raise ValueError(f"request {request.key!r} cannot go from {before} to {stage}")
        self._take_out(request, is_start=stage is Stage.PREFILLING)
        self._put(request, stage, to_front=to_front)

    def _take_out(self, request: Request, *, is_start: bool = False) -> None:
        stage = self._stages[request.key]
        if is_start and stage is Stage.WAITING:
            self.waiting.start(request)
        elif is_start and stage is Stage.ISOLATED:
            self.isolated.start(request)
        elif stage in self._collections:
            self._collections[stage].remove(request)

    def _put(self, request: Request, stage: Stage, *, to_front: bool = False) -> None:
        self._stages[request.key] = stage
        if to_front:
            self.waiting.push_front(request)
        elif stage in self._collections:
            self._collections[stage].append(request)

    def _vacate(self, request: Request) -> None:
        """Give back a running request's row and blocks."""
        self._memory.vacate(request)
        self.drafting.drop(request)
        self.restores.drop(request.key)

    # -- in and out --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that has been validated.

        Raises
        ------
        Overloaded
            `max_waiting_requests` requests are already waiting.
        InvalidRequest
            `fork_of` names a request with another prompt or tenant.
        """
        self._check_room()
        parent = find_parent(request, self.requests, self.forks)
        if self._config.has_states and not self._config.num_snapshots:
            # The parent's state is after its own tokens, so a fork computes the prompt itself.
            parent = None
        request.accept(self._config.eos_token_ids)
        request.arrival_index = self._num_submitted
        self._num_submitted += 1
        self.requests[request.key] = request
        request.parent = parent
        if request.alone:
            self._put(request, Stage.ISOLATED)
        elif parent is None:
            self._put(request, Stage.WAITING)
        elif parent.phase in (Phase.PENDING, Phase.PREFILLING):
            self._put(request, Stage.FORK)
        else:
            self._put(request, Stage.WAITING, to_front=True)
            self._memory.blocked_head.unblock()
        if request.deadline_s is not None:
            self.deadlines.push(request, request.deadline_s, len(self.requests))

    def _check_room(self) -> None:
        bound = self._config.max_waiting_requests
        if self.num_waiting >= bound:
            num_missing = self.waiting.num_missing_tokens + self.returning.num_tokens
            wait_s = num_missing * self._speed.prefill_s_per_token
            raise Overloaded(
                f"the waiting queue is full: {self.num_waiting} requests, the bound is {bound} "
                "(max_waiting_requests)",
                retry_after_s=max(1.0, wait_s),
            )

    def release(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: Sequence[int] = (),
        error: QuireError | None = None,
    ) -> TokenDelta:
        """End a request: give back everything that it holds, and return its last delta.

        Parameters
        ----------
        token_ids
            Tokens of the request that no delta has reported yet.
        """
        self._take_out(request)
        if reason is not FinishReason.ERROR:
            self._memory.retain(request)
        request.enter(Phase.FINISHED)
        if request.row >= 0:
            self._vacate(request)
        else:
            if request.offloaded is not None:
                self.offload.drop(request)
            self._memory.blocked_head.unblock()
        self._memory.release_tip(request)
        del self.requests[request.key], self._stages[request.key]
        self._replace_parent(request)
        index = request.num_tokens - request.num_prompt_tokens - len(token_ids)
        return request.delta(index, list(token_ids), reason, error)

    def _replace_parent(self, ended: Request) -> None:
        """If forks wait for a request that ends or pauses, the first fork becomes the parent of the others."""
        forks = self.forks.take(ended)
        if not forks:
            return
        heir, *others = forks
        heir.parent = None
        self._put(heir, Stage.WAITING)
        for fork in others:
            fork.parent = heir
            self._put(fork, Stage.FORK)

    def release_unreported(
        self, request: Request, reason: FinishReason, error: QuireError | None = None
    ) -> None:
        """End a request now, and keep its last delta until `take_ended` returns it."""
        self._ended.append(self.release(request, reason, error=error))

    def expire(self, now_s: float) -> None:
        """End the requests that have reached their deadline."""
        for deadline_s, request in self.deadlines.pop_expired(now_s):
            late_s = now_s - deadline_s
            error = DeadlineExceeded(f"the request's deadline passed {late_s:.3f} s ago")
            self.release_unreported(request, FinishReason.ABORT, error)

    def take_ended(self) -> list[TokenDelta]:
        """Remove and return the deltas that `release_unreported` has kept."""
        ended, self._ended = self._ended, []
        return ended

    # -- starting and stopping ---------------------------------------------------------------------------

    def next_to_start(self) -> Request | None:
        """The first preempted request, or, when there is none, the first waiting request that is not paused."""
        if self.returning:
            return self.returning.head()
        while self.waiting:
            request = self.waiting.head()
            if not request.is_paused:
                return request
            self._move(request, Stage.PAUSED)
        return None

    def start(self, request: Request) -> None:
        """Move a request to PREFILLING. The caller gives it its row next."""
        self._move(request, Stage.PREFILLING)
        request.enter(Phase.PREFILLING)
        request.parent = None
        request.is_preempted = False
        self._unfilled.add(request.key)

    def begin_decoding(self, request: Request, now_s: float) -> None:
        """Move a request to DECODING, because its first token has been sampled. Its forks may start."""
        self._move(request, Stage.DECODING)
        request.enter(Phase.DECODING)
        if request.first_token_s is None:
            request.first_token_s = now_s
        if forks := self.forks.take(request):
            for fork in reversed(forks):
                self._put(fork, Stage.WAITING, to_front=True)
            self._memory.blocked_head.unblock()
            self._fresh_parents.append(request)

    @property
    def fresh_parents(self) -> Sequence[Request]:
        """Requests that got their first token since the last plan; their forks start next."""
        return self._fresh_parents

    def end_plan(self) -> None:
        """Record that a step is planned: it fills the blocks of started requests, and parents may drop old blocks."""
        self._unfilled.clear()
        self._fresh_parents.clear()

    def preempt(self, request: Request, *, may_offload: bool = True) -> None:
        """Take a running request's row and blocks away.

        Its blocks are copied to the host tier (host memory) if they fit there; otherwise it computes its tokens again.

        Parameters
        ----------
        may_offload
            Whether the blocks may be copied.
        """
        offloaded = None
        # Blocks that are not filled yet cannot be copied: a step makes its copies before it computes.
        if may_offload and request.key not in self._unfilled:
            offloaded = self.offload.save(request)
        self._vacate(request)
        if offloaded is None:
            self._memory.release_tip(request)
        request.offloaded = offloaded
        request.enter(Phase.PENDING if offloaded is None else Phase.OFFLOADED)
        request.is_preempted = True
        self._move(request, Stage.PAUSED if request.is_paused else Stage.RETURNING)
        self.admission.hold()
        self.counters.num_preemptions += 1
        self.counters.num_offloads += offloaded is not None

    def recompute(self, request: Request) -> None:
        """Drop the copies of an offloaded request, which must compute its tokens again."""
        stage = self._stages[request.key]
        self._take_out(request)
        self.offload.drop(request)
        self._memory.release_tip(request)
        request.enter(Phase.PENDING)
        self._put(request, stage)

    def pause(self, key: Hashable) -> None:
        """Let a live request compute nothing until `resume`; the rules are those of `Scheduler.pause`."""
        request = self.requests.get(key)
        if request is None or request.is_paused:
            return
        request.is_paused = True
        self._replace_parent(request)
        match self._stages[key]:
            case Stage.FORK:
                self._move(request, Stage.WAITING)
                request.parent = None
            case Stage.ISOLATED | Stage.RETURNING:
                self._move(request, Stage.PAUSED)
            case Stage.PREFILLING | Stage.DECODING:
                self._memory.rows.set_paused(request.row, True)
        self._memory.blocked_head.unblock()

    def resume(self, key: Hashable) -> None:
        """Let a paused request continue; the rules are those of `Scheduler.resume`."""
        request = self.requests.get(key)
        if request is None or not request.is_paused:
            return
        request.is_paused = False
        match self._stages[key]:
            case Stage.PAUSED if request.is_preempted:
                self._move(request, Stage.RETURNING)
            case Stage.PAUSED:
                self._move(request, Stage.WAITING, to_front=True)
            case Stage.PREFILLING | Stage.DECODING:
                self._memory.rows.set_paused(request.row, False)
        self._memory.blocked_head.unblock()

    # -- inspection --------------------------------------------------------------------------------------

    def counts_held(self) -> dict[str, int]:
        """Number of requests in each collection, by name; all 0 if no request is alive."""
        return {f"{s.value} requests": len(c) for s, c in self._collections.items()}

    def snapshot(self) -> dict[str, object]:
        """The requests without a row as plain data."""
        return {
            "returning": [_describe(request) for request in self.returning],
            "waiting": [_describe(request) for request in self.waiting],
            "waiting_forks": len(self.forks),
            "paused": [_describe(request) for request in self._paused.values()],
        }

    def check(self) -> None:
        """Raise `IntegrityError` where a request is not exactly where its stage says."""
        by_stage: dict[Stage, set[Hashable]] = {stage: set() for stage in Stage}
        for key, stage in self._stages.items():
            by_stage[stage].add(key)
        if self._stages.keys() != self.requests.keys():
            raise IntegrityError("a live request has no stage, or a stage has no live request")
        for stage, collection in self._collections.items():
            if collection.keys() != by_stage[stage]:
                raise IntegrityError(
                    f"{stage} holds {collection.keys()}, not the requests of that stage: "
                    f"{by_stage[stage]}"
                )
        self.waiting.check()
        self.returning.check()
        self.forks.check(self.requests)
        num_with_row = len(by_stage[Stage.PREFILLING]) + len(by_stage[Stage.DECODING])
        if num_with_row != self._memory.rows.num_active:
            raise IntegrityError(
                f"{num_with_row} requests run, {self._memory.rows.num_active} rows are in use"
            )
        for key, request in self.requests.items():
            stage = self._stages[key]
            if (stage in _WITHOUT_ROW) != (request.row < 0):
                raise IntegrityError(f"request {key!r} is {stage} and has row {request.row}")
            for phase, own in (
                (Phase.PREFILLING, stage is Stage.PREFILLING),
                (Phase.DECODING, stage is Stage.DECODING),
                (Phase.OFFLOADED, request.offloaded is not None),
            ):
                if (request.phase is phase) != own:
                    raise IntegrityError(
                        f"request {key!r} is {request.phase}, its stage is {stage}, "
                        f"its offloaded blocks: {request.offloaded}"
                    )
            if stage is Stage.PAUSED and not request.is_paused:
                raise IntegrityError(f"request {key!r} is in stage PAUSED but is not paused")


def _describe(request: Request) -> dict[str, object]:
    """A request without a row as plain data."""
    entry: dict[str, object] = {"key": request.key, "length": request.num_tokens}
    if request.offloaded is not None:
        entry["num_computed"] = request.offloaded.num_computed
        entry["host_blocks"] = [block.host_block for block in request.offloaded.blocks]
    return entry
