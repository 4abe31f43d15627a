"""Mixtures of experts under `deterministic: true` on the CPU: other tokens do not change a token's result.

The matrix products of each expert use `tiled_linear`, so an expert with a single token computes a tile of 16 rows. The
results of a token's experts are added in ascending order of the experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from quire.replica.model.deterministic.cpu_activations import elementwise
from quire.replica.model.deterministic.cpu_tiles import fitting_tile_rows, tiled_linear
from quire.replica.model.deterministic.stacked_experts import ExpertRouter, StackedExperts


def tiled_router(router: nn.Module, *, softmax_first: bool) -> ExpertRouter:
    """Return a router whose product runs in tiles; `ExpertRouter` describes the arguments."""
    tile_rows = fitting_tile_rows(router.weight)
    bias = getattr(router, "bias", None)

    def product(x: torch.Tensor) -> torch.Tensor:
        logits = tiled_linear(x, router.weight, tile_rows)
        return logits if bias is None else logits + bias

    return ExpertRouter(router, product, softmax_first=softmax_first)


class TiledExperts(StackedExperts, ABC):
    """Experts with matrix products in tiles of fixed height; subclasses combine gates and ups."""

    def __init__(self, experts: nn.Module):
        super().__init__(experts)
        self._tile_rows = {
            name: fitting_tile_rows(self._weight(name, 0)) for name in ("gate_up_proj", "down_proj")
        }

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], ids and weights [tokens, top_k] to [tokens, hidden]."""
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            tokens, choice = torch.where(ids == expert)
            inner = self.gate(self._product("gate_up_proj", expert, x[tokens]))
            part = self._product("down_proj", expert, inner)
            out.index_add_(0, tokens, part * weights[tokens, choice, None])
        return out

    @abstractmethod
    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * inner], gates and ups, to [tokens, inner]."""

    def _weight(self, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        return weight.t() if self.transposed else weight

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        out = tiled_linear(x, self._weight(name, expert), self._tile_rows[name])
        bias = getattr(self, name + "_bias")
        return out if bias is None else out.add_(bias[expert])


class TiledGatedExperts(TiledExperts):
    """Gates then ups: activation(gate) * up."""

    def __init__(self, experts: nn.Module):
        super().__init__(experts)
        self.act_fn = elementwise(experts.act_fn)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * inner], gates then ups, to [tokens, inner]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class TiledGptOssExperts(TiledExperts):
    """gpt-oss: gates and ups interleaved and clamped, gate * sigmoid(alpha * gate) * (up + 1)."""

    transposed = True

    def __init__(self, experts: nn.Module):
        super().__init__(experts)
        self.alpha, self.limit = experts.alpha, experts.limit

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * inner], gate and up alternating, to [tokens, inner]."""
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return gate / torch.exp(gate * -self.alpha).add_(1.0) * (up + 1.0)


# Keys are names of transformers' classes, so that the classes need not be imported.
EXPERT_MODULES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "Qwen3MoeTopKRouter": partial(tiled_router, softmax_first=True),
    "GptOssTopKRouter": partial(tiled_router, softmax_first=False),
    "Qwen3MoeExperts": TiledGatedExperts,
    "GptOssExperts": TiledGptOssExperts,
}
