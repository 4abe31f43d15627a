"""`deterministic: true`: matrix products whose rows do not depend on how many rows there are.

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
from torch import nn

TILE_ROWS = (16, 64, 256)  # the first is the definition, the others must agree with it
_ALIGNMENT_BYTES = 64  # a cache line, and torch's own alignment: kernels may peel unaligned heads


class TiledLinear(nn.Module):
    """A linear layer with `deterministic` rows. Shares its parameters with the layer it replaces.

    Parameters
    ----------
    linear
        Layer with a float32 weight [out_features, in_features].
    tile_rows
        Heights that may be used, rising.
    """

    def __init__(self, linear: nn.Linear, tile_rows: tuple[int, ...]):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.tile_rows = tile_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        out = tiled_linear(x.reshape(-1, self.in_features), self.weight, self.tile_rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


class ElementwiseSiLU(nn.Module):
    """x / (1 + exp(-x)) from operations whose result does not depend on an element's place in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return x / torch.exp(-x).add_(1.0)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, tile_rows: tuple[int, ...]) -> torch.Tensor:
    """x [rows, K] times weight [N, K] transposed, in tiles of `tile_rows`: [rows, N] float32."""
    if x.data_ptr() % _ALIGNMENT_BYTES or not x.is_contiguous():
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


def make_deterministic(model: nn.Module) -> dict[tuple[int, int], tuple[int, ...]]:
    """Replace every linear layer and SiLU of a float32 CPU model by its batch-invariant form.

    Returns
    -------
    Tile heights by weight shape (out_features, in_features), as the probe found them.

    Raises
    ------
    ValueError
        The model is not float32 on the CPU, or this machine's matrix library gives a row of a 16-row product
        bits that depend on the row's place.
    """
    _align(model)
    heights: dict[tuple[int, int], tuple[int, ...]] = {}
    replacements: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                shape = (child.out_features, child.in_features)
                if shape not in heights:
                    heights[shape] = _probe(child.weight)
                replacements.append((parent, name, TiledLinear(child, heights[shape])))
            elif type(child).__name__ in ("SiLU", "SiLUActivation"):
                replacements.append((parent, name, ElementwiseSiLU()))
    for parent, name, module in replacements:
        setattr(parent, name, module)
    return heights


def _align(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"deterministic: true needs float32 on the CPU; {name} is {parameter.dtype} on "
                f"{parameter.device}"
            )
        if parameter.data_ptr() % _ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _probe(weight: torch.Tensor) -> tuple[int, ...]:
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
