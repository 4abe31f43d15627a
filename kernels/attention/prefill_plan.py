"""Work lists of prefill attention, built on the device: no host synchronisation, usable in CUDA graphs.

One launch per step serves all layers with the same window. An item is a tile of query tokens of one row. The heads of
a KV group share the tile's `block_m` rows, so it covers ``block_m // group`` tokens (at least ``block_m // 16``: of a
group with more heads, several programs compute 16 each)::

    q_len    70                          1        40               (block_m 128, group 4: 32 tokens a tile)
    tiles    (0,64) (0,32) (0,0)         none     (2,32) (2,0)     (row, first query token)

Rows with fewer than `min_query_tokens` query tokens are not listed: decode attention computes them. Within a row the
last tile, which sees the most keys, is listed first.

Bytes: 8 for each tile; each planner program reads the lengths of all rows (4 B each, from L2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels import argument_checks
from quire.kernels.attention import attention_checks
from quire.kernels.attention.attention_call import AttentionShape
from quire.kernels.attention.decode_plan import MAX_ROWS, block_rows
from quire.kernels.tuning import PrefillConfig, device_arch, launch_options, prefill_config


@triton.jit(
    do_not_specialize=["num_rows", "min_query_tokens"],
    do_not_specialize_on_alignment=["num_tiles_ptr"],
)
def _plan_prefill_kernel(
    tiles_ptr, num_tiles_ptr, cu_q_ptr, num_rows, min_query_tokens,
    TILE_QUERIES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """List the query tiles of row i = program_id, the last one (which sees the most keys) first."""
    here = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)
    valid = row < num_rows
    q_len = tl.load(cu_q_ptr + row + 1, mask=valid, other=0) - tl.load(
        cu_q_ptr + row, mask=valid, other=0
    )
    tiles = tl.where(q_len >= min_query_tokens, (q_len + TILE_QUERIES - 1) // TILE_QUERIES, 0)
    if here == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    my_start = tl.sum(tl.where(row < here, tiles, 0), 0)
    my_tiles = tl.sum(tl.where(row == here, tiles, 0), 0)
    lane = tl.arange(0, 128)
    for done in range(0, my_tiles, 128):
        index = done + lane
        tile = tiles_ptr + (my_start + index) * 2
        tl.store(tile, tl.zeros_like(lane) + here, mask=index < my_tiles)
        tl.store(tile + 1, (my_tiles - 1 - index) * TILE_QUERIES, mask=index < my_tiles)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Query tiles of one batch for `prefill_attention`."""

    config: PrefillConfig
    shape: AttentionShape
    cu_q: torch.Tensor  # [rows + 1] int32
    kv_len: torch.Tensor  # [rows] int32
    tiles: torch.Tensor  # [max_tiles, 2] int32: row, first query token in the row
    num_tiles: torch.Tensor  # [1] int32


def plan_prefill(
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    chunk: int | None = None,
    value_dim: int | None = None,
    values_in_keys: bool = False,
    min_query_tokens: int = 2,
    max_rows: int | None = None,
    config: PrefillConfig | None = None,
    tiles: torch.Tensor | None = None,
) -> PrefillPlan:
    """List the query tiles of one batch, once per step before the first layer.

    Parameters
    ----------
    cu_q
        [rows + 1] int32, first query token of each row.
    kv_len
        [rows] int32, tokens in the cache, this step's included.
    num_tokens
        Query tokens of the batch: the first dimension of q.
    num_heads, num_kv_heads, head_dim, window, chunk
        Heads of the layers and the keys that a query sees (the fields of `AttentionShape`).
    value_dim, values_in_keys
        Elements of a value, and whether a value is the beginning of its key.
    dtype
        Dtype of q. float32 has another configuration than the 16-bit types.
    min_query_tokens
        Rows with fewer query tokens are not listed. 2 leaves decode rows to `decode_attention`. 1 lists them here, so
        that a token's bits are the same whether it is decoded or prefilled again.
    max_rows
        Most rows of any batch, at most 4096. Batches with the same bound use the same compiled planner. None takes the
        number of rows of this batch.
    config
        Replaces the configuration from `quire.kernels.tuning`.
    tiles
        [num_tokens // tokens of a tile + rows + 1, 2] int32 buffer; None allocates it.

    Raises
    ------
    ValueError
        A shape, dtype or number is outside its bounds.
    """
    num_rows = attention_checks.check_rows(cu_q, kv_len, cu_q.device)
    max_rows = num_rows if max_rows is None else max_rows
    argument_checks.check_bounds("max_rows", max_rows, 1, MAX_ROWS)
    argument_checks.check_bounds("rows of kv_len", num_rows, 1, max_rows)
    argument_checks.check_bounds("num_tokens", num_tokens, 0, 2**24)
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, window, chunk, value_dim, values_in_keys
    )
    argument_checks.check_bounds("min_query_tokens", min_query_tokens, 1, 2**24)
    if config is None:
        config = prefill_config(device_arch(cu_q.device), shape.largest_dim, dtype)
    attention_checks.check_prefill_config(config)
    tile_queries = config.block_m // shape.tile_heads
    max_tiles = num_tokens // tile_queries + num_rows
    if tiles is None:
        tiles = torch.empty(max_tiles + 1, 2, dtype=torch.int32, device=cu_q.device)
    elif tiles.shape[0] <= max_tiles or tiles.shape[1:] != (2,) or tiles.dtype != torch.int32:
        raise ValueError(
            f"tiles: must be int32 [>= {max_tiles + 1}, 2], got {tiles.dtype} {list(tiles.shape)}"
        )
    # The buffer's last entry holds the count.
    num_tiles = tiles[-1]
    _plan_prefill_kernel[(num_rows,)](
        tiles, num_tiles, cu_q, num_rows, min_query_tokens,
        TILE_QUERIES=tile_queries, BLOCK_ROWS=block_rows(max_rows),
        **launch_options(device_arch(cu_q.device), 4),
    )  # fmt: skip
    return PrefillPlan(
        config=config,
        shape=shape,
        cu_q=cu_q,
        kv_len=kv_len,
        tiles=tiles[:max_tiles],
        num_tiles=num_tiles,
    )
