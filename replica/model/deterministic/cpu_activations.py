"""Activations that give an element the same bits at every position.

torch's SiLU, GELU, sigmoid and others compute the exponential in one way in their vector loop and in another way in the
scalar loop for the remaining elements. Its exponential, tanh, erf and log1p alone have one way.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x))."""
    return x / torch.exp(-x).add_(1.0)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / torch.exp(-x).add_(1.0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x / 2 (1 + erf(x / sqrt(2)))."""
    return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2.0 / math.pi))
    return torch.tanh(inner).add_(1.0).mul_(x).mul_(0.5)


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """log(1 + exp(beta x)) / beta, and x where beta x exceeds the threshold."""
    scaled = x * beta
    smooth = torch.log1p(torch.exp(-scaled.abs())).add_(scaled.clamp(min=0.0)).div_(beta)
    return torch.where(scaled > threshold, x, smooth)


class ElementwiseSiLU(nn.Module):
    """`silu` as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return silu(x)


class ElementwiseTanhGELU(nn.Module):
    """`tanh_gelu` as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return tanh_gelu(x)


_ACTIVATIONS = {
    "SiLU": ElementwiseSiLU,
    "SiLUActivation": ElementwiseSiLU,
    "GELUTanh": ElementwiseTanhGELU,
}


def elementwise(activation: nn.Module) -> nn.Module:
    """Return an activation's formula whose bits do not depend on the position; other modules are returned unchanged."""
    formula = _ACTIVATIONS.get(type(activation).__name__)
    return activation if formula is None else formula()
