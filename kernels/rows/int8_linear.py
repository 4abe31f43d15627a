"""GEMMs in int8, with one scale for each output channel of the weights and for each token.

For activations x [rows, k] and weights w [n, k]::

    w ~ W * t      t [n, 1], stored by the checkpoint     W, X int8
    x ~ X * s      s [rows, 1], computed in each call: the largest |x| divided by 127
    y = (X W^T) * s t^T + bias                            added up in int32, without rounding; rounded once

`torch._int_mm` computes X W^T: with cuBLAS on a GPU, with oneDNN or loops on the CPU.

Error. Rounding changes a number by at most half of its row's scale, which is 1/254 of the row's largest number.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

_MAX = 127.0
_LEAST_ROWS = 32  # cuBLAS refuses 16 rows and fewer


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to int8 codes and one scale: x is about codes * scales.

    Parameters
    ----------
    x
        [rows, k] bfloat16, float16 or float32.

    Returns
    -------
    [rows, k] int8 and [rows, 1] float32.
    """
    scales = x.abs().amax(1, keepdim=True).float() / _MAX
    scales = scales.where(scales > 0.0, 1.0)
    return (x.float() / scales).round_().clamp_(-_MAX, _MAX).to(torch.int8), scales


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
        [rows, k] int8 and [rows, 1] float32.
    weight, weight_scales
        [n, k] int8 and [n, 1] float32; n and k are multiples of 8.
    bias
        [n] bfloat16.

    Returns
    -------
    [rows, n] bfloat16.
    """
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, max(0, _LEAST_ROWS - rows)))
    sums = torch._int_mm(padded, weight.t())[:rows]
    out = sums.float() * x_scales * weight_scales.t()
    return (out if bias is None else out + bias).to(torch.bfloat16)
