"""Creates fused modules for the fuse pass; `gpu_fusion.py` and `cpu_fusion.py` have what depends on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from quire.replica.model.attention import Rotation, StepContext
from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer
from quire.replica.model.fusion.fused_parts import (
    AnyLinear,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    NormWeight,
    Product,
)
from quire.replica.model.fusion.trial_pass import TrialPass

# Builds the `StepContext` of a backend from its fields.
ContextFactory = Callable[..., StepContext]
# Arguments: kind in the report, parent, name of the child, replacement.
ReplaceProduct = Callable[[str, nn.Module, str, nn.Module], None]


class FusionBackend:
    """The devices' part of the fuse pass. Its own methods are for a device that needs no conversion."""

    # Values of `AttentionFacts.table_repeats` that the kernels support, in the order in which they are tried.
    table_repeats: tuple[int, ...]
    # Whether the fused modules have been compared with the model's in an earlier start (`packed_cache.py`).
    is_proven = False
    # Whether layers may form chains, sequences of layers that run as one (`layer_chains.py`).
    has_chains: bool
    # Builds the metadata of a step in the form used for serving.
    context: ContextFactory
    # The fused modules.
    norm: type[FusedNorm]
    mlp: type[FusedMLP]
    attention: type[FusedAttention]
    layer: type[FusedLayer]
    decoder: type[FusedDecoder]

    def product(self, parts: Sequence[AnyLinear]) -> Product:
        """Merge linear layers with the same input into one matrix product."""
        return Product(parts)

    def norm_weight(self, weight: torch.Tensor, eps: float, plus_one: bool) -> NormWeight:
        """Convert the weight [columns] of an RMS norm to the kernels' format; `plus_one`: it scales by 1 + weight."""
        return NormWeight(weight, eps, plus_one, weight.dtype)

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """Convert attention sinks [heads] to the form that attention reads."""
        return sinks

    def mark_last(self, layer: FusedLayer, trial: TrialPass) -> None:
        """Find out whether the last layer of a chain may skip tokens whose results are not read."""

    def takes_last_norm(self, norm: nn.Module) -> bool:
        """Whether this norm may be the last norm of a fused decoder."""
        return True

    def rotations(
        self, rotation: nn.Module, like: torch.Tensor, trial: TrialPass
    ) -> Iterator[Rotation]:
        """Yield replacements of `rotation`, the model's module that computes RoPE tables; the fastest first."""
        yield rotation

    def fuse_head(self, model: nn.Module, decoder: FusedDecoder, trial: TrialPass) -> bool:
        """Join last norm and output head into one call if the bits stay equal; return whether they were joined."""
        return False

    def replace_rest(
        self, model: nn.Module, trial: TrialPass, replace: ReplaceProduct
    ) -> list[str]:
        """Replace linear layers outside fused modules; return the reasons why some were not replaced."""
        return []

    def quantize(self, model: nn.Module, trial: TrialPass) -> list[float]:
        """Convert packed weights to int8; return the deviation of each matrix product."""
        return []
