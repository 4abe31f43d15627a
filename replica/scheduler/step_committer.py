"""Committing a step: its tokens enter the request table, finished requests end, failed steps are undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quire.protos import ragged
from quire.protos.errors import EngineError, QuireError
from quire.protos.wire import TokenDelta, TokenLogprob, TokenRecord
from quire.replica.config import EngineConfig
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.core.request import FinishReason
from quire.replica.core.step_plan import NO_TOKEN, CopiesDone, StepPlan, StepResult
from quire.replica.kv_cache.host_tier import Transfers
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.scheduler.chunking import Chunking
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.request_book import RequestBook
from quire.replica.scheduler.snapshot_plans import SnapshotPlans
from quire.replica.scheduler.speed import CopySpeed
from quire.replica.scheduler.steps_in_flight import Step, StepIndexer, StepsInFlight


class _Recorded(NamedTuple):
    """The rows that sampled and still belong to their requests, m of them, with their new tokens in the table."""

    rows: np.ndarray  # [m] int64
    deltas: DeltaBatch  # columns of these rows
    # Index of each row that ends to the reason: LENGTH also if its credit is spent, ERROR if no id is allowed.
    ends: dict[int, FinishReason]

    def token_ids(self, i: int) -> list[int]:
        """The new tokens of a row, by its index."""
        tokens = self.deltas.tokens
        begin, end = (i, i + 1) if tokens.cu is None else tokens.cu[i : i + 2]
        new: list[int] = tokens.token_ids[begin:end].tolist()
        return new


class StepCommitter:
    """Commits the results of steps, and undoes failed steps."""

    def __init__(
        self,
        config: EngineConfig,
        memory: EngineMemory,
        book: RequestBook,
        steps: StepsInFlight,
        indexer: StepIndexer,
        snapshots: SnapshotPlans,
        chunking: Chunking,
        copies: CopySpeed,
    ):
        self._vocab_size = config.vocab_size
        self._memory = memory
        self._rows = memory.rows
        self._book = book
        self._steps = steps
        self._indexer = indexer
        self._snapshots = snapshots
        self._chunking = chunking
        self._copies = copies
        self._restores = book.restores
        self._drafting = book.drafting

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> DeltaBatch:
        """Record the sampled tokens, and end and release finished requests. Implements `Scheduler.commit`."""
        step = self._steps.oldest(plan)
        try:
            has_stuck = self._has_stuck(plan, result)
        except EngineError as error:
            failed = self.fail(plan, error)
            self.note_copies(result.copies)
            return DeltaBatch(failed)
        self._steps.land()
        self._memory.land(step.number)
        self.note_copies(result.copies, step.transfers.saves)
        # Collect the prompts' log-probabilities before any of these rows ends.
        scored = self._prompt_scores(step, plan, result)
        embedded = self._embeddings(step, plan, result, now_s)
        recorded = self._record(step, *_counted(step, plan, result), has_stuck)
        self._end_drafts(step)
        if self._memory.publishing is not None:
            prefill_s = result.duration_s if step.chunks else 0.0
            self._memory.publishing.add(step.registered, prefill_s)
        complete = self._end_prefills(recorded, now_s) if step.chunks else {}
        for behind in self._steps:
            self._indexer.register_known(behind)
            self._snapshots.attach_known(behind)
            self._indexer.adopt(behind)
        self._end_finished(recorded, complete)
        if result.logprobs:
            _add_logprobs(plan, result, recorded, complete)
        if not step.chunks:
            self._drafting.observe_step(step.num_decodes, step.drafts, result.duration_s)
        self._chunking.observe(
            step.budget, step.num_decodes, result.duration_s, step.leaves_out_decodes, now_s
        )
        deltas = recorded.deltas
        deltas.whole += [*scored, *embedded, *self._book.take_ended(), *complete.values()]
        if not complete and deltas.tokens.cu is None:
            return deltas
        has_tokens = ragged.counts(len(deltas.keys), deltas.tokens.cu) > 0
        has_tokens[list(complete)] = False
        return deltas.only(has_tokens)

    def fail(self, plan: StepPlan, error: QuireError) -> list[TokenDelta]:
        """End every request of the failed step and of the step behind it. Implements `Scheduler.fail_step`."""
        self._steps.oldest(plan)
        failed = self._steps.land_all()
        for step in failed:
            self._memory.land(step.number)
        deltas = self._book.take_ended()
        for step in failed:
            for row in step.rows[step.is_alive(self._rows, step.rows)].tolist():
                request = self._rows.request(row)
                deltas.append(self._book.release(request, FinishReason.ERROR, error=error))
        unknown: list[int] = []
        for step in failed:
            self._snapshots.forget(step)
            if step.transfers:
                self._recompute_copied(step.transfers)
            unknown += [*step.registered, *step.transfers.restores]
        # Forget the blocks of all steps at once, because blocks of one step may continue blocks of another one.
        self._indexer.forget(unknown)
        for step in failed:
            self._memory.host.forget_saves(step.transfers)
        # The device's copy of the request table may lack what the failed plans changed.
        self._rows.report_again()
        return deltas

    def _recompute_copied(self, transfers: Transfers) -> None:
        """Let requests compute again what a failed step should have copied between the tiers for them."""
        for row in np.flatnonzero(self._rows.active).tolist():
            # A row that uses restored blocks and is still active was not in the step: it waits for its blocks.
            if not transfers.restores.keys().isdisjoint(self._rows.blocks(row)):
                self._book.preempt(self._rows.request(row), may_offload=False)
        for request in list(self._book.requests.values()):
            if request.offloaded is not None:
                host_blocks = (block.host_block for block in request.offloaded.blocks)
                if not transfers.saves.keys().isdisjoint(host_blocks):
                    self._book.recompute(request)

    # -- checks and measurements -------------------------------------------------------------------------

    def _has_stuck(self, plan: StepPlan, result: StepResult) -> bool:
        """Whether some sample is stuck: it is NO_TOKEN instead of a token id, because constraints exclude all ids.

        Raises
        ------
        EngineError
            The number of tokens is wrong, or a token id is not in the vocabulary.
        """
        tokens, planned = result.token_ids, plan.sampling.token_index.shape
        if tokens.shape != planned:
            raise EngineError(f"step {plan.step} sampled {tokens.shape}, planned {planned}")
        # Negative ids, NO_TOKEN among them, are huge as unsigned numbers: one pass finds all wrong ids.
        if not len(tokens) or tokens.astype(np.uint64).max() < self._vocab_size:
            return False
        chosen = tokens[tokens != NO_TOKEN]
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self._vocab_size:
            raise EngineError(f"step {plan.step} sampled an id out of the vocabulary")
        return True

    def note_copies(self, copies: CopiesDone, saved: Iterable[int] = ()) -> None:
        """Publish what has been copied to the host tier, and let prefills continue that waited for copies from it.

        Parameters
        ----------
        saved
            Host blocks that have been copied, if `copies` does not tell.
        """
        saved = saved if copies.saved is None else copies.saved
        self._memory.host.end_saves(saved, are_all=copies.are_all)
        for num_blocks, seconds in copies.restores:
            self._copies.observe(num_blocks, seconds)
        through = copies.restored_step
        self._restores.land(self._steps.num_planned if through is None else through)

    def _prompt_scores(self, step: Step, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Deltas with the log-probabilities of prompt tokens; clients get them before the first token."""
        deltas = []
        for targets, scores in zip(plan.prompts, result.prompt_logprobs, strict=True):
            if not step.is_alive(self._rows, np.array([targets.row]))[0]:
                continue
            request = self._rows.request(targets.row)
            request.num_read = targets.start + len(scores) - 1
            delta = request.delta(request.num_emitted, [])
            delta.facts = delta.facts._replace(prompt_logprobs=scores)
            deltas.append(delta)
        return deltas

    def _embeddings(
        self, step: Step, plan: StepPlan, result: StepResult, now_s: float
    ) -> list[TokenDelta]:
        """Pool hidden states; end the requests with the last of theirs, and return the deltas with the embeddings."""
        deltas = []
        for targets, hidden_sum in zip(plan.pooling, result.pooled, strict=True):
            if not step.is_alive(self._rows, np.array([targets.row]))[0]:
                continue
            request = self._rows.request(targets.row)
            request.add_pooled(hidden_sum, targets.num_computed)
            if targets.is_last:
                request.first_token_s = now_s
                delta = self._book.release(request, FinishReason.STOP)
                delta.facts = delta.facts._replace(embedding=request.embedding())
                deltas.append(delta)
        return deltas

    # -- tokens ------------------------------------------------------------------------------------------

    def _record(
        self, step: Step, tokens: np.ndarray, cu: np.ndarray | None, has_stuck: bool
    ) -> _Recorded:
        """Append the tokens to their rows, up to the end of each, and find the rows that end."""
        table, decodes = self._rows, step.decodes
        is_single = cu is None and not has_stuck
        if decodes is not None and is_single and table.are_unchanged(decodes):
            then = step.decodes_then
            return self._record_decodes(decodes if then is None else then, step, tokens)
        rows = step.sample_rows
        alive = step.is_alive(table, rows)
        if not alive.all():
            # Some requests were aborted while the step was in flight, or ended by the step before.
            rows = rows[alive]
            tokens, cu = ragged.select(tokens, cu, alive)
        for row, owner, *_ in step.drafts:
            # The plan of a row without a draft has done so if its block is full.
            if table.owners[row] == owner:
                table.flush(row)
        index = table.length[rows] - table.num_prompt_tokens[rows]
        if is_single:
            tokens = tokens.astype(np.int32, copy=False)
            ends = table.ended(rows, tokens, table.record(rows, tokens))
            return _Recorded(rows, self._columns(rows, index, tokens), ends)
        tokens, cu, ends = self._cut(rows, tokens, cu)
        table.record(rows, tokens, cu)
        return _Recorded(rows, self._columns(rows, index, tokens, cu), ends)

    def _record_decodes(self, decodes: DecodeRows, step: Step, tokens: np.ndarray) -> _Recorded:
        """Fast path of `_record` for a step of decoding rows only, if no row is gone: their columns are gathered."""
        rows, tokens = step.sample_rows, tokens.astype(np.int32, copy=False)
        ends = self._rows.ended(rows, tokens, self._rows.record_decodes(decodes, tokens), decodes)
        columns = decodes.columns
        index = decodes.position - columns.num_prompt_tokens
        record = TokenRecord(columns.stream_ids, index, tokens)
        return _Recorded(rows, DeltaBatch([], record, columns.keys, columns.sources), ends)

    def _columns(
        self, rows: np.ndarray, index: np.ndarray, tokens: np.ndarray, cu: np.ndarray | None = None
    ) -> DeltaBatch:
        table = self._rows
        record = TokenRecord(table.stream_ids[rows], index, tokens, cu)
        return DeltaBatch([], record, table.keys[rows], table.sources[rows])

    def _cut(
        self, rows: np.ndarray, tokens: np.ndarray, cu: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None, dict[int, FinishReason]]:
        """Drop the tokens after the end of each row.

        Returns
        -------
        The tokens that are left, int32, their `cu`, and the ends (`_Recorded.ends`).
        """
        counts = ragged.counts(len(rows), cu)
        row_index = np.repeat(np.arange(len(rows)), counts)
        offset = ragged.offsets(counts)
        ends: dict[int, FinishReason] = {}
        for at in (tokens == NO_TOKEN).nonzero()[0].tolist():
            i = int(row_index[at])
            ends[i] = FinishReason.ERROR
            counts[i] = min(counts[i], offset[at])
        is_left = offset < counts[row_index]
        tokens, row_index, offset = tokens[is_left], row_index[is_left], offset[is_left]
        tokens, owners = tokens.astype(np.int32), rows[row_index]
        length = self._rows.length[owners] + offset + 1
        for at, reason in self._rows.ended(owners, tokens, length).items():
            ends[int(row_index[at])] = reason
            counts[row_index[at]] = offset[at] + 1
        return tokens[offset < counts[row_index]], ragged.cumulated(counts), ends

    def _end_drafts(self, step: Step) -> None:
        """Let the rows with a verified draft go on, and index the blocks that their accepted tokens fill."""
        table = self._rows
        drafts = [draft for draft in step.drafts if table.owners[draft.row] == draft.owner]
        if not drafts:
            return
        self._drafting.end(drafts)
        for row, _, start, _ in drafts:
            self._indexer.register_chunk(step, row, start, int(table.num_computed[row]))
        self._indexer.adopt(step)

    def _end_prefills(self, recorded: _Recorded, now_s: float) -> dict[int, TokenDelta]:
        """Let rows that had their last chunk in this step decode. Returns their deltas, by the index of the row."""
        rows, tokens = recorded.rows, recorded.deltas.tokens
        is_first = ~self._rows.decoding[rows]
        if tokens.cu is not None:
            is_first &= np.diff(tokens.cu) > 0
        prefilled = is_first.nonzero()[0]
        complete = {}
        for i in prefilled.tolist():
            request = self._rows.request(int(rows[i]))
            self._book.begin_decoding(request, now_s)
            complete[i] = request.delta(int(tokens.index[i]), recorded.token_ids(i))
        if len(prefilled):
            self._rows.begin_decoding(rows[prefilled])
        return complete

    def _end_finished(self, recorded: _Recorded, complete: dict[int, TokenDelta]) -> None:
        """End the requests that got their last token in this step, and add their deltas to `complete`."""
        for i, reason in recorded.ends.items():
            row = int(recorded.rows[i])
            request, length = self._rows.request(row), int(self._rows.length[row])
            error = None
            if reason is FinishReason.LENGTH and length < request.max_length:
                if length >= request.run_length:
                    # The request has generated as many tokens as its router allows for now.
                    self._book.pause(request.key)
                continue
            if reason is FinishReason.ERROR:
                error = request.stuck_error(length - request.num_prompt_tokens)
            complete[i] = self._book.release(request, reason, recorded.token_ids(i), error)


