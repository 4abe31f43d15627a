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
    """See `FusionBackend`."""

    # 2 for tables with the angles of half a head, 0 for layers without rotation.
    table_repeats: tuple[int, ...] = (1, 2, 0)
    has_chains = True
    context: ContextFactory = GpuStepContext
    norm = GpuNorm
    mlp = GpuMLP
    attention = GpuAttention
    layer = GpuLayer
    decoder = GpuDecoder

    def product(self, parts: Sequence[nn.Linear | Fp8Linear]) -> Product:
        """A product of the vendor's library."""
        return Product(parts)

    def norm_weight(self, weight: torch.Tensor, eps: float, plus_one: bool) -> NormWeight:
        """The model's own weight."""
        return NormWeight(weight, eps, plus_one)

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """In float32, because a layer would convert them in every step."""
        return sinks.detach().float()

    def mark_last(self, layer: FusedLayer, trial: TrialPass) -> None:
        """Does nothing: the last layer computes all tokens, because graphs have fixed shapes."""

    def takes_last_norm(self, norm: nn.Module) -> bool:
        """Only a fused norm: it adds the last layer's addend."""
        return isinstance(norm, FusedNorm)

    def rotations(
        self, rotation: nn.Module, like: torch.Tensor, trial: TrialPass
    ) -> Iterator[Rotation]:
        """Only the model's own. A table needs the positions on the host."""
        yield rotation

    def fuse_head(self, model: nn.Module, decoder: FusedDecoder, trial: TrialPass) -> bool:
        """Never: the last norm is fused with the last layer's addition."""
        return False

    def replace_rest(
        self, model: nn.Module, trial: TrialPass, replace: ReplaceProduct
    ) -> list[str]:
        """Does nothing: they are the vendor's products already."""
        return []

    def quantize(self, model: nn.Module, trial: TrialPass) -> list[float]:
        """Not supported: `startup.gpu_sizing` rejects int8 weights."""
        raise NotImplementedError
