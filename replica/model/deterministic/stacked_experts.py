"""Mixtures of experts as transformers builds them: the router, and the layout of stacked weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class StackedExperts(nn.Module):
    """Gated experts with stacked weights, shared with the module that it replaces.

    Parameters
    ----------
    experts
        transformers' module with `gate_up_proj` and `down_proj`, [experts, out, in], or [experts, in, out] if
        `transposed`. Biases are optional; their names end in `_bias`.
    """

    transposed = False

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.num_experts = experts.num_experts
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self.gate_up_proj_bias = getattr(experts, "gate_up_proj_bias", None)
        self.down_proj_bias = getattr(experts, "down_proj_bias", None)


class ExpertRouter(nn.Module):
    """Scores and chooses experts. Shares the parameters of the router that it replaces.

    Parameters
    ----------
    router
        Router of Qwen3-MoE (softmax, then top k) or gpt-oss (top k, then softmax).
    product
        The router's batch-invariant matrix product: [tokens, hidden] to logits [tokens, experts].
    softmax_first
        True for Qwen3-MoE, False for gpt-oss.
    """

    def __init__(
        self,
        router: nn.Module,
        product: Callable[[torch.Tensor], torch.Tensor],
        *,
        softmax_first: bool,
    ):
        super().__init__()
        self.weight = router.weight
        self.bias = getattr(router, "bias", None)
        self.product = product
        self.top_k = router.top_k
        # Softmax over all experts followed by normalising the top k equals softmax over the top k.
        self.of_best = not softmax_first or router.norm_topk_prob

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., hidden] to logits [tokens, experts], and weights and ids [tokens, top_k]."""
        logits = self.product(x.reshape(-1, x.shape[-1]))
        best, ids = torch.topk(logits, self.top_k, dim=-1)
        if self.of_best:
            weights = torch.softmax(best, dim=-1, dtype=torch.float32)
        else:
            weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)
        return logits, weights.to(logits.dtype), ids
