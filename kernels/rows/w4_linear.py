"""Products with weights of 4 bits and activations of 16 (W4A16): one layout for every format of checkpoints.

    w[n, k] = scale[n, g] * (number[n, k] - zero[n, g])      g = k // group_size
    y = x w^T + bias                                         added up in float32, rounded once

| tensor | what |
|---|---|
| words [n, k / 8] int32 | number i of a word has the bits 4 i to 4 i + 3: input features 8 j to 8 j + 7 in order |
| scales [n, groups] | any float dtype |
| zeros [n, groups] uint8 | 0 to 15 |

Number minus zero point is an integer from -15 to 15, which every float dtype holds exactly. The kernels add up the
products of a group in float32, and multiply the sum by the scale. So the weights are not rounded at all: y is within
the rounding of float32 sums, and of the result, of the product with the float32 weight.

A GPU runs `quire.kernels.rows.w4_matmul`; the CPU's compiled library has `cpu_linear.PackedWeight.of_numbers`. The
product here dequantises the weight in each call, for a CPU without the library and for dtypes that the library lacks.

Bytes: n k / 2 for the numbers, and 1 + the scale's for each group of an output. Flops: 2 rows n k.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

PER_WORD = 8  # numbers of a word
# Input features that share a scale; a group may also be all input features of an output.
GROUP_SIZES = (32, 64, 128)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """Words [..., m] int32 to numbers [..., 8 m] uint8, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def pack_words(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [..., 8 m] uint8, 0 to 15, to words [..., m] int32."""
    pairs = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return pairs.contiguous().view(torch.int32)


def dequantise(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return the weight [n, k] float32."""
    numbers = unpack_words(words).unflatten(1, (scales.shape[1], -1))
    return ((numbers.float() - zeros[..., None]) * scales[..., None].float()).flatten(1)


def product(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    triton: bool | None = None,
) -> torch.Tensor:
    """Compute x @ w.T + bias.

    Parameters
    ----------
    x
        [rows, k] bfloat16, float16 or float32, contiguous.
    words, scales, zeros
        The weight, as above.
    bias
        [n] in the dtype of x.
    triton
        True uses the kernel, False torch operations. None uses the kernel except on the CPU.

    Returns
    -------
    [rows, n] in the dtype of x.
    """
    if x.device.type != "cpu" if triton is None else triton:
        from quire.kernels.rows import w4_matmul

        return w4_matmul.product(x, words, scales, zeros, bias)
    out = F.linear(x.float(), dequantise(words, scales, zeros))
    return (out if bias is None else out + bias).to(x.dtype)
