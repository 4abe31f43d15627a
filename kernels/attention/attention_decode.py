"""Paged decode attention: one query token for each row. Reading the keys and values once takes most of the time.

For row r with n keys, query head h of KV head g (``group`` heads each), f = scale * log2(e)::

    o_h = sum_j 2^(f q_h.k_gj - m_h) v_gj / sum_j 2^(f q_h.k_gj - m_h)          j in the keys that r sees

Work. Keys are cut into splits of a fixed number of tokens, counted from position 0. A work item is (rows, split). The
list of items is on the device (`quire.kernels.attention.decode_plan`), and a persistent grid processes it for each KV
head. So the host needs no heuristic, no batch size is a special case, and one CUDA graph serves every length. The query
heads of a KV group are the rows of one 16-row matrix tile. A second, small kernel merges a row's partial results::

    item list   r0 s0 | r0 s1 | r0 s2 | r1 s0 | r2 s0 | ...      x KV heads, walked by num_programs programs
                  |       |       |       |
    partials    slot 0  slot 1  slot 2    out    (a single split is finished in place)
                  +---m0, l0, o0 -> merge -> out

The merge is a tree of two levels, fixed by the row's number of splits. Level 1 merges each run of `MERGE_SPLITS` splits
in order; level 2 merges these results in order::

    splits      0 1 2 ... 31 | 32 33 ... 63 | 64 ... 70
    level 1     in order       in order       in order       of one head, side by side in one program
    level 2     +--------------+--------------+---> out

A row's bits depend on its own keys only, not on the batch, the grid, the order of completion or the slots.

Shared prefixes (cascade). Rows with the same first blocks in their tables share the items of these splits. One row
uses `group` of the tile's 16 lanes, so up to 16 // group rows fit, and the keys are loaded once for all. A lane's
arithmetic does not depend on the other lanes, and partial results go to the same slots, so the bits are the same.

Groups of more than 16 heads, as in latent attention: a tile has 16 of them, and the programs of a group's tiles follow
each other, so that the later ones find the keys in the L2 cache. Taller tiles do not fit: at values of 512 elements,
the accumulators of a split, of its run and of the row take 96 of a thread's 255 registers for 16 rows.

Layout. q, out [tokens, heads, D or V]; cache [num_blocks, kv_heads, block_size, D or V], any block stride. Keys have D
elements and values V; in latent attention a value is the beginning of its key, and only keys are read.

Bytes: n kv_heads (D + V) itemsize for each row (latent: n D itemsize). A shared split is read once for 16 // group
rows, from the L2 cache if the shared keys and values fit it. A row with several splits adds 8 (V + 2) heads for each
split: 1.6% of the KV bytes at split 256, group 4, bf16. Flops: 2 n heads (D + V) for each row (16 / group times as many
in the padded tiles).
"""

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl

from quire.kernels.attention.attention_call import AttentionOptions, prepare_call
from quire.kernels.attention.attention_checks import TILE_HEADS
from quire.kernels.attention.attention_math import (
    attend_tile,
    finish,
    first_key,
    head_scales,
    load_keys_values,
    load_query,
    merge,
    position_seen,
    split_range,
)
from quire.kernels.attention.decode_plan import DecodePlan
from quire.kernels.tuning import launch_options

