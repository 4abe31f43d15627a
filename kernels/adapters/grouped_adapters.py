"""Low-rank adapters on a GPU: each token of a step adds the adapter of its slot to a product's output.

    inner[t, p] = scale[s, p] * down[s, p] x[t]           s: the slot of token t, p: a merged linear layer
    out[t, columns of p] += up[s, columns of p] inner[t, p]

```
 tile of 16 tokens, by slot    5 5 5 2 2 5 0 0 ...
 programs of the tile          5     2                 the first token of each slot; the others end at once
                               │     └ rows 3, 4       a program multiplies all 16 rows, and stores those of its slot
                               └ rows 0, 1, 2, 5
```

So tokens need no order, the grid depends on shapes only (graphs stay valid), and tokens of one adapter share its
weights. A row of a matrix instruction does not depend on the other rows, so a token has the same bits alone and in any
batch.

Layout. x [T, depth], out [T, N], slots [T] int32; for each slot down [P, R, depth], up [N, R] and scales [P] float32,
with any distance between slots; R is a multiple of 16, and smaller ranks have zeros. Slot 0 is never read.

Bytes: (P depth + N) R b for each slot of each tile of 16 tokens. Flops: 2 T R (P depth + N), 16 times as many in tiles
in which every token has an adapter of its own; those are bound by the adapters' memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.kernels.argument_checks import FLOATS, check_matrix, check_vector

BLOCK_T = 16
BLOCK_K = 128
BLOCK_N = 64
RANK_STEP = 16  # least depth of a matrix instruction


@triton.jit
def _slot_of(slots_ptr, tile, place, num_tokens, BLOCK_T: tl.constexpr):
    """Return the tokens of a tile, their slots, and the slot of the token at `place` if it is the first with it, else
    0."""
    token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slots_ptr + token, mask=token < num_tokens, other=0)
    at = tl.arange(0, BLOCK_T)
    slot = tl.max(tl.where(at == place, slots, 0), axis=0)
    earlier = tl.sum(tl.where((at < place) & (slots == slot), 1, 0), axis=0)
    return token, slots, tl.where(earlier == 0, slot, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    inner_ptr, x_ptr, slots_ptr, down_ptr, scales_ptr, num_tokens, depth, stride_x, stride_down, stride_scales,
    RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute `inner` of one slot's tokens in a tile, for one part."""
    tile, place, part = tl.program_id(0) // BLOCK_T, tl.program_id(0) % BLOCK_T, tl.program_id(1)
    token, slots, slot = _slot_of(slots_ptr, tile, place, num_tokens, BLOCK_T)
    if slot > 0:
        k, r = tl.arange(0, BLOCK_K), tl.arange(0, RANK)
        own = slots == slot
        x_tile = x_ptr + token.to(tl.int64)[:, None] * stride_x + k[None, :]
        down = down_ptr + slot.to(tl.int64) * stride_down + part.to(tl.int64) * RANK * depth
        down_tile = down + r.to(tl.int64)[None, :] * depth + k[:, None]
        acc = tl.zeros([BLOCK_T, RANK], tl.float32)
        for start in range(0, depth, BLOCK_K):
            inside = k < depth - start
            x = tl.load(x_tile + start, mask=own[:, None] & inside[None, :], other=0.0)
            weights = tl.load(down_tile + start, mask=inside[:, None], other=0.0)
            acc += tl.dot(x, weights, input_precision="ieee")
        acc *= tl.load(scales_ptr + slot.to(tl.int64) * stride_scales + part)
        row = token.to(tl.int64) * tl.num_programs(1) + part
        out = inner_ptr + row[:, None] * RANK + r[None, :]
        tl.store(out, acc.to(inner_ptr.dtype.element_ty), mask=own[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _up_kernel(
    out_ptr, inner_ptr, slots_ptr, up_ptr, num_tokens, first_column, num_columns, part, num_parts,
    stride_out, stride_up,
    RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add one slot's adapter to a tile of the output, within the columns of one part."""
    tile, place = tl.program_id(0) // BLOCK_T, tl.program_id(0) % BLOCK_T
    token, slots, slot = _slot_of(slots_ptr, tile, place, num_tokens, BLOCK_T)
    if slot > 0:
        r = tl.arange(0, RANK)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        held = column < num_columns
        column += first_column
        own = slots == slot
        row = token.to(tl.int64) * num_parts + part
        inner = tl.load(inner_ptr + row[:, None] * RANK + r[None, :], mask=own[:, None], other=0.0)
        up = up_ptr + slot.to(tl.int64) * stride_up + column.to(tl.int64)[None, :] * RANK
        weights = tl.load(up + r[:, None], mask=held[None, :], other=0.0)
        acc = tl.dot(inner, weights, input_precision="ieee")
        out = out_ptr + token.to(tl.int64)[:, None] * stride_out + column[None, :]
        mask = own[:, None] & held[None, :]
        acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def add_adapters(
    x: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scales: torch.Tensor,
    columns: Sequence[int],
) -> None:
    """Add the adapters of a step's tokens to a product's output, in place.

    Parameters
    ----------
    x
        [T, depth], rows contiguous.
    out
        [T, N] in the dtype of x, rows contiguous.
    slots
        [T] int32; 0: no adapter.
    down, up
        [slots, P, R, depth] and [slots, N, R] in the dtype of x; contiguous within a slot.
    scales
        [slots, P] float32.
    columns
        [P] columns of each part; their sum is N.

    Raises
    ------
    ValueError
        A shape, dtype, stride or device is not supported.
    """
    num_parts, rank, depth = down.shape[1:]
    check_matrix("x", x, (None, depth), FLOATS, x.device)
    check_matrix("out", out, (len(x), sum(columns)), (x.dtype,), x.device)
    check_vector("slots", slots, len(x), (torch.int32,), x.device)
    if rank % RANK_STEP or up.shape[1:] != (out.shape[1], rank) or len(columns) != num_parts:
        raise ValueError(
            f"down, up: must be [slots, {len(columns)}, R, {depth}] and [slots, {out.shape[1]}, R], R a multiple of "
            f"{RANK_STEP}, got {list(down.shape)} and {list(up.shape)}"
        )
    if not len(x):
        return
    inner = torch.empty(len(x), num_parts, rank, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(len(x), BLOCK_T) * BLOCK_T
    shape = dict(RANK=rank, BLOCK_T=BLOCK_T)
    _down_kernel[(programs, num_parts)](
        inner, x, slots, down, scales, len(x), depth, x.stride(0), down.stride(0), scales.stride(0),
        BLOCK_K=BLOCK_K, num_warps=4, num_stages=3, enable_fp_fusion=False, **shape,
    )  # fmt: skip
    first = 0
    for part, count in enumerate(columns):
        _up_kernel[(programs, triton.cdiv(count, BLOCK_N))](
            out, inner, slots, up, len(x), first, count, part, num_parts, out.stride(0), up.stride(0),
            BLOCK_N=BLOCK_N, num_warps=4, num_stages=2, enable_fp_fusion=False, **shape,
        )  # fmt: skip
        first += count
