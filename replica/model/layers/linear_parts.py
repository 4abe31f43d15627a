"""The names of the linear layers that a product computes, which adapters need after layers have been merged.

A product of merged layers has several *parts*, in the order of its columns: `model.layers.0.self_attn.q_proj`, ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from quire.replica.model.layers.fp8 import CodedLinear
from quire.replica.model.layers.w4 import W4Linear


class LinearPart(NamedTuple):
    """One linear layer of the model, by its name before any fusion."""

    name: str
    in_features: int
    out_features: int


def name_linears(model: nn.Module) -> None:
    """Let each linear layer know its name; `parts_of` returns it."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, CodedLinear, W4Linear)):
            module.linear_parts = (LinearPart(name, module.in_features, module.out_features),)


def parts_of(module: nn.Module) -> tuple[LinearPart, ...]:
    """Return the linear layers that a module computes; empty if it is no such product."""
    return getattr(module, "linear_parts", ())


def keep_parts(product: nn.Module, replaced: Iterable[nn.Module]) -> None:
    """Let a product know the linear layers that it merges or replaces."""
    product.linear_parts = tuple(part for module in replaced for part in parts_of(module))
