"""Writing a step's plan from the request table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.protos import ragged
from quire.replica.core.step_plan import (
    BlockTables,
    Drafts,
    PoolTargets,
    PromptTargets,
    SamplingBatch,
    StepPlan,
)
from quire.replica.request_table.decode_rows import DecodeRows, Draft
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
        drafts: Sequence[Draft] = (),
    ) -> tuple[StepPlan, np.ndarray, np.ndarray]:
        """Write the plan of a step, and count its tokens as computed.

        Parameters
        ----------
        decodes
            Rows with one token, as the row table has just returned them. In a step of only such rows, which is most
            steps, their arrays are those of the step before, moved on by one token.
        chunks
            (row, number of tokens) of each prefill.
        copies
            (from, to) blocks to copy before the step; only with chunks.
        drafts
            Decoding rows with a draft; `decodes` has the others.

        Returns
        -------
        The plan, its rows ([n] int64), and its rows that sample ([m] int64, each once).
        """
        if chunks or drafts:
            return self._write_ragged(step, decodes, chunks, copies, drafts)
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
            token_ids=decodes.token_ids,
            positions=decodes.position,
            cu_q=decodes.cu_q,
            num_sampled=decodes.num_sampled,
            kv_len=kv_len,
            block_tables=BlockTables(table.block_tables, rows, decodes.num_blocks),
            slots=decodes.take_slots(table.flat_tables),
            sampling=sampling,
            rows=rows,
            changes=table.journal.take(table.sampling),
            num_decode_rows=len(rows),
            adapters=table.adapters.of(rows),
            adapter_loads=table.adapters.take_loads(),
        )
        table.count_computed(rows, kv_len, len(rows), 0)
        decodes.advance()
        return plan, rows, rows

    def _write_ragged(
        self,
        step: int,
        decodes: DecodeRows,
        chunks: Sequence[tuple[int, int]],
        copies: Sequence[tuple[int, int]],
        drafts: Sequence[Draft],
    ) -> tuple[StepPlan, np.ndarray, np.ndarray]:
        """Write the plan of rows with any numbers of tokens: decoding rows, those with a draft, prefills."""
        table, num_decodes = self._table, len(decodes) + len(drafts)
        spans = [*((d.row, 1 + len(d.token_ids)) for d in drafts), *chunks]
        rows = np.concatenate([decodes.ids, np.array([row for row, _ in spans], np.int64)])
        num_scheduled = np.ones(len(rows), np.int32)
        num_scheduled[len(decodes) :] = [count for _, count in spans]
        cu_q = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(num_scheduled, out=cu_q[1:])
        start = table.num_computed[rows]
        kv_len = start + num_scheduled
        positions = np.arange(cu_q[-1], dtype=np.int32) - np.repeat(
            cu_q[:-1] - start, num_scheduled
        )
        # A chunk samples if it ends at the row's last token. The newest token of a decoding row may not be recorded
        # yet, so its length is not compared.
        num_sampled = num_scheduled.copy()
        chunked = rows[num_decodes:]
        is_last = kv_len[num_decodes:] == table.length[chunked]
        num_sampled[num_decodes:] = is_last & ~table.is_pooled[chunked]
        token_index = sampled_tokens(cu_q, num_sampled)
        token_ids = self._token_ids(decodes, chunks, drafts)
        sampling = gather_batch(
            table,
            np.repeat(rows, num_sampled),
            token_index,
            positions[token_index] + 1,
            _drafts(token_ids, token_index, num_sampled) if drafts else None,
        )
        begins = cu_q[num_decodes:].tolist()
        plan = StepPlan(
            step=step,
            token_ids=token_ids,
            positions=positions,
            cu_q=cu_q,
            num_sampled=num_sampled,
            kv_len=kv_len,
            block_tables=BlockTables(
                table.block_tables, rows, -(-int(kv_len.max()) // table.block_size)
            ),
            slots=self._slots(np.repeat(rows, num_scheduled), positions),
            sampling=sampling,
            copies=tuple(copies),
            prompts=self._prompt_targets(chunks, begins),
            pooling=self._pool_targets(chunks, begins),
            rows=rows,
            changes=table.journal.take(table.sampling),
            num_decode_rows=len(decodes),
            adapters=table.adapters.of(rows),
            adapter_loads=table.adapters.take_loads(),
        )
        num_decode_tokens = int(cu_q[num_decodes])
        table.count_computed(rows, kv_len, num_decode_tokens, int(cu_q[-1]) - num_decode_tokens)
        if drafts:
            table.begin_drafts(drafts)
        return plan, rows, rows[num_sampled > 0]

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[G, T] int64, the slots of tokens [T] at these positions of their rows."""
        table, block_size = self._table, self._table.block_size
        index = positions // block_size
        slots: np.ndarray = table.block_tables[:, rows, index].astype(np.int64, order="C")
        slots *= block_size
        slots += positions - index * block_size
        return slots

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

    def _token_ids(
        self, decodes: DecodeRows, chunks: Sequence[tuple[int, int]], drafts: Sequence[Draft]
    ) -> np.ndarray:
        parts = [decodes.token_ids]
        for draft in drafts:
            parts += [np.array([-1 - draft.row], np.int32), draft.token_ids]
        for row, count in chunks:
            start = int(self._table.num_computed[row])
            parts.append(self._table.request(row).token_ids[start : start + count])
        return np.concatenate(parts)


def _drafts(token_ids: np.ndarray, token_index: np.ndarray, num_sampled: np.ndarray) -> Drafts:
    """The drafted tokens before each sample: all tokens of a row with a draft but the first one."""
    offset = ragged.offsets(num_sampled)
    return Drafts(offset, np.where(offset > 0, token_ids[token_index], -1).astype(np.int64))


def sampled_tokens(cu_q: np.ndarray, num_sampled: np.ndarray) -> np.ndarray:
    """[S] int32, flat indices of the last `num_sampled` tokens of each row, in the order of the rows."""
    end = np.cumsum(num_sampled)
    offset = np.arange(int(end[-1]), dtype=np.int32) - np.repeat(end, num_sampled)
    index: np.ndarray = np.repeat(cu_q[1:], num_sampled) + offset
    return index.astype(np.int32)
