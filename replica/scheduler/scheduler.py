"""The scheduler: which tokens of which requests a step computes, and what came of it.

```
 add ──▶ waiting ──admit──▶ prefilling ──last chunk──▶ decoding ──commit──▶ release
                              ▲   │                        │
                              │   └────────┬───────────────┘        (the cache is full)
                              │            ▼
                              └─return── evicted: its blocks in the host tier, or nothing but its tokens
```

Owned by one thread. `plan` and `commit` (or `fail_step`) alternate, or `plan` is one step ahead: then it counts on a
token of each row in flight that it does not know yet. Between the two a step is in flight, and blocks that are given
back meanwhile are not handed out before it is over (`deferred_frees.py`). An eviction needs those tokens and is not
planned ahead. What a row may sample next can depend on them (a grammar, bad words): such a plan awaits them, and
`complete` says the rest.

Who gets which blocks is `admission.py`; in which order, `order.py`; how much prefill a step holds, `chunking.py`;
what it puts into the prefix index, `steps_in_flight.py`. Who gives way when the cache is full is `preemption.py`;
`offload.py` moves it to the host tier (`host_tier.py`) and back. Without such a tier, or without room there, a victim
is soft reset: what it generated joins what it must prefill. Until all victims have returned no new request is admitted.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.protos.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    QuireError,
)
from quire.protos.wire import Load
from quire.replica.config import EngineConfig
from quire.replica.core.request import DeltaBatch, FinishReason, Phase, Request, validate
from quire.replica.core.step_plan import NO_TOKEN, RequestDelta, SamplingBatch, StepPlan, StepResult
from quire.replica.kv_cache.blocks import BlockManager, IntegrityError
from quire.replica.kv_cache.cache_events import EventLog
from quire.replica.kv_cache.deferred_frees import DeferredFrees
from quire.replica.kv_cache.host_tier import HostTier, Transfers
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.admission import Admission, Offer
from quire.replica.scheduler.chunking import Chunking
from quire.replica.scheduler.copy_speed import CopySpeed
from quire.replica.scheduler.forks import Share, Sharing, WaitingForks, find_parent, held_positions
from quire.replica.scheduler.isolation import IsolatedRequests
from quire.replica.scheduler.offload import Offload, Return
from quire.replica.scheduler.order import PrefillOrder, PriorityQueue, ShortestFirstQueue, urgency
from quire.replica.scheduler.preemption import ReturnQueue, choose_victim
from quire.replica.scheduler.queues import Deadlines, WaitingQueue
from quire.replica.scheduler.speed import StepSpeed
from quire.replica.scheduler.steps_in_flight import Step, StepIndexer

# Decoding rows fill a few routing blocks a step, and a pass over one costs as much as over ten: so they are told
# after so many steps or when so many have gathered. A prompt's blocks are told in the step that computes them.
_HASH_STEPS = 8
_HASH_BLOCKS = 32
_NO_ROWS = np.empty(0, np.int64)
MAX_STEPS_IN_FLIGHT = 2


def _uses(plan: StepPlan, restored: set[int]) -> bool:
    """Whether the step reads or writes any of these blocks."""
    copied = any(not restored.isdisjoint(pair) for pair in plan.copies)
    return copied or bool(np.isin(plan.block_tables, list(restored)).any())


class Scheduler:
    """Requests, rows, blocks, prefix index and events of one engine.

    A step holds the decoding rows, then the next chunks of running prefills, then of requests that start. The
    work of planning it grows with the requests that run, never with those that wait.

    | `config.scheduler` | |
    |---|---|
    | shortest_first | requests start by arrival and length, see `order.py` |
    | fifo | requests start in the order of arrival |
    | prefill_first | the same; started prompts come before the decoding rows, see `Chunking.leaves_out_decodes` |
    | priority | requests start, and prefills share a step, by priority, deadline, arrival; see `order.py` |

    Parameters
    ----------
    config
        The engine's limits.
    epoch
        Name of this incarnation for the event log; a random one by default.
    max_event_batches
        Batches of cache events kept for routers that missed some.
    """

    def __init__(
        self, config: EngineConfig, *, epoch: str | None = None, max_event_batches: int = 1024
    ):
        self.config = config
        self.events = EventLog(epoch, max_event_batches)
        self.prefix = PrefixCache(
            config.block_size,
            config.num_blocks,
            self.events,
            num_host_blocks=config.num_host_blocks,
            groups=config.groups,
            model_name=config.model_name,
            revision=config.revision,
        )
        self.host = HostTier(config.num_host_blocks, self.prefix)
        self.blocks = BlockManager(
            config.num_blocks, on_demote=self.host.demote, order=config.demotion_order
        )
        self.rows = RowTable(
            config.num_rows,
            config.max_row_blocks,
            config.block_size,
            config.vocab_size,
            config.groups,
        )
        self.deferred_frees = DeferredFrees(self.blocks)
        self.speed = StepSpeed()
        self.copies = CopySpeed(self.speed, always_copies=config.restore == "always")
        self._admission = Admission(
            config, self.prefix, self.blocks, self.host, self.rows, self.copies
        )
        self._offload = Offload(
            config, self.prefix, self.blocks, self.host, self.rows, self._admission, self.copies
        )
        self._indexer = StepIndexer(config, self.prefix, self.blocks, self.rows)
        self._sharing = Sharing(config, self.prefix, self.blocks, self.rows)
        self._chunking = Chunking(config, self.speed)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_offloads = 0
        self.num_restores = 0
        self.num_prefix_tokens_queried = 0
        self.num_prefix_tokens_hit = 0
        self.num_prefix_tokens_hit_on_host = 0
        self._requests: dict[Hashable, Request] = {}  # every live one
        self._waiting = self._make_queue()
        self._forks = WaitingForks()  # outside the queue
        self._isolated = IsolatedRequests()  # the same
        self._fresh_parents: list[Request] = []  # got their first token in the step before
        self._prefill_order = PrefillOrder(by_urgency=config.scheduler == "priority")
        self._returning = ReturnQueue()
        # Paused, and out of its queue not to stop the others there. Paused requests deeper in the waiting queue
        # stay until they are its head.
        self._set_aside: dict[Hashable, Request] = {}
        self._prefilling: dict[Hashable, Request] = {}  # in order of admission
        self._started: set[Hashable] = (
            set()
        )  # since the last step: their blocks are yet to be filled
        # Steps whose blocks may still be on their way back from the host tier, the oldest first, with the blocks
        self._restoring: deque[tuple[int, Collection[int]]] = deque()
        self._arriving: dict[Hashable, int] = {}  # prefills that wait for those of this step
        self._deadlines = Deadlines()
        self._num_submitted = 0
        self._steps: deque[Step] = deque()  # in flight, the oldest first
        self._ended: list[RequestDelta] = []  # ended by `plan`, not yet told
        # A head of the queue is looked at again only after something that could let it in.
        self._num_changes = 0
        self._blocked = (-1, -1)  # its arrival, and the changes up to then
        self._lacks_blocks = False  # whoever is first in line

    def reconfigure(self, config: EngineConfig) -> None:
        """Take on a configuration that differs in `LIGHT_FIELDS` only; requests go on under it."""
        self.config = config
        self._admission.reconfigure(config)
        self._chunking.reconfigure(config)
        self._num_changes += 1

    def _make_queue(self) -> WaitingQueue:
        if self.config.scheduler == "priority":
            return PriorityQueue()
        if self.config.scheduler == "shortest_first":
            return ShortestFirstQueue(self._foretold_prefill_s)
        return WaitingQueue()

    def _foretold_prefill_s(self, request: Request) -> float:
        """Seconds of prefill that a waiting request needs; 0 while the speed is not known."""
        num_missing = request.num_missing_tokens
        return self.speed.prefill_s(request.num_tokens - num_missing, num_missing)

    # -- requests in and out -----------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps that have been planned and neither committed nor failed."""
        return len(self._steps)

    @property
    def num_running(self) -> int:
        return self.rows.num_active

    @property
    def num_waiting(self) -> int:
        """Accepted requests without a row: new ones, forks, and those that gave way."""
        queued = len(self._waiting) + len(self._returning) + len(self._set_aside)
        return queued + len(self._forks) + len(self._isolated)

    @property
    def stream_ids_in_flight(self) -> np.ndarray:
        """[n] int64, `Request.stream_id` of the rows of the step in flight."""
        rows = [step.rows for step in self._steps]
        return self.rows.stream_ids[np.unique(np.concatenate(rows)) if rows else _NO_ROWS]

    def validate(self, request: Request) -> None:
        """Refuse what can never be served; safe in any thread.

        Raises
        ------
        InvalidRequest
            A field is out of its bounds, or the key names a live request. See `request.validate`.
        """
        validate(request, self.config)
        if request.params.grammar is not None and request.grammar is None:
            raise EngineError("the request's grammar has not been compiled")
        if request.key in self._requests:
            raise InvalidRequest(f"request_id: {request.key!r} is in use", field="request_id")

    def add(self, request: Request) -> RequestDelta | None:
        """Queue a request. A refusal is its only delta: `error`, with a `QuireError` that says why."""
        try:
            self.validate(request)
            self._check_room()
            parent = find_parent(request, self._requests, self._forks)
        except QuireError as error:
            return request.refusal(error)
        request.accept(self.config.eos_token_ids)
        request.arrival_index = self._num_submitted
        self._num_submitted += 1
        self._requests[request.key] = request
        request.parent = parent
        if request.alone:
            self._isolated.append(request)
        elif parent is None:
            self._waiting.append(request)
        elif parent.phase in (Phase.PENDING, Phase.PREFILLING):
            self._forks.add(request)
        else:
            self._push_front([request])
        if request.deadline_s is not None:
            self._deadlines.push(request, request.deadline_s, len(self._requests))
        return None

    def abort(self, key: Hashable) -> RequestDelta | None:
        """End a request, also while its step is in flight; None when it is not alive."""
        request = self._requests.get(key)
        return None if request is None else self._release(request, FinishReason.ABORT)

    def abort_all(self) -> list[RequestDelta]:
        """End every request."""
        return [self._release(r, FinishReason.ABORT) for r in list(self._requests.values())]

    def pause(self, key: Hashable) -> None:
        """Let a live request compute nothing until `resume`; unknown keys and paused requests are ignored.

        It keeps its row and blocks, as long as nobody needs them: it is the first to give way when the cache is
        full. What does not run yet does not start, and stops nobody behind it. A token that is being computed
        still comes.
        """
        request = self._requests.get(key)
        if request is None or request.is_paused:
            return
        request.is_paused = True
        self._replace_parent(request)  # nobody waits for what does not go on
        if request in self._isolated:
            self._isolated.remove(request)
            self._set_aside[key] = request
        if request in self._forks:
            self._forks.remove(request)
            request.parent = None
            self._waiting.append(request)
        if request.row >= 0:
            self.rows.set_paused(request.row, True)
        elif request.is_victim:
            self._returning.remove(request)
            self._set_aside[key] = request
        self._num_changes += 1

    def resume(self, key: Hashable) -> None:
        """Let a paused request go on: it runs, or is at the head of its queue if that had come to it."""
        request = self._requests.get(key)
        if request is None or not request.is_paused:
            return
        request.is_paused = False
        if request.row >= 0:
            self.rows.set_paused(request.row, False)
        elif self._set_aside.pop(key, None) is not None:
            if request.is_victim:
                self._returning.put(request)
            else:
                self._waiting.push_front(request)
        self._num_changes += 1

    def grant(self, key: Hashable, credit_end: int) -> None:
        """Let a request run until it has `credit_end` output tokens, those of earlier attempts included; nothing
        when it is unknown or may have as many already."""
        request = self._requests.get(key)
        if request is None or request.credit_end is None or credit_end <= request.credit_end:
            return
        request.credit_end = credit_end
        if request.row >= 0:
            self.rows.set_run_length(request.row, request.run_length)
        self.resume(key)

    def next_deadline_s(self) -> float | None:
        """When `plan` must be called again although it gave no step; None = not before something changes."""
        return self._deadlines.next_s()

    def take_ended(self) -> list[RequestDelta]:
        """Deltas of the requests that `plan` ended. `commit` and `fail_step` return them too; whoever got
        no plan calls this."""
        ended, self._ended = self._ended, []
        return ended

    def _check_room(self) -> None:
        bound = self.config.max_waiting_requests
        if self.num_waiting >= bound:
            num_missing = self._waiting.num_missing_tokens + self._returning.num_tokens
            wait_s = num_missing * self.speed.prefill_s_per_token
            raise Overloaded(
                f"the waiting queue is full: {self.num_waiting} requests, the bound is {bound} "
                "(max_waiting_requests)",
                retry_after_s=max(1.0, wait_s),
            )

    def _release(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: Sequence[int] = (),
        error: QuireError | None = None,
    ) -> RequestDelta:
        """The one way out: give everything back and say how the request ended.

        Parameters
        ----------
        token_ids
            Tokens of the request that no delta has told yet.
        """
        if request.row >= 0:
            self._vacate(request)
        else:
            self._unqueue(request)
            if request.parked is not None:
                self._offload.drop(request)
            self._num_changes += 1
        self._release_tip(request)
        request.enter(Phase.FINISHED)
        del self._requests[request.key]
        self._replace_parent(request)
        index = request.num_tokens - request.num_prompt_tokens - len(token_ids)
        return request.delta(index, list(token_ids), reason, error)

    def _replace_parent(self, ended: Request) -> None:
        """Of the forks that wait for a request that ended or paused the first is an ordinary one, for which the
        others wait."""
        forks = self._forks.take(ended)
        if not forks:
            return
        heir, *others = forks
        heir.parent = None
        self._waiting.append(heir)
        for fork in others:
            fork.parent = heir
            self._forks.add(fork)

    def _push_front(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):
            self._waiting.push_front(request)
        self._num_changes += 1

    def _vacate(self, request: Request) -> None:
        """Give back a running request's row and blocks; its full blocks stay cached."""
        self._prefilling.pop(request.key, None)
        self._arriving.pop(request.key, None)
        self._give_back(reversed(self.rows.vacate(request.row)))
        self._num_changes += 1

    def _give_back(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """Release blocks, once no step in flight uses them; arguments of `BlockManager.release`."""
        newest = self._steps[-1].number if self._steps else None
        self.deferred_frees.give_back(blocks, newest, passed=passed)

    def _release_tip(self, request: Request) -> None:
        """The request needs the name of its last indexed block no more."""
        self.prefix.release_entry(request.tip)
        request.tip, request.num_indexed = None, 0

    def _unqueue(self, request: Request) -> None:
        """Take a request out of whichever queue it waits in."""
        if request in self._forks:
            self._forks.remove(request)
        elif request in self._isolated:
            self._isolated.remove(request)
        elif self._set_aside.pop(request.key, None) is None:
            (self._returning if request.is_victim else self._waiting).remove(request)

    def _expire(self, now_s: float) -> None:
        for deadline_s, request in self._deadlines.pop_expired(now_s):
            late_s = now_s - deadline_s
            error = DeadlineExceeded(f"the request's deadline passed {late_s:.3f} s ago")
            self._ended.append(self._release(request, FinishReason.ABORT, error=error))

    # -- planning ----------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step.

        Returns
        -------
        None when no request is alive, or only paused ones; with a step in flight also when nothing can be planned
        before that is committed.

        Raises
        ------
        RuntimeError
            As many steps as may be are in flight.
        """
        if len(self._steps) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"step {self._steps[0].number} is still in flight")
        self._expire(now_s)
        if self._steps and self._is_on_trial:
            return None
        while True:
            composed = self._compose(now_s)
            if composed is None:
                return None
            step, decodes = composed
            if len(decodes) or step.chunks:
                break
            if self._steps:
                return None
            if self._arriving:  # there is nothing else to do: the step waits for their blocks
                self._arriving.clear()
                continue
            if not self._is_blocked():
                self.prefix.hash_new()
                return None
            # They wait for each other's sliding blocks, or for those of paused ones; ends as in `_grow_decodes`.
            self._evict(self._choose_victim())
        for before in self._steps:
            if before.decodes is decodes:
                before.decodes_then = copy.copy(decodes)
        plan, step.rows, step.sample_rows = self.rows.build(
            step.number, decodes, step.chunks, step.copies
        )
        step.claims = decodes.claims if not step.chunks else self.rows.claims[step.rows]
        if self._steps and self._needs_tokens(decodes):
            plan = plan._replace(awaits_tokens=True)
        self._started.clear()
        self._fresh_parents = []
        transfers = step.transfers = self.host.launch()
        if transfers:
            plan = plan._replace(saves=transfers.save_pairs(), restores=transfers.restore_pairs())
        if transfers.restores:
            self._restoring.append((step.number, transfers.restores.keys()))
        if self._restoring:
            restored = set().union(*(blocks for _, blocks in self._restoring))
            plan = plan._replace(uses_restores=_uses(plan, restored))
        step.decodes = None if step.chunks else decodes
        gathered = self.prefix.num_unhashed >= _HASH_BLOCKS
        if gathered or step.chunks or step.number % _HASH_STEPS == 0:
            self.prefix.hash_new()
        self._steps.append(step)
        self._adopt(step)
        self.num_steps = step.number
        return plan

    @property
    def _is_on_trial(self) -> bool:
        """Whether a request on probation runs or is next: it goes step by step."""
        return len(self._isolated) > 0 or self._isolated.current is not None

    def _needs_tokens(self, decodes: DecodeRows) -> bool:
        """Whether what some row may sample depends on its token in the step in flight."""
        return not decodes.is_plain and bool(self.rows.sampling.needs_history[decodes.ids].any())

    def complete(self, plan: StepPlan) -> SamplingBatch:
        """The sampling of a plan that awaited tokens, once the step before it is committed."""
        step = self._in_flight(plan)
        alive = self._are_alive(step, step.sample_rows)
        return self.rows.sampling.complete(self.rows, plan.sampling, alive)

    def _adopt(self, step: Step) -> None:
        for block in self._indexer.adopt(step):
            self._give_back([block])

    def _compose(self, now_s: float) -> tuple[Step, DecodeRows] | None:
        """Choose the work of a step and give it its blocks; also the rows that decode. None if that must wait for
        the step in flight."""
        # A parent keeps what its forks see for one plan; forks that do not start in it compute anew what is gone.
        if self.rows.sliding:
            self._trim(held_positions(self._fresh_parents))
        if (alone := self._compose_alone(now_s)) is not None:
            return alone
        if self._leaves_out_decodes():
            budget = self._chunking.budget(0, left_out=True)
            step = Step(self.num_steps + 1, budget, leaves_out_decodes=True)
            self._continue_prefills(step, False, now_s)
            if step.chunks:
                return step, self.rows.no_decode_rows()
        grown = self._grow_decodes()
        if grown is None:
            return None
        decodes, may_admit = grown
        budget = self._chunking.budget(len(decodes))
        step = Step(self.num_steps + 1, budget, num_decodes=len(decodes))
        self._indexer.register_decodes(step, decodes, are_known=not self._steps)
        if self._prefilling:
            self._continue_prefills(step, may_admit, now_s)
        if may_admit:
            self._admit(step, now_s)
        else:
            self._lacks_blocks = True
        return step, decodes

    def _compose_alone(self, now_s: float) -> tuple[Step, DecodeRows] | None:
        """The step of a request on probation, if there is one and its blocks fit."""
        self._isolated.update(self._num_new_tokens(self._isolated.current))
        head = self._isolated.head()
        if head is not None and self.rows.num_free:
            offer = self._admission.offer(head, self._prefilling.values())
            if offer is not None:
                self._admission.take(head, offer)
                self._count_hit(head, offer.num_hit_tokens, offer.hit.num_host_entries, now_s)
                head.enter(Phase.PREFILLING)
                self._prefilling[head.key] = head
                self._started.add(head.key)
                self._isolated.start(head)
        request = self._isolated.current
        if request is None:
            return None
        step = Step(self.num_steps + 1, self._chunking.budget(0))
        if request.phase is Phase.PREFILLING:
            self._schedule_chunk(step, request)
            return (step, self.rows.no_decode_rows()) if step.chunks else None
        decodes = self.rows.only(request.row)
        lacking = self.rows.lacking_block(decodes)
        if len(lacking):
            blocks = self.blocks.allocate(len(self.config.groups))
            if blocks is None:
                return None  # it grows, or gives way, beside the others
            self.rows.append_blocks(decodes, lacking, blocks)
        self._indexer.register_decodes(step, decodes, are_known=True)
        return step, decodes

    def _num_new_tokens(self, request: Request | None) -> int:
        """Output tokens that a running request has generated on this replica."""
        if request is None or request.row < 0:
            return 0
        length = int(self.rows.length[request.row])
        return length - request.num_prompt_tokens - request.num_emitted

    def _trim(self, held: Mapping[int, int] | None = None) -> bool:
        """Free what fell out of the rows' windows; returns whether that was anything."""
        stale = self.rows.trim(held)
        self._give_back(stale, passed=True)
        self._num_changes += bool(stale)
        return bool(stale)

    def _leaves_out_decodes(self) -> bool:
        if not self._chunking.prefill_first or not self._prefilling:
            return False
        rows = [request.row for request in self._ready_prefills()]
        if not rows:
            return False
        computed = self.rows.num_computed[rows]
        missing = int((self.rows.length[rows] - computed).sum())
        num_decodes = len(self.rows.decode_rows())
        return self._chunking.leaves_out_decodes(num_decodes, int(computed[0]), missing)

    def _continue_prefills(self, step: Step, may_admit: bool, now_s: float) -> None:
        """Plan chunks of the running prefills, and of more urgent requests that start before them."""
        running, by_urgency = self._prefill_order.sort(self._ready_prefills())
        for request in running:
            if by_urgency and may_admit:
                self._admit(step, now_s, before=request)
            if step.budget.tokens <= 0:
                return
            self._schedule_chunk(step, request)

    def _ready_prefills(self) -> list[Request]:
        """Running prefills that may have a chunk in this step."""
        return [
            request
            for request in self._prefilling.values()
            if not request.is_paused and request.key not in self._arriving
        ]

    def _grow_decodes(self) -> tuple[DecodeRows, bool] | None:
        """Give a block of each group to every decoding row that needs one, if it must be from other requests.

        Returns
        -------
        The decoding rows, and whether there was room for all: after an eviction nothing is admitted in the
        same step. None if somebody would have to be evicted and a step is in flight.
        """
        decodes = self.rows.decode_rows()
        lacking = self.rows.lacking_block(decodes)
        if not len(lacking):
            return decodes, True
        roomy = True
        num_groups = len(self.config.groups)
        while (blocks := self.blocks.allocate(len(lacking) * num_groups)) is None:
            if self._trim():
                continue
            if self._steps:
                return None
            # Ends: a request alone always fits, or it would have been refused.
            self._evict(self._choose_victim())
            decodes = self.rows.decode_rows()
            lacking = self.rows.lacking_block(decodes)
            roomy = False
        self.rows.append_blocks(decodes, lacking, blocks)
        return decodes, roomy

    def _is_blocked(self) -> bool:
        """Whether some request could run if others gave way."""
        return self.rows.num_active > 0 and (
            self._next_to_start() is not None
            or self._isolated.head() is not None
            or any(not request.is_paused for request in self._prefilling.values())
        )

    def _choose_victim(self) -> Request:
        rows = np.flatnonzero(self.rows.active)
        # A row whose blocks are being copied back has yet to use them: it gives way last.
        arriving = [self._requests[key].row for key in self._arriving]
        others = rows[~np.isin(rows, arriving)]
        rows = others if len(others) else rows
        victim = choose_victim(
            self.rows.arrival_index[rows], self.rows.paused[rows], len(self._returning) > 0
        )
        return self.rows.request(int(rows[victim]))

    def _evict(self, request: Request, may_offload: bool = True) -> None:
        """Take a running request's row and blocks; it returns, with its blocks from the host tier if they found
        room there, else to compute them again."""
        parked = None
        # What is yet to be filled cannot be copied: the step's saves come before everything else.
        if may_offload and request.key not in self._started:
            parked = self._offload.park(request)
        self._vacate(request)
        if parked is None:
            self._release_tip(request)
        request.parked = parked
        request.enter(Phase.PENDING if parked is None else Phase.OFFLOADED)
        self._queue_victim(request)
        self._admission.hold()
        self.num_preemptions += 1
        self.num_offloads += parked is not None

    def _queue_victim(self, request: Request) -> None:
        request.is_victim = True
        if request.is_paused:
            self._set_aside[request.key] = request
        else:
            self._returning.put(request)

    def _schedule_chunk(self, step: Step, request: Request, at_least: int = 0) -> None:
        """Plan as many of the request's missing tokens as budget and blocks allow, `at_least` of them whatever
        the budget's milliseconds say."""
        row = request.row
        start = int(self.rows.num_computed[row])
        count = max(step.budget.grant(start, request.num_tokens - start), at_least)
        if count > 0 and self.rows.sliding:
            count = self._admission.extend_sliding(row, count)
        if count <= 0:
            return
        step.budget.spend(start, count)
        step.chunks.append((row, count))
        if self._indexer.register_chunk(step, row, count):
            self._num_changes += 1  # the head of the queue may now share these blocks

    def _admit(self, step: Step, now_s: float, before: Request | None = None) -> None:
        """Start victims and then waiting requests in their order, until one does not fit.

        Parameters
        ----------
        before
            Only those that are more urgent than this one.
        """
        while (
            self.rows.num_free
            and not step.budget.is_spent
            and (request := self._next_to_start()) is not None
        ):
            if self._blocked == (request.arrival_index, self._num_changes):
                return
            if request.parked is not None and not self._offload.prefers_copy(request):
                self._returning.remove(request)
                self._forget_parked(request)
                continue
            if before is not None and urgency(request) > urgency(before):
                return
            offer = self._find_offer(request)
            if offer is None:
                self._blocked = (request.arrival_index, self._num_changes)
                self._lacks_blocks = True
                return
            start = self._num_known(request, offer)
            if not step.budget.grant(start, request.num_tokens - start):
                # Started without a chunk it would not be among those who end if the step fails, though the
                # blocks that it found may be written by that step.
                return
            if request.is_victim:
                self._returning.remove(request)
            else:
                self._waiting.start(request)
            request.parent = None
            if isinstance(offer, Share):
                step.copies += self._sharing.take(request, offer)
                self._count_hit(request, offer.num_computed, 0, now_s)
            elif isinstance(offer, Offer):
                self._admission.take(request, offer)
                num_host_entries = offer.hit.num_host_entries
                self._count_hit(request, offer.num_hit_tokens, num_host_entries, now_s)
            else:
                self._offload.take(request, offer)
                self.num_restores += 1
            request.enter(Phase.PREFILLING)
            request.is_victim = False
            self._lacks_blocks = False
            self._prefilling[request.key] = request
            self._started.add(request.key)
            has_others = bool(step.chunks) or step.num_decodes > 0
            arrives_with = self._arrives_with(request, step.number) if has_others else None
            if arrives_with is not None and not isinstance(offer, Share):
                self._arriving[request.key] = arrives_with  # while the others' steps run
                continue
            # A fork's copies belong to this step, so its one token does.
            self._schedule_chunk(step, request, at_least=isinstance(offer, Share))

    def _arrives_with(self, request: Request, number: int) -> int | None:
        """The newest step that copies blocks of the request's row back, of those that may still be at it and step
        `number`, which is being planned; None where all blocks are there."""
        if not self._restoring and not self.host.planned_restores:
            return None
        blocks = set(self.rows.blocks(request.row))
        if not blocks.isdisjoint(self.host.planned_restores):
            return number
        copying = (step for step, copied in self._restoring if not blocks.isdisjoint(copied))
        return max(copying, default=None)

    @staticmethod
    def _num_known(request: Request, offer: Offer | Return | Share) -> int:
        """Tokens that need not be computed if the request takes the offer."""
        if isinstance(offer, Share):
            return offer.num_computed
        return offer.num_hit_tokens if isinstance(offer, Offer) else request.parked.num_computed

    def _find_offer(self, request: Request) -> Offer | Return | Share | None:
        """What the request gets if it starts now: of its parent, of the host tier, or what is known and new
        blocks; None if it must wait."""
        prefilling = self._prefilling.values()
        if request.parked is not None:
            return self._offload.offer(request, prefilling)
        share = self._sharing.offer(request)
        if share is None:
            return self._admission.offer(request, prefilling)
        return share if self._sharing.fits(request, self._admission, prefilling) else None

    def _next_to_start(self) -> Request | None:
        """The head of the victims, or without any the first waiting request that is not paused."""
        if self._returning:
            return self._returning.head()
        while self._waiting:
            request = self._waiting.head()
            if not request.is_paused:
                return request
            self._waiting.remove(request)
            self._set_aside[request.key] = request
        return None

    def _count_hit(
        self, request: Request, num_hit: int, num_host_entries: int, now_s: float
    ) -> None:
        """At the first start: how much of the prompt need not be computed."""
        if request.first_scheduled_s is None:
            num_prompt_tokens = request.num_prompt_tokens
            num_restored = num_host_entries * self.config.block_size
            request.first_scheduled_s = now_s
            request.num_cached_tokens = min(num_hit, num_prompt_tokens)
            request.num_host_cached_tokens = min(num_restored, request.num_cached_tokens)
            self.num_prefix_tokens_queried += num_prompt_tokens
            self.num_prefix_tokens_hit += request.num_cached_tokens
            self.num_prefix_tokens_hit_on_host += request.num_host_cached_tokens

    # -- after the step ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> DeltaBatch:
        """Take the sampled tokens in; end and release what is finished.

        A result that cannot be right (wrong length, ids out of the vocabulary) fails the step.

        Returns
        -------
        One delta for each row that sampled, and those of `take_ended`.
        """
        step = self._in_flight(plan)
        tokens = np.asarray(result.token_ids)
        error, has_stuck = self._check_result(step, tokens)
        if error is not None:
            return DeltaBatch(self.fail_step(plan, error))
        self._land(self._steps.popleft())
        self._note_restored(result)
        scored = self._tell_scores(step, plan, result)  # before any of these rows ends
        table, rows, decodes = self.rows, step.sample_rows, step.decodes
        if decodes is not None and not has_stuck and table.are_unchanged(decodes):
            decodes = step.decodes_then or decodes
            tokens = tokens.astype(np.int32, copy=False)
            length = table.record_decodes(decodes, tokens)
            index = decodes.position - decodes.num_prompt_tokens
            columns = (decodes.keys, decodes.sources, decodes.stream_ids, index, tokens)
            complete: dict[int, RequestDelta] = {}
        else:
            decodes = None
            alive = self._are_alive(step, rows)
            if not alive.all():  # aborted while in flight, or ended by the step before
                rows, tokens = rows[alive], tokens[alive]
            if has_stuck:
                rows, tokens = self._end_stuck(rows, tokens)
            tokens = tokens.astype(np.int32, copy=False)
            length = table.record(rows, tokens)
            index = length - 1 - table.num_prompt_tokens[rows]
            owners = (table.keys[rows], table.sources[rows], table.stream_ids[rows])
            columns = (*owners, index, tokens)
            complete = self._end_prefills(rows, index, tokens, now_s)
        for behind in self._steps:
            self._indexer.register_known(behind)
            self._adopt(behind)
        for i, reason in table.ended(rows, tokens, length, decodes).items():
            request = table.request(int(rows[i]))
            if reason is FinishReason.LENGTH and length[i] < request.max_length:
                if length[i] >= request.run_length:
                    self.pause(request.key)  # its credit is spent
                continue
            complete[i] = self._release(request, reason, [int(tokens[i])])
        if result.logprobs:
            logprobs = {int(step.sample_rows[i]): lp for i, lp in result.logprobs.items()}  # by row
            keys = columns[0]
            for i, row in enumerate(rows.tolist()):
                if row in logprobs:
                    delta = complete.setdefault(
                        i, RequestDelta(keys[i], int(index[i]), [int(tokens[i])])
                    )
                    delta.logprobs = [logprobs[row]]
        left_out = step.leaves_out_decodes
        self._chunking.observe(
            step.budget, plan.num_decode_rows, result.duration_s, left_out, now_s
        )
        batch = DeltaBatch([*scored, *self.take_ended(), *complete.values()], *columns)
        return batch.without(complete) if complete else batch

    def _note_restored(self, result: StepResult) -> None:
        """Blocks have come back from the host tier: who waited for no others is in the next plan."""
        for num_blocks, seconds in result.restores:
            self.copies.observe(num_blocks, seconds)
        through = self.num_steps if result.restored_step is None else result.restored_step
        while self._restoring and self._restoring[0][0] <= through:
            self._restoring.popleft()
        self._arriving = {key: step for key, step in self._arriving.items() if step > through}

    def _land(self, step: Step) -> None:
        """The step is over, whether it failed or not: what was held for it is given back."""
        self.host.land(step.transfers)
        if self.deferred_frees.land(step.number):
            self._num_changes += 1

    def _are_alive(self, step: Step, rows: np.ndarray) -> np.ndarray:
        """[m] bool, which of the step's rows [m] still belong to the requests that it was planned for."""
        claims = step.claims
        if len(rows) < len(step.rows):
            claims = claims[np.isin(step.rows, rows)]  # both in the order of the step
        return self.rows.claims[rows] == claims

    def _tell_scores(self, step: Step, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Deltas with the log-probabilities of prompts; they come before the first token."""
        deltas = []
        for targets, scores in zip(plan.prompts, result.prompt_logprobs, strict=True):
            if not self._are_alive(step, np.array([targets.row]))[0]:  # aborted while in flight
                continue
            request = self.rows.request(targets.row)
            request.num_scored = targets.start + len(scores) - 1
            delta = request.delta(request.num_emitted, [])
            delta.prompt_logprobs = scores
            deltas.append(delta)
        return deltas

    def _end_stuck(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """End the rows whose constraints left no token; returns the others and their tokens."""
        stuck = tokens == NO_TOKEN
        for row in rows[stuck].tolist():
            index = int(self.rows.length[row] - self.rows.num_prompt_tokens[row])
            request = self.rows.request(row)
            error = request.stuck_error(index)
            self._ended.append(self._release(request, FinishReason.ERROR, error=error))
        return rows[~stuck], tokens[~stuck]

    def fail_step(self, plan: StepPlan, error: QuireError) -> list[RequestDelta]:
        """End every request of a step that did not run to its end, and of the step behind it, which has read what
        it left; the cache forgets what they would have written, in both tiers. Whose blocks they would have copied
        starts over."""
        self._in_flight(plan)
        failed, self._steps = list(self._steps), deque()
        for step in failed:
            self._land(step)
        deltas = self.take_ended()
        for step in failed:
            for row in step.rows[self._are_alive(step, step.rows)].tolist():
                request = self.rows.request(row)
                deltas.append(self._release(request, FinishReason.ERROR, error=error))
        unknown: list[int] = []
        for step in failed:
            if step.transfers:
                self._restart_copied(step.transfers)
            unknown += [*step.registered, *step.transfers.restores]
        self._indexer.forget(
            unknown
        )  # together: blocks of one step may continue those of the other
        for step in failed:
            self.host.forget_saves(step.transfers)
        self.rows.tell_again()  # whether the step got as far as the device's table nobody knows
        return deltas

    def _restart_copied(self, transfers: Transfers) -> None:
        """A step failed: its copies between the tiers are worth nothing, so who needs one computes it again."""
        for row in np.flatnonzero(
            self.rows.active
        ).tolist():  # not in the step, but given blocks for it
            if not transfers.restores.keys().isdisjoint(self.rows.blocks(row)):
                self._evict(self.rows.request(row), may_offload=False)
        offloaded = [r for r in self._requests.values() if r.parked is not None]
        for request in offloaded:
            if not transfers.saves.keys().isdisjoint(b.host_block for b in request.parked.blocks):
                self._unqueue(request)
                self._forget_parked(request)

    def _forget_parked(self, request: Request) -> None:
        """An offloaded request, out of its queue, computes again what it has in the host tier."""
        self._offload.drop(request)
        self._release_tip(request)
        request.enter(Phase.PENDING)
        self._queue_victim(request)

    def _in_flight(self, plan: StepPlan) -> Step:
        if not self._steps or self._steps[0].number != plan.step:
            raise ValueError(f"step {plan.step} is not the oldest in flight")
        return self._steps[0]

    def _check_result(self, step: Step, tokens: np.ndarray) -> tuple[EngineError | None, bool]:
        """What is wrong with the tokens, and whether some row got none."""
        if tokens.shape != step.sample_rows.shape:
            wrong = f"sampled {tokens.shape}, planned {step.sample_rows.shape}"
            return EngineError(f"step {step.number} {wrong}"), False
        # Negative ids, NO_TOKEN among them, are huge ones when read as unsigned: one pass finds all.
        if not len(tokens) or tokens.astype(np.uint64).max() < self.config.vocab_size:
            return None, False
        chosen = tokens[tokens != NO_TOKEN]
        if not len(chosen) or 0 <= chosen.min() <= chosen.max() < self.config.vocab_size:
            return None, True
        return EngineError(f"step {step.number} sampled an id out of the vocabulary"), False

    def _end_prefills(
        self, rows: np.ndarray, index: np.ndarray, tokens: np.ndarray, now_s: float
    ) -> dict[int, RequestDelta]:
        """Rows whose last chunk was in this step decode from now on; complete deltas for them."""
        complete: dict[int, RequestDelta] = {}
        prefilled = np.flatnonzero(~self.rows.decoding[rows])
        for i in prefilled.tolist():
            request = self.rows.request(int(rows[i]))
            del self._prefilling[request.key]
            request.enter(Phase.DECODING)
            if request.first_token_s is None:
                request.first_token_s = now_s
            complete[i] = request.delta(int(index[i]), [int(tokens[i])])
            if forks := self._forks.take(request):
                self._push_front(forks)
                self._fresh_parents.append(request)
        if len(prefilled):
            self.rows.begin_decoding(rows[prefilled])
        return complete

    # -- seen from outside -------------------------------------------------------------------------------

    def load(self, num_compiles: int = 0, stalled_s: float = 0.0) -> Load:
        """What the router's cost needs; a reading from another thread may be one step old.

        Parameters
        ----------
        num_compiles, stalled_s
            The runner's and the loop's, which the scheduler does not know.
        """
        host = self.host.blocks
        host_free, host_cached = host.num_free, host.num_cached
        return Load(
            num_running=self.rows.num_active,
            num_waiting=self.num_waiting,
            # A fork computes one token of its prompt.
            queued_prefill_tokens=self._waiting.num_missing_tokens
            + self._returning.num_tokens
            + len(self._forks)
            + self.rows.num_missing_tokens,
            num_decode_tokens=self.rows.num_decode_tokens,
            blocks_free=self.blocks.num_free,
            blocks_cached=self.blocks.num_cached,
            blocks_in_use=self.blocks.num_in_use,
            blocks_total=self.blocks.num_blocks,
            prefill_s_per_token=self.speed.prefill_s_per_token,
            decode_step_s=self.speed.decode_step_s,
            num_steps=self.num_steps,
            num_compiles=num_compiles,
            num_preemptions=self.num_preemptions,
            host_blocks_free=host_free,
            host_blocks_cached=host_cached,
            host_blocks_in_use=host.num_blocks - host_free - host_cached,
            host_blocks_total=host.num_blocks,
            num_offloads=self.num_offloads,
            num_restores=self.num_restores,
            stalled_s=stalled_s,
            num_places=max(0, self.config.max_waiting_requests - self.num_waiting),
            num_startable=0 if self._lacks_blocks else self.rows.num_free,
        )

    def clear_cache(self) -> None:
        """Forget every cached block of both tiers; live requests keep theirs, but nobody can match them any
        more."""
        blocks, host_blocks = self.prefix.clear()
        for block in blocks:
            self.blocks.forget_content(block)
        for block in host_blocks:
            self.host.blocks.forget_content(block)
        self._num_changes += 1

    def snapshot(self) -> dict[str, Any]:
        """Blocks, rows and queues as plain data."""
        return {
            "num_steps": self.num_steps,
            "steps_in_flight": len(self._steps),
            "blocks": self.blocks.snapshot(),
            "deferred_references": self.deferred_frees.num_references,
            "host_blocks": self.host.blocks.snapshot(),
            "prefix": {
                "indexed_blocks": len(self.prefix),
                "tokens_queried": self.num_prefix_tokens_queried,
                "tokens_hit": self.num_prefix_tokens_hit,
                "tokens_hit_on_host": self.num_prefix_tokens_hit_on_host,
            },
            "events": {"seq": self.events.seq, "held": self.events.num_held},
            "rows": self.rows.snapshot(),
            "returning": [self._describe(r) for r in self._returning],
            "waiting": [self._describe(r) for r in self._waiting],
            "waiting_forks": len(self._forks),
            "paused": [self._describe(r) for r in self._set_aside.values()],
        }

    def _describe(self, request: Request) -> dict[str, Any]:
        """A request without a row as plain data."""
        entry: dict[str, Any] = {"key": request.key, "length": request.num_tokens}
        if request.parked is not None:
            entry["num_computed"] = request.parked.num_computed
            entry["host_blocks"] = [block.host_block for block in request.parked.blocks]
        return entry

    def check_idle(self) -> None:
        """Raise `IntegrityError` if nobody is alive and something is still held for somebody.

        A few comparisons, however large the cache is; `check` finds out more.
        """
        if self._requests or self._steps:
            return
        held = {
            "blocks of the device": self.blocks.num_in_use,
            "blocks of the host tier": self.host.blocks.num_in_use,
            "rows": self.rows.num_active,
            "queued requests": self.num_waiting,
            "prefills": len(self._prefilling),
            "decoding tokens": self.rows.num_decode_tokens,
            "missing tokens": self.rows.num_missing_tokens,
        }
        leaked = {name: count for name, count in held.items() if count}
        if leaked:
            raise IntegrityError(f"no request is alive, but these are held: {leaked}")

    def check(self) -> None:
        """Walk everything; raise `IntegrityError` (an AssertionError) where two records disagree."""
        self.prefix.check()
        owners = self.rows.num_owners(self.config.num_blocks)
        held = self.deferred_frees.num_owners()
        self.blocks.check((owners + held).tolist(), self.prefix.__contains__)
        offloaded = [r for r in self._requests.values() if r.parked is not None]
        self.host.check(block.host_block for r in offloaded for block in r.parked.blocks)
        self.rows.check(owners, max(0, len(self._steps) - 1))
        tips = Counter(id(r.tip) for r in self._requests.values() if r.tip is not None)
        for request in self._requests.values():
            if request.tip is not None and request.tip.num_rows != tips[id(request.tip)]:
                raise IntegrityError(
                    f"the prefix entry of request {request.key!r} counts {request.tip.num_rows} rows"
                )
        elsewhere = self._set_aside.keys() | self._forks.check(self._requests)
        elsewhere |= self._isolated.keys()
        queued = {k: r for k, r in self._requests.items() if r.row < 0 and k not in elsewhere}
        self._waiting.check({k for k, r in queued.items() if not r.is_victim})
        self._returning.check({k for k, r in queued.items() if r.is_victim})
        if self.num_waiting + self.rows.num_active != len(self._requests):
            raise IntegrityError(
                f"{len(self._requests)} requests live, rows and queues hold others"
            )
        if not all(r.is_paused and r.row < 0 for r in self._set_aside.values()):
            raise IntegrityError("a request is set aside that is not paused or has a row")
        for r in self._requests.values():
            if (r.phase is Phase.OFFLOADED) != (r.parked is not None):
                raise IntegrityError(f"request {r.key!r} is {r.phase}; has parked: {r.parked}")
        for key, request in self._requests.items():
            if (request.phase is Phase.PREFILLING) != (key in self._prefilling):
                raise IntegrityError(
                    f"request {key!r} is {request.phase}, the prefills say otherwise"
                )
