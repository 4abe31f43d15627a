"""GEMMs of a mixture of experts: each row has the same bits in every batch, and the host does not synchronise.

A pair is a token and one of the k experts chosen for it: pair p is choice p % k of token p // k. For pair p with
expert e::

    out[p, n] = sum_k x[row of p, k] w[e, n, k] (+ bias[e, n])                     as `matmul_fixed`, one split

Then the results of a token's pairs are added in the order of its choices, in float32 with one rounding. A token's
experts, their order and their weights follow from the token alone, so its result does too.

The plan (`ExpertPlan`) lists the pairs expert by expert, in tiles of BLOCK_M pairs of one expert; programs of empty
tiles return at once. The grid does not depend on how many pairs an expert has, so the launch can be captured in a CUDA
graph::

    experts of the pairs     2 0 2 1 2 0        BLOCK_M 2
    pairs, by expert         1 5 | 3 | 0 2 4
    tiles (expert, pairs)    (0: 1 5) (0: -) (1: 3) (2: 0 2) (2: 4) (2: -)         expert e begins at tile s // 2 + e,
                                                                                   s pairs before it
Layout. w [E, N, K] or [E, K, N], any strides, either n or k contiguous.

Bytes: the weights of the chosen experts, once for each tile; 4 B for each pair and expert for the plan, from L2.
Flops: 2 N K for each pair. An expert with one pair still computes a tile of 64 rows: a quarter of the matrix units'
peak when the weights are read at full memory speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels import tuning
from quire.kernels.argument_checks import FLOATS, check_bounds, check_dtype, check_matrix
from quire.kernels.rows.matmul_fixed import add_tiles, matmul_config

PLAN_BLOCK = 1024
PLAN_WARPS = 4
COMBINE_BLOCK = 512
COMBINE_WARPS = 4


@triton.jit(do_not_specialize=["num_pairs"])
def _plan_experts_kernel(
    pairs_ptr, tiles_ptr, experts_ptr, num_pairs, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    """List the pairs of expert e = program_id in rising order, and its tiles: (expert, first pair, number of pairs)."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = 0
    count = 0
    for done in range(0, num_pairs, BLOCK):
        inside = done + lane < num_pairs
        other = tl.load(experts_ptr + done + lane, mask=inside, other=0)
        start += tl.sum((inside & (other < expert)).to(tl.int32), 0)
        count += tl.sum((inside & (other == expert)).to(tl.int32), 0)
    place = start
    for done in range(0, num_pairs, BLOCK):
        inside = done + lane < num_pairs
        other = tl.load(experts_ptr + done + lane, mask=inside, other=0)
        own = (inside & (other == expert)).to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(own, 0) - own, done + lane, mask=own == 1)
        place += tl.sum(own, 0)
    first_tile = start // BLOCK_M + expert
    end_tile = (start + count) // BLOCK_M + expert + 1
    for done in range(first_tile, end_tile, BLOCK):
        tile = done + lane
        inside = tile < end_tile
        skipped = (tile - first_tile) * BLOCK_M
        held = tl.minimum(tl.maximum(count - skipped, 0), BLOCK_M)
        tl.store(tiles_ptr + tile * 3, tl.zeros_like(lane) + expert, mask=inside)
        tl.store(tiles_ptr + tile * 3 + 1, start + skipped, mask=inside)
        tl.store(tiles_ptr + tile * 3 + 2, held, mask=inside)


