"""GEMMs in FP8 (e4m3), with one scale for each output channel of the weights and for each token.

For activations x [rows, k] and weights w [n, k]::

    w ~ W * t      t [n, 1], computed once            W, X float8_e4m3fn
    x ~ X * s      s [rows, 1], computed in each call
    y = (X W^T) * s t^T + bias                        added up in float32, rounded once to bfloat16

`torch._scaled_mm` computes X W^T: with cuBLAS or CUTLASS on a GPU of compute capability 8.9 and later, with oneDNN on
the CPU. Hopper's fast accumulation, which keeps 14 bits of a sum (DeepSeek-V3 technical report, 3.3.2), is off.

Error. e4m3 has 4 significant bits, so rounding changes a number of at least 2^-6 scales by at most 2^-4 of itself.
Every element of y is within (2^-4 + 2^-4 + 2^-8) sum |x||w| of the exact product, plus half of 2^-9 scales for each
subnormal number, plus bfloat16's rounding. The average error is smaller: the rounding error of a number is 2.6 % (root
mean square), and independent errors add as squares. So the error is 3.7 % of the root mean square of y, for any k.

Flops: 2 rows n k. Bytes: n k for the weights, which is half of the bfloat16 weights; X is also written and read, rows k
bytes each time.
"""

from __future__ import annotations

import functools
import math

import torch

MAX_E4M3 = 448.0
MULTIPLE = 16  # n and k must be multiples of this, for the loads of the matrix units


def supports(in_features: int, out_features: int) -> bool:
    """Whether a linear layer of this shape can be computed in FP8."""
    return not (in_features % MULTIPLE or out_features % MULTIPLE)


@functools.cache
def missing(device: str) -> str | None:
    """Reason why this machine's `device` ("cpu" or "cuda") cannot compute in FP8; None if it can."""
    if device == "cuda":
        if torch.version.hip is not None:
            return "an AMD GPU, whose FP8 has another exponent bias"
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < (8, 9):
            name = torch.cuda.get_device_name()
            return f"compute capability 8.9 or later; {name} has {major}.{minor}"
        return None
    try:
        ones = torch.ones(MULTIPLE, MULTIPLE, device=device).to(torch.float8_e4m3fn)
        scales = torch.ones(MULTIPLE, 1, device=device)
        scaled_product(ones, scales, ones, scales)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"torch._scaled_mm on this processor, which says: {str(error).splitlines()[0]}"
    return None


def quantise_rows(
    x: torch.Tensor, bound: float | None = None, *, triton: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to float8_e4m3fn codes and one scale: x is about codes * scales.

    Parameters
    ----------
    x
        [rows, k] bfloat16, float16 or float32, rows contiguous.
    bound
        > 0: numbers of larger magnitude are clamped to it. None: no clamping.
    triton
        True uses the kernel (`quire.kernels.rows.fp8_rows`), False torch operations, with the same bits. None uses the
        kernel except on the CPU.

    Returns
    -------
    [rows, k] float8_e4m3fn and [rows, 1] float32.
    """
    if x.device.type != "cpu" if triton is None else triton:
        from quire.kernels.rows import fp8_rows

        return fp8_rows.quantise_rows(x, bound)
    largest = x.abs().amax(1, keepdim=True).float().clamp_max(bound or math.inf)
    scales = largest / MAX_E4M3
    scales = scales.where(scales > 0.0, 1.0)
    codes = (x.float() / scales).clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return codes, scales


def scaled_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute (x * x_scales) @ (weight * weight_scales).T + bias.

    Parameters
    ----------
    x, x_scales
        [rows, k] float8_e4m3fn and [rows, 1] float32, contiguous.
    weight, weight_scales
        [n, k] float8_e4m3fn and [n, 1] float32; n and k are multiples of `MULTIPLE`.
    bias
        [n] bfloat16.

    Returns
    -------
    [rows, n] bfloat16.
    """
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
