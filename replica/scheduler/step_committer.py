"""Committing a step: its tokens enter the request table, finished requests end, failed steps are undone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.protos.errors import EngineError, QuireError
from quire.replica.config import EngineConfig
from quire.replica.core.request import DeltaBatch, FinishReason
from quire.replica.core.step_plan import NO_TOKEN, RequestDelta, StepPlan, StepResult
from quire.replica.kv_cache.host_tier import Transfers
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.scheduler.chunking import Chunking
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.request_book import RequestBook
from quire.replica.scheduler.snapshot_plans import SnapshotPlans
from quire.replica.scheduler.speed import CopySpeed
from quire.replica.scheduler.steps_in_flight import Step, StepIndexer, StepsInFlight


class _DeltaColumns(NamedTuple):
    """The columns of a `DeltaBatch`."""

    keys: np.ndarray
    sources: np.ndarray
    stream_ids: np.ndarray
    output_index: np.ndarray
    tokens: np.ndarray


class _Recorded(NamedTuple):
    """Tokens that have entered the request table; m rows."""

    rows: np.ndarray  # [m] int64
    tokens: np.ndarray  # [m] int32
    length: np.ndarray  # [m] int32, number of tokens of the row, this one included
    columns: _DeltaColumns
    # The rows, if the step had decoding rows only and each still belongs to its request.
    decodes: DecodeRows | None


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

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> DeltaBatch:
        """Record the sampled tokens, and end and release finished requests. Implements `Scheduler.commit`."""
        step = self._steps.oldest(plan)
        tokens = np.asarray(result.token_ids)
        try:
            has_stuck = self._has_stuck(step, tokens)
        except EngineError as error:
            return DeltaBatch(self.fail(plan, error))
        self._steps.land()
        self._memory.land(step.number, step.transfers)
        self._note_restores(result)
        # Collect the prompts' log-probabilities before any of these rows ends.
        scored = self._prompt_scores(step, plan, result)
        embedded = self._embeddings(step, plan, result, now_s)
        complete: dict[int, RequestDelta] = {}
        recorded = self._record(step, tokens, has_stuck, complete, now_s)
        for behind in self._steps:
            self._indexer.register_known(behind)
            self._snapshots.attach_known(behind)
            self._indexer.adopt(behind)
        self._end_finished(recorded, complete)
        if result.logprobs:
            _add_logprobs(step, result, recorded, complete)
        self._chunking.observe(
            step.budget, plan.num_decode_rows, result.duration_s, step.leaves_out_decodes, now_s
        )
        whole = [*scored, *embedded, *self._book.take_ended(), *complete.values()]
        batch = DeltaBatch(whole, *recorded.columns)
        return batch.without(complete) if complete else batch

    def fail(self, plan: StepPlan, error: QuireError) -> list[RequestDelta]:
        """End every request of the failed step and of the step behind it. Implements `Scheduler.fail_step`."""
        self._steps.oldest(plan)
        failed = self._steps.land_all()
        for step in failed:
            self._memory.land(step.number, step.transfers)
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

    def _has_stuck(self, step: Step, tokens: np.ndarray) -> bool:
        """Whether some row is stuck: it got NO_TOKEN instead of a token id, because its constraints exclude all ids.

        Raises
        ------
        EngineError
            The number of tokens is wrong, or a token id is not in the vocabulary.
        """
        if tokens.shape != step.sample_rows.shape:
            wrong = f"sampled {tokens.shape}, planned {step.sample_rows.shape}"
            raise EngineError(f"step {step.number} {wrong}")
        # Negative ids, NO_TOKEN among them, are huge as unsigned numbers: one pass finds all wrong ids.
        if not len(tokens) or tokens.astype(np.uint64).max() < self._vocab_size:
            return False
        chosen = tokens[tokens != NO_TOKEN]
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self._vocab_size:
            raise EngineError(f"step {step.number} sampled an id out of the vocabulary")
        return True

    def _note_restores(self, result: StepResult) -> None:
        """Measure the copies from the host tier that have ended, and let the prefills that waited for them continue."""
        for num_blocks, seconds in result.restores:
            self._copies.observe(num_blocks, seconds)
        through = result.restored_step
        self._restores.land(self._steps.num_planned if through is None else through)

    def _prompt_scores(self, step: Step, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Deltas with the log-probabilities of prompt tokens; clients get them before the first token."""
        deltas = []
        for targets, scores in zip(plan.prompts, result.prompt_logprobs, strict=True):
            if not step.is_alive(self._rows, np.array([targets.row]))[0]:
                continue
            request = self._rows.request(targets.row)
            request.num_read = targets.start + len(scores) - 1
            delta = request.delta(request.num_emitted, [])
            delta.prompt_logprobs = scores
            deltas.append(delta)
        return deltas

    def _embeddings(
        self, step: Step, plan: StepPlan, result: StepResult, now_s: float
    ) -> list[RequestDelta]:
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
                delta.embedding = request.embedding()
                deltas.append(delta)
        return deltas

    # -- tokens ------------------------------------------------------------------------------------------

    def _record(
        self,
        step: Step,
        tokens: np.ndarray,
        has_stuck: bool,
        complete: dict[int, RequestDelta],
        now_s: float,
    ) -> _Recorded:
        """Append the tokens to their rows.

        Parameters
        ----------
        complete
            Receives the deltas of first tokens. Keys are indices into the rows of the result.
        """
        decodes = step.decodes
        if decodes is not None and not has_stuck and self._rows.are_unchanged(decodes):
            then = step.decodes_then
            return self._record_decodes(decodes if then is None else then, step, tokens)
        table, rows = self._rows, step.sample_rows
        alive = step.is_alive(table, rows)
        if not alive.all():
            # Some requests were aborted while the step was in flight, or ended by the step before.
            rows, tokens = rows[alive], tokens[alive]
        if has_stuck:
            rows, tokens = self._end_stuck(rows, tokens)
        tokens = tokens.astype(np.int32, copy=False)
        length = table.record(rows, tokens)
        index = length - 1 - table.num_prompt_tokens[rows]
        owners = (table.keys[rows], table.sources[rows], table.stream_ids[rows])
        self._end_prefills(rows, index, tokens, complete, now_s)
        return _Recorded(rows, tokens, length, _DeltaColumns(*owners, index, tokens), None)

    def _record_decodes(self, decodes: DecodeRows, step: Step, tokens: np.ndarray) -> _Recorded:
        """Fast path of `_record` for a step of decoding rows only, if no row is gone: their columns are gathered."""
        tokens = tokens.astype(np.int32, copy=False)
        length = self._rows.record_decodes(decodes, tokens)
        columns = decodes.columns
        index = decodes.position - columns.num_prompt_tokens
        deltas = _DeltaColumns(columns.keys, columns.sources, columns.stream_ids, index, tokens)
        return _Recorded(step.sample_rows, tokens, length, deltas, decodes)

    def _end_stuck(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """End the requests of rows that got NO_TOKEN. Returns the other rows and their tokens."""
        stuck = tokens == NO_TOKEN
        for row in rows[stuck].tolist():
            index = int(self._rows.length[row] - self._rows.num_prompt_tokens[row])
            request = self._rows.request(row)
            error = request.stuck_error(index)
            self._book.release_unreported(request, FinishReason.ERROR, error)
        return rows[~stuck], tokens[~stuck]

    def _end_prefills(
        self,
        rows: np.ndarray,
        index: np.ndarray,
        tokens: np.ndarray,
        complete: dict[int, RequestDelta],
        now_s: float,
    ) -> None:
        """Let rows that had their last chunk in this step decode, and add their deltas to `complete`."""
        prefilled = np.flatnonzero(~self._rows.decoding[rows])
        for i in prefilled.tolist():
            request = self._rows.request(int(rows[i]))
            self._book.begin_decoding(request, now_s)
            complete[i] = request.delta(int(index[i]), [int(tokens[i])])
        if len(prefilled):
            self._rows.begin_decoding(rows[prefilled])

    def _end_finished(self, recorded: _Recorded, complete: dict[int, RequestDelta]) -> None:
        """End the requests that got their last token in this step, and add their deltas to `complete`."""
        rows, tokens, length, _, decodes = recorded
        for i, reason in self._rows.ended(rows, tokens, length, decodes).items():
            request = self._rows.request(int(rows[i]))
            if reason is FinishReason.LENGTH and length[i] < request.max_length:
                if length[i] >= request.run_length:
                    # The request has generated as many tokens as its router allows for now.
                    self._book.pause(request.key)
                continue
            complete[i] = self._book.release(request, reason, [int(tokens[i])])


def _add_logprobs(
    step: Step, result: StepResult, recorded: _Recorded, complete: dict[int, RequestDelta]
) -> None:
    """Add the log-probabilities of sampled tokens to their deltas, which are created for rows without one."""
    logprobs = {int(step.sample_rows[i]): found for i, found in result.logprobs.items()}
    columns = recorded.columns
    for i, row in enumerate(recorded.rows.tolist()):
        if row in logprobs:
            token = int(recorded.tokens[i])
            delta = complete.setdefault(
                i, RequestDelta(columns.keys[i], int(columns.output_index[i]), [token])
            )
            delta.logprobs = [logprobs[row]]
