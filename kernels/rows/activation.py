"""Gated activations on the fused gate and up projection.

For a row [gate | up] of 2 n numbers::

    silu_mul       gate / (1 + e^-gate) * up
    gelu_tanh_mul  gate / (1 + e^-2u) * up      u = sqrt(2 / pi) (gate + 0.044715 gate^3)

The second equals 0.5 gate (1 + tanh u) but avoids the cancellation in 1 + tanh u. Both activations are computed in
float32 and rounded to the dtype before the multiplication by `up`, as the separate operations do. So the fusion changes
no rounding.

Layout. gate_up [tokens, 2 n], out [tokens, n]; rows contiguous, any stride between rows. Elements are independent, so
no bit depends on the batch.

Bytes per row: 3 n itemsize. Flops: about 10 n, with one exponential and one division per element.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix
from quire.kernels.tensor_meta import CACHED_CHECKS, TensorMeta, meta_of

BLOCK = 1024
NUM_WARPS = 4
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def _gated_kernel(
    out_ptr, x_ptr, stride_out, stride_x, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute BLOCK results of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < SIZE
    x_row_ptr = x_ptr + row * stride_x
    gate = tl.load(x_row_ptr + column, mask=held, other=0.0).to(tl.float32)
    up = tl.load(x_row_ptr + SIZE + column, mask=held, other=0.0).to(tl.float32)
    if GELU:
        exponent = (-2.0 * SQRT_2_OVER_PI) * (gate + 0.044715 * gate * gate * gate)
    else:
        exponent = -gate
    activated = gate / (1.0 + tl.exp(exponent))
    activated = activated.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        out_ptr + row * stride_out + column,
        (activated * up).to(out_ptr.dtype.element_ty),
        mask=held,
    )


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute silu(gate) * up.

    Parameters
    ----------
    gate_up
        [tokens, 2 n] bfloat16, float16 or float32: gate in the first n columns, up in the others.
    out
        [tokens, n] in the same dtype, without overlap with `gate_up`; None allocates it.

    Returns
    -------
    `out`.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    return _gated(gate_up, out, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute gelu(gate, approximate="tanh") * up; takes the arguments of `silu_mul`."""
    return _gated(gate_up, out, gelu=True)


def _gated(gate_up: torch.Tensor, out: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    rows, size, strides = _checked(meta_of(gate_up), meta_of(out))
    out = gate_up.new_empty(rows, size) if out is None else out
    if rows:
        _gated_kernel[(rows, triton.cdiv(size, BLOCK))](
            out,
            gate_up,
            *strides,
            SIZE=size,
            GELU=gelu,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


@functools.lru_cache(CACHED_CHECKS)
def _checked(gate_up: TensorMeta, out: TensorMeta | None) -> tuple[int, int, tuple[int, int]]:
    """Check the operands; return rows, n, and the row strides of out and gate_up."""
    check_matrix("gate_up", gate_up, (None, None), FLOATS, gate_up.device)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up: must have an even number of columns, got {columns}")
    size = columns // 2
    # The grid's second dimension is limited to 65535.
    check_bounds("n", size, 1, 65535 * BLOCK)
    if out is not None:
        check_matrix("out", out, (rows, size), (gate_up.dtype,), gate_up.device)
    return rows, size, (size if out is None else out.stride(0), gate_up.stride(0))
