"""Composing a step: which rows decode, which prompts get a chunk, which requests start.

```
 step   [ decoding rows: one token each ][ chunks of running prefills ][ chunks of requests that start ]
          1. blocks for their next token    2. while the budget lasts     3. while blocks and budget last
```

A request that runs alone (`queues.py`) gets steps without other requests. Under `prefill_first` a step may
hold chunks only. Preempting a request needs its newest token, so a step that would preempt is not planned before the
step in flight (launched, not yet committed) is committed.
"""

from __future__ import annotations

import copy

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.request import Phase, Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.request_table.plan_writer import PlanWriter
from quire.replica.scheduler.admission import Offer
from quire.replica.scheduler.chunking import Chunking
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.forks import Share, held_positions
from quire.replica.scheduler.offload import Return
from quire.replica.scheduler.order import POLICIES, PrefillOrder, urgency
from quire.replica.scheduler.preemption import choose_preempted
from quire.replica.scheduler.request_book import RequestBook
from quire.replica.scheduler.snapshot_plans import SnapshotPlans
from quire.replica.scheduler.steps_in_flight import Step, StepIndexer, StepsInFlight

# Decoding rows complete few routing blocks (64 tokens that routers know by a hash) in a step, and hashing one costs as
# much as hashing ten. Their hashes are computed after this many steps, or when this many blocks wait. A prompt's blocks
# are hashed in the step that computes them.
_HASH_STEPS = 8
_HASH_BLOCKS = 32


