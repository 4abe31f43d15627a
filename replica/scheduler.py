"""The scheduler: which tokens of which requests a step computes, and what came of it.

```
 add ──▶ waiting ──admit──▶ prefilling ──last chunk──▶ decoding ──commit──▶ release
            ▲                   │                          │
            └──── soft reset ───┴──────────────────────────┘        (the cache is full)
```

Owned by one thread. `plan` and `commit` (or `fail_step`) alternate; between them the step is in flight and
blocks that are given back are not handed out again, because only `plan` allocates.

Who gets which blocks is `admission.py`; what a step puts into the prefix index is `step.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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
from quire.replica.admission import Admission, Offer
from quire.replica.blocks import BlockManager, IntegrityError
from quire.replica.config import EngineConfig
from quire.replica.events import EventLog
from quire.replica.forks import Share, Sharing, WaitingForks, find_parent, held_positions
from quire.replica.plan import NO_TOKEN, RequestDelta, StepPlan, StepResult
from quire.replica.prefix import PrefixCache
from quire.replica.queues import Deadlines, WaitingQueue
from quire.replica.request import DeltaBatch, FinishReason, Phase, Request, validate
from quire.replica.rows import DecodeRows, RowTable
from quire.replica.speed import StepSpeed
from quire.replica.step import Step, StepIndexer

# Decoding rows fill a few routing blocks a step, and a pass over one costs as much as over ten: so they are told
# after so many steps or when so many have gathered. A prompt's blocks are told in the step that computes them.
_HASH_STEPS = 8
_HASH_BLOCKS = 16


class Scheduler:
    """Requests, rows, blocks, prefix index and events of one engine. First come, first served.

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
            groups=config.groups,
            model_name=config.model_name,
            revision=config.revision,
        )
        self.blocks = BlockManager(config.num_blocks, on_demote=self.prefix.forget)
        max_tokens = min(config.max_model_len, config.max_cache_tokens)
        self.rows = RowTable(
            # One token of every decoding row must fit a step.
            min(config.max_running_requests, config.max_batch_tokens),
            -(-max_tokens // config.block_size),
            config.block_size,
            config.vocab_size,
            config.groups,
        )
        self._admission = Admission(config, self.prefix, self.blocks, self.rows)
        self._indexer = StepIndexer(config, self.prefix, self.blocks, self.rows)
        self._sharing = Sharing(config, self.prefix, self.blocks, self.rows)
        self.speed = StepSpeed()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_tokens_queried = 0
        self.num_prefix_tokens_hit = 0
        self._requests: dict[Hashable, Request] = {}  # every live one
        self._waiting = WaitingQueue()
        self._forks = WaitingForks()  # outside the queue
        self._fresh_parents: list[Request] = []  # got their first token in the step before
        self._prefilling: dict[Hashable, Request] = {}  # in order of admission
        self._deadlines = Deadlines()
        self._num_submitted = 0
        self._step: Step | None = None  # in flight
        self._ended: list[RequestDelta] = []  # ended by `plan`, not yet told
        # The head of the queue is looked at again only after something that could let it in.
        self._num_changes = 0
        self._blocked_at_change = -1

    # -- requests in and out -----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.rows.num_active

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._forks)

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
            parent = find_parent(request, self._requests)
        except QuireError as error:
            return request.refusal(error)
        request.accept(self.config.eos_token_ids)
        request.arrival_index = self._num_submitted
        self._num_submitted += 1
        self._requests[request.key] = request
        request.parent = parent
        if parent is None:
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

    def take_ended(self) -> list[RequestDelta]:
        """Deltas of the requests that `plan` ended. `commit` and `fail_step` return them too; whoever got
        no plan calls this."""
        ended, self._ended = self._ended, []
        return ended

    def _check_room(self) -> None:
        bound = self.config.max_waiting_requests
        if self.num_waiting >= bound:
            wait_s = self._waiting.num_tokens * self.speed.prefill_s_per_token
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
        if request in self._forks:
            self._forks.remove(request)
        elif request.phase is Phase.PENDING:
            self._waiting.remove(request)
            self._num_changes += 1
        else:
            self._vacate(request)
        request.enter(Phase.FINISHED)
        del self._requests[request.key]
        self._replace_parent(request)
        index = request.num_tokens - request.num_prompt_tokens - len(token_ids)
        return request.delta(index, list(token_ids), reason, error)

    def _replace_parent(self, ended: Request) -> None:
        """The first fork that waits for a request that has ended is an ordinary one, the others wait for it."""
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
        self.prefix.release_entry(request.tip)
        request.tip, request.num_indexed = None, 0
        self.blocks.release(reversed(self.rows.vacate(request.row)))
        self._num_changes += 1

    def _expire(self, now_s: float) -> None:
        for deadline_s, request in self._deadlines.pop_expired(now_s):
            late_s = now_s - deadline_s
            error = DeadlineExceeded(f"the request's deadline passed {late_s:.3f} s ago")
            self._ended.append(self._release(request, FinishReason.ABORT, error=error))

    # -- planning ----------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when no request is alive.

        Raises
        ------
        RuntimeError
            The step before has not been committed.
        """
        if self._step is not None:
            raise RuntimeError(f"step {self._step.number} is still in flight")
        self._expire(now_s)
        step, decodes = self._compose(now_s)
        while not len(decodes) and not step.chunks:
            if not self._prefilling:
                self.prefix.hash_new()
                return None
            # They wait for each other's sliding blocks; ends as in `_grow_decodes`.
            self._soft_reset(self.rows.newest())
            step, decodes = self._compose(now_s)
        plan, step.rows, step.sample_rows = self.rows.build(
            step.number, decodes, step.chunks, step.copies
        )
        step.decodes = None if step.chunks else decodes
        gathered = self.prefix.num_unhashed >= _HASH_BLOCKS
        if gathered or step.chunks or step.number % _HASH_STEPS == 0:
            self.prefix.hash_new()
        self._indexer.adopt(step)
        self._step = step
        self.num_steps = step.number
        return plan

    def _compose(self, now_s: float) -> tuple[Step, DecodeRows]:
        """Choose the work of a step and give it its blocks; also the rows that decode."""
        # A parent keeps what its forks see for one plan; forks that do not start in it compute anew what is gone.
        self._trim(held_positions(self._fresh_parents))
        self._fresh_parents = []
        decodes, may_admit = self._grow_decodes()
        step = Step(self.num_steps + 1)
        self._indexer.register_decodes(step, decodes)
        budget = self.config.max_batch_tokens - len(decodes)
        for request in self._prefilling.values():
            budget -= self._schedule_chunk(step, request, budget)
        if may_admit:
            self._admit(step, budget, now_s)
        return step, decodes

    def _trim(self, held: Mapping[int, int] | None = None) -> bool:
        """Free what fell out of the rows' windows; returns whether that was anything."""
        stale = self.rows.trim(held)
        self.blocks.release(stale)
        self._num_changes += bool(stale)
        return bool(stale)

    def _grow_decodes(self) -> tuple[DecodeRows, bool]:
        """Give a block of each group to every decoding row that needs one, if it must be from the newest
        requests.

        Returns
        -------
        The decoding rows, and whether there was room for all: after a soft reset nothing is admitted in the
        same step.
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
            # Ends: a request alone always fits, or it would have been refused.
            self._soft_reset(self.rows.newest())
            decodes = self.rows.decode_rows()
            lacking = self.rows.lacking_block(decodes)
            roomy = False
        self.rows.append_blocks(lacking, blocks)
        return decodes, roomy

    def _soft_reset(self, request: Request) -> None:
        """Back to the head of the queue; what it generated joins what it must prefill."""
        self._vacate(request)
        request.enter(Phase.PENDING)
        self._waiting.push_front(request)
        self.num_preemptions += 1

    def _schedule_chunk(self, step: Step, request: Request, budget: int) -> int:
        """Plan as many of the request's missing tokens as budget and blocks allow; returns how many."""
        row = request.row
        count = min(budget, request.num_tokens - int(self.rows.num_computed[row]))
        if count > 0 and self.rows.sliding:
            count = self._admission.extend_sliding(row, count)
        if count <= 0:
            return 0
        step.chunks.append((row, count))
        if self._indexer.register_chunk(step, row, count):
            self._num_changes += 1  # the head of the queue may now share these blocks
        return count

    def _admit(self, step: Step, budget: int, now_s: float) -> None:
        """Start waiting requests in their order, until one does not fit."""
        while budget > 0 and self._waiting and self.rows.num_free:
            if self._blocked_at_change == self._num_changes:
                return
            request = self._waiting.head()
            share = self._sharing.offer(request)
            if share is None:
                offer = self._admission.offer(request, self._prefilling.values())
            elif self._admission.has_room(
                self._sharing.num_fresh_blocks, self._prefilling.values()
            ):
                offer = share
            else:
                offer = None
            if offer is None:
                self._blocked_at_change = self._num_changes
                return
            self._start(step, request, offer, now_s)
            budget -= self._schedule_chunk(step, request, budget)

    def _start(self, step: Step, request: Request, offer: Offer | Share, now_s: float) -> None:
        self._waiting.remove(request)
        request.parent = None
        if isinstance(offer, Share):
            step.copies += self._sharing.take(request, offer)
            num_hit = offer.num_computed
        else:
            num_hit = self._admission.take(request, offer)
        request.enter(Phase.PREFILLING)
        self._prefilling[request.key] = request
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = min(num_hit, request.num_prompt_tokens)
            self.num_prefix_tokens_queried += request.num_prompt_tokens
            self.num_prefix_tokens_hit += request.num_cached_tokens

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
        error = self._result_error(step, tokens)
        if error is not None:
            return DeltaBatch(self.fail_step(plan, error))
        self._step = None
        scored = self._tell_scores(plan, result)  # before any of these rows ends
        table, rows, decodes = self.rows, step.sample_rows, step.decodes
        has_stuck = bool((tokens == NO_TOKEN).any())
        if decodes is not None and not has_stuck and table.are_unchanged(decodes):
            tokens = tokens.astype(np.int32, copy=False)
            length = table.record(rows, tokens, decodes.tail_begin)
            max_length = decodes.max_length
            index = length - 1 - decodes.num_prompt_tokens
            columns = (decodes.keys, decodes.sources, decodes.stream_ids, index, tokens)
            complete: dict[int, RequestDelta] = {}
        else:
            alive = table.active[rows]
            if not alive.all():  # aborted while in flight
                rows, tokens = rows[alive], tokens[alive]
            if has_stuck:
                rows, tokens = self._end_stuck(rows, tokens)
            tokens = tokens.astype(np.int32, copy=False)
            length = table.record(rows, tokens)
            max_length = table.max_length[rows]
            index = length - 1 - table.num_prompt_tokens[rows]
            owners = (table.keys[rows], table.sources[rows], table.stream_ids[rows])
            columns = (*owners, index, tokens)
            complete = self._end_prefills(rows, index, tokens, now_s)
        for i, reason in table.ended(rows, tokens, length, max_length).items():
            request = table.request(int(rows[i]))
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
        num_prefill = plan.num_tokens - plan.num_decode_rows
        self.speed.observe(num_prefill, plan.num_decode_rows, result.duration_s)
        batch = DeltaBatch([*scored, *self.take_ended(), *complete.values()], *columns)
        return batch.without(complete) if complete else batch

    def _tell_scores(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Deltas with the log-probabilities of prompts; they come before the first token."""
        deltas = []
        for targets, scores in zip(plan.prompts, result.prompt_logprobs, strict=True):
            request = self.rows.requests[targets.row]
            if request is None:  # aborted while in flight
                continue
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
        """End every request of a step that did not run to its end; the cache forgets what it would have
        written."""
        step = self._in_flight(plan)
        self._step = None
        deltas = self.take_ended()
        for row in step.rows.tolist():
            request = self.rows.requests[row]
            if request is not None:
                deltas.append(self._release(request, FinishReason.ERROR, error=error))
        self._indexer.forget(step)
        return deltas

    def _in_flight(self, plan: StepPlan) -> Step:
        step = self._step
        if step is None or step.number != plan.step:
            raise ValueError(f"step {plan.step} is not in flight")
        return step

    def _result_error(self, step: Step, tokens: np.ndarray) -> EngineError | None:
        if tokens.shape != step.sample_rows.shape:
            return EngineError(
                f"step {step.number} sampled {tokens.shape}, planned {step.sample_rows.shape}"
            )
        # Negative ids are huge ones when read as unsigned: one pass finds both. NO_TOKEN is the one allowed.
        if len(tokens) and tokens.astype(np.uint64).max() >= self.config.vocab_size:
            chosen = tokens[tokens != NO_TOKEN]
            if not len(chosen) or 0 <= chosen.min() <= chosen.max() < self.config.vocab_size:
                return None
            return EngineError(f"step {step.number} sampled an id out of the vocabulary")
        return None

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

    def load(self, num_compiles: int = 0) -> Load:
        """What the router's cost needs; a reading from another thread may be one step old.

        Parameters
        ----------
        num_compiles
            The runner's, which the scheduler does not know.
        """
        return Load(
            num_running=self.rows.num_active,
            num_waiting=self.num_waiting,
            # A fork computes one token of its prompt.
            queued_prefill_tokens=(
                self._waiting.num_tokens + len(self._forks) + self.rows.num_missing_tokens
            ),
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
        )

    def clear_cache(self) -> None:
        """Forget every cached block; running requests keep theirs, but nobody can match them any more."""
        for block in self.prefix.clear():
            self.blocks.forget_content(block)
        self._num_changes += 1

    def snapshot(self) -> dict[str, Any]:
        """Blocks, rows and queues as plain data."""
        return {
            "num_steps": self.num_steps,
            "step_in_flight": self._step is not None,
            "blocks": {
                "free": self.blocks.num_free,
                "cached": self.blocks.num_cached,
                "in_use": self.blocks.num_in_use,
                "total": self.blocks.num_blocks,
            },
            "prefix": {
                "indexed_blocks": len(self.prefix),
                "tokens_queried": self.num_prefix_tokens_queried,
                "tokens_hit": self.num_prefix_tokens_hit,
            },
            "events": {"seq": self.events.seq, "held": self.events.num_held},
            "rows": self.rows.snapshot(),
            "waiting": [{"key": r.key, "length": r.num_tokens} for r in self._waiting],
            "waiting_forks": len(self._forks),
        }

    def check(self) -> None:
        """Walk everything; raise `IntegrityError` (an AssertionError) where two records disagree."""
        self.prefix.check()
        owners = self.rows.num_owners(self.config.num_blocks)
        self.blocks.check(owners.tolist())
        for block in range(self.config.num_blocks):
            if self.blocks.has_content(block) != (block in self.prefix):
                raise IntegrityError(f"block {block}: pool and prefix index disagree")
        self.rows.check(owners)
        tips = Counter(id(r.tip) for r in self._requests.values() if r.tip is not None)
        for request in self._requests.values():
            if request.tip is not None and request.tip.num_rows != tips[id(request.tip)]:
                raise IntegrityError(
                    f"the prefix entry of request {request.key!r} counts {request.tip.num_rows} rows"
                )
        pending = {k for k, r in self._requests.items() if r.phase is Phase.PENDING}
        self._waiting.check(pending - self._forks.check(self._requests))
        if len(pending) + self.rows.num_active != len(self._requests):
            raise IntegrityError(f"{len(self._requests)} requests live, rows and queue hold others")
        for key, request in self._requests.items():
            if (request.phase is Phase.PREFILLING) != (key in self._prefilling):
                raise IntegrityError(
                    f"request {key!r} is {request.phase}, the prefills say otherwise"
                )
