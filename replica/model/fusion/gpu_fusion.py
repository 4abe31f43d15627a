"""`FusionBackend` of a GPU."""

from __future__ import annotations

import torch
from torch import nn

from quire.replica.model.fusion.fused_parts import FusedNorm
from quire.replica.model.fusion.fusion_backend import ContextFactory, FusionBackend
from quire.replica.model.fusion.gpu_fused_layer import GpuDecoder, GpuLayer
from quire.replica.model.fusion.gpu_fused_parts import GpuAttention, GpuMLP, GpuNorm
from quire.replica.model.gpu_step_context import GpuStepContext


class GpuFusion(FusionBackend):
    """`FusionBackend` of a GPU.

    Products and norms have the model's own weights. The last layer computes all tokens, because graphs have fixed
    shapes; a cache of RoPE tables would need the positions on the host; the last norm is fused with the last layer's
    addition to the residual, so the head is not; other linear layers use the vendor's library as they are.
    `startup.gpu_sizing` refuses int8 weights.
    """

    # 1: RoPE tables for all rotary dimensions; 2: tables with the angles of half a head; 0: layers without RoPE.
    table_repeats: tuple[int, ...] = (1, 2, 0)
    has_chains = True
    context: ContextFactory = GpuStepContext
    norm = GpuNorm
    mlp = GpuMLP
    attention = GpuAttention
    layer = GpuLayer
    decoder = GpuDecoder

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """Convert sinks to float32 once; otherwise a layer would convert them in every step."""
        return sinks.detach().float()

    def takes_last_norm(self, norm: nn.Module) -> bool:
        """Whether the norm is fused: it must add the result of the last layer's MLP to the residual."""
        return isinstance(norm, FusedNorm)
