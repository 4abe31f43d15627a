"""Paged decode attention: one query token a row, keys and values read once at the speed of the memory.

For row r with n keys, query head h of KV head g (``group`` heads each), f = scale * log2(e)::

    o_h = sum_j 2^(f q_h.k_gj - m_h) v_gj / sum_j 2^(f q_h.k_gj - m_h)          j in the keys that r sees

Work. Keys are cut into splits of a fixed number of tokens from position 0. An item is (row, KV head, split); the
list lies on the device (`quire.kernels.decode_plan`) and a persistent grid walks it, so there is no host
heuristic, no step at some batch size, and one CUDA graph fits every length. The heads of a group are the rows
of one 16-row matrix tile. A second small kernel merges a row's partial results in the order of the splits::

    item list   r0 s0 | r0 s1 | r0 s2 | r1 s0 | r2 s0 | ...      x KV heads, walked by num_programs programs
                  |       |       |       |
    partials    slot 0  slot 1  slot 2    out    (a single split is finished in place)
                  +---m0, l0, o0 -> merge in order -> out

A row's bits depend on its own keys only: not on the batch, the grid, the order of completion or the slots.

Shared prefixes (cascade). Rows whose tables begin with the same blocks form a group; the splits inside the shared
part become items of (up to ``item_rows`` rows, KV head, split) with all rows' heads in `shared_subtiles` tiles of 16
rows: the keys are loaded once for all of them, every 16-row tile does exactly what it does without sharing, and the
partial results go to the same slots. Hence the same bits.

Layout. q, out [tokens, heads, head_dim]; pages [num_blocks, kv_heads, block_size, head_dim], any block stride.

Bytes: 2 n kv_heads head_dim itemsize a row (shared tokens: once a run of `item_rows` rows), plus
8 (head_dim + 2) heads for each split of a row that has several: 1.6% of the KV bytes at split 256, group 4, bf16.
Flops: 4 n heads head_dim a row (16 / group times as many in the padded tiles).
"""

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl

from quire.kernels.attention_call import AttentionCall, AttentionOptions, prepare_call
from quire.kernels.attention_tile import (
    attend_tile,
    finish,
    first_key,
    head_scales,
    load_tile,
    merge,
    position_seen,
    split_range,
    tile_offsets,
)
from quire.kernels.decode_plan import ITEM_WIDTH, DecodePlan
from quire.kernels.tuning import launch_options

SUBTILE = tl.constexpr(16)  # rows of the smallest matrix instruction
MERGE_DIMS = 128  # most head dimensions of one warp of the reduction: 16 bytes a lane


