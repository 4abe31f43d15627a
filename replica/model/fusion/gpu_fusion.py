"""`FusionBackend` of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from quire.replica.model.attention import Rotation
from quire.replica.model.fp8 import Fp8Linear
from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer
from quire.replica.model.fusion.fused_parts import FusedNorm, NormWeight, Product
from quire.replica.model.fusion.fusion_backend import ContextFactory, ReplaceProduct
from quire.replica.model.fusion.gpu_fused_layer import GpuDecoder, GpuLayer
from quire.replica.model.fusion.gpu_fused_parts import GpuAttention, GpuMLP, GpuNorm
from quire.replica.model.fusion.trial_pass import TrialPass
from quire.replica.model.gpu_step_context import GpuStepContext


class GpuFusion:
    """`FusionBackend` of a GPU."""

    # 1: RoPE tables for all rotary dimensions; 2: tables with the angles of half a head; 0: layers without RoPE.
    table_repeats: tuple[int, ...] = (1, 2, 0)
    has_chains = True
    context: ContextFactory = GpuStepContext
    norm = GpuNorm
    mlp = GpuMLP
    attention = GpuAttention
    layer = GpuLayer
    decoder = GpuDecoder

    def product(self, parts: Sequence[nn.Linear | Fp8Linear]) -> Product:
        """Return a matrix product of the vendor's library."""
        return Product(parts)

    def norm_weight(self, weight: torch.Tensor, eps: float, plus_one: bool) -> NormWeight:
        """Return the model's own weight, not converted."""
        return NormWeight(weight, eps, plus_one)

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """Convert sinks to float32 once; otherwise a layer would convert them in every step."""
        return sinks.detach().float()

    def mark_last(self, layer: FusedLayer, trial: TrialPass) -> None:
        """Does nothing: the last layer computes all tokens, because graphs have fixed shapes."""

    def takes_last_norm(self, norm: nn.Module) -> bool:
        """Whether the norm is fused: it must add the result of the last layer's MLP to the residual."""
        return isinstance(norm, FusedNorm)

    def rotations(
        self, rotation: nn.Module, like: torch.Tensor, trial: TrialPass
    ) -> Iterator[Rotation]:
        """Yield only the model's own module. A cache of tables would need the positions on the host."""
        yield rotation

    def fuse_head(self, model: nn.Module, decoder: FusedDecoder, trial: TrialPass) -> bool:
        """Return False: the last norm is fused with the last layer's addition to the residual."""
        return False

    def replace_rest(
        self, model: nn.Module, trial: TrialPass, replace: ReplaceProduct
    ) -> list[str]:
        """Does nothing: the remaining linear layers already use the vendor's library."""
        return []

    def quantize(self, model: nn.Module, trial: TrialPass) -> list[float]:
        """Not supported on a GPU. `startup.gpu_sizing` rejects int8 weights, so this is never called."""
        raise NotImplementedError
