"""Mixtures of experts under `deterministic: true` on the CPU: other tokens do not change a token's result.

The matrix products of each expert use `tiled_linear`, so an expert with a single token computes a tile of 16 rows. The
results of a token's experts are added in ascending order of the experts.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.replica.model.deterministic.cpu_tiles import fitting_tile_rows, tiled_linear
from quire.replica.model.deterministic.stacked_experts import StackedExperts


class TiledRouter(nn.Module):
    """Scores and chooses experts. Shares the weight [experts, hidden] of the router that it replaces.

    Parameters
    ----------
    router
        Router of Qwen3-MoE (softmax, then top k) or gpt-oss (top k, then softmax).
    softmax_first
        True for Qwen3-MoE, False for gpt-oss.
    """

    def __init__(self, router: nn.Module, *, softmax_first: bool):
        super().__init__()
        self.weight = router.weight
        self.bias = getattr(router, "bias", None)
        self.top_k = router.top_k
        self.softmax_first = softmax_first
        self.normalize = getattr(router, "norm_topk_prob", False)
        self.tile_rows = fitting_tile_rows(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., hidden] to logits [tokens, experts], and weights and ids [tokens, top_k]."""
        logits = tiled_linear(x.reshape(-1, x.shape[-1]), self.weight, self.tile_rows)
        if self.bias is not None:
            logits += self.bias
        if self.softmax_first:
            weights, ids = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
            if self.normalize:
                weights = weights / weights.sum(dim=-1, keepdim=True)
        else:
            best, ids = torch.topk(logits, self.top_k, dim=-1)
            weights = torch.softmax(best, dim=-1)
        return logits, weights, ids


class TiledExperts(StackedExperts):
    """Experts with matrix products in tiles of fixed height."""

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

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * inner], gates then ups, to [tokens, inner]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / torch.exp(-gate).add_(1.0) * up

    def _weight(self, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        return weight.t() if self.transposed else weight

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        out = tiled_linear(x, self._weight(name, expert), self._tile_rows[name])
        bias = getattr(self, name + "_bias")
        return out if bias is None else out.add_(bias[expert])


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
EXPERT_MODULES = {
    "Qwen3MoeTopKRouter": lambda module: TiledRouter(module, softmax_first=True),
    "GptOssTopKRouter": lambda module: TiledRouter(module, softmax_first=False),
    "Qwen3MoeExperts": TiledExperts,
    "GptOssExperts": TiledGptOssExperts,
}
