"""Fused layers and decoders: the order in which a layer calls its parts.

```
 CPU   norm │ qkv │ norm, rotate, write │ attend │ o + residual │ norm │ gate, up │ act·mul │ down + residual
 GPU   residual + norm │ qkv │ norm, rotate, write │ attend │ o │ residual + norm │ gate, up │ act·mul │ down
```

Consecutive layers form a chain (`layer_chains.py`): the call of the first layer runs the chain. On the CPU, a chain
is one call into the compiled library (`cpu_fused_layer.py`). On a GPU, a layer returns its residual stream and the
result of its MLP separately. The norm that follows, in the next layer or at the end of the decoder, adds both
(`gpu_fused_layer.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import Rotation, StepContext, Tables
from quire.replica.model.fusion.fused_parts import FusedAttention, FusedMLP, FusedNorm


class FusedLayer(nn.Module, ABC):
    """x + attention(norm x), then y + mlp(norm y)."""

    def __init__(
        self,
        attention_norm: FusedNorm,
        attention: FusedAttention,
        mlp_norm: FusedNorm,
        mlp: FusedMLP,
    ):
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        # This layer and the later layers that its call runs. A tuple, so that they are not registered as children.
        self._chain: tuple[FusedLayer, ...] = (self,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Tables,
        quire: StepContext,
        **_: object,
    ) -> torch.Tensor:
        """Map [1, T, hidden] to the same shape. The signature is that of transformers' decoder layers."""
        if quire.ran_ahead:
            quire.ran_ahead.passes(self, hidden_states, position_embeddings)
            return hidden_states
        return self.run(hidden_states, position_embeddings, quire)

    # `step` is the StepContext of the subclass' device.
    @abstractmethod
    def run(self, x: torch.Tensor, tables: Tables, step: Any) -> torch.Tensor:
        """Run the chain, [1, T, hidden] to the same shape, and set `step.ran_ahead`: the layers that have run early."""

    @abstractmethod
    def runs_chained(self, pool: KVPool) -> bool:
        """Whether the layer may be part of a chain."""

    @abstractmethod
    def runs_like(self, other: FusedLayer, pool: KVPool) -> bool:
        """Whether two layers may be in the same chain, if `runs_chained` holds for both."""

    def chain(self, layers: Sequence[FusedLayer]) -> None:
        """Make calls of this layer run `layers` too. The model must call each with the result of the previous one."""
        self._chain = (self, *layers)

    @property
    def chained(self) -> tuple[FusedLayer, ...]:
        """This layer and the layers that run with it, in order."""
        return self._chain

    def _called(self, step: StepContext) -> tuple[FusedLayer, ...]:
        """Layers that run when the model calls this one: only this one if `on_attend` observes each layer."""
        return self._chain if step.on_attend is None else (self,)


class FusedDecoder(nn.Module, ABC):
    """Embedding, RoPE tables, one chain of layers, norm. Replaces a decoder that does nothing else.

    It has the decoder's children, under the same names. If a step observes single layers (`StepContext.on_attend`), the
    decoder's own loop runs.

    Parameters
    ----------
    decoder
        transformers' decoder.
    embedding, norm
        Parts of the decoder.
    rotation
        The decoder's module that computes RoPE tables, or a cache of its results.
    first
        First layer of the chain.
    """

    def __init__(
        self,
        decoder: nn.Module,
        embedding: nn.Module,
        rotation: Rotation,
        first: FusedLayer,
        norm: nn.Module,
    ):
        super().__init__()
        for name, child in decoder.named_children():
            self.add_module(name, child)
        self._parts = (
            decoder,
            embedding,
            rotation,
            first,
            norm,
        )  # a tuple does not register children

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        quire: StepContext,
        **options: object,
    ) -> BaseModelOutputWithPast:
        """Map token ids and positions [1, T] to hidden states [1, T, hidden], like transformers' decoder."""
        if not self.runs_whole(quire):
            decoder = self._parts[0]
            return decoder(input_ids=input_ids, position_ids=position_ids, quire=quire, **options)
        hidden = self.run(input_ids, position_ids, quire)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    # `step` is the StepContext of the subclass' device.
    def runs_whole(self, step: Any) -> bool:
        """Whether `run` can compute a step, so that the decoder's own loop is not needed."""
        return step.on_attend is None

    @abstractmethod
    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        """Run all parts: token ids and positions [1, T] to hidden states [1, T, hidden]."""

    @property
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return self._parts[-1]