@triton.jit
def _lane_rows(
    members_ptr, first_member, num_members, subtile, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr
):
    """Row and validity of the 16 lanes of a subtile: lane i holds head i % GROUP_PAD of its i // GROUP_PAD-th row."""
    lane = tl.arange(0, SUBTILE)
    offset = subtile * (SUBTILE // GROUP_PAD) + lane // GROUP_PAD
    valid = offset < num_members
    if GROUP != GROUP_PAD:
        valid = valid & (lane % GROUP_PAD < GROUP)
    if members_ptr is not None:
        row = tl.load(members_ptr + first_member + offset, mask=valid, other=0)
    else:
        row = first_member + offset
    return row, valid


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["tables_ptr"])
def _decode_kernel(
    out_ptr, partial_acc_ptr, partial_ml_ptr,
    q_ptr, k_ptr, v_ptr, tables_ptr, cu_q_ptr, kv_len_ptr,
    items_ptr, num_items_ptr, members_ptr, row_slot_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, stride_q, stride_out, stride_table, stride_block, stride_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, SUBTILES: tl.constexpr,
    SHARED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Walk the items of one list. SHARED: several rows an item, every tile full, results to slots only."""
    LOCAL: tl.constexpr = WINDOW > 0 or CHUNK > 0
    dim = tl.arange(0, HEAD_PAD)
    total = tl.load(num_items_ptr) * KV_HEADS
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        head = index % KV_HEADS
        heads = head * GROUP + tl.arange(0, SUBTILE) % GROUP_PAD
        item_ptr = items_ptr + index // KV_HEADS * ITEM_WIDTH
        first_member = tl.load(item_ptr)
        num_members = tl.load(item_ptr + 1)
        first_split = tl.load(item_ptr + 2)
        end_split = tl.load(item_ptr + 3)
        lead = first_member
        if members_ptr is not None:
            lead = tl.load(members_ptr + first_member)
        if SHARED:
            begin = 0
            end = end_split * SPLIT
        else:
            end = tl.load(kv_len_ptr + lead)
            begin = first_key(end - 1, WINDOW, CHUNK)
        table_ptr = tables_ptr + tl.cast(lead, tl.int64) * stride_table
        k_head_ptr = k_ptr + tl.cast(head, tl.int64) * stride_head
        v_head_ptr = v_ptr + tl.cast(head, tl.int64) * stride_head
        qk_scale, v_scale = head_scales(k_scale_ptr, v_scale_ptr, head, scale)

        q = ()
        total_m = ()
        total_l = ()
        total_acc = ()
        for i in tl.static_range(SUBTILES):
            row, valid = _lane_rows(members_ptr, first_member, num_members, i, GROUP, GROUP_PAD)
            token = tl.load(cu_q_ptr + row, mask=valid, other=0).to(tl.int64)
            offsets = (token * stride_q + heads * HEAD_DIM)[:, None] + dim[None, :]
            held = valid[:, None] & (dim < HEAD_DIM)[None, :]
            q += (tl.load(q_ptr + offsets, mask=held, other=0.0),)
            total_m += (tl.full([SUBTILE], float("-inf"), tl.float32),)
            total_l += (tl.zeros([SUBTILE], tl.float32),)
            total_acc += (tl.zeros([SUBTILE, HEAD_PAD], tl.float32),)

        for split in range(first_split, end_split):
            m = ()
            l = ()
            acc = ()
            for _ in tl.static_range(SUBTILES):
                m += (tl.full([SUBTILE], float("-inf"), tl.float32),)
                l += (tl.zeros([SUBTILE], tl.float32),)
                acc += (tl.zeros([SUBTILE, HEAD_PAD], tl.float32),)
            low = tl.maximum(split * SPLIT, begin // TILE * TILE)
            high = tl.minimum(split * SPLIT + SPLIT, end)
            for start in range(low, high, TILE):
                base, rows = tile_offsets(
                    table_ptr, start, begin, end, stride_block,
                    HEAD_DIM, BLOCK_SIZE, TILE, not SHARED, LOCAL,
                )  # fmt: skip
                k = load_tile(
                    k_head_ptr, base, rows, start, begin, end, q_ptr.dtype.element_ty,
                    HEAD_DIM, HEAD_PAD, FP8, not SHARED, LOCAL,
                )  # fmt: skip
                v = load_tile(
                    v_head_ptr, base, rows, start, begin, end, q_ptr.dtype.element_ty,
                    HEAD_DIM, HEAD_PAD, FP8, not SHARED, LOCAL,
                )  # fmt: skip
                key = start + tl.arange(0, TILE)
                seen = position_seen(key, begin, end, LOCAL)[None, :]
                m_next = ()
                l_next = ()
                acc_next = ()
                for i in tl.static_range(SUBTILES):
                    m_i, l_i, acc_i = attend_tile(
                        q[i], k, v, m[i], l[i], acc[i], seen, qk_scale, SOFTCAP, not SHARED
                    )
                    m_next += (m_i,)
                    l_next += (l_i,)
                    acc_next += (acc_i,)
                m = m_next
                l = l_next
                acc = acc_next
            m_next = ()
            l_next = ()
            acc_next = ()
            for i in tl.static_range(SUBTILES):
                m_i, l_i, acc_i = merge(total_m[i], total_l[i], total_acc[i], m[i], l[i], acc[i])
                m_next += (m_i,)
                l_next += (l_i,)
                acc_next += (acc_i,)
            total_m = m_next
            total_l = l_next
            total_acc = acc_next

        for i in tl.static_range(SUBTILES):
            row, valid = _lane_rows(members_ptr, first_member, num_members, i, GROUP, GROUP_PAD)
            held = valid[:, None] & (dim < HEAD_DIM)[None, :]
            slot = tl.load(row_slot_ptr + row, mask=valid, other=0)
            if not SHARED:
                token = tl.load(cu_q_ptr + row, mask=valid, other=0).to(tl.int64)
                sink = None
                if sinks_ptr is not None:
                    sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0)
                result = finish(total_m[i], total_l[i], total_acc[i], sink, v_scale)
                offsets = (token * stride_out + heads * HEAD_DIM)[:, None] + dim[None, :]
                tl.store(
                    out_ptr + offsets,
                    result.to(out_ptr.dtype.element_ty),
                    mask=held & (slot < 0)[:, None],
                )
            has_slot = valid & (slot >= 0)
            slot = slot + first_split - begin // SPLIT
            slot_head = slot.to(tl.int64) * (KV_HEADS * GROUP) + heads
            slot_acc_ptr = partial_acc_ptr + slot_head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(slot_acc_ptr, total_acc[i], mask=held & has_slot[:, None])
            tl.store(partial_ml_ptr + slot_head * 2, total_m[i], mask=has_slot)
            tl.store(partial_ml_ptr + slot_head * 2 + 1, total_l[i], mask=has_slot)


@triton.jit
def _merge_kernel(
    out_ptr, partial_acc_ptr, partial_ml_ptr, cu_q_ptr, kv_len_ptr,
    merge_rows_ptr, num_rows_ptr, row_slot_ptr, sinks_ptr, v_scale_ptr, stride_out,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge partial results in the order of the splits; rows without keys get zeros."""
    slices: tl.constexpr = (HEAD_DIM + DIM_BLOCK - 1) // DIM_BLOCK
    total = tl.load(num_rows_ptr) * (HEADS * slices)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        row = tl.load(merge_rows_ptr + index // (HEADS * slices))
        head = index // slices % HEADS
        dim = index % slices * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
        held = dim < HEAD_DIM
        slot = tl.load(row_slot_ptr + row)
        _, num_splits = split_range(tl.load(kv_len_ptr + row), SPLIT, WINDOW, CHUNK)
        num_splits = tl.where(slot >= 0, num_splits, 0)
        first = slot.to(tl.int64) * HEADS + head
        m = tl.full([1], float("-inf"), tl.float32)
        l = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, DIM_BLOCK], tl.float32)
        lane = tl.arange(0, 1)
        for begin in range(0, num_splits, UNROLL):
            # All loads of a round before its first merge: they are in flight together.
            m_next = ()
            l_next = ()
            acc_next = ()
            for i in tl.static_range(UNROLL):
                split = begin + i + lane
                listed = split < num_splits
                at = first + split * HEADS
                m_next += (tl.load(partial_ml_ptr + at * 2, mask=listed, other=float("-inf")),)
                l_next += (tl.load(partial_ml_ptr + at * 2 + 1, mask=listed, other=0.0),)
                acc_next += (
                    tl.load(partial_acc_ptr + at * HEAD_DIM + dim, mask=held & listed, other=0.0),
                )
            for i in tl.static_range(UNROLL):
                m, l, acc = merge(m, l, acc, m_next[i], l_next[i], acc_next[i][None, :])
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head + lane)
        v_scale = 1.0
        if v_scale_ptr is not None:
            v_scale = tl.load(v_scale_ptr + head // GROUP)
        result = finish(m, l, acc, sink, v_scale)
        token = tl.load(cu_q_ptr + row).to(tl.int64)
        offsets = token * stride_out + head * HEAD_DIM + dim
        tl.store(
            out_ptr + offsets[None, :], result.to(out_ptr.dtype.element_ty), mask=held[None, :]
        )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Attention of the rows with one query token; the output of other tokens is left as it is.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, scale
        As in `quire.kernels.attention_call.prepare_call`.
    plan
        `plan_decode` of this batch.
    options
        `softcap`, `sinks`, `k_scale`, `v_scale`, `out`: `quire.kernels.attention_call.AttentionOptions`.

    Returns
    -------
    `out`. The bits of a row depend on that row's keys only.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or option that does not fit, with its bound.
    """
    ws = plan.workspace
    call = prepare_call(q, k_cache, v_cache, block_tables, scale, ws.shape, plan.kv_len, **options)
    if not len(q):
        return call.out
    if plan.shared is not None:
        _walk(call, plan, shared=True)
    _walk(call, plan, shared=False)
    shape, config = ws.shape, ws.config
    # fmt: off
    _merge_kernel[(ws.num_merge_programs,)](
        call.out, ws.partial_acc, ws.partial_ml, plan.cu_q, plan.kv_len,
        ws.merge_rows, ws.counts[1:], ws.row_slot, call.sinks, call.v_scale, call.out.stride(0),
        HEADS=shape.num_heads, GROUP=shape.group,
        HEAD_DIM=shape.head_dim, DIM_BLOCK=merge_dims(shape.head_dim),
        SPLIT=config.split_tokens, WINDOW=shape.window or 0, CHUNK=shape.chunk or 0, UNROLL=config.merge_unroll,
        **launch_options(ws.arch, 1, programs_per_processor=config.merge_programs_per_processor),
    )
    # fmt: on
    return call.out


def merge_dims(head_dim: int) -> int:
    """Head dimensions of one warp of the reduction."""
    return min(triton.next_power_of_2(head_dim), MERGE_DIMS)


def _walk(call: AttentionCall, plan: DecodePlan, *, shared: bool) -> None:
    """Launch the persistent grid over the shared items, or over the rows' own."""
    ws, config = plan.workspace, plan.workspace.config
    if shared:
        grid, items, num_items = ws.num_shared_programs, ws.shared_items, ws.counts[2:]
        resident, num_stages = config.shared_programs_per_processor, config.shared_num_stages
    else:
        grid, items, num_items = ws.num_programs, ws.items, ws.counts
        resident, num_stages = config.programs_per_processor, config.num_stages
    members = None if plan.shared is None else plan.shared.members
    # fmt: off
    _decode_kernel[(grid,)](
        call.out, ws.partial_acc, ws.partial_ml,
        call.q, call.k_cache, call.v_cache, call.block_tables, plan.cu_q, plan.kv_len,
        items, num_items, members, ws.row_slot, call.sinks, call.k_scale, call.v_scale,
        call.qk_scale, *call.strides(),
        GROUP_PAD=triton.next_power_of_2(ws.shape.group), SPLIT=config.split_tokens, TILE=config.tile_tokens,
        SUBTILES=config.shared_subtiles if shared else 1, SHARED=shared,
        **call.constants(ws.shape), **launch_options(ws.arch, config.num_warps, num_stages, resident),
    )
    # fmt: on