@triton.jit
def _experts_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, pairs_ptr, tiles_ptr,
    num_columns, depth, stride_out, stride_x, stride_expert, stride_n, stride_k, stride_bias,
    PAIRS_A_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the results of one expert's pairs."""
    tile_n = tl.program_id(0)
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    if count > 0:
        lane = tl.arange(0, BLOCK_M)
        held = lane < count
        pair = tl.load(pairs_ptr + first + lane, mask=held, other=0).to(tl.int64)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Columns beyond the end are masked, not clamped: clamped addresses would not be contiguous for [E, K, N].
        w_held = (column < num_columns)[None, :]
        x_tile_ptr = x_ptr + (pair // PAIRS_A_ROW * stride_x)[:, None] + k[None, :]
        w_tile_ptr = (
            w_ptr
            + expert * stride_expert
            + (column.to(tl.int64) * stride_n)[None, :]
            + (k * stride_k)[:, None]
        )
        acc = add_tiles(
            x_tile_ptr, w_tile_ptr, held[:, None], w_held, stride_k, depth, 0, tl.cdiv(depth, BLOCK_K),
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
        )  # fmt: skip
        if bias_ptr is not None:
            bias = tl.load(
                bias_ptr + expert * stride_bias + column, mask=column < num_columns, other=0.0
            )
            acc += bias.to(tl.float32)[None, :]
        offset = (pair * stride_out)[:, None] + column[None, :]
        inside = held[:, None] & w_held
        tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(
    out_ptr, x_ptr, weights_ptr, num_columns, stride_out, stride_x, stride_weights,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the results of one token's pairs, each times its weight, in the order of the choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        weight = tl.load(weights_ptr + token * stride_weights + choice).to(tl.float32)
        offset = (token * CHOICES + choice) * stride_x + column
        total += tl.load(x_ptr + offset, mask=held, other=0.0).to(tl.float32) * weight
    tl.store(out_ptr + token * stride_out + column, total.to(out_ptr.dtype.element_ty), mask=held)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The pairs of one layer and step, ordered by expert."""

    num_experts: int
    num_choices: int  # experts of each token
    pairs: torch.Tensor  # [tokens * choices] int32, pairs ordered by expert
    # [max tiles, 3] int32: expert, index of the first pair in `pairs`, number of pairs
    tiles: torch.Tensor


def plan_experts(experts: torch.Tensor, num_experts: int, dtype: torch.dtype) -> ExpertPlan:
    """List the pairs of each expert, on the device.

    Parameters
    ----------
    experts
        [tokens, choices] int64 or int32, contiguous, values in [0, num_experts): the experts of each token.
    num_experts
        Experts of the layer.
    dtype
        Dtype of x and the weights in `experts_product`, which determines the rows of a tile.

    Raises
    ------
    ValueError
        A shape, dtype or number is not supported.
    """
    check_dtype("experts", experts, (torch.int64, torch.int32))
    if experts.dim() != 2 or not experts.is_contiguous():
        raise ValueError(
            f"experts: must be a contiguous matrix, got shape {list(experts.shape)} with strides {experts.stride()}"
        )
    check_bounds("num_experts", num_experts, 1, 2**15)
    check_bounds("pairs", experts.numel(), 0, 2**30)
    device, block_m = experts.device, _block_m(experts.device, dtype)
    num_pairs = experts.numel()
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(num_pairs // block_m + num_experts, 3, dtype=torch.int32, device=device)
    _plan_experts_kernel[(num_experts,)](
        pairs, tiles, experts, num_pairs,
        BLOCK_M=block_m, BLOCK=PLAN_BLOCK, num_warps=PLAN_WARPS,
    )  # fmt: skip
    return ExpertPlan(num_experts, experts.shape[1], pairs, tiles)


def experts_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: ExpertPlan,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Multiply each pair's row by the weight of its expert.

    Parameters
    ----------
    x
        [tokens, K] or [pairs, K], the latter in the order p = token * choices + choice; rows contiguous.
    weight
        [experts, N, K], or [experts, K, N] if `transposed`, in the dtype of x.
    plan
        `plan_experts` of these tokens.
    bias
        [experts, N] in the dtype of x or float32, added in float32.

    Returns
    -------
    [pairs, N] in the dtype of x.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported; the message has the bound.
    """
    check_dtype("weight", weight, FLOATS)
    if weight.dim() != 3 or 1 not in weight.stride()[1:]:
        raise ValueError(
            "weight: must be three-dimensional with one of the last two dimensions contiguous, got shape "
            f"{list(weight.shape)} with strides {weight.stride()}"
        )
    weight = weight.transpose(1, 2) if transposed else weight
    num_experts, columns, depth = weight.shape
    check_bounds("experts of weight", num_experts, plan.num_experts, plan.num_experts)
    check_matrix("x", x, (None, depth), (weight.dtype,), weight.device)
    num_pairs = len(plan.pairs)
    pairs_a_row = 1 if len(x) == num_pairs else plan.num_choices
    check_bounds("rows of x times choices", len(x) * pairs_a_row, num_pairs, num_pairs)
    if bias is not None:
        check_matrix("bias", bias, (num_experts, columns), (x.dtype, torch.float32), x.device)
    out = x.new_empty(num_pairs, columns)
    if not num_pairs:
        return out
    config = matmul_config(tuning.device_arch(x.device), x.dtype)
    tile = config.tiles[0]
    _experts_kernel[(triton.cdiv(columns, config.block_n), len(plan.tiles))](
        out, x, weight, bias, plan.pairs, plan.tiles,
        columns, depth, out.stride(0), x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0),
        PAIRS_A_ROW=pairs_a_row,
        BLOCK_M=tile.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN_K=depth % config.block_k == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum x [tokens * choices, N] times weights [tokens, choices] over each token's choices.

    Returns [tokens, N] in the dtype of x.

    Raises
    ------
    ValueError
        A shape, dtype or stride is not supported.
    """
    check_matrix("weights", weights, (None, None), FLOATS, x.device)
    tokens, choices = weights.shape
    check_matrix("x", x, (tokens * choices, None), FLOATS, x.device)
    out = x.new_empty(tokens, x.shape[1])
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(x.shape[1], COMBINE_BLOCK))](
            out, x, weights, x.shape[1], out.stride(0), x.stride(0), weights.stride(0),
            CHOICES=choices, BLOCK=COMBINE_BLOCK, num_warps=COMBINE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _block_m(device: torch.device, dtype: torch.dtype) -> int:
    return matmul_config(tuning.device_arch(device), dtype).tiles[0].block_m
