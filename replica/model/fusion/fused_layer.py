"""Fused layers and decoders: the order in which a layer calls its parts.

```
 CPU   norm │ qkv │ norm, rotate, write │ attend │ o + residual │ norm │ gate, up │ act·mul │ down + residual
 GPU   residual + norm │ qkv │ norm, rotate, write │ attend │ o │ residual + norm │ gate, up │ act·mul │ down
```

Consecutive layers form a chain (`layer_chains.py`): the call of the first layer runs all of them. On the CPU, a chain
is one call into the compiled library (`cpu_fused_layer.py`). On a GPU, a layer returns its residual stream and the
addend separately, and the next norm adds them: that of the next layer, or the decoder's last norm
(`gpu_fused_layer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import Rotation, StepContext, Tables
from quire.replica.model.fusion.fused_parts import FusedAttention, FusedMLP, FusedNorm


class FusedLayer(nn.Module):
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
        # This layer and the layers that follow in sequence. In a tuple, so that they are not registered as children.
        self._chain: tuple[FusedLayer, ...] = (self,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Tables,
        quire: StepContext,
        **_: object,
    ) -> torch.Tensor:
        """[1, T, hidden] to the same; called like transformers' decoder layers."""
        if quire.ran_ahead:
            quire.ran_ahead.passes(self, hidden_states, position_embeddings)
            return hidden_states
        return self.run(hidden_states, position_embeddings, quire)

    # `step` is the StepContext of the subclass' device.
    def run(self, x: torch.Tensor, tables: Tables, step: Any) -> torch.Tensor:
        """Run the chain, [1, T, hidden] to the same, and note in `step` which layers have run ahead."""
        raise NotImplementedError

    def runs_chained(self, pool: KVPool) -> bool:
        """Whether the layer may be part of a chain."""
        raise NotImplementedError

    def runs_like(self, other: FusedLayer, pool: KVPool) -> bool:
        """Whether two layers that run chained may be in the same chain."""
        raise NotImplementedError

    def chain(self, layers: Sequence[FusedLayer]) -> None:
        """Run `layers` together with this layer. The model calls each with the result of the previous one."""
        self._chain = (self, *layers)

    @property
    def chained(self) -> tuple[FusedLayer, ...]:
        """This layer and the layers that run with it, in order."""
        return self._chain

    def _called(self, step: StepContext) -> tuple[FusedLayer, ...]:
        """Layers that run when the model calls this one: only this one if `on_attend` observes each layer."""
        return self._chain if step.on_attend is None else (self,)


class FusedDecoder(nn.Module):
    """Embedding, rotation tables, one chain of layers, norm. Replaces a decoder with a loop that does nothing else.

    It has the decoder's children, under the same names. Passes that observe single layers use the decoder's own loop.

    Parameters
    ----------
    decoder
        transformers' decoder.
    embedding, norm
        Parts of the decoder.
    rotation
        Part of the decoder, or a table of its results.
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
        """[1, T] and [1, T] to hidden states [1, T, hidden]; called like transformers' decoder."""
        if not self.runs_whole(quire):
            decoder = self._parts[0]
            return decoder(input_ids=input_ids, position_ids=position_ids, quire=quire, **options)
        hidden = self.run(input_ids, position_ids, quire)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    # `step` is the StepContext of the subclass' device.
    def runs_whole(self, step: Any) -> bool:
        """Whether a step does not need the decoder's own loop."""
        return step.on_attend is None

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        """Run all parts: [1, T] and [1, T] to hidden states [1, T, hidden]."""
        raise NotImplementedError

    @property
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return self._parts[-1]
