"""The scheduler: which tokens of which requests a step computes, and what came of it.

```
 add ──▶ waiting ──admit──▶ prefilling ──last chunk──▶ decoding ──commit──▶ release
            ▲                   │                          │
            └──── soft reset ───┴──────────────────────────┘        (the cache is full)
```

Owned by one thread. `plan` and `commit` (or `fail_step`) alternate; between them the step is in flight and
blocks that are given back are not handed out again, because only `plan` allocates.

Blocks are registered in the prefix index when the step that completes them is *planned*: within a step all
rows write their KV before any of them reads it, layer by layer, so a row may match what an earlier row of the
same step computes. A step that fails takes its registrations back.

Blocks of layer groups. A row gets all blocks of its known tokens in the groups of full attention when it is
admitted. In a sliding group it gets those of a chunk when the chunk is planned, and what fell out of the window
returns at the next plan, so that a long prompt needs no more than window and chunk; admission sets that much aside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
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
from quire.replica.blocks import BlockManager, IntegrityError
from quire.replica.config import EngineConfig
from quire.replica.events import EventLog
from quire.replica.plan import NO_TOKEN, RequestDelta, StepPlan, StepResult
from quire.replica.prefix import Hit, PrefixCache
from quire.replica.queues import Deadlines, WaitingQueue
from quire.replica.request import DeltaBatch, FinishReason, Phase, Request, validate
from quire.replica.rows import DecodeRows, RowTable
from quire.replica.speed import StepSpeed

# Decoding rows fill a few routing blocks a step, and a pass over one costs as much as over ten: so they are told
# after so many steps or when so many have gathered. A prompt's blocks are told in the step that computes them.
_HASH_STEPS = 8
_HASH_BLOCKS = 16
_NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Step:
    """What the scheduler remembers of the step in flight."""

    number: int
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [n]
    sample_rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)  # [S]
    decodes: DecodeRows | None = None  # the rows, if all of them decode
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens)
    registered: list[int] = field(default_factory=list)  # blocks, parents before children
    # (group, row, index in its table, its own block, the block that is indexed for the same content)
    duplicates: list[tuple[int, int, int, int, int]] = field(default_factory=list)


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
        self.speed = StepSpeed()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_tokens_queried = 0
        self.num_prefix_tokens_hit = 0
        self._margin_blocks = config.safety_margin * config.num_blocks
        self._requests: dict[Hashable, Request] = {}  # every live one
        self._waiting = WaitingQueue()
        self._prefilling: dict[Hashable, Request] = {}  # in order of admission
        self._deadlines = Deadlines()
        self._num_submitted = 0
        self._step: _Step | None = None  # in flight
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
        return len(self._waiting)

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
        except QuireError as error:
            return request.refusal(error)
        request.accept(self.config.eos_token_ids)
        request.arrival_index = self._num_submitted
        self._num_submitted += 1
        self._requests[request.key] = request
        self._waiting.append(request)
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
        if len(self._waiting) >= bound:
            wait_s = self._waiting.num_tokens * self.speed.prefill_s_per_token
            raise Overloaded(
                f"the waiting queue is full: {len(self._waiting)} requests, the bound is {bound} "
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
        if request.phase is Phase.PENDING:
            self._waiting.remove(request)
            self._num_changes += 1
        else:
            self._vacate(request)
        request.enter(Phase.FINISHED)
        del self._requests[request.key]
        index = request.num_tokens - request.num_prompt_tokens - len(token_ids)
        return request.delta(index, list(token_ids), reason, error)

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
        plan, step.rows, step.sample_rows = self.rows.build(step.number, decodes, step.chunks)
        step.decodes = None if step.chunks else decodes
        gathered = self.prefix.num_unhashed >= _HASH_BLOCKS
        if gathered or step.chunks or step.number % _HASH_STEPS == 0:
            self.prefix.hash_new()
        self._adopt(step)
        self._step = step
        self.num_steps = step.number
        return plan

    def _compose(self, now_s: float) -> tuple[_Step, DecodeRows]:
        """Choose the work of a step and give it its blocks; also the rows that decode."""
        if stale := self.rows.trim():
            self.blocks.release(stale)
            self._num_changes += 1
        decodes, may_admit = self._grow_decodes()
        step = _Step(self.num_steps + 1)
        for row, request, i, blocks, token_bytes in self.rows.fill_blocks(decodes):
            if self.config.prefix_caching:
                self._register(step, row, request, i, blocks, token_bytes)
        budget = self.config.max_batch_tokens - len(decodes)
        for request in self._prefilling.values():
            budget -= self._schedule_chunk(step, request, budget)
        if may_admit:
            self._admit(step, budget, now_s)
        return step, decodes

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

    def _schedule_chunk(self, step: _Step, request: Request, budget: int) -> int:
        """Plan as many of the request's missing tokens as budget and blocks allow; returns how many."""
        row = request.row
        count = min(budget, request.num_tokens - int(self.rows.num_computed[row]))
        if count > 0 and self.rows.sliding:
            count = self._extend_sliding(row, count)
        if count <= 0:
            return 0
        step.chunks.append((row, count))
        if self._register_blocks(step, row, count):
            self._num_changes += 1  # the head of the queue may now share these blocks
        return count

    def _extend_sliding(self, row: int, count: int) -> int:
        """Give the row the sliding blocks of its next `count` tokens, or of as many as there are blocks for."""
        block_size, num_groups = self.config.block_size, len(self.rows.sliding)
        start = int(self.rows.num_computed[row])
        have = int(self.rows.num_blocks[self.rows.sliding[0], row])
        lacking = -(-(start + count) // block_size) - have
        lacking = max(0, min(lacking, self.blocks.num_available // num_groups))
        self.rows.extend(row, self._allocate(lacking * num_groups))
        return min(count, (have + lacking) * block_size - start)

    def _allocate(self, count: int) -> list[int]:
        blocks = self.blocks.allocate(count)
        if blocks is None:
            raise IntegrityError(f"{count} blocks were available and are not")
        return blocks

    def _set_aside(self, num_tokens: int, step_tokens: int, held: Sequence[int]) -> int:
        """Sliding blocks that a prefill of `num_tokens` may need beside those it holds of each such group."""
        return sum(
            max(
                0,
                self.config.groups[g].max_blocks(num_tokens, step_tokens, self.config.block_size)
                - count,
            )
            for g, count in zip(self.rows.sliding, held, strict=True)
        )

    def _num_set_aside(self) -> int:
        """Sliding blocks that the running prefills may still need."""
        if not self.rows.sliding:
            return 0
        held = self.rows.num_blocks - self.rows.first_block
        return sum(
            self._set_aside(
                request.num_tokens,
                self.config.max_batch_tokens,
                held[self.rows.sliding, request.row].tolist(),
            )
            for request in self._prefilling.values()
        )

    def _admit(self, step: _Step, budget: int, now_s: float) -> None:
        """Start waiting requests in their order, each with room for all blocks of its known tokens, in every
        group, or not at all.

        While anything runs, an admission must leave `safety_margin` of the blocks available, so that decoding
        rows can grow. A request alone may take smaller chunks than it would like.
        """
        while budget > 0 and self._waiting and self.rows.num_free:
            if self._blocked_at_change == self._num_changes:
                return
            request = self._waiting.head()
            groups, sliding = self.config.groups, self.rows.sliding
            hit = Hit([], [[] for _ in groups])
            if self.config.prefix_caching:
                hit = self.prefix.match(request.token_ids, chain=request.chain)
            lacking = -(-request.num_tokens // self.config.block_size) - len(hit.entries)
            left = self.blocks.num_available - self.blocks.num_unowned(hit.all_blocks)
            left -= lacking * (len(groups) - len(sliding))
            if sliding:
                chunk = self.config.max_batch_tokens if self.rows.num_active else 1
                held = [len(hit.blocks[g]) for g in sliding]
                left -= self._set_aside(request.num_tokens, chunk, held) + self._num_set_aside()
            if left < (self._margin_blocks if self.rows.num_active else 0):
                self._blocked_at_change = self._num_changes
                return
            self._start(request, hit, lacking, now_s)
            budget -= self._schedule_chunk(step, request, budget)

    def _start(self, request: Request, hit: Hit, lacking: int, now_s: float) -> None:
        self.blocks.retain(hit.all_blocks)
        num_full = len(self.config.groups) - len(self.rows.sliding)
        fresh = self._allocate(lacking * num_full)
        blocks = [
            known + (fresh[g * lacking : (g + 1) * lacking] if g < num_full else [])
            for g, known in enumerate(hit.blocks)
        ]
        self._waiting.remove(request)
        num_hit = len(hit.entries) * self.config.block_size
        self.rows.claim(request, blocks, num_hit)
        if hit.entries:
            request.tip, request.num_indexed = hit.entries[-1], len(hit.entries)
            self.prefix.retain_entry(request.tip)
        request.enter(Phase.PREFILLING)
        self._prefilling[request.key] = request
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = min(num_hit, request.num_prompt_tokens)
            self.num_prefix_tokens_queried += request.num_prompt_tokens
            self.num_prefix_tokens_hit += request.num_cached_tokens

    def _register_blocks(self, step: _Step, row: int, count: int) -> bool:
        """Index the blocks that the row's next `count` tokens fill; returns whether there are any."""
        if not self.config.prefix_caching:
            return False
        block_size = self.config.block_size
        start = int(self.rows.num_computed[row])
        first, end = start // block_size, (start + count) // block_size
        request = self.rows.request(row)
        if end == first:
            return False
        width = 4 * block_size
        raw = request.token_ids[first * block_size : end * block_size].tobytes()
        blocks = self.rows.block_tables[:, row, first:end].T.tolist()
        for i, own in enumerate(blocks, first):
            begin = (i - first) * width
            if not self._register(step, row, request, i, own, raw[begin : begin + width]):
                break
        return True

    def _register(
        self,
        step: _Step,
        row: int,
        request: Request,
        i: int,
        blocks: Sequence[int],
        token_bytes: bytes,
    ) -> bool:
        """Index a row's i-th block of each group; returns whether its content is indexed."""
        if i != request.num_indexed:
            return False  # nothing can be indexed behind a block that is not
        entry = self.prefix.register(blocks, request.tip, token_bytes, request.chain, i)
        if entry is None:
            return False
        for g, (block, indexed) in enumerate(zip(blocks, entry.blocks, strict=True)):
            if indexed == block:
                self.blocks.mark_content(block)
                step.registered.append(block)
            else:
                self.blocks.retain([indexed])
                step.duplicates.append((g, row, i, block, indexed))
        self.prefix.advance_entry(entry)
        request.tip, request.num_indexed = entry, i + 1
        return True

    def _adopt(self, step: _Step) -> None:
        """Swap blocks whose content was already indexed for the indexed ones, and free the duplicates.

        The plan keeps the tables it was built with: the step writes and reads the duplicates, the next one
        reads the indexed blocks, complete by then. So every owner of an indexed block owns the indexed
        blocks before it too, which demotion leaf-first rests on (see `BlockManager`).
        """
        for g, row, i, own, indexed in step.duplicates:
            self.rows.replace_block(g, row, i, indexed)
            self.blocks.release([own])

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
        batch = DeltaBatch([*self.take_ended(), *complete.values()], *columns)
        return batch.without(complete) if complete else batch

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
        for block in reversed(step.registered):
            if block in self.prefix:  # else the cache was cleared meanwhile
                self.prefix.forget(block)
                self.blocks.forget_content(block)
        return deltas

    def _in_flight(self, plan: StepPlan) -> _Step:
        step = self._step
        if step is None or step.number != plan.step:
            raise ValueError(f"step {plan.step} is not in flight")
        return step

    def _result_error(self, step: _Step, tokens: np.ndarray) -> EngineError | None:
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
            num_waiting=len(self._waiting),
            queued_prefill_tokens=self._waiting.num_tokens + self.rows.num_missing_tokens,
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
        self._waiting.check(pending)
        if len(pending) + self.rows.num_active != len(self._requests):
            raise IntegrityError(f"{len(self._requests)} requests live, rows and queue hold others")
        for key, request in self._requests.items():
            if (request.phase is Phase.PREFILLING) != (key in self._prefilling):
                raise IntegrityError(
                    f"request {key!r} is {request.phase}, the prefills say otherwise"
                )
