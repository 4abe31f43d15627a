"""Rotary embedding, optional QK-norm and the write of keys and values into the paged cache, in one pass.

For each token at position p and each head x of q and k, R rotary dimensions of D, h = R / 2::

    x = norm(x) * w                                   optional, over the head (`quire.kernels.rows.norm`)
    y[i]     = x[i] cos[p, i] - x[i + h] sin[p, i]                    i < h
    y[i + h] = x[i + h] cos[p, i + h] + x[i] sin[p, i + h]
    y[j]     = x[j]                                   R <= j < D: partial rotation

This is transformers' half-split ("neox") layout. The RoPE tables cos and sin, [positions, R] float32, express every
variant of the frequencies (linear, dynamic, YaRN, Llama 3, LongRoPE, multimodal sections) and include the attention
factor. The rotation is computed in float32 and rounded once.

q is written to `q_out`, k and v to their slots. A float8_e4m3fn cache stores x / scale of the head, clamped to +-448
and rounded to the nearest, ties to even, by integer operations: the same bits on every device.

Layout::

    slots [tokens] int64, block id * block_size + offset           -1: not written (padding)
    cache [num_blocks, kv_heads, block_size, head_dim], any block stride

Bytes per token: 2 heads D itemsize for q, kv_heads D (2 itemsize + 2 cache itemsize) for k and v; the RoPE tables are
read from the L2 cache. Flops: 3 R (heads + kv_heads), and 4 D more for each head with the norm.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import (
    FLOATS,
    check_block_size,
    check_bounds,
    check_device,
    check_dtype,
    check_heads,
    check_matrix,
    check_shape,
    check_vector,
)
from quire.kernels.rows.norm import inverse_rms, scale_normed
from quire.kernels.tensor_meta import CACHED_CHECKS, TensorMeta, meta_of

HEAD_BLOCK = 8  # heads of a program: loads of 16 bytes for each thread at head size 128
NUM_WARPS = 4

_E4M3_MAX_BITS = tl.constexpr(0x43E00000)  # 448.0
_E4M3_LEAST_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2^-6
# 2^14: adding it to a magnitude below 2^-6 rounds the sum to multiples of 2^-9, the step of e4m3's subnormal numbers.
_E4M3_SUBNORMAL_MAGIC_BITS = tl.constexpr(141 << 23)


@triton.jit
def e4m3_bits(x):
    """Convert float32 to bytes of float8_e4m3fn: clamped to +-448, rounded to nearest even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, _E4M3_MAX_BITS)
    # Normal numbers: the exponent's bias changes from 127 to 7, and 20 mantissa bits are rounded away.
    odd = (clamped >> 20) & 1
    normal = (clamped - (120 << 23) + 0x7FFFF + odd) >> 20
    magic = tl.full(x.shape, _E4M3_SUBNORMAL_MAGIC_BITS, tl.uint32).to(tl.float32, bitcast=True)
    shifted = (clamped.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True)
    subnormal = shifted - _E4M3_SUBNORMAL_MAGIC_BITS
    code = tl.where(clamped < _E4M3_LEAST_NORMAL_BITS, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def _load_part(ptr, offsets, dim, held, WIDTH: tl.constexpr):
    """Load [heads, WIDTH_PAD] dimensions `dim` as float32; zero where not held or dim >= WIDTH."""
    return tl.load(ptr + offsets, mask=held & (dim < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_part(ptr, offsets, x, dim, held, scale, FP8: tl.constexpr, WIDTH: tl.constexpr):
    """Store dimensions `dim` of heads into the cache or q; with FP8, store the codes of x / scale [heads]."""
    if FP8:
        value = e4m3_bits(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    else:
        value = x.to(ptr.dtype.element_ty)
    tl.store(ptr + offsets, value, mask=held & (dim < WIDTH)[None, :])


@triton.jit
def _rotate_heads(
    out_ptr, out_offset, x_ptr, x_offset, held, weight_ptr, eps,
    cos_ptr, sin_ptr, angle, angle_count, scale,
    HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    GEMMA: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads at `x_offset` and store them at `out_offset` (each [heads] int64).

    `angle` is the token's offset in the RoPE tables. `angle_count` is R / 2, or 0 for a position outside the tables.
    """
    HALF: tl.constexpr = ROTARY // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY
    half = tl.arange(0, HALF_PAD)
    rest = tl.arange(0, REST_PAD)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_base = x_offset[:, None]
    out_base = out_offset[:, None]
    if HALF > 0:
        low = _load_part(x_ptr, x_base + half[None, :], half, held, HALF)
        high = _load_part(x_ptr, x_base + HALF + half[None, :], half, held, HALF)
    if REST > 0:
        tail = _load_part(x_ptr, x_base + ROTARY + rest[None, :], rest, held, REST)
    if weight_ptr is not None:
        total = tl.zeros([x_offset.shape[0]], tl.float32)
        if HALF > 0:
            total += tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST > 0:
            total += tl.sum(tail * tail, 1)
        factor = inverse_rms(total, HEAD_DIM, eps)[:, None]
        if HALF > 0:
            weight = tl.load(weight_ptr + half, mask=half < HALF, other=0.0)[None, :]
            low = scale_normed(low * factor, weight, dtype, GEMMA).to(tl.float32)
            weight = tl.load(weight_ptr + HALF + half, mask=half < HALF, other=0.0)[None, :]
            high = scale_normed(high * factor, weight, dtype, GEMMA).to(tl.float32)
        if REST > 0:
            weight = tl.load(weight_ptr + ROTARY + rest, mask=rest < REST, other=0.0)[None, :]
            tail = scale_normed(tail * factor, weight, dtype, GEMMA).to(tl.float32)
    # q may be its own output, and Triton may compute an element in several warps: finish all loads before any store.
    tl.debug_barrier()
    if HALF > 0:
        known = half < angle_count
        nan = float("nan")
        cos_low = tl.load(cos_ptr + angle + half, mask=known, other=nan)[None, :]
        sin_low = tl.load(sin_ptr + angle + half, mask=known, other=nan)[None, :]
        cos_high = tl.load(cos_ptr + angle + HALF + half, mask=known, other=nan)[None, :]
        sin_high = tl.load(sin_ptr + angle + HALF + half, mask=known, other=nan)[None, :]
        _store_part(
            out_ptr, out_base + half[None, :], low * cos_low - high * sin_low,
            half, held, scale, FP8, HALF,
        )  # fmt: skip
        _store_part(
            out_ptr, out_base + HALF + half[None, :], high * cos_high + low * sin_high,
            half, held, scale, FP8, HALF,
        )  # fmt: skip
    if REST > 0:
        _store_part(out_ptr, out_base + ROTARY + rest[None, :], tail, rest, held, scale, FP8, REST)


# A step's slots are one row of an array [layer groups, tokens], so their alignment depends on the number of tokens.
@triton.jit(
    do_not_specialize=["num_slots", "num_positions"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _kv_write_kernel(
    q_out_ptr, k_cache_ptr, v_cache_ptr, q_ptr, k_ptr, v_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    q_weight_ptr, k_weight_ptr, k_scale_ptr, v_scale_ptr,
    eps, num_slots, num_positions, stride_q_out, stride_q, stride_k, stride_v, stride_block, stride_head, stride_angle,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, FULL_PAD: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, GEMMA: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Compute HEAD_BLOCK heads of one token: of q, or of k and v."""
    Q_BLOCKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angle = token * 0
    angle_count = 0
    if ROTARY > 0:
        position = tl.load(positions_ptr + token).to(tl.int64)
        in_table = (position >= 0) & (position < num_positions)
        angle = tl.where(in_table, position, 0) * stride_angle
        angle_count = tl.where(in_table, ROTARY // 2, 0)
    ones = tl.full([HEAD_BLOCK], 1.0, tl.float32)
    if part < Q_BLOCKS:
        head = part * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        held = (head < HEADS)[:, None]
        _rotate_heads(
            q_out_ptr, token * stride_q_out + head * HEAD_DIM, q_ptr, token * stride_q + head * HEAD_DIM,
            held, q_weight_ptr, eps, cos_ptr, sin_ptr, angle, angle_count, ones,
            HEAD_DIM, ROTARY, HALF_PAD, REST_PAD, GEMMA, False,
        )  # fmt: skip
    else:
        head = (part - Q_BLOCKS) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        slot = tl.load(slots_ptr + token)
        # The host does not check slots, which are on the device: a token with a slot outside the cache is not written.
        stored = (slot >= 0) & (slot < num_slots)
        held = (head < tl.where(stored, KV_HEADS, 0))[:, None]
        block = slot // BLOCK_SIZE
        page = block * stride_block + head * stride_head + slot % BLOCK_SIZE * HEAD_DIM
        k_scale = ones
        v_scale = ones
        if k_scale_ptr is not None:
            k_scale = tl.load(k_scale_ptr + head, mask=head < KV_HEADS, other=1.0)
            v_scale = tl.load(v_scale_ptr + head, mask=head < KV_HEADS, other=1.0)
        _rotate_heads(
            k_cache_ptr, page, k_ptr, token * stride_k + head * HEAD_DIM,
            held, k_weight_ptr, eps, cos_ptr, sin_ptr, angle, angle_count, k_scale,
            HEAD_DIM, ROTARY, HALF_PAD, REST_PAD, GEMMA, FP8,
        )  # fmt: skip
        dim = tl.arange(0, FULL_PAD)
        from_offset = (token * stride_v + head * HEAD_DIM)[:, None] + dim[None, :]
        v = _load_part(v_ptr, from_offset, dim, held, HEAD_DIM)
        _store_part(v_cache_ptr, page[:, None] + dim[None, :], v, dim, held, v_scale, FP8, HEAD_DIM)


def write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    gemma: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, and write k and v into the cache.

    Parameters
    ----------
    q, k, v
        [tokens, heads or kv_heads, head_dim] bfloat16, float16 or float32. The heads of a token are contiguous, so
        slices of one fused projection are allowed. k is not changed.
    k_cache, v_cache
        [num_blocks, kv_heads, block_size, head_dim] in the dtype of q or float8_e4m3fn. The tokens of one block and
        head are contiguous; both have the same strides.
    slots
        [tokens] int64, each slot at most once. A token with a slot outside the cache, such as -1, is not written.
    positions
        [tokens] int32 or int64, rows of `cos` and `sin`. A position outside them gives NaN in the rotated dimensions.
    cos, sin
        [positions, rotary_dim] float32, rotary_dim even and <= head_dim; None: no rotation.
    q_norm, k_norm
        [head_dim] weights of the RMS norm of each head, in the dtype of q or float32; both or neither.
    eps, gemma
        Options of the norm: the number added to the mean square, and whether to scale by 1 + weight (Gemma).
    k_scale, v_scale
        [kv_heads] float32 > 0 for a float8_e4m3fn cache, which then holds x / scale. None: 1.
    q_out
        [tokens, heads, head_dim] in the dtype of q; None: q itself.

    Returns
    -------
    `q_out`.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    q_out = q if q_out is None else q_out
    operands = (
        *(q, k, v, k_cache, v_cache, slots, positions, cos, sin),
        *(q_norm, k_norm, k_scale, v_scale, q_out),
    )
    grid, numbers, constants = _checked(eps, gemma, *map(meta_of, operands))
    if grid[0]:
        if constants["FP8"]:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        _kv_write_kernel[grid](
            q_out, k_cache, v_cache, q, k, v, slots, positions, cos, sin, q_norm, k_norm, k_scale, v_scale,
            eps, *numbers, **constants, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out


@functools.lru_cache(CACHED_CHECKS)
def _checked(
    eps: float,
    gemma: bool,
    q: TensorMeta,
    k: TensorMeta,
    v: TensorMeta,
    k_cache: TensorMeta,
    v_cache: TensorMeta,
    slots: TensorMeta,
    positions: TensorMeta | None,
    cos: TensorMeta | None,
    sin: TensorMeta | None,
    q_norm: TensorMeta | None,
    k_norm: TensorMeta | None,
    k_scale: TensorMeta | None,
    v_scale: TensorMeta | None,
    q_out: TensorMeta,
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int | bool]]:
    """Check the operands; return the grid, the kernel's scalar arguments after eps, and its compile-time arguments."""
    _check_heads_of_tokens(q, k, v, q_out)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    check_heads(heads, kv_heads, head_dim)
    _check_cache(q, k_cache, v_cache, kv_heads)
    check_vector("slots", slots, tokens, (torch.int64,), q.device)
    rotary = _check_tables(q, positions, cos, sin)
    _check_factors(q, k_cache, (q_norm, k_norm), (k_scale, v_scale), eps)
    num_blocks, _, block_size, _ = k_cache.shape
    num_positions, stride_angle = (0, 0) if cos is None else (cos.shape[0], cos.stride(0))
    numbers = (
        *(num_blocks * block_size, num_positions),
        *(x.stride(0) for x in (q_out, q, k, v)),
        *(*k_cache.strides[:2], stride_angle),
    )
    constants = dict(
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_BLOCK=HEAD_BLOCK,
        GEMMA=gemma,
        FP8=k_cache.dtype == torch.float8_e4m3fn,
        **head_layout(head_dim, rotary),
    )
    parts = triton.cdiv(heads, HEAD_BLOCK) + triton.cdiv(kv_heads, HEAD_BLOCK)
    return (tokens, parts), numbers, constants


def head_layout(head_dim: int, rotary: int) -> dict[str, int]:
    """Compile-time arguments for a head whose first `rotary` dimensions are rotated."""
    return dict(
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        HALF_PAD=triton.next_power_of_2(max(rotary // 2, 1)),
        REST_PAD=triton.next_power_of_2(max(head_dim - rotary, 1)),
        FULL_PAD=triton.next_power_of_2(head_dim),
    )


def _check_heads_of_tokens(q: TensorMeta, k: TensorMeta, v: TensorMeta, q_out: TensorMeta) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 3:
            raise ValueError(f"{name}: must be [tokens, heads, head_dim], got {list(x.shape)}")
    check_dtype("q", q, FLOATS)
    check_shape("k", k, (q.shape[0], k.shape[1], q.shape[2]))
    check_shape("v", v, tuple(k.shape))
    check_shape("q_out", q_out, tuple(q.shape))
    for name, x in (("q", q), ("k", k), ("v", v), ("q_out", q_out)):
        check_dtype(name, x, (q.dtype,))
        check_device(name, x, q.device)
        if x.stride()[1:] != (x.shape[2], 1):
            raise ValueError(
                f"{name}: heads of a token must be contiguous, got strides {x.stride()}"
            )


def _check_cache(q: TensorMeta, k_cache: TensorMeta, v_cache: TensorMeta, kv_heads: int) -> None:
    if k_cache.dim() != 4 or tuple(k_cache.shape[1::2]) != (kv_heads, q.shape[2]):
        raise ValueError(
            f"k_cache: must be [blocks, {kv_heads}, block_size, {q.shape[2]}], got {list(k_cache.shape)}"
        )
    check_block_size(k_cache.shape[2])
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, cache, (q.dtype, torch.float8_e4m3fn))
        check_dtype(name, cache, (k_cache.dtype,))
        check_device(name, cache, q.device)
        if cache.stride()[2:] != (q.shape[2], 1) or cache.stride() != k_cache.stride():
            raise ValueError(
                f"{name}: blocks must be contiguous, with equal strides for k and v, got strides {cache.stride()}"
            )


def _check_tables(
    q: TensorMeta,
    positions: TensorMeta | None,
    cos: TensorMeta | None,
    sin: TensorMeta | None,
) -> int:
    """Check the arguments of the rotation; return the number of rotated dimensions, 0 without rotation."""
    if positions is None and cos is None and sin is None:
        return 0
    if positions is None or cos is None or sin is None:
        given = [x is not None for x in (positions, cos, sin)]
        raise ValueError(f"positions, cos, sin: must be given together, got {given}")
    check_vector("positions", positions, q.shape[0], (torch.int32, torch.int64), q.device)
    check_matrix("cos", cos, (None, None), (torch.float32,), q.device)
    check_matrix("sin", sin, tuple(cos.shape), (torch.float32,), q.device)
    if cos.stride() != sin.stride():
        raise ValueError(f"sin: must have the strides of cos, {cos.stride()}, got {sin.stride()}")
    rotary = cos.shape[1]
    check_bounds("rotary_dim", rotary, 2, q.shape[2])
    if rotary % 2:
        raise ValueError(f"rotary_dim: must be even, got {rotary}")
    return rotary


def _check_factors(
    q: TensorMeta,
    k_cache: TensorMeta,
    norms: tuple[TensorMeta | None, TensorMeta | None],
    scales: tuple[TensorMeta | None, TensorMeta | None],
    eps: float,
) -> None:
    """Check the norms' weights and the cache's scales."""
    for names, pair in ((("q_norm", "k_norm"), norms), (("k_scale", "v_scale"), scales)):
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(f"{names[0]}, {names[1]}: must be given together, got one")
    if norms[0] is not None:
        for name, x in zip(("q_norm", "k_norm"), norms, strict=True):
            check_vector(name, x, q.shape[2], (q.dtype, torch.float32), q.device)
        check_dtype("k_norm", norms[1], (norms[0].dtype,))
        if not eps >= 0.0:
            raise ValueError(f"eps: must be >= 0, got {eps}")
    if scales[0] is not None:
        check_dtype("k_cache, with scales", k_cache, (torch.float8_e4m3fn,))
        for name, x in zip(("k_scale", "v_scale"), scales, strict=True):
            check_vector(name, x, k_cache.shape[1], (torch.float32,), q.device)
