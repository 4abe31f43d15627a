"""Paged prefill attention, causal: the new tokens of each row of a ragged batch attend to all keys up to their own.

Query tokens at positions p = kv_len - q_len ... kv_len - 1 of row r attend to keys 0 ... p of the same row; the formula
is that of `quire.kernels.attention.attention_decode`. A work item is (query tile, KV head). The rows of its matrix tile
are BLOCK_M pairs of a query and a head of the KV group (64 rows and more: Hopper's wgmma), so the keys of a KV head are
loaded once for its whole group. A group of more than 16 heads is several items. The loop over tiles of keys has three
parts, and only the edges are masked::

    keys      0 ...        [ edge | full | full | full | edge ]      ... kv_len
              not visited   window         unmasked       diagonal

The first part exists only with a window or with chunked attention: the loop then starts at the first tile that any
query of the item sees. Tiles begin at absolute multiples of `tile_tokens`, and a key that a query does not see adds an
exact zero. So a token's bits depend neither on the prefill chunk that it arrived in nor on the batch.

The items are listed on the device (`plan_prefill`). Within a row the last query tile, which has the most keys, comes
first. KV heads are the fastest index, so the long items of all heads start first.

Layout. q, out [tokens, heads, D or V]; cache [num_blocks, kv_heads, block_size, D or V], any block stride. Keys have D
elements and values V; in latent attention a value is the beginning of its key.

Flops: 2 heads (D + V) (q_len kv_len - q_len (q_len - 1) / 2) for each row, plus at most one tile of keys at each edge
of a query tile. Bytes: q and out once; K and V once for each query tile, from the L2 cache if the items of a KV head
run at the same time.
"""

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl

from quire.kernels.attention.attention_call import AttentionOptions, prepare_call
from quire.kernels.attention.attention_math import (
    attend_tile,
    finish,
    first_key,
    head_scales,
    load_keys_values,
    load_query,
)
from quire.kernels.attention.prefill_plan import PrefillPlan
from quire.kernels.tuning import device_arch, launch_options


