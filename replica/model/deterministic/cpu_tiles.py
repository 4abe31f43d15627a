"""Matrix products whose rows do not depend on how many rows there are.

What was found (MKL 2024.2, AVX-512, float32): a row of `F.linear` has other bits for 1, 2, 3, 5, 6, 7, 9, 10 or 11
rows than in a larger product. All other operations of the served models' blocks are invariant, except
activations whose vector loop ends in a scalar one with another exponential (SiLU, GELU).

So every product is cut into tiles of fixed height, the last one padded with zeros: 16 rows, or a larger height of
`TILE_ROWS` if a probe on this machine finds its rows equal to the 16-row tile's bit for bit, at every row
position, for the same weight shape. Weights are the left factor, W [N, K] x X^T [K, tile]: MKL reads them faster so
for few rows.
"""

from __future__ import annotations

import torch

TILE_ROWS = (16, 64, 256)  # the first is the definition, the others must agree with it
ALIGNMENT_BYTES = 64  # a cache line, and torch's own alignment: kernels may peel unaligned heads


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, tile_rows: tuple[int, ...]) -> torch.Tensor:
    """x [rows, K] times weight [N, K] transposed, in tiles of `tile_rows`: [rows, N] float32."""
    if x.data_ptr() % ALIGNMENT_BYTES or not x.is_contiguous():
        x = x.contiguous().clone()
    rows = x.shape[0]
    out = x.new_empty(rows, weight.shape[0])
    start = 0
    while start < rows:
        tile = _tile_for(rows - start, tile_rows)
        part = x[start : start + tile]
        count = part.shape[0]
        if count < tile:
            padded = x.new_zeros(tile, x.shape[1])
            padded[:count] = part
            part = padded
        out[start : start + count] = torch.mm(weight, part.t())[:, :count].t()
        start += tile
    return out


def _tile_for(rows: int, tile_rows: tuple[int, ...]) -> int:
    """The largest height that `rows` fill by more than half; the smallest if there is none."""
    return max((tile for tile in tile_rows if rows > tile // 2), default=tile_rows[0])


def fitting_tile_rows(weight: torch.Tensor) -> tuple[int, ...]:
    """Heights whose rows equal those of the 16-row tile; kernels are chosen by shape, so random rows tell."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(max(TILE_ROWS), weight.shape[1], generator=random)
    base = TILE_ROWS[0]
    expected = tiled_linear(x, weight, (base,))
    shifted = tiled_linear(x.roll(5, 0), weight, (base,)).roll(-5, 0)
    if not torch.equal(expected, shifted):
        raise ValueError(
            f"deterministic: true cannot hold here: a [{base}, {weight.shape[1]}] x [{weight.shape[1]}, "
            f"{weight.shape[0]}] product of this matrix library depends on the row's position; "
            "set deterministic: false"
        )
    return (
        base,
        *(t for t in TILE_ROWS[1:] if torch.equal(tiled_linear(x, weight, (t,)), expected)),
    )