SUBTILE = tl.constexpr(TILE_HEADS)  # lanes of a tile
MERGE_ELEMENTS = 1024  # accumulator elements of one merge program: 8 for each thread
MERGE_WARPS = 4


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["tables_ptr"])
def _decode_kernel(
    out_ptr, partial_acc_ptr, partial_ml_ptr,
    q_ptr, k_ptr, v_ptr, tables_ptr, cu_q_ptr, kv_len_ptr,
    items_ptr, num_items_ptr, row_slot_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, stride_q, stride_out, stride_table, stride_block, stride_k_head, stride_v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_PART: tl.constexpr, KEY_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Process the work items: lane i of a tile has head i % GROUP_PAD of row i // GROUP_PAD of the item.

    A group of more heads than a tile has lanes is several tiles, in programs that follow each other.
    """
    PARTS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    LOCAL: tl.constexpr = WINDOW > 0 or CHUNK > 0
    ITEM_WIDTH: tl.constexpr = 2 + SUBTILE // GROUP_PAD
    lane = tl.arange(0, SUBTILE)
    dim = tl.arange(0, VALUE_PAD)
    total = tl.load(num_items_ptr) * (KV_HEADS * PARTS)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        part = index % (KV_HEADS * PARTS)
        head = part // PARTS
        in_group = part % PARTS * TILE_HEADS + lane % GROUP_PAD
        heads = head * GROUP + in_group
        item_ptr = items_ptr + index // (KV_HEADS * PARTS) * ITEM_WIDTH
        first_split = tl.load(item_ptr)
        end_split = tl.load(item_ptr + 1)
        # All rows of an item see the same keys, so the first row's length and block table serve all.
        lead = tl.load(item_ptr + 2)
        row = tl.load(item_ptr + 2 + lane // GROUP_PAD)
        valid = row >= 0
        if GROUP != GROUP_PAD * PARTS:
            valid = valid & (in_group < GROUP)
        end = tl.load(kv_len_ptr + lead)
        begin = first_key(end - 1, WINDOW, CHUNK)
        table_ptr = tables_ptr + tl.cast(lead, tl.int64) * stride_table
        k_head_ptr = k_ptr + tl.cast(head, tl.int64) * stride_k_head
        v_head_ptr = None
        if v_ptr is not None:
            v_head_ptr = v_ptr + tl.cast(head, tl.int64) * stride_v_head
        qk_scale, v_scale = head_scales(k_scale_ptr, v_scale_ptr, head, scale)
        token = tl.load(cu_q_ptr + row, mask=valid, other=0).to(tl.int64)
        q = load_query(
            q_ptr, token * stride_q + heads * HEAD_DIM, valid, HEAD_DIM, KEY_PART, KEY_PAD, REST_PAD
        )

        total_m, total_l, total_acc = _empty_state(SUBTILE, VALUE_PAD)
        for first in range(first_split, end_split, MERGE_SPLITS):
            group_m, group_l, group_acc = _empty_state(SUBTILE, VALUE_PAD)
            for split in range(first, tl.minimum(first + MERGE_SPLITS, end_split)):
                m, l, acc = _empty_state(SUBTILE, VALUE_PAD)
                low = tl.maximum(split * SPLIT, begin // TILE * TILE)
                high = tl.minimum(split * SPLIT + SPLIT, end)
                for start in range(low, high, TILE):
                    k, v = load_keys_values(
                        k_head_ptr, v_head_ptr, table_ptr, start, begin, end, stride_block,
                        q_ptr.dtype.element_ty, HEAD_DIM, KEY_PART, KEY_PAD, REST_PAD, VALUE_DIM, VALUE_PAD,
                        BLOCK_SIZE, TILE, FP8, True, LOCAL,
                    )  # fmt: skip
                    seen = position_seen(start + tl.arange(0, TILE), begin, end, LOCAL)[None, :]
                    m, l, acc = attend_tile(q, k, v, m, l, acc, seen, qk_scale, SOFTCAP, True)
                group_m, group_l, group_acc = merge(group_m, group_l, group_acc, m, l, acc)
            total_m, total_l, total_acc = merge(
                total_m, total_l, total_acc, group_m, group_l, group_acc
            )

        slot = tl.load(row_slot_ptr + row, mask=valid, other=0)
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0)
        result = finish(total_m, total_l, total_acc, sink, v_scale)
        held = valid[:, None] & (dim < VALUE_DIM)[None, :]
        offsets = (token * stride_out + heads * VALUE_DIM)[:, None] + dim[None, :]
        tl.store(
            out_ptr + offsets,
            result.to(out_ptr.dtype.element_ty),
            mask=held & (slot < 0)[:, None],
        )
        has_slot = valid & (slot >= 0)
        slot = slot + first_split - begin // SPLIT
        at = slot.to(tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(
            partial_acc_ptr + (at * VALUE_DIM)[:, None] + dim[None, :],
            total_acc,
            mask=held & has_slot[:, None],
        )
        tl.store(partial_ml_ptr + at * 2, total_m, mask=has_slot)
        tl.store(partial_ml_ptr + at * 2 + 1, total_l, mask=has_slot)


@triton.jit
def _empty_state(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(m, l, acc) before the first key."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _merge_slots(
    partial_acc_ptr, partial_ml_ptr, slot, step, count, most, head, dim,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, LANES: tl.constexpr, DIMS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge, in order, `count` partial results of `head` in slots slot, slot + step, ...

    `slot`, `count` (at most `most`) and `head` are [LANES] each; lanes are independent.
    """
    m, l, acc = _empty_state(LANES, DIMS)
    for begin in range(0, most, UNROLL):
        # Issue all loads of a round before its first merge, so that they overlap.
        m_next = ()
        l_next = ()
        acc_next = ()
        for i in tl.static_range(UNROLL):
            listed = begin + i < count
            at = (slot + (begin + i) * step).to(tl.int64) * HEADS + head
            m_next += (tl.load(partial_ml_ptr + at * 2, mask=listed, other=float("-inf")),)
            l_next += (tl.load(partial_ml_ptr + at * 2 + 1, mask=listed, other=0.0),)
            offsets = (at * VALUE_DIM)[:, None] + dim[None, :]
            held = listed[:, None] & (dim < VALUE_DIM)[None, :]
            acc_next += (tl.load(partial_acc_ptr + offsets, mask=held, other=0.0),)
        for i in tl.static_range(UNROLL):
            m, l, acc = merge(m, l, acc, m_next[i], l_next[i], acc_next[i])
    return m, l, acc


@triton.jit
def _merge_kernel(
    out_ptr, partial_acc_ptr, partial_ml_ptr, cu_q_ptr, kv_len_ptr,
    merge_rows_ptr, num_rows_ptr, row_slot_ptr, sinks_ptr, v_scale_ptr, stride_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, LANES: tl.constexpr, DIMS: tl.constexpr,
    SPLIT: tl.constexpr, MERGE_SPLITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge the rows' partial results; a row without keys gets zeros.

    Long rows, those with more than MERGE_SPLITS splits, come first in the list. A long row has one program for each
    head, in which LANES lanes do level 1 for LANES runs of splits at a time. For a short row, each program merges LANES
    heads.
    """
    lane = tl.arange(0, LANES)
    dim = tl.arange(0, DIMS)
    parts: tl.constexpr = (HEADS + LANES - 1) // LANES
    num_long = tl.load(num_rows_ptr + 1)
    total = num_long * HEADS + (tl.load(num_rows_ptr) - num_long) * parts
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        is_long = index < num_long * HEADS
        short = index - num_long * HEADS
        row = tl.load(merge_rows_ptr + tl.where(is_long, index // HEADS, num_long + short // parts))
        # Long row: all lanes have the same head in level 1; only lane 0 does level 2.
        head = tl.where(is_long, index % HEADS, short % parts * LANES + lane)
        used = tl.where(is_long, lane < 1, head < HEADS)
        slot = tl.load(row_slot_ptr + row)
        _, num_splits = split_range(tl.load(kv_len_ptr + row), SPLIT, WINDOW, CHUNK)
        num_splits = tl.where(slot >= 0, num_splits, 0)
        step = tl.where(is_long, MERGE_SPLITS, 1)
        count = (num_splits + step - 1) // step
        if is_long:
            for done in range(0, num_splits, LANES * MERGE_SPLITS):
                first = done + lane * MERGE_SPLITS
                own = tl.minimum(tl.maximum(num_splits - first, 0), MERGE_SPLITS)
                m, l, acc = _merge_slots(
                    partial_acc_ptr, partial_ml_ptr, slot + first, 1, own, MERGE_SPLITS, head, dim,
                    HEADS, VALUE_DIM, LANES, DIMS, UNROLL,
                )  # fmt: skip
                # The result overwrites its first split, which other threads may not have loaded yet.
                tl.debug_barrier()
                at = (slot + first).to(tl.int64) * HEADS + head
                held = (own > 0)[:, None] & (dim < VALUE_DIM)[None, :]
                tl.store(partial_acc_ptr + (at * VALUE_DIM)[:, None] + dim[None, :], acc, mask=held)
                tl.store(partial_ml_ptr + at * 2, m, mask=own > 0)
                tl.store(partial_ml_ptr + at * 2 + 1, l, mask=own > 0)
            tl.debug_barrier()
        m, l, acc = _merge_slots(
            partial_acc_ptr, partial_ml_ptr, slot + lane * 0, step, tl.where(used, count, 0), count, head, dim,
            HEADS, VALUE_DIM, LANES, DIMS, UNROLL,
        )  # fmt: skip
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=used, other=0.0)
        v_scale = 1.0
        if v_scale_ptr is not None:
            v_scale = tl.load(v_scale_ptr + head // GROUP, mask=used, other=1.0)[:, None]
        result = finish(m, l, acc, sink, v_scale)
        token = tl.load(cu_q_ptr + row).to(tl.int64)
        offsets = (token * stride_out + head * VALUE_DIM)[:, None] + dim[None, :]
        held = used[:, None] & (dim < VALUE_DIM)[None, :]
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=held)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Compute attention for rows with one query token; the output of other rows is not written.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, scale
        Queries, the layer's cache, its block tables and the factor on q.k; `prepare_call` has shapes and dtypes.
    plan
        `plan_decode` of this batch.
    options
        `softcap`, `sinks`, `k_scale`, `v_scale` and `out`, described at `attention_call.AttentionOptions`.

    Returns
    -------
    `out`. A row's bits depend on that row's keys only.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or option is not supported; the message has the bound.
    """
    ws = plan.workspace
    call = prepare_call(q, k_cache, v_cache, block_tables, scale, ws.shape, plan.kv_len, **options)
    if not q.shape[0]:
        return call.out
    shape, config = ws.shape, ws.config
    # fmt: off
    _decode_kernel[(ws.num_programs,)](
        call.out, ws.partial_acc, ws.partial_ml,
        call.q, call.k_cache, call.v_cache, call.block_tables, plan.cu_q, plan.kv_len,
        ws.items, ws.counts, ws.row_slot, call.sinks, call.k_scale, call.v_scale,
        call.qk_scale, *call.launch.strides,
        GROUP_PAD=shape.group_pad, SPLIT=config.split_tokens, TILE=config.tile_tokens,
        MERGE_SPLITS=config.merge_splits, **call.launch.constants,
        **launch_options(ws.arch, config.num_warps, config.num_stages, config.programs_per_sm),
    )
    _merge_kernel[(ws.num_merge_programs,)](
        call.out, ws.partial_acc, ws.partial_ml, plan.cu_q, plan.kv_len,
        ws.merge_rows, ws.merge_counts, ws.row_slot, call.sinks, call.v_scale, call.out.stride(0),
        HEADS=shape.num_heads, GROUP=shape.group, VALUE_DIM=shape.value_size,
        SPLIT=config.split_tokens, MERGE_SPLITS=config.merge_splits,
        WINDOW=shape.window or 0, CHUNK=shape.chunk or 0, UNROLL=config.merge_unroll,
        **merge_layout(shape.value_size),
        **launch_options(ws.arch, MERGE_WARPS, programs_per_sm=config.merge_programs_per_sm),
    )
    # fmt: on
    return call.out


def merge_layout(value_dim: int) -> dict[str, int]:
    """Compile-time shape of the merge kernel's accumulators: number of lanes and dimensions of each."""
    dims = 1 << (value_dim - 1).bit_length()
    return dict(LANES=MERGE_ELEMENTS // dims, DIMS=dims)
