"""Matrix products in which the number of rows does not change a row's bits.

Measured with MKL 2024.2, AVX-512, float32: a row of `F.linear` has other bits in products of 1, 2, 3, 5, 6, 7, 9, 10 or
11 rows than in larger products. The other operations of the served models are invariant, except SiLU and GELU
(`cpu_tiled_linear.py`).

Every matrix product is therefore cut into tiles of fixed height, and the last tile is padded with zeros. A tile has 16
rows, or a larger height of `TILE_ROWS` if a test on this machine finds the rows equal to those of 16-row tiles bit for
bit, at every position, for the same weight shape. Weights are the left factor, W [N, K] x X^T [K, tile], because MKL
then reads them faster if there are few rows.
"""

from __future__ import annotations

import torch

TILE_ROWS = (16, 64, 256)  # the first defines the bits, the others must match it
ALIGNMENT_BYTES = (
    64  # a cache line, as torch aligns; kernels may treat unaligned beginnings differently
)


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
    """Return the height of the next tile: the largest that `rows` fill by more than half, else the smallest."""
    return max((tile for tile in tile_rows if rows > tile // 2), default=tile_rows[0])


def fitting_tile_rows(weight: torch.Tensor) -> tuple[int, ...]:
    """Find the tile heights with the same bits as 16-row tiles.

    Random rows suffice for the test, because the matrix library chooses its kernels by shape.

    Raises
    ------
    ValueError
        In 16-row tiles, the bits of a row depend on its position.
    """
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
