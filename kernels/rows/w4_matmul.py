"""The kernel of `w4_linear.py`: products with weights of 4 bits, for decode and prefill.

A program computes one tile of the result. It reads the words of a step of k, spreads them to numbers, subtracts the
zero points, and multiplies in the dtype of x, in which the differences are exact::

    words [BLOCK_N, BLOCK_K / 8] ─▶ numbers [BLOCK_N, BLOCK_K] - zeros [BLOCK_N] ─▶ dot with x [BLOCK_M, BLOCK_K]
                                                                                     │ float32, times scales [BLOCK_N]
                                                                                     ▼
                                                                        accumulator [BLOCK_M, BLOCK_N]

A step lies within one group. The order of additions follows the weight's shape; the tile's height follows the number
of rows, and with it the matrix instruction, so a row's bits may differ between a small and a large batch.

Bytes, few rows: N K / 2 for the numbers and 3 N K / group_size for scales and zeros, read once. Flops: 2 M N K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix, check_vector

CHANNEL_STEP = 64  # step of k where a group has all input features


@dataclass(frozen=True, slots=True)
class W4Tile:
    """Shape of a program, for up to `max_rows` rows."""

    max_rows: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Few rows are bound by the weights' memory: narrow tiles give every SM a program (4096 outputs are 128 of 32). More
# rows use the matrix units, whose weights are spread once for each block_m rows. Not measured on a GPU yet.
TILES = (
    W4Tile(16, 16, 32, 4, 3),
    W4Tile(64, 64, 64, 4, 3),
    W4Tile(2**31 - 1, 128, 64, 8, 3),
)


@triton.jit(do_not_specialize=["num_rows"])
def _w4_kernel(
    out_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, num_rows, num_columns, depth, groups, stride_x,
    GROUP_STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile; GROUP_STEPS 0: one group has all steps."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = (row < num_rows)[:, None]
    # Columns beyond the end repeat the last one; their results are not stored.
    w_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // 8)
    shift = tl.arange(0, 8) * 4
    x_tile = x_ptr + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    words_tile = words_ptr + w_row[:, None] * (depth // 8) + word[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(depth, BLOCK_K)):
        start = step * BLOCK_K
        group = w_row * groups
        if GROUP_STEPS > 0:
            group += step // GROUP_STEPS
            x = tl.load(x_tile + start, mask=held, other=0.0)
            words = tl.load(words_tile + start // 8)
        else:
            x = tl.load(x_tile + start, mask=held & (k < depth - start)[None, :], other=0.0)
            inside = (word < (depth - start) // 8)[None, :]
            words = tl.load(words_tile + start // 8, mask=inside, other=0)
        zero = tl.load(zeros_ptr + group).to(tl.int32)
        scale = tl.load(scales_ptr + group).to(tl.float32)
        numbers = (words[:, :, None] >> shift[None, None, :]) & 15
        numbers = tl.reshape(numbers, [BLOCK_N, BLOCK_K]) - zero[:, None]
        # By float32, because Triton's interpreter has no conversion of integers to bfloat16.
        w = tl.trans(numbers.to(tl.float32).to(x.dtype))
        part = tl.dot(x, w, input_precision="ieee")
        acc += part * scale[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(tl.float32)[None, :]
    out = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=held & (column < num_columns)[None, :])


def step_of(depth: int, groups: int) -> tuple[int, int]:
    """Return (BLOCK_K, GROUP_STEPS) of a weight with `groups` groups."""
    return (
        (CHANNEL_STEP, 0)
        if groups == 1
        else (min(depth // groups, CHANNEL_STEP), max(depth // groups // CHANNEL_STEP, 1))
    )


def product(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x @ w.T + bias, see `w4_linear.product`.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported.
    """
    columns, depth, groups = len(words), words.shape[1] * 8, scales.shape[1]
    check_matrix("x", x, (None, depth), FLOATS, x.device)
    check_matrix("words", words, (None, None), (torch.int32,), x.device)
    check_matrix("scales", scales, (columns, None), FLOATS, x.device)
    check_matrix("zeros", zeros, (columns, groups), (torch.uint8,), x.device)
    if depth % groups or (groups > 1 and depth // groups % 32):
        raise ValueError(
            f"scales: groups must have all or a multiple of 32 of {depth} input features, got {groups} groups"
        )
    if bias is not None:
        check_vector("bias", bias, columns, FLOATS, x.device)
    out = x.new_empty(len(x), columns)
    if not len(x) or not columns:
        return out
    tile = next(tile for tile in TILES if len(x) <= tile.max_rows)
    tiles_n = triton.cdiv(columns, tile.block_n)
    check_bounds("tiles of columns", tiles_n, 1, 65535)
    block_k, group_steps = step_of(depth, groups)
    _w4_kernel[(triton.cdiv(len(x), tile.block_m), tiles_n)](
        out, x, words, scales, zeros, bias, len(x), columns, depth, groups, x.stride(0),
        GROUP_STEPS=group_steps, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