class StepComposer:
    """Chooses the work of each step, and gives rows and blocks to its requests."""

    def __init__(
        self,
        config: EngineConfig,
        memory: EngineMemory,
        book: RequestBook,
        steps: StepsInFlight,
        indexer: StepIndexer,
        snapshots: SnapshotPlans,
        chunking: Chunking,
    ):
        self._block_size = config.block_size
        self._max_batch_tokens = config.max_batch_tokens
        self._num_rows, self._max_samples = config.num_rows, config.max_samples
        self._num_groups = len(config.groups)
        self._memory = memory
        self._rows = memory.rows
        self._blocks = memory.blocks
        self._head = memory.blocked_head
        self._book = book
        self._steps = steps
        self._admission = book.admission
        self._offload = book.offload
        self._sharing = book.sharing
        self._restores = book.restores
        self._drafting = book.drafting
        self._indexer = indexer
        self._snapshots = snapshots
        self._chunking = chunking
        self._writer = PlanWriter(memory.rows)
        self._prefill_order = PrefillOrder(POLICIES[config.scheduler].prefills_by_urgency)

    def plan(self, now_s: float) -> tuple[Step, StepPlan] | None:
        """The next step. None if there is nothing to compute, or if the step in flight must be committed first."""
        composed = self._compose(now_s)
        if composed is None:
            return None
        step, decodes = composed
        saves = self._snapshots.plan(step, decodes)
        plan = self._write(step, decodes)
        self._book.end_plan()
        plan = self._add_snapshots(step, plan, saves)
        plan = self._add_transfers(step, plan, now_s)
        self._hash_blocks(step)
        return step, plan

    def _compose(self, now_s: float) -> tuple[Step, DecodeRows] | None:
        """The next step, which is not empty, and its decoding rows. None under the conditions of `plan`."""
        while True:
            composed = self._compose_once(now_s)
            if composed is None:
                return None
            step, _ = composed
            if step.num_decodes or step.chunks:
                return composed
            if self._steps:
                return None
            if self._restores:
                # There is nothing else to do: the step itself waits for the copies.
                self._restores.clear()
            elif self._is_blocked():
                # Prefills wait for blocks of sliding-window groups that other prefills or paused rows hold. The loop
                # ends, because a request that is the only one always fits.
                self._book.preempt(self._choose_preempted())
            else:
                self._memory.prefix.hash_new()
                return None

    def _compose_once(self, now_s: float) -> tuple[Step, DecodeRows] | None:
        """The next step, which may be empty, and its decoding rows without a draft.

        None if it must wait for the step in flight.
        """
        if self._steps and self._drafting.waits():
            return None
        if self._rows.sliding:
            # For one plan a parent keeps the blocks that its new forks see. A fork that starts later may have to
            # compute the prompt itself.
            self._memory.trim(held_positions(self._book.fresh_parents))
        if (alone := self._compose_alone(now_s)) is not None:
            return alone
        if self._leaves_out_decodes():
            budget = self._chunking.budget(0, left_out=True)
            step = Step(self._next_number, budget, leaves_out_decodes=True)
            self._continue_prefills(step, False, now_s)
            if step.chunks:
                return step, self._rows.some_decode_rows([])
        grown = self._grow_decodes()
        if grown is None:
            return None
        decodes, may_admit = grown
        drafts = self._drafting.choose(decodes, self._draft_room(len(decodes)))
        num_drafted = sum(len(draft.token_ids) for draft in drafts) if drafts else 0
        budget = self._chunking.budget(len(decodes) + num_drafted)
        step = Step(self._next_number, budget, num_decodes=len(decodes), drafts=drafts)
        if drafts:
            rows = np.setdiff1d(decodes.ids, [draft.row for draft in drafts])
            decodes = self._rows.some_decode_rows(rows)
        self._indexer.register_decodes(step, decodes, are_known=not self._steps)
        if self._book.prefilling:
            self._continue_prefills(step, may_admit, now_s)
        if may_admit:
            self._admit(step, now_s)
        else:
            self._head.lacks_blocks = True
        return step, decodes

    @property
    def _next_number(self) -> int:
        return self._steps.num_planned + 1

    # -- a request that runs alone -----------------------------------------------------------------------

    def _compose_alone(self, now_s: float) -> tuple[Step, DecodeRows] | None:
        """The step of the request that runs alone, if there is one and its blocks fit."""
        isolated = self._book.isolated
        if not isolated.any:
            return None
        isolated.update(self._num_new_tokens(isolated.current))
        head = isolated.head()
        if head is not None and self._rows.num_free and self._rows.adapters.fits(head.adapter):
            offer = self._admission.offer(head, self._book.prefilling.values())
            if offer is not None:
                self._book.start(head)
                self._take(head, offer, now_s)
        request = isolated.current
        if request is None:
            return None
        step = Step(self._next_number, self._chunking.budget(0))
        if request.phase is Phase.PREFILLING:
            self._schedule_chunk(step, request)
            return (step, self._rows.some_decode_rows([])) if step.chunks else None
        decodes = self._rows.some_decode_rows([request.row])
        lacking = self._rows.lacking_block(decodes)
        if len(lacking):
            blocks = self._blocks.allocate(self._num_groups)
            if blocks is None:
                # The ordinary step gives the request its blocks, or preempts another one.
                return None
            self._rows.append_blocks(decodes, lacking, blocks)
        self._indexer.register_decodes(step, decodes, are_known=True)
        step.num_decodes = 1
        return step, decodes

    def _num_new_tokens(self, request: Request | None) -> int:
        """Number of output tokens that a running request has generated on this replica; 0 without a row."""
        if request is None or request.row < 0:
            return 0
        length = int(self._rows.length[request.row])
        return length - request.num_prompt_tokens - request.num_emitted

    # -- decoding rows -----------------------------------------------------------------------------------

    def _leaves_out_decodes(self) -> bool:
        """Whether the step holds prefill chunks only; the rule is in `Chunking.leaves_out_decodes`."""
        if not self._chunking.prefill_first or not self._book.prefilling:
            return False
        rows = [request.row for request in self._ready_prefills()]
        if not rows:
            return False
        computed = self._rows.num_computed[rows]
        missing = int((self._rows.length[rows] - computed).sum())
        num_decodes = len(self._rows.decode_rows())
        return self._chunking.leaves_out_decodes(num_decodes, int(computed[0]), missing)

    def _grow_decodes(self) -> tuple[DecodeRows, bool] | None:
        """Give a block of each group to every decoding row that needs one, preempting other requests if necessary.

        Returns
        -------
        The decoding rows, and whether requests may start in this step (false after a preemption). None if a request
        must be preempted while a step is in flight.
        """
        decodes = self._rows.decode_rows()
        lacking = self._rows.lacking_block(decodes)
        if not len(lacking):
            return decodes, True
        may_admit = True
        while (blocks := self._blocks.allocate(len(lacking) * self._num_groups)) is None:
            if self._memory.trim():
                continue
            if self._steps:
                return None
            # The loop ends, because a request that is the only one always fits; `add` refuses those that would not.
            self._book.preempt(self._choose_preempted())
            decodes = self._rows.decode_rows()
            lacking = self._rows.lacking_block(decodes)
            may_admit = False
        self._rows.append_blocks(decodes, lacking, blocks)
        return decodes, may_admit

    def _draft_room(self, num_decodes: int) -> int:
        """Number of drafted tokens for which a step has room, if each row that may be in it samples once besides."""
        if not self._drafting.is_on:
            return 0
        num_rows = min(self._num_rows, len(self._book.requests))
        return min(self._max_batch_tokens - num_decodes, self._max_samples - num_rows)

    def _is_blocked(self) -> bool:
        """Whether some request could run if a running one were preempted."""
        return self._rows.num_active > 0 and (
            self._book.next_to_start() is not None
            or self._book.isolated.head() is not None
            or any(not request.is_paused for request in self._book.prefilling.values())
        )

    def _choose_preempted(self) -> Request:
        """The running request to preempt. One that waits for copied blocks is chosen only if there is no other."""
        rows = np.flatnonzero(self._rows.active)
        copying = [self._book.requests[key].row for key in self._restores.keys()]
        others = rows[~np.isin(rows, copying)]
        rows = others if len(others) else rows
        chosen = choose_preempted(
            self._rows.arrival_index[rows],
            self._rows.paused[rows],
            len(self._book.returning) > 0,
        )
        return self._rows.request(int(rows[chosen]))

    # -- prefill chunks ----------------------------------------------------------------------------------

    def _ready_prefills(self) -> list[Request]:
        """Running prefills that may have a chunk in this step."""
        return [
            request
            for request in self._book.prefilling.values()
            if not request.is_paused and request.key not in self._restores
        ]

    def _continue_prefills(self, step: Step, may_admit: bool, now_s: float) -> None:
        """Schedule chunks of the running prefills, and of more urgent requests that start before them."""
        running, by_urgency = self._prefill_order.sort(self._ready_prefills())
        for request in running:
            if by_urgency and may_admit:
                self._admit(step, now_s, before=request)
            if step.budget.tokens <= 0:
                return
            self._schedule_chunk(step, request)

    def _schedule_chunk(self, step: Step, request: Request, at_least: int = 0) -> None:
        """Schedule as many of the request's missing tokens as budget and blocks allow.

        Parameters
        ----------
        at_least
            Number of tokens to schedule even if the budget is spent.
        """
        row = request.row
        start = int(self._rows.num_computed[row])
        count = max(step.budget.grant(start, request.num_tokens - start), at_least)
        if count > 0 and self._rows.sliding:
            count = self._admission.extend_sliding(row, count)
        if count <= 0:
            return
        step.budget.spend(start, count)
        step.chunks.append((row, count))
        if self._indexer.register_chunk(step, row, start, start + count):
            # The head of the queue may share these blocks.
            self._head.unblock()

    # -- requests that start -----------------------------------------------------------------------------

    def _admit(self, step: Step, now_s: float, before: Request | None = None) -> None:
        """Start preempted and then waiting requests in their order, until one does not fit.

        Parameters
        ----------
        before
            Start only requests that are more urgent than this one.
        """
        while (
            self._rows.num_free
            and not step.budget.is_spent
            and (request := self._book.next_to_start()) is not None
        ):
            if self._head.is_blocked(request):
                return
            if request.offloaded is not None and not self._offload.prefers_copy(request):
                self._book.recompute(request)
                continue
            if before is not None and urgency(request) > urgency(before):
                return
            offer = None
            if self._rows.adapters.fits(request.adapter):
                offer = self._find_offer(request)
            if offer is None:
                self._head.block(request)
                return
            start = self._num_known(request, offer)
            if not step.budget.grant(start, request.num_tokens - start):
                # A request that starts must have a chunk in the step. The step may write the cached blocks that the
                # request found, so if the step fails, the request must end too.
                return
            self._book.start(request)
            self._head.lacks_blocks = False
            if isinstance(offer, Share):
                step.copies += self._sharing.take(request, offer)
                self._count_hit(request, offer.num_computed, 0, now_s)
            else:
                self._take(request, offer, now_s)
            if self._waits_for_copies(step, request, offer):
                continue
            # A fork's blocks are copied in this step, so its one token must be in this step too.
            self._schedule_chunk(step, request, at_least=isinstance(offer, Share))

    def _find_offer(self, request: Request) -> Offer | Return | Share | None:
        """The blocks that the request gets if it starts now; None if it must wait.

        A request gets copies from the host tier, blocks of its parent, or cached and new blocks.
        """
        prefilling = self._book.prefilling.values()
        if request.offloaded is not None:
            return self._offload.offer(request, prefilling)
        share = self._sharing.offer(request)
        if share is None:
            return self._admission.offer(request, prefilling)
        return share if self._sharing.fits(request, self._admission, prefilling) else None

    def _take(self, request: Request, offer: Offer | Return, now_s: float) -> None:
        """Give a request the row and the blocks that it was offered."""
        if isinstance(offer, Offer):
            self._admission.take(request, offer)
            self._count_hit(request, offer.num_hit_tokens, offer.hit.num_host_entries, now_s)
        else:
            self._offload.take(request, offer)
            self._book.counters.num_restores += 1

    def _waits_for_copies(
        self, step: Step, request: Request, offer: Offer | Return | Share
    ) -> bool:
        """Let a request that has just started wait for its copied blocks, if other requests have work in the step.

        Returns whether it waits.
        """
        if isinstance(offer, Share) or not (step.chunks or step.num_decodes > 0):
            return False
        copying_step = self._restores.step_of(request.row, step.number)
        if copying_step is None:
            return False
        self._restores.wait(request, copying_step)
        return True

    @staticmethod
    def _num_known(request: Request, offer: Offer | Return | Share) -> int:
        """Number of tokens that need not be computed if the request takes the offer."""
        if isinstance(offer, Share):
            return offer.num_computed
        if isinstance(offer, Offer):
            return offer.num_hit_tokens
        return 0 if request.offloaded is None else request.offloaded.num_computed

    def _count_hit(
        self, request: Request, num_hit: int, num_host_entries: int, now_s: float
    ) -> None:
        """Record how much of the prompt need not be computed, at the request's first start."""
        if request.first_scheduled_s is not None:
            return
        num_prompt_tokens = request.num_prompt_tokens
        num_restored = num_host_entries * self._block_size
        request.first_scheduled_s = now_s
        request.num_cached_tokens = min(num_hit, num_prompt_tokens)
        request.num_host_cached_tokens = min(num_restored, request.num_cached_tokens)
        request.num_peer_cached_tokens = min(
            request.num_pulled_tokens, request.num_host_cached_tokens
        )
        counters = self._book.counters
        counters.num_prefix_tokens_queried += num_prompt_tokens
        counters.num_prefix_tokens_hit += request.num_cached_tokens
        counters.num_prefix_tokens_hit_on_host += request.num_host_cached_tokens

    # -- the plan ----------------------------------------------------------------------------------------

    def _write(self, step: Step, decodes: DecodeRows) -> StepPlan:
        """Write the step's plan. From now on, its tokens count as computed."""
        for before in self._steps:
            if before.decodes is decodes:
                # `write` moves this object on by one token. The step before is committed later and needs its old state.
                before.decodes_then = copy.copy(decodes)
        plan, step.rows, step.sample_rows = self._writer.write(
            step.number, decodes, step.chunks, step.copies, step.drafts
        )
        is_ragged = bool(step.chunks or step.drafts)
        step.owners = self._rows.owners[step.rows] if is_ragged else decodes.columns.owners
        step.decodes = None if is_ragged else decodes
        if self._steps and self._needs_tokens(step, decodes):
            plan = plan._replace(awaits_tokens=True)
        return plan

    def _needs_tokens(self, step: Step, decodes: DecodeRows) -> bool:
        """Whether some row's allowed token ids depend on the token that the step in flight samples for it."""
        if decodes.is_plain and not step.drafts:
            return False
        return bool(self._rows.needs_history[step.rows[: step.num_decodes]].any())

    def _add_transfers(self, step: Step, plan: StepPlan, now_s: float) -> StepPlan:
        """Add the copies between device and host tier that are planned by now to the step."""
        if (publishing := self._memory.publishing) is not None and publishing.is_due(now_s):
            steps = (step, *self._steps)
            publishing.plan([block for s in steps for block in s.registered])
        transfers = step.transfers = self._memory.host.launch()
        if transfers:
            plan = plan._replace(saves=transfers.save_pairs(), restores=transfers.restore_pairs())
            self._restores.launch(step.number, transfers)
        if self._restores.are_copying:
            plan = plan._replace(uses_restores=self._restores.are_used_by(plan))
        return plan

    def _add_snapshots(self, step: Step, plan: StepPlan, saves: np.ndarray) -> StepPlan:
        """Add the snapshots of recurrent states that the step loads, moves and takes."""
        loads, moves = self._memory.prefix.snapshots.launch()
        if not (loads or moves or len(saves)):
            return plan
        step.moved = [host_slot for _, host_slot in moves]
        pairs = np.array([*loads, *moves], np.int64).reshape(-1, 2)
        return plan._replace(state_copies=pairs, state_saves=saves)

    def _hash_blocks(self, step: Step) -> None:
        """Hash new routing blocks, if the step has prefill or if enough blocks wait."""
        prefix = self._memory.prefix
        has_many = prefix.num_unhashed >= _HASH_BLOCKS
        if has_many or step.chunks or step.number % _HASH_STEPS == 0:
            prefix.hash_new()
