"""The layout in which transformers stacks the weights of experts."""

from __future__ import annotations

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
