"""RMS norm, with an optional residual addition before it.

For a row x of n numbers, with the residual stream r and weights w::

    s = x + r                          rounded to the dtype: the new residual stream
    y = s / sqrt(mean(s^2) + eps)
    out = round(y) * w                 Llama form: y is rounded to the dtype first, as transformers and vLLM do
    out = y * (1 + w)                  Gemma form: rounded once

Arithmetic is float32 with IEEE division and square root. A program holds one row in registers. Its block size follows
from n alone, so the order of additions, and with it the bits of a row, do not depend on the batch.

Layout. x, r, out, s [tokens, n]; rows contiguous, any stride between rows. `out` may be x and s may be r.

Bytes per row: 2 n itemsize, or 4 n itemsize with the residual; the weights come from the L2 cache. Flops: 4 n.
"""

from __future__ import annotations

import functools
from typing import overload

import torch
import triton
import triton.language as tl

from quire.kernels import tuning
from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix, check_vector
from quire.kernels.tensor_meta import CACHED_CHECKS, TensorMeta, meta_of

MAX_HIDDEN = 1 << 15  # 32 elements for each thread of the largest program


@triton.jit
def inverse_rms(square_sum, COUNT: tl.constexpr, eps):
    """1 / sqrt(square_sum / COUNT + eps), each operation rounded correctly (IEEE 754)."""
    mean = tl.div_rn(square_sum, tl.zeros_like(square_sum) + COUNT)
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def scale_normed(y, weight, dtype: tl.constexpr, GEMMA: tl.constexpr):
    """y [...] float32 times the weights as `dtype`, rounded as in the Llama or the Gemma form."""
    if GEMMA:
        y = y * (1.0 + weight.to(tl.float32))
    else:
        y = y.to(dtype).to(tl.float32) * weight.to(tl.float32)
    return y.to(dtype)


@triton.jit
def _rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr,
    eps, stride_out, stride_sum, stride_x, stride_residual,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, GEMMA: tl.constexpr,
):  # fmt: skip
    """Compute one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    held = column < HIDDEN
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + column, mask=held, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * stride_residual + column, mask=held, other=0.0).to(
            tl.float32
        )
        rounded = x.to(dtype)
        tl.store(sum_ptr + row * stride_sum + column, rounded, mask=held)
        x = rounded.to(tl.float32)
    factor = inverse_rms(tl.sum(x * x, axis=0, keep_dims=True), HIDDEN, eps)
    weight = tl.load(weight_ptr + column, mask=held, other=0.0)
    y = scale_normed(x * factor, weight, dtype, GEMMA)
    tl.store(out_ptr + row * stride_out + column, y, mask=held)


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: None = None,
    gemma: bool = False,
    out: torch.Tensor | None = None,
    residual_out: None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor,
    gemma: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    gemma: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the RMS norm of each row of x, or of x + residual.

    Parameters
    ----------
    x
        [tokens, hidden] bfloat16, float16 or float32; 1 <= hidden <= `MAX_HIDDEN`.
    weight
        [hidden] in the dtype of x or float32.
    eps
        Added to the mean square, >= 0.
    residual
        [tokens, hidden] in the dtype of x.
    gemma
        Scale by 1 + weight instead of weight, without the rounding before it.
    out, residual_out
        [tokens, hidden] in the dtype of x; None allocates. `out` may be x, `residual_out` may be `residual`.

    Returns
    -------
    `out`; with a residual (`out`, `residual_out`), where `residual_out` is x + residual.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    if residual is None and residual_out is not None:
        raise ValueError("residual_out: needs a residual, got none")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is not None and residual_out is None:
        residual_out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    operands = (x, weight, residual, out, residual_out)
    rows, strides, constants = _checked(eps, gemma, *map(meta_of, operands))
    if rows:
        _rms_norm_kernel[(rows,)](
            out, residual_out, x, residual, weight, eps, *strides, **constants
        )
    return out if residual is None else (out, residual_out)


@functools.lru_cache(CACHED_CHECKS)
def _checked(
    eps: float,
    gemma: bool,
    x: TensorMeta,
    weight: TensorMeta,
    residual: TensorMeta | None,
    out: TensorMeta,
    residual_out: TensorMeta | None,
) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Check the operands; return rows, strides of out, residual_out, x and residual, and compile-time arguments."""
    check_matrix("x", x, (None, None), FLOATS, x.device)
    shape, kind = tuple(x.shape), (x.dtype,)
    check_bounds("hidden", shape[1], 1, MAX_HIDDEN)
    check_vector("weight", weight, shape[1], (x.dtype, torch.float32), x.device)
    if not eps >= 0.0:
        raise ValueError(f"eps: must be >= 0, got {eps}")
    check_matrix("out", out, shape, kind, x.device)
    if residual is not None:
        check_matrix("residual", residual, shape, kind, x.device)
        check_matrix("residual_out", residual_out, shape, kind, x.device)
    block = triton.next_power_of_2(shape[1])
    num_warps = norm_warps(block, tuning.device_arch(x.device))
    constants = dict(HIDDEN=shape[1], BLOCK=block, GEMMA=gemma, num_warps=num_warps)
    strides = tuple(0 if f is None else f.stride(0) for f in (out, residual_out, x, residual))
    return shape[0], strides, {**constants, "enable_fp_fusion": False}


def norm_warps(block: int, arch: str) -> int:
    """Warps of a program: each thread has 16 elements, 32 in the largest blocks. The batch has no influence."""
    lanes = tuning.warp_lanes(arch)
    return min(max(block // (16 * lanes), 1), tuning.PROGRAM_THREADS // lanes)