@triton.jit
def _walk_keys(
    m, l, acc, q, position, k_ptr, v_ptr, table_ptr, low, high, begin, end, qk_scale, stride_block,
    HEAD_DIM: tl.constexpr, KEY_PART: tl.constexpr, KEY_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key tiles in [low, high) to the online softmax. No query of the item sees a key outside [begin, end)."""
    LOCAL: tl.constexpr = WINDOW > 0 or CHUNK > 0
    for start in range(low, high, TILE):
        k, v = load_keys_values(
            k_ptr, v_ptr, table_ptr, start, begin, end, stride_block, q[0].dtype, HEAD_DIM, KEY_PART, KEY_PAD,
            REST_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE, FP8, MASKED, LOCAL,
        )  # fmt: skip
        key = (start + tl.arange(0, TILE))[None, :]
        seen = key <= position[:, None]
        if LOCAL:
            seen = seen & (key >= first_key(position, WINDOW, CHUNK)[:, None])
        m, l, acc = attend_tile(q, k, v, m, l, acc, seen, qk_scale, SOFTCAP, MASKED)
    return m, l, acc


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "num_tiles_ptr"],
)
def _prefill_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, cu_q_ptr, kv_len_ptr, tiles_ptr, num_tiles_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr,
    scale, stride_q, stride_out, stride_table, stride_block, stride_k_head, stride_v_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_PART: tl.constexpr, KEY_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Compute one query tile of one part of a KV group; programs beyond the end of the list do nothing."""
    PARTS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    index = tl.program_id(0) // (KV_HEADS * PARTS)
    part = tl.program_id(0) % (KV_HEADS * PARTS)
    head = part // PARTS
    if index < tl.load(num_tiles_ptr):
        row = tl.load(tiles_ptr + index * 2)
        first_query = tl.load(tiles_ptr + index * 2 + 1)
        first_token = tl.load(cu_q_ptr + row)
        q_len = tl.load(cu_q_ptr + row + 1) - first_token
        context = tl.load(kv_len_ptr + row) - q_len

        lane = tl.arange(0, BLOCK_M)
        queries: tl.constexpr = BLOCK_M // TILE_HEADS
        end_query = tl.minimum(first_query + queries, q_len)
        query = first_query + lane // TILE_HEADS
        valid = (lane < queries * TILE_HEADS) & (query < q_len)
        # Lanes without a query repeat the last query, so that they see keys; their results are not stored.
        query = tl.minimum(query, end_query - 1)
        position = context + query
        heads = part % PARTS * TILE_HEADS + lane % TILE_HEADS
        if GROUP % TILE_HEADS != 0:
            valid = valid & (heads < GROUP)
            heads = tl.minimum(heads, GROUP - 1)
        heads = head * GROUP + heads
        token = (first_token + query).to(tl.int64)
        q = load_query(
            q_ptr, token * stride_q + heads * HEAD_DIM, valid, HEAD_DIM, KEY_PART, KEY_PAD, REST_PAD
        )

        first = context + first_query
        last = context + end_query - 1
        begin = first_key(first, WINDOW, CHUNK)
        end = last + 1
        # All queries see every key of [full_low, full_high). With chunked attention this range is empty for a query
        # tile that spans two chunks.
        low = begin // TILE * TILE
        full_high = (first + 1) // TILE * TILE
        full_low = low
        if WINDOW > 0 or CHUNK > 0:
            full_low = (first_key(last, WINDOW, CHUNK) + TILE - 1) // TILE * TILE
            full_low = tl.minimum(full_low, (end + TILE - 1) // TILE * TILE)
        full_high = tl.maximum(full_high, full_low)

        table_ptr = tables_ptr + tl.cast(row, tl.int64) * stride_table
        k_head_ptr = k_ptr + tl.cast(head, tl.int64) * stride_k_head
        v_head_ptr = None
        if v_ptr is not None:
            v_head_ptr = v_ptr + tl.cast(head, tl.int64) * stride_v_head
        qk_scale, v_scale = head_scales(k_scale_ptr, v_scale_ptr, head, scale)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
        if WINDOW > 0 or CHUNK > 0:
            m, l, acc = _walk_keys(
                m, l, acc, q, position, k_head_ptr, v_head_ptr, table_ptr, low, full_low, begin, end, qk_scale,
                stride_block, HEAD_DIM, KEY_PART, KEY_PAD, REST_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE,
                WINDOW, CHUNK, SOFTCAP, FP8, True,
            )  # fmt: skip
        m, l, acc = _walk_keys(
            m, l, acc, q, position, k_head_ptr, v_head_ptr, table_ptr, full_low, full_high, begin, end, qk_scale,
            stride_block, HEAD_DIM, KEY_PART, KEY_PAD, REST_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE,
            WINDOW, CHUNK, SOFTCAP, FP8, False,
        )  # fmt: skip
        m, l, acc = _walk_keys(
            m, l, acc, q, position, k_head_ptr, v_head_ptr, table_ptr, full_high, end, begin, end, qk_scale,
            stride_block, HEAD_DIM, KEY_PART, KEY_PAD, REST_PAD, VALUE_DIM, VALUE_PAD, BLOCK_SIZE, TILE,
            WINDOW, CHUNK, SOFTCAP, FP8, True,
        )  # fmt: skip
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + heads)
        result = finish(m, l, acc, sink, v_scale)
        dim = tl.arange(0, VALUE_PAD)
        held = valid[:, None] & (dim < VALUE_DIM)[None, :]
        offsets = (token * stride_out + heads * VALUE_DIM)[:, None] + dim[None, :]
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=held)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: PrefillPlan,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Compute causal attention for the rows that the plan lists; the output of other rows is not written.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, scale
        Queries, the layer's cache, its block tables and the factor on q.k; `prepare_call` has shapes and dtypes.
    plan
        `plan_prefill` of this batch.
    options
        `softcap`, `sinks`, `k_scale`, `v_scale` and `out`, described at `attention_call.AttentionOptions`.

    Returns
    -------
    `out`. A token's bits depend on its row's keys only, not on the prefill chunk or the batch.

    Raises
    ------
    ValueError
        A shape, dtype, stride, device or option is not supported; the message has the bound.
    """
    shape, config = plan.shape, plan.config
    call = prepare_call(q, k_cache, v_cache, block_tables, scale, shape, plan.kv_len, **options)
    max_tiles = plan.tiles.shape[0]
    if not q.shape[0] or not max_tiles:
        return call.out
    # fmt: off
    _prefill_kernel[(max_tiles * shape.num_kv_heads * shape.group_tiles,)](
        call.out, call.q, call.k_cache, call.v_cache, call.block_tables,
        plan.cu_q, plan.kv_len, plan.tiles, plan.num_tiles, call.sinks, call.k_scale, call.v_scale,
        call.qk_scale, *call.launch.strides, BLOCK_M=config.block_m, TILE=config.tile_tokens,
        **call.launch.constants,
        **launch_options(device_arch(q.device), config.num_warps, config.num_stages),
    )
    # fmt: on
    return call.out
