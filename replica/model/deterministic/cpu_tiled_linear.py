"""`deterministic: true` on the CPU: layers in which the number of rows does not change a row's bits.

Matrix products run in tiles of fixed height (`cpu_tiles.py`), and so do mixtures of experts (`cpu_tiled_experts.py`).
Activations are replaced too (`cpu_activations.py`).
"""

from __future__ import annotations

import torch
from torch import nn

from quire.replica.model.deterministic.cpu_activations import elementwise
from quire.replica.model.deterministic.cpu_tiled_experts import EXPERT_MODULES
from quire.replica.model.deterministic.cpu_tiles import (
    ALIGNMENT_BYTES,
    fitting_tile_rows,
    tiled_linear,
)
from quire.replica.model.layers.latent_attention import fix_rows
from quire.replica.model.layers.linear_parts import keep_parts
from quire.replica.model.layers.w4 import W4Linear


class TiledLinear(nn.Module):
    """A batch-invariant linear layer. Shares its parameters with the layer it replaces.

    Parameters
    ----------
    linear
        The layer, with a float32 weight [out_features, in_features].
    tile_rows
        Numbers of rows that a tile may have, ascending; all give the same bits.
    """

    def __init__(self, linear: nn.Linear, tile_rows: tuple[int, ...]):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.tile_rows = tile_rows
        keep_parts(self, [linear])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        out = tiled_linear(x.reshape(-1, self.in_features), self.weight, self.tile_rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


def make_deterministic(model: nn.Module) -> dict[tuple[int, int], tuple[int, ...]]:
    """Replace linear layers, experts and activations of a float32 CPU model by batch-invariant ones, in place.

    Returns
    -------
    Usable tile heights by weight shape (out_features, in_features).

    Raises
    ------
    ValueError
        The model is not float32 on the CPU, or in this machine's matrix library the bits of a row depend on its
        position in a product of 16 rows.
    """
    for name, module in model.named_modules():
        if isinstance(module, W4Linear):
            raise ValueError(
                f"deterministic: true cannot hold: {name} is in 4 bits, whose products follow the number of rows; set "
                "deterministic: false"
            )
    _align(model)
    heights: dict[tuple[int, int], tuple[int, ...]] = {}
    replacements: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                shape = (child.out_features, child.in_features)
                if shape not in heights:
                    heights[shape] = fitting_tile_rows(child.weight)
                replacements.append((parent, name, TiledLinear(child, heights[shape])))
            elif type(child).__name__ in EXPERT_MODULES:
                replacements.append((parent, name, EXPERT_MODULES[type(child).__name__](child)))
            elif (activation := elementwise(child)) is not child:
                replacements.append((parent, name, activation))
    for parent, name, module in replacements:
        setattr(parent, name, module)
    fix_rows(model)
    return heights


def _align(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"deterministic: true needs float32 on the CPU; {name} is {parameter.dtype} on "
                f"{parameter.device}"
            )
        if parameter.data_ptr() % ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
