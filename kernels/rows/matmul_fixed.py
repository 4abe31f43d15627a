"""GEMM in which a row has the same bits in every batch: the order of additions depends on the weight alone.

    out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n])          float32 accumulation

Vendor libraries choose the tile, the split of k and the instruction by the number of rows, so a request's logits depend
on the other requests of its batch. Here the order of additions follows from the weight's shape, the dtype and the
architecture. k is cut into splits of fixed length. Each split is summed separately, in steps of BLOCK_K, and the sums
of the splits are added in order::

    k         0 ........ | ........ | ........ | ...... K      3 splits
    sums      p0           p1         p2                       out = ((0 + p0) + p1) + p2 + bias

Three forms compute this. They distribute the same additions over programs differently:

    apart     few rows    one program per split writes its sum; a second kernel adds the sums    uses all SMs
    in turn   many rows   one program computes all splits of its tile, one after the other       no sums in memory
    whole     one split   one program per tile                                                   wide weights

The height of a tile (64, 128 or 256 rows) follows the number of rows. It changes no bit, because a row's result does
not depend on its place in the tile, as long as the matrix instruction is the same. Hopper's wgmma needs at least 64
rows. For fewer rows Triton uses `mma.sync`, which takes 16 rows, reads 8 or 16 k at a time, and aligns and truncates
the products differently before it adds them: a row would have two results. So the lowest tile has 64 rows, and all
heights use m64n128k16 (a test reads it in the compiled code). Blackwell's instruction takes 128 rows or 64; there all
tiles have 128.

Bytes, few rows: N K itemsize for the weight, and 8 S M N for the sums of S splits, which fit the L2 cache. Each program
has 3 tiles of 16 KiB in flight, and an SM (AMD: compute unit) has 1 to 2 programs: 48 to 96 KiB. 24 KiB are enough to
hide the memory's latency if every SM has a program. So S is chosen such that N / BLOCK_N tiles times S is at least 128
where K allows it: 4096 x 4096 has 32 tiles and 4 splits. Flops: 2 M N K. A tile of 64 rows needs a quarter of the
matrix units' peak when the weights are read at full memory speed; rows of the tile without data cost no bytes.

Bytes, many rows: a tile of 256 x 128 reads 1 byte from the L2 cache for 85 multiplications, one of 128 x 128 for 64.
The form "in turn" has a second accumulator, which limits its tiles to 128 rows.

Programs go through the tiles column by column in bands of GROUP_M tiles of rows, so that a band's weights are read from
the L2 cache. This order changes no bit.

Layout. x [M, K], w [N, K] (as `torch.nn.Linear`), out [M, N]; rows contiguous, any stride between rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from quire.kernels import tuning
from quire.kernels.argument_checks import FLOATS, check_bounds, check_matrix, check_vector

Form = Literal["whole", "apart", "in turn"]

GROUP_M = 8
# Number of programs that keep nearly all SMs of a GPU busy (an H100 has 132). It is a constant and not read from the
# device, because the cut into splits, and with it the bits of a result, depends on it.
PROGRAMS = 128
MAX_SPLITS = 8
MIN_SPLIT_DEPTH = (
    256  # least length of a split in k: a shorter one would mostly wait for its first loads
)
SUM_BLOCK = 512
SUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """The height of a tile and its launch options. They do not change the result's bits."""

    block_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Shape of the kernel. The bits of a result depend on `block_n` and `block_k`.

    Attributes
    ----------
    tiles
        Tiles of the forms with one accumulator, by rising height.
    in_turn
        Tile of the form "in turn", which has two accumulators.
    """

    block_n: int
    block_k: int
    tiles: tuple[Tile, ...]
    in_turn: Tile


# For bfloat16 and float16.
_CONFIG = {
    "sm_80": MatmulConfig(128, 64, (Tile(64, 4, 4), Tile(128, 8, 4)), Tile(128, 8, 4)),
    "sm_90": MatmulConfig(
        128, 64, (Tile(64, 4, 4), Tile(128, 8, 4), Tile(256, 8, 4)), Tile(128, 8, 4)
    ),
    "sm_100": MatmulConfig(128, 64, (Tile(128, 8, 4),), Tile(128, 8, 4)),
    "gfx942": MatmulConfig(128, 32, (Tile(64, 4, 2), Tile(128, 8, 2)), Tile(128, 8, 2)),
}
# `tl.dot` in float32 runs outside the matrix units (IEEE arithmetic).
_CONFIG_FLOAT32 = MatmulConfig(64, 16, (Tile(32, 4, 3),), Tile(32, 4, 3))


def matmul_config(arch: str, dtype: torch.dtype) -> MatmulConfig:
    """The configuration for operands of `dtype`, for any M, N and K.

    Raises
    ------
    ValueError
        The table has no entry for the architecture.
    """
    if dtype == torch.float32:
        return _CONFIG_FLOAT32
    arch = "sm_90" if arch == tuning.INTERPRETER else arch
    if arch not in _CONFIG:
        raise ValueError(f"architecture: must be one of {', '.join(_CONFIG)}, got {arch}")
    return _CONFIG[arch]


@dataclass(frozen=True, slots=True)
class Splits:
    """How k is cut into splits. Like `block_k`, this determines the bits of a result."""

    count: int
    steps: int  # steps of block_k in each split; the last split may have fewer

    @classmethod
    def of(cls, columns: int, depth: int, config: MatmulConfig) -> Splits:
        """The splits of a weight [columns, depth]."""
        wanted = triton.cdiv(PROGRAMS, triton.cdiv(columns, config.block_n))
        count = max(1, min(wanted, MAX_SPLITS, depth // MIN_SPLIT_DEPTH))
        all_steps = triton.cdiv(depth, config.block_k)
        steps = triton.cdiv(all_steps, count)
        return cls(triton.cdiv(all_steps, steps), steps)


@triton.jit
def add_tiles(
    x_tile_ptr, w_tile_ptr, x_held, w_held, stride_k, depth, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Sum x @ w over the steps [first, end) of BLOCK_K: [BLOCK_M, BLOCK_N] float32.

    Elements outside the masks `x_held` and `w_held` count as zeros; `w_held` None masks nothing.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, end):
        start = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_tile_ptr + start, mask=x_held, other=0.0)
            if w_held is None:
                w = tl.load(w_tile_ptr + start * stride_k)
            else:
                w = tl.load(w_tile_ptr + start * stride_k, mask=w_held, other=0.0)
        else:
            inside = k < depth - start
            x = tl.load(x_tile_ptr + start, mask=x_held & inside[None, :], other=0.0)
            w_inside = inside[:, None] if w_held is None else inside[:, None] & w_held
            w = tl.load(w_tile_ptr + start * stride_k, mask=w_inside, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, num_rows, num_columns, depth, split_steps, stride_out, stride_x, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    FORM: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result; in the form "apart" one tile of the sums of split program_id(1)."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    in_band = BAND * tl.cdiv(num_columns, BLOCK_N)
    first_m = tl.program_id(0) // in_band * BAND
    band = tl.minimum(tiles_m - first_m, BAND)
    tile_m = first_m + tl.program_id(0) % in_band % band
    tile_n = tl.program_id(0) % in_band // band

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_held = (row < num_rows)[:, None]
    # Columns beyond the end repeat the last one; their results are not stored.
    w_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    x_tile_ptr = x_ptr + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_tile_ptr = w_ptr + w_row[None, :] * stride_w + k[:, None]
    num_steps = tl.cdiv(depth, BLOCK_K)

    if FORM == "in turn":
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, num_steps, split_steps):
            end = tl.minimum(first + split_steps, num_steps)
            acc += add_tiles(
                x_tile_ptr, w_tile_ptr, x_held, None, 1, depth, first, end, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K
            )  # fmt: skip
    else:
        first = tl.program_id(1) * split_steps
        end = tl.minimum(first + split_steps, num_steps)
        acc = add_tiles(
            x_tile_ptr, w_tile_ptr, x_held, None, 1, depth, first, end, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K
        )  # fmt: skip
    held = x_held & (column < num_columns)[None, :]
    if FORM == "apart":
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * stride_out
    elif bias_ptr is not None:
        acc += tl.load(bias_ptr + w_row).to(tl.float32)[None, :]
    out_offset = row.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_splits_kernel(
    out_ptr, sums_ptr, bias_ptr, num_rows, num_columns, stride_out,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the splits' sums [SPLITS, M, N] of one row, in the same order as the form "in turn"."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * num_rows + row) * num_columns + column
        total += tl.load(sums_ptr + place, mask=held, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + column, total.to(out_ptr.dtype.element_ty), mask=held)


class FixedProduct:
    """x @ weight.T (+ bias), where each row's bits depend on that row and the weight only.

    Parameters
    ----------
    weight
        [N, K] bfloat16, float16 or float32, rows contiguous. It is not copied: every call reads this tensor.
    bias
        [N] in the dtype of the weight or float32, added in float32.
    config
        Tile sizes; None takes `matmul_config` of the weight's device and dtype.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        config: MatmulConfig | None = None,
    ):
        check_matrix("weight", weight, (None, None), FLOATS, weight.device)
        self.columns, self.depth = weight.shape
        check_bounds("K", self.depth, 1, 2**31 - 1)
        if bias is not None:
            dtypes = (weight.dtype, torch.float32)
            check_vector("bias", bias, self.columns, dtypes, weight.device)
        self.weight = weight
        self.bias = bias
        self.config = config or matmul_config(tuning.device_arch(weight.device), weight.dtype)
        self.splits = Splits.of(self.columns, self.depth, self.config)

    def form(self, rows: int) -> tuple[Form, Tile]:
        """Form and tile for an input of `rows` rows."""
        config = self.config
        if self.splits.count > 1:
            tiles_m = triton.cdiv(rows, config.in_turn.block_m)
            if tiles_m * triton.cdiv(self.columns, config.block_n) >= PROGRAMS:
                return "in turn", config.in_turn
        form: Form = "whole" if self.splits.count == 1 else "apart"
        fitting = (tile for tile in config.tiles if tile.block_m >= rows)
        return form, next(fitting, config.tiles[-1])

    def distinct_rows(self, max_rows: int) -> list[int]:
        """Return row counts that together launch every kernel variant that calls with 1 to `max_rows` rows launch."""
        config = self.config
        tiles_n = triton.cdiv(self.columns, config.block_n)
        starts = [1, *(tile.block_m + 1 for tile in config.tiles[:-1])]
        starts.append((triton.cdiv(PROGRAMS, tiles_n) - 1) * config.in_turn.block_m + 1)
        found = {self.form(rows): rows for rows in starts if rows <= max_rows}
        return sorted(found.values())

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [M, K], in the weight's dtype, by the transposed weight.

        `out` is [M, N] in the weight's dtype or float32; None allocates it in the weight's dtype.
        """
        dtype, device = self.weight.dtype, self.weight.device
        check_matrix("x", x, (None, self.depth), (dtype,), device)
        rows = len(x)
        if out is None:
            out = x.new_empty(rows, self.columns)
        else:
            check_matrix("out", out, (rows, self.columns), (dtype, torch.float32), device)
        if not rows or not self.columns:
            return out
        form, tile = self.form(rows)
        if form != "apart":
            self._launch(out, x, self.bias, form, tile, 1)
            return out
        count = self.splits.count
        sums = x.new_empty((count, rows, self.columns), dtype=torch.float32)
        self._launch(sums[0], x, None, form, tile, count)
        _sum_splits_kernel[(rows, triton.cdiv(self.columns, SUM_BLOCK))](
            out, sums, self.bias, rows, self.columns, out.stride(0),
            SPLITS=count, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    def _launch(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        form: Form,
        tile: Tile,
        splits: int,
    ) -> None:
        """Launch `splits` programs for each tile."""
        config, rows = self.config, len(x)
        tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(self.columns, config.block_n)
        check_bounds("tiles", tiles, 0, 2**31 - 1)
        _matmul_kernel[(tiles, splits)](
            out, x, self.weight, bias, rows, self.columns, self.depth, self.splits.steps,
            out.stride(0), x.stride(0), self.weight.stride(0),
            BLOCK_M=tile.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BAND=GROUP_M,
            FORM=form, EVEN_K=self.depth % config.block_k == 0,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
        )  # fmt: skip


def matmul_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """Compute x [M, K] @ weight.T (+ bias) with a `FixedProduct` that is used once."""
    return FixedProduct(weight, bias, config)(x, out)
