"""Builds a step's input tensors on the device from the request table, without a round trip through the host.

The request table has one row for each running request; a batch lists the table rows that it runs. For batch row i and
table row r::

    num_computed[r]   tokens already in the cache
    block_tables[r]   block ids
    last_token[r]     token that was sampled last

    p = positions[t]   = num_computed[r] + t - cu_q[i]               for cu_q[i] <= t < cu_q[i + 1]
    slots[t]           = block_tables[r, p // block_size] * block_size + p % block_size
    kv_len[i]          = num_computed[r] + cu_q[i + 1] - cu_q[i]
    batch_tables[i]    = block_tables[r]
    input_ids[cu_q[i]] = last_token[r]                               for rows that decode

The arrays of the step may be longer than the batch (captured graphs). The rest is padding: rows with kv_len 0 and
tokens with position 0 and slot -1.

The host never rewrites the whole table: it sends changes as (row, column, value) triples, which `apply_differences`
scatters.

Bytes: 16 for each token, 8 for each used block-table entry, 20 for each difference. There is almost no arithmetic, so
the launches take most of the time. Every grid follows from the arrays' lengths, so CUDA graphs can capture the kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import check_block_size, check_bounds, check_matrix, check_vector

BLOCK = 256
_INT32 = (torch.int32,)
_VALUES = (torch.int32, torch.int64, torch.float32)


@triton.jit(
    do_not_specialize=["num_batch_rows", "num_tokens", "stride_batch"],
    do_not_specialize_on_alignment=["slots_ptr", "batch_tables_ptr"],
)
def _prepare_kernel(
    positions_ptr, kv_len_ptr, slots_ptr, batch_tables_ptr,
    rows_ptr, cu_q_ptr, num_computed_ptr, tables_ptr,
    num_batch_rows, table_rows, table_width, num_tokens, stride_table, stride_batch,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tokens and the block table of one batch row; the last program writes the padding tokens."""
    i = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if i == num_batch_rows:
        for start in range(tl.load(cu_q_ptr + num_batch_rows), num_tokens, BLOCK):
            token = start + lane
            tl.store(positions_ptr + token, lane * 0, mask=token < num_tokens)
            tl.store(slots_ptr + token, lane.to(tl.int64) * 0 - 1, mask=token < num_tokens)
    else:
        row = tl.load(rows_ptr + i)
        # The host does not check `rows`, which is on the device: a row outside the table gets no tokens.
        known = (row >= 0) & (row < table_rows)
        row = tl.where(known, row, 0).to(tl.int64)
        num_slots = tl.where(known, table_width * BLOCK_SIZE, 0)
        first = tl.load(cu_q_ptr + i)
        count = tl.load(cu_q_ptr + i + 1) - first
        computed = tl.load(num_computed_ptr + row)
        kv_len = tl.where(known & (count > 0), computed + count, 0)
        tl.store(kv_len_ptr + i, kv_len)
        table_ptr = tables_ptr + row * stride_table
        for start in range(0, count, BLOCK):
            index = start + lane
            position = computed + index
            held = (index < count) & (first + index < num_tokens)
            listed = held & (position >= 0) & (position < num_slots)
            block = tl.load(table_ptr + position // BLOCK_SIZE, mask=listed, other=-1).to(tl.int64)
            slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(positions_ptr + first + index, position, mask=held)
            tl.store(slots_ptr + first + index, slot, mask=held)
        used = tl.minimum((kv_len + BLOCK_SIZE - 1) // BLOCK_SIZE, table_width)
        batch_ptr = batch_tables_ptr + i.to(tl.int64) * stride_batch
        for start in range(0, used, BLOCK):
            entry = start + lane
            block = tl.load(table_ptr + entry, mask=entry < used, other=0)
            tl.store(batch_ptr + entry, block, mask=entry < used)


@triton.jit(do_not_specialize=["num_batch_rows", "num_tokens"])
def _gather_last_kernel(
    input_ids_ptr, last_token_ptr, rows_ptr, cu_q_ptr, decodes_ptr,
    num_batch_rows, table_rows, num_tokens, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the last tokens of BLOCK batch rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = i < num_batch_rows
    held = held & (tl.load(decodes_ptr + i, mask=held, other=0) != 0)
    row = tl.load(rows_ptr + i, mask=held, other=-1)
    token = tl.load(cu_q_ptr + i, mask=held, other=-1)
    held = held & (row >= 0) & (row < table_rows) & (token >= 0) & (token < num_tokens)
    last = tl.load(last_token_ptr + row, mask=held, other=0)
    tl.store(input_ids_ptr + token, last.to(input_ids_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["num_values"])
def _scatter_kernel(
    table_ptr, rows_ptr, columns_ptr, values_ptr, num_values, table_rows, table_width, stride_table,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scatter BLOCK values; if `columns_ptr` is None, into column 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = i < num_values
    row = tl.load(rows_ptr + i, mask=held, other=-1)
    column = i * 0
    if columns_ptr is not None:
        column = tl.load(columns_ptr + i, mask=held, other=-1)
    held = held & (row >= 0) & (row < table_rows) & (column >= 0) & (column < table_width)
    value = tl.load(values_ptr + i, mask=held, other=0)
    offset = row.to(tl.int64) * stride_table + column
    tl.store(table_ptr + offset, value.to(table_ptr.dtype.element_ty), mask=held)


def prepare_batch(
    rows: torch.Tensor,
    cu_q: torch.Tensor,
    num_computed: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    positions: torch.Tensor,
    kv_len: torch.Tensor,
    slots: torch.Tensor,
    batch_tables: torch.Tensor,
) -> None:
    """Write positions, lengths, slots and block tables of a step into the caller's arrays.

    Parameters
    ----------
    rows
        [n] int32, table row of each batch row. -1, or a row outside the table, is a padding row without keys.
    cu_q
        [n + 1] int32, non-decreasing from 0 to at most `tokens`.
    num_computed
        [R] int32, cached tokens of each table row.
    block_tables
        [R, width] int32, block ids of each table row, rows contiguous. A token in a block with an id < 0 gets slot -1.
    block_size
        16 to 256 tokens.
    positions, slots
        [tokens] int32 and int64, output. From cu_q[n] on they are 0 and -1.
    kv_len
        [n] int32, output. 0 for rows without tokens.
    batch_tables
        [n, width] int32, output. Entries beyond a row's tokens are not written.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    device = rows.device
    check_block_size(block_size)
    check_vector("rows", rows, None, _INT32, device)
    check_vector("cu_q", cu_q, len(rows) + 1, _INT32, device)
    check_vector("num_computed", num_computed, None, _INT32, device)
    check_matrix("block_tables", block_tables, (len(num_computed), None), _INT32, device)
    check_bounds("table rows", len(num_computed), 1, 2**31 - 1)
    check_bounds("block_tables columns", block_tables.shape[1], 1, (2**31 - 1) // block_size)
    check_vector("positions", positions, None, _INT32, device)
    check_vector("slots", slots, len(positions), (torch.int64,), device)
    check_vector("kv_len", kv_len, len(rows), _INT32, device)
    check_matrix("batch_tables", batch_tables, (len(rows), block_tables.shape[1]), _INT32, device)
    # fmt: off
    _prepare_kernel[(len(rows) + 1,)](
        positions, kv_len, slots, batch_tables, rows, cu_q, num_computed, block_tables,
        len(rows), *block_tables.shape, len(positions), block_tables.stride(0), batch_tables.stride(0),
        BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )
    # fmt: on


def gather_last_tokens(
    input_ids: torch.Tensor,
    last_token: torch.Tensor,
    rows: torch.Tensor,
    cu_q: torch.Tensor,
    decodes: torch.Tensor,
) -> None:
    """Set input_ids[cu_q[i]] = last_token[rows[i]] for the batch rows with decodes[i].

    Parameters
    ----------
    input_ids
        [tokens] int32 or int64; other tokens do not change.
    last_token
        [R] int32 or int64, last sampled token of each table row.
    rows, cu_q
        [n] and [n + 1] int32: table row and first token of each batch row, as for `prepare_batch`.
    decodes
        [n] bool, uint8 or int32: nonzero for a batch row whose single token was sampled by the previous step.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    device = input_ids.device
    check_vector("input_ids", input_ids, None, (torch.int32, torch.int64), device)
    check_vector("last_token", last_token, None, (torch.int32, torch.int64), device)
    check_vector("rows", rows, None, _INT32, device)
    check_vector("cu_q", cu_q, len(rows) + 1, _INT32, device)
    check_vector("decodes", decodes, len(rows), (torch.bool, torch.uint8, torch.int32), device)
    if len(rows):
        # fmt: off
        _gather_last_kernel[(triton.cdiv(len(rows), BLOCK),)](
            input_ids, last_token, rows, cu_q, decodes, len(rows), len(last_token), len(input_ids),
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )
        # fmt: on


def apply_differences(
    table: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor | None,
    values: torch.Tensor,
) -> None:
    """Set table[rows[i], columns[i]] = values[i]: the host's changes, or the tokens that a step sampled.

    Parameters
    ----------
    table
        [R, columns] int32, int64 or float32 with contiguous rows, or [R] for a single column.
    rows, columns
        [n] int32; `columns` None stands for column 0. Pairs outside the table are skipped; no pair may occur twice.
    values
        [n] int32, int64 or float32: an integer dtype if the table's is one, else float32.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    table = table[:, None] if table.dim() == 1 else table
    check_matrix("table", table, (None, None), _VALUES, table.device)
    check_vector("rows", rows, None, _INT32, table.device)
    if columns is not None:
        check_vector("columns", columns, len(rows), _INT32, table.device)
    check_vector("values", values, len(rows), _VALUES, table.device)
    if values.is_floating_point() != table.is_floating_point():
        raise ValueError(f"values: must be integers exactly if the table's are, got {values.dtype}")
    if len(rows):
        # fmt: off
        _scatter_kernel[(triton.cdiv(len(rows), BLOCK),)](
            table, rows, columns, values, len(rows), *table.shape, table.stride(0),
            BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )
        # fmt: on
