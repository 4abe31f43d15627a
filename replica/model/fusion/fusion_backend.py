"""The fused forms of one kind of device, as the fuse pass asks for them: `gpu_fusion.py`, `cpu_fusion.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from quire.replica.model.attention import Rotation, StepContext
from quire.replica.model.fp8 import Fp8Linear
from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer
from quire.replica.model.fusion.fused_parts import (
    Activation,
    AttentionFacts,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    NormWeight,
    Product,
)
from quire.replica.model.fusion.trial_pass import TrialPass

# Builds a `StepContext` from its fields.
ContextFactory = Callable[..., StepContext]


class FusionBackend(Protocol):
    """What `CpuFusion` and `GpuFusion` offer."""

    # How often the rotation's tables may lie side by side in a head's rotary dimensions; 0: the layer does not rotate.
    table_repeats: tuple[int, ...]
    # Whether a layer may run with the next one.
    has_chains: bool
    # Builds the metadata of a step in which layers run as they do when the model serves.
    context: ContextFactory

    def product(self, parts: Sequence[nn.Linear | Fp8Linear]) -> Product:
        """Linear layers of the same input as one."""
        ...

    def norm_weight(self, weight: torch.Tensor, eps: float, plus_one: bool) -> NormWeight:
        """From a module's weight [columns]."""
        ...

    def norm(self, weight: NormWeight) -> FusedNorm: ...

    def mlp(self, gate_up: Product, down: Product, activation: Activation) -> FusedMLP: ...

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """[heads], as attention reads them in every step."""
        ...

    def attention(
        self,
        facts: AttentionFacts,
        qkv: Product,
        output: Product,
        norms: tuple[NormWeight, NormWeight] | None,
    ) -> FusedAttention: ...

    def layer(
        self,
        attention_norm: FusedNorm,
        attention: FusedAttention,
        mlp_norm: FusedNorm,
        mlp: FusedMLP,
    ) -> FusedLayer: ...

    def mark_last(self, layer: FusedLayer, trial: TrialPass) -> None:
        """Find out what the model makes of the result of its last chained layer."""
        ...

    def takes_last_norm(self, norm: nn.Module) -> bool:
        """Whether a fused decoder may end with this norm."""
        ...

    def rotations(
        self, rotation: nn.Module, like: torch.Tensor, trial: TrialPass
    ) -> Iterator[Rotation]:
        """Forms of the model's rotation that a fused decoder may use, the fastest first."""
        ...

    def decoder(
        self,
        decoder: nn.Module,
        embedding: nn.Module,
        rotation: Rotation,
        first: FusedLayer,
        norm: nn.Module,
    ) -> FusedDecoder: ...

    def fuse_head(self, model: nn.Module, decoder: FusedDecoder, trial: TrialPass) -> bool:
        """Join the last norm and the output head, where that keeps every bit; returns whether it does."""
        ...

    def replace_rest(
        self, model: nn.Module, trial: TrialPass, replace: ReplaceProduct
    ) -> list[str]:
        """Replace linear layers that no fused part has taken; the reasons why some were not."""
        ...

    def quantize(self, model: nn.Module, trial: TrialPass) -> list[float]:
        """Store weights in int8; the deviation of each product."""
        ...


# Counter's name, parent, child's name, replacement.
ReplaceProduct = Callable[[str, nn.Module, str, nn.Module], None]
