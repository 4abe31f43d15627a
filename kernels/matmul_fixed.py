"""Matrix product whose rows have the same bits in every batch: one tile shape, one order of additions.

    out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])          k in tiles of BLOCK_K, in order, float32 accumulation

Vendor libraries pick the tile, the split of k and the instruction by the number of rows, so that a request's
logits depend on who shares its batch. Here they follow from the dtype and architecture alone, k is never split
among programs, and a row's result does not depend on where in the tile it stands: rows are bit-equal for any
batch and position. The price at few rows is a tile that is mostly padding, and no split of k.

Programs walk the tiles column by column in bands of GROUP_M tiles of rows, so that a band's weights are read from
the L2 cache; the walk changes no bit.

Layout. x [M, K], w [N, K] (as `torch.nn.Linear`), out [M, N]; rows contiguous at any stride.

Bytes: (M K + N K + M N) itemsize with perfect caching. Flops: 2 M N K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels import tuning
from quire.kernels.checks import check_bounds
from quire.kernels.row_checks import FLOATS, check_matrix, check_vector

GROUP_M = 8


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Shape of the kernel; all but num_stages fixes bits."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# bfloat16 and float16. 64 rows are the least that Hopper's wgmma takes, and waste the least in decode.
_CONFIG = {
    "sm_80": MatmulConfig(64, 128, 64, 4, 4),
    "sm_90": MatmulConfig(64, 128, 64, 4, 4),
    "sm_100": MatmulConfig(64, 128, 64, 4, 4),
    "gfx942": MatmulConfig(64, 128, 32, 4, 2),
}
# float32 multiplies outside the matrix units (IEEE products).
_CONFIG_FLOAT32 = MatmulConfig(32, 64, 16, 4, 3)


def matmul_config(arch: str, dtype: torch.dtype) -> MatmulConfig:
    """The configuration for operands of `dtype`, for any M, N and K.

    Raises
    ------
    ValueError
        An architecture without an entry.
    """
    if dtype == torch.float32:
        return _CONFIG_FLOAT32
    arch = "sm_90" if arch == tuning.INTERPRETER else arch
    if arch not in _CONFIG:
        raise ValueError(f"architecture: must be one of {', '.join(_CONFIG)}, got {arch}")
    return _CONFIG[arch]


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, num_rows, num_columns, stride_out, stride_x, stride_w,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One tile of the result."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    in_band = BAND * tl.cdiv(num_columns, BLOCK_N)
    first_m = tl.program_id(0) // in_band * BAND
    band = tl.minimum(tiles_m - first_m, BAND)
    tile_m = first_m + tl.program_id(0) % in_band % band
    tile_n = tl.program_id(0) % in_band // band

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the end repeat the last one; their results are not stored.
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    w_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    x_tile_ptr = x_ptr + x_row[:, None] * stride_x + k[None, :]
    w_tile_ptr = w_ptr + w_row[None, :] * stride_w + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_tile_ptr + start)
            w = tl.load(w_tile_ptr + start)
        else:
            x = tl.load(x_tile_ptr + start, mask=(k < K - start)[None, :], other=0.0)
            w = tl.load(w_tile_ptr + start, mask=(k < K - start)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    held = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(tl.float32)[None, :]
    out_offset = row.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=held)


def matmul_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """x @ weight.T (+ bias), each row's bits a function of that row only.

    Parameters
    ----------
    x
        [M, K] bfloat16, float16 or float32.
    weight
        [N, K] in the dtype of x.
    bias
        [N] in the dtype of x or float32, added in float32.
    out
        [M, N] in the dtype of x or float32; allocated in the dtype of x where None.
    config
        `matmul_config` of the device by default.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device that does not fit, with its bound.
    """
    check_matrix("x", x, (None, None), FLOATS, x.device)
    (rows, depth), columns = x.shape, weight.shape[0]
    check_bounds("K", depth, 1, 2**31 - 1)
    check_matrix("weight", weight, (None, depth), (x.dtype,), x.device)
    if bias is not None:
        check_vector("bias", bias, columns, (x.dtype, torch.float32), x.device)
    out = x.new_empty(rows, columns) if out is None else out
    check_matrix("out", out, (rows, columns), (x.dtype, torch.float32), x.device)
    config = config or matmul_config(tuning.device_arch(x.device), x.dtype)
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    check_bounds("tiles", tiles, 0, 2**31 - 1)
    if tiles:
        # fmt: off
        _matmul_kernel[(tiles,)](
            out, x, weight, bias, rows, columns, out.stride(0), x.stride(0), weight.stride(0),
            K=depth, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BAND=GROUP_M,
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
        )
        # fmt: on
    return out
