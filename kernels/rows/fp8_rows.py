"""Quantisation of rows to float8_e4m3fn with one scale per row: the activations and the weights of FP8 GEMMs.

For a row x of n numbers::

    a = min(max |x|, bound)          s = a / 448, or 1 for a row of zeros
    code = x / s, clamped to +-448 and rounded to the nearest, ties to even

The kernel uses IEEE divisions and `quire.kernels.rows.kv_write.e4m3_bits`, so the bits are those of
`tests/kernels/reference.py`. Each program computes one row. It reads a row of up to `MAX_BLOCK` elements
once and a longer row twice, the second time from the L2 cache.

Layout. x [rows, n], rows contiguous, any stride between rows; codes [rows, n] and scales [rows, 1] contiguous.

Bytes per row: n (itemsize + 1). Flops: about 20 n: one division, the others integer operations of the rounding.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix
from quire.kernels.rows.kv_write import e4m3_bits

MAX_BLOCK = 8192  # elements that a program holds in registers: 32 for each thread of 8 warps
MAX_COLUMNS = 1 << 20
NUM_WARPS = 8


@triton.jit
def _quantise_rows_kernel(
    codes_ptr, scales_ptr, x_ptr, bound, stride_x, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantise one row."""
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * stride_x
    codes_row_ptr = codes_ptr + row * COLUMNS
    column = tl.arange(0, BLOCK)
    x = tl.load(x_row_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0, keep_dims=True)  # [1]
    for start in range(BLOCK, COLUMNS, BLOCK):
        held = start + column < COLUMNS
        part = tl.load(x_row_ptr + start + column, mask=held, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=0, keep_dims=True))
    largest = tl.minimum(largest, bound)
    scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    scale = tl.where(scale > 0.0, scale, 1.0)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    scales = tl.broadcast_to(scale, (BLOCK,))
    tl.store(codes_row_ptr + column, e4m3_bits(tl.div_rn(x, scales)), mask=column < COLUMNS)
    for start in range(BLOCK, COLUMNS, BLOCK):
        held = start + column < COLUMNS
        part = tl.load(x_row_ptr + start + column, mask=held, other=0.0).to(tl.float32)
        tl.store(codes_row_ptr + start + column, e4m3_bits(tl.div_rn(part, scales)), mask=held)


def quantise_rows(x: torch.Tensor, bound: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to codes and one scale: x is about codes * scales.

    Parameters
    ----------
    x
        [rows, n] bfloat16, float16 or float32, rows contiguous; 1 <= n <= `MAX_COLUMNS`.
    bound
        > 0: numbers of larger magnitude are clamped to it. None: no clamping.

    Returns
    -------
    [rows, n] float8_e4m3fn and [rows, 1] float32 > 0.

    Raises
    ------
    ValueError
        A shape, dtype, stride or bound is not supported; the message has the limit.
    """
    check_matrix("x", x, (None, None), FLOATS, x.device)
    rows, columns = x.shape
    check_bounds("n", columns, 1, MAX_COLUMNS)
    if bound is not None and not bound > 0.0:
        raise ValueError(f"bound: must be > 0 or None, got {bound}")
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        _quantise_rows_kernel[(rows,)](
            codes, scales, x, math.inf if bound is None else float(bound), x.stride(0),
            COLUMNS=columns, BLOCK=row_block(columns), num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def row_block(columns: int) -> int:
    """Number of elements that a program holds in registers at the same time."""
    return min(triton.next_power_of_2(columns), MAX_BLOCK)
