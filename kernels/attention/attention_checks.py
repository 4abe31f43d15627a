"""Argument checks of the attention kernels. Every message names the argument, the bound and the value."""

from __future__ import annotations

import torch

from quire.kernels.argument_checks import (
    FLOATS,
    check_block_size,
    check_bounds,
    check_device,
    check_head_dim,
    check_ids,
    check_power_of_two,
    check_shape,
)
from quire.kernels.tuning import DecodeConfig, PrefillConfig

# Query heads of a tile: rows of the smallest matrix instruction. Larger groups are several tiles.
TILE_HEADS = 16
# Bounds of elements: keys and values of unequal sizes; latents, and the part of a key behind its latent.
_MAX_UNEQUAL, _MAX_LATENT, _MAX_REST = 256, 512, 64


def check_rows(cu_q: torch.Tensor, kv_len: torch.Tensor, device: torch.device) -> int:
    """Check the vectors that describe a ragged batch; return its number of rows."""
    num_rows = kv_len.shape[0] if kv_len.dim() == 1 else -1
    check_ids("kv_len", kv_len, num_rows, device)
    check_ids("cu_q", cu_q, num_rows + 1, device)
    return num_rows


def check_local(window: int | None, chunk: int | None) -> None:
    """Raise if both window and chunk are given, or if the given one is not between 1 and 2**30."""
    if window is not None and chunk is not None:
        raise ValueError(f"window, chunk: at most one may be given, got {window} and {chunk}")
    for name, value in (("window", window), ("chunk", chunk)):
        if value is not None:
            check_bounds(name, value, 1, 2**30)


def check_sizes(head_dim: int, value_dim: int, values_in_keys: bool) -> None:
    """Raise unless the kernels take keys and values of these sizes."""
    if values_in_keys:
        check_bounds("value_dim with values in keys", value_dim, 8, _MAX_LATENT)
        check_bounds("head_dim - value_dim with values in keys", head_dim - value_dim, 1, _MAX_REST)
    elif value_dim != head_dim:
        check_bounds(f"head_dim with values of {value_dim}", head_dim, 8, _MAX_UNEQUAL)
        check_bounds(f"value_dim with keys of {head_dim}", value_dim, 8, _MAX_UNEQUAL)
    else:
        check_head_dim(head_dim)


def check_decode_config(config: DecodeConfig) -> None:
    """Raise unless the decode kernels can run this configuration."""
    check_power_of_two("tile_tokens", config.tile_tokens, 16)
    check_power_of_two("split_tokens", config.split_tokens, config.tile_tokens)
    for name in (
        "merge_splits",
        "merge_unroll",
        "programs_per_sm",
        "merge_programs_per_sm",
    ):
        check_bounds(name, getattr(config, name), 1, 64)


def check_prefill_config(config: PrefillConfig) -> None:
    """Raise unless the prefill kernel can run this configuration."""
    check_power_of_two("tile_tokens", config.tile_tokens, 16)
    check_power_of_two("block_m", config.block_m, TILE_HEADS)


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    values_in_keys: bool,
) -> None:
    """Check the tensors of an attention call against its plan: (query heads, KV heads), elements of a (key, value)."""
    num_heads, num_kv_heads = heads
    head_dim, value_dim = sizes
    if q.dim() != 3 or q.shape[1:] != (num_heads, head_dim):
        raise ValueError(
            f"q: must be [tokens, {num_heads}, {head_dim}] as in the plan, got {list(q.shape)}"
        )
    if q.dtype not in FLOATS:
        raise ValueError(f"q: must be bfloat16, float16 or float32, got {q.dtype}")
    _check_heads_contiguous("q", q)
    if k_cache.dim() != 4 or k_cache.shape[1::2] != (num_kv_heads, head_dim):
        raise ValueError(
            f"k_cache: must be [blocks, {num_kv_heads}, block_size, {head_dim}] as in the plan, "
            f"got {list(k_cache.shape)}"
        )
    check_block_size(k_cache.shape[2])
    check_shape("v_cache", v_cache, (*k_cache.shape[:3], value_dim))
    widths = (head_dim, head_dim if values_in_keys else value_dim)
    for name, cache, width in zip(("k_cache", "v_cache"), (k_cache, v_cache), widths, strict=True):
        check_device(name, cache, q.device)
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn) or cache.dtype != k_cache.dtype:
            raise ValueError(
                f"{name}: must be {q.dtype} as q or float8_e4m3fn, the same for k and v, got {cache.dtype}"
            )
        # The tokens of one block and head are contiguous; the stride of blocks is the same for k and v.
        if cache.stride()[2:] != (width, 1) or cache.stride(0) != k_cache.stride(0):
            raise ValueError(
                f"{name}: blocks must be contiguous, [..., {width}, 1], with equal strides of blocks for k and v, "
                f"got strides {cache.stride()}"
            )
    check_tables(block_tables, num_rows, q.device)


def check_tables(block_tables: torch.Tensor, num_rows: int, device: torch.device) -> None:
    """Raise unless `block_tables` is an int32 matrix of at least `num_rows` contiguous rows on the device."""
    if (
        block_tables.dim() != 2
        or block_tables.shape[0] < num_rows
        or block_tables.dtype != torch.int32
        or block_tables.stride(1) != 1
    ):
        raise ValueError(
            f"block_tables: must be int32 [>= {num_rows} rows, max blocks] with contiguous rows, got "
            f"{block_tables.dtype} {list(block_tables.shape)} with strides {block_tables.stride()}"
        )
    check_device("block_tables", block_tables, device)


def check_options(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check the options of an attention call: `sinks` and the scales must be contiguous float32 vectors."""
    if not scale > 0.0:
        raise ValueError(f"scale: must be > 0, got {scale}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap: must be > 0 or None, got {softcap}")
    lengths = {"sinks": q.shape[1], "k_scale": k_cache.shape[1], "v_scale": k_cache.shape[1]}
    for name, x in (("sinks", sinks), ("k_scale", k_scale), ("v_scale", v_scale)):
        if x is None:
            continue
        check_shape(name, x, (lengths[name],))
        check_device(name, x, q.device)
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"{name}: must be contiguous float32, got {x.dtype}")
    quantised = k_cache.dtype == torch.float8_e4m3fn
    if (k_scale is None) != (v_scale is None) or (k_scale is not None and not quantised):
        raise ValueError(
            "k_scale, v_scale: must be given together, and only with a float8_e4m3fn cache, got "
            f"{k_scale is not None}, {v_scale is not None} with a {k_cache.dtype} cache"
        )


def check_out(out: torch.Tensor, q: torch.Tensor, value_dim: int) -> None:
    """Raise unless `out` has q's tokens, heads, dtype and device, `value_dim` elements and contiguous heads."""
    check_shape("out", out, (*q.shape[:2], value_dim))
    check_device("out", out, q.device)
    if out.dtype != q.dtype:
        raise ValueError(f"out: must be {q.dtype} as q, got {out.dtype}")
    _check_heads_contiguous("out", out)


def _check_heads_contiguous(name: str, x: torch.Tensor) -> None:
    if x.stride()[1:] != (x.shape[2], 1):
        raise ValueError(f"{name}: heads of a token must be contiguous, got strides {x.stride()}")
