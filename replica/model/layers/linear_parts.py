"""The names of the linear layers that a product computes, which adapters need after layers have been merged.

A product of merged layers has several *parts*, in the order of its columns: `model.layers.0.self_attn.q_proj`, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from quire.replica.model.layers.fp8 import CodedLinear
from quire.replica.model.layers.w4 import W4Linear


class WholeLayer(NamedTuple):
    """The linear layer of the checkpoint of which a rank has a part, and which one."""

    name: str
    in_features: int
    out_features: int
    columns: tuple[int, int]  # the range of its input features
    rows: tuple[int, int]  # the range of its output features


class LinearPart(NamedTuple):
    """One linear layer of the model, by its name before any fusion."""

    name: str
    in_features: int
    out_features: int
    # None: it is a whole layer.
    whole: WholeLayer | None = None

    @property
    def of_checkpoint(self) -> WholeLayer:
        """The layer of the checkpoint that it is, or is a part of."""
        if self.whole is not None:
            return self.whole
        sizes = (self.in_features, self.out_features)
        return WholeLayer(self.name, *sizes, (0, self.in_features), (0, self.out_features))


def whole_layers(model: nn.Module) -> Mapping[str, WholeLayer]:
    """Return the layers of the checkpoint of which a rank's model has a part, by the name of the part."""
    return getattr(model, "whole_layers", {})


def name_linears(model: nn.Module) -> None:
    """Let each linear layer know its name; `parts_of` returns it."""
    wholes = whole_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, CodedLinear, W4Linear)):
            own = LinearPart(name, module.in_features, module.out_features, wholes.get(name))
            module.linear_parts = (own,)


def parts_of(module: nn.Module) -> tuple[LinearPart, ...]:
    """Return the linear layers that a module computes; empty if it is no such product."""
    return getattr(module, "linear_parts", ())


def keep_parts(product: nn.Module, replaced: Iterable[nn.Module]) -> None:
    """Let a product know the linear layers that it merges or replaces."""
    product.linear_parts = tuple(part for module in replaced for part in parts_of(module))
