"""Activations that give an element the same bits at every position.

torch's SiLU and GELU compute the exponential in one way in their vector loop and in another way in the scalar loop for
the remaining elements.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class ElementwiseSiLU(nn.Module):
    """x / (1 + exp(-x)), from operations that give an element the same bits at every position."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return x / torch.exp(-x).add_(1.0)


class ElementwiseTanhGELU(nn.Module):
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); an element has the same bits at every position."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2.0 / math.pi))
        return torch.tanh(inner).add_(1.0).mul_(x).mul_(0.5)


_ACTIVATIONS = {
    "SiLU": ElementwiseSiLU,
    "SiLUActivation": ElementwiseSiLU,
    "GELUTanh": ElementwiseTanhGELU,
}


def elementwise(activation: nn.Module) -> nn.Module:
    """Return an activation's formula whose bits do not depend on the position; other modules are returned unchanged."""
    formula = _ACTIVATIONS.get(type(activation).__name__)
    return activation if formula is None else formula()