def _counted(
    step: Step, plan: StepPlan, result: StepResult
) -> tuple[np.ndarray, np.ndarray | None]:
    """The samples that count, and their `cu` over the rows that sample: one each, more if drafted tokens are right."""
    drafts, tokens = plan.sampling.drafts, result.token_ids
    if drafts is None:
        return tokens, None
    is_counting = drafts.counting(tokens)
    begins = (drafts.offset == 0).nonzero()[0]
    return tokens[is_counting], ragged.cumulated(np.add.reduceat(is_counting, begins, dtype=int))


def _add_logprobs(
    plan: StepPlan, result: StepResult, recorded: _Recorded, complete: dict[int, TokenDelta]
) -> None:
    """Add the log-probabilities of sampled tokens to their deltas, which are created for rows without one."""
    sampled = plan.sampling.rows.tolist()
    logprobs: dict[int, list[TokenLogprob]] = {}
    for at in sorted(result.logprobs):
        logprobs.setdefault(sampled[at], []).append(result.logprobs[at])
    tokens, keys = recorded.deltas.tokens, recorded.deltas.keys
    for i, row in enumerate(recorded.rows.tolist()):
        if row in logprobs and (token_ids := recorded.token_ids(i)):
            delta = complete.setdefault(i, TokenDelta(keys[i], int(tokens.index[i]), token_ids))
            delta.facts = delta.facts._replace(logprobs=logprobs[row][: len(token_ids)])
