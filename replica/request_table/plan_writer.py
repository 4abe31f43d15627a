"""Writing a step's plan from the request table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.replica.core.step_plan import (
    BlockTables,
    PoolTargets,
    PromptTargets,
    SamplingBatch,
    StepPlan,
)
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.request_table.rows import RowTable
from quire.replica.request_table.sampling_batches import gather_batch


class PlanWriter:
    """Turns the rows of a step into the flat arrays of a `StepPlan`.

    Parameters
    ----------
    table
        The rows.
    """

    def __init__(self, table: RowTable):
        self._table = table

    def write(
        self,
        step: int,
        decodes: DecodeRows,
        chunks: Sequence[tuple[int, int]],
        copies: Sequence[tuple[int, int]] = (),
    ) -> tuple[StepPlan, np.ndarray, np.ndarray]:
        """Write the plan of a step, and count its tokens as computed.

        Parameters
        ----------
        decodes
            Rows that compute one token, as the row table has just returned them. Without chunks they move on by one
            token.
        chunks
            (row, number of tokens) of each prefill.
        copies
            (from, to) blocks to copy before the step; only with chunks.

        Returns
        -------
        The plan, its rows ([n] int64), and its rows that sample ([S] int64).
        """
        if chunks:
            return self._write_mixed(step, decodes.ids, chunks, copies)
        table = self._table
        rows, kv_len = decodes.ids, decodes.length
        if decodes.is_plain:
            sampling = SamplingBatch(
                token_index=decodes.cu_q[:-1],
                columns=decodes.columns.sampling,
                position=kv_len.astype(np.int64),
                rows=rows,
            )
        else:
            sampling = gather_batch(table, rows, decodes.cu_q[:-1], kv_len)
        plan = StepPlan(
            step=step,
            num_decode_rows=len(rows),
            token_ids=table.last_token[rows],
            positions=decodes.position,
            cu_q=decodes.cu_q,
            kv_len=kv_len,
            block_tables=BlockTables(table.block_tables, rows, decodes.num_blocks),
            slots=decodes.take_slots(table.flat_tables),
            sampling=sampling,
            decode_rows=rows,
            rows=rows,
            changes=table.journal.take(table.sampling),
        )
        table.count_computed(rows, kv_len, len(rows), 0)
        decodes.advance()
        return plan, rows, rows

    def _write_mixed(
        self,
        step: int,
        decode_rows: np.ndarray,
        chunks: Sequence[tuple[int, int]],
        copies: Sequence[tuple[int, int]],
    ) -> tuple[StepPlan, np.ndarray, np.ndarray]:
        table = self._table
        rows = np.concatenate([decode_rows, np.array([row for row, _ in chunks], np.int64)])
        num_q = np.ones(len(rows), np.int32)
        num_q[len(decode_rows) :] = [count for _, count in chunks]
        cu_q = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(num_q, out=cu_q[1:])
        start = table.num_computed[rows]
        kv_len = start + num_q
        positions = np.arange(cu_q[-1], dtype=np.int32) - np.repeat(cu_q[:-1] - start, num_q)
        # Every decoding row samples. Its newest token may not be recorded yet, so only chunks compare lengths.
        samples = np.ones(len(rows), bool)
        chunked = slice(len(decode_rows), None)
        samples[chunked] = kv_len[chunked] == table.length[rows[chunked]]
        samples[chunked] &= ~table.is_pooled[rows[chunked]]
        samples = np.flatnonzero(samples)
        sample_rows = rows[samples]
        block_size = table.block_size
        block_index = positions // block_size
        slots = table.block_tables[:, np.repeat(rows, num_q), block_index].astype(
            np.int64, order="C"
        )
        slots *= block_size
        slots += positions - block_index * block_size
        plan = StepPlan(
            step=step,
            num_decode_rows=len(decode_rows),
            token_ids=self._chunk_tokens(decode_rows, chunks, cu_q),
            positions=positions,
            cu_q=cu_q,
            kv_len=kv_len,
            block_tables=BlockTables(table.block_tables, rows, -(-int(kv_len.max()) // block_size)),
            slots=slots,
            sampling=gather_batch(table, sample_rows, cu_q[samples + 1] - 1, kv_len[samples]),
            copies=tuple(copies),
            prompts=self._prompt_targets(chunks, cu_q[len(decode_rows) :].tolist()),
            pooling=self._pool_targets(chunks, cu_q[len(decode_rows) :].tolist()),
            decode_rows=decode_rows,
            rows=rows,
            changes=table.journal.take(table.sampling),
        )
        num_decode_rows = len(decode_rows)
        table.count_computed(rows, kv_len, num_decode_rows, int(cu_q[-1]) - num_decode_rows)
        return plan, rows, sample_rows

    def _prompt_targets(
        self, chunks: Sequence[tuple[int, int]], begins: Sequence[int]
    ) -> tuple[PromptTargets, ...]:
        """The prompt tokens in these chunks that need a log-probability.

        Parameters
        ----------
        begins
            For each chunk the flat index of its first token, and the end of the last chunk.
        """
        table, targets = self._table, []
        for (row, count), begin in zip(chunks, begins[:-1], strict=True):
            request = table.request(row)
            start = int(table.num_computed[row])
            first = max(start, request.num_read)
            end = min(start + count, request.num_to_read)
            num_top = request.params.prompt_logprobs
            if num_top is not None and first < end:
                ids = request.token_ids[first + 1 : end + 1].astype(np.int64)
                targets.append(PromptTargets(row, begin + first - start, first + 1, ids, num_top))
        return tuple(targets)

    def _pool_targets(
        self, chunks: Sequence[tuple[int, int]], begins: Sequence[int]
    ) -> tuple[PoolTargets, ...]:
        """The tokens in these chunks with hidden states that are pooled; the parameters are those above."""
        table, targets = self._table, []
        for (row, count), begin in zip(chunks, begins[:-1], strict=True):
            if not table.is_pooled[row]:
                continue
            request = table.request(row)
            start = int(table.num_computed[row])
            end = start + count
            is_last = end == request.num_tokens
            first = max(start, request.num_read) if request.num_to_read else end - 1
            if first < end and (is_last or request.num_to_read):
                begin += first - start
                targets.append(PoolTargets(row, begin, begin + end - first, end, is_last))
        return tuple(targets)

    def _chunk_tokens(
        self, decode_rows: np.ndarray, chunks: Sequence[tuple[int, int]], cu_q: np.ndarray
    ) -> np.ndarray:
        table = self._table
        token_ids = np.empty(cu_q[-1], np.int32)
        token_ids[: len(decode_rows)] = table.last_token[decode_rows]
        begin = len(decode_rows)
        for row, count in chunks:
            start = int(table.num_computed[row])
            token_ids[begin : begin + count] = table.request(row).token_ids[start : start + count]
            begin += count
        return token_ids
