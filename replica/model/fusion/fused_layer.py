"""Fused layers and decoders: what a layer's parts are called with, and in which order.

```
 CPU   norm │ qkv │ norm, rotate, write │ attend │ o + residual │ norm │ gate, up │ act·mul │ down + residual
 GPU   residual + norm │ qkv │ norm, rotate, write │ attend │ o │ residual + norm │ gate, up │ act·mul │ down
```

Consecutive layers form a chain (`layer_chains.py`): the call of the first runs all of them. On the CPU a layer whose
products are all packed is one call into the compiled library, and so is a chain (`kernels/cpu/cpu_layer_stack.py`).
On a GPU a layer of a chain hands on its residual stream and its last addend, and the next norm adds the two:
the norm of the next layer, or the decoder's last one.
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
        # This layer, and those that the model then calls with the result of the one before them; not its children.
        self._chain: tuple[FusedLayer, ...] = (self,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Tables,
        quire: StepContext,
        **_: object,
    ) -> torch.Tensor:
        """[1, T, hidden] to the same; called as transformers calls a decoder layer."""
        if quire.ran_ahead:
            quire.ran_ahead.passes(self, hidden_states, position_embeddings)
            return hidden_states
        return self.run(hidden_states, position_embeddings, quire)

    # `step` is the StepContext of the subclass' device.
    def run(self, x: torch.Tensor, tables: Tables, step: Any) -> torch.Tensor:
        """Its chain: [1, T, hidden] to the same; the layers that have run ahead are left in `step`."""
        raise NotImplementedError

    def runs_chained(self, pool: KVPool) -> bool:
        """Whether it may be a part of a chain."""
        raise NotImplementedError

    def runs_like(self, other: FusedLayer, pool: KVPool) -> bool:
        """Whether two layers that may be chained may be parts of the same chain."""
        raise NotImplementedError

    def chain(self, layers: Sequence[FusedLayer]) -> None:
        """From now on run these with it: the model calls each with what the one before it made, and the same tables."""
        self._chain = (self, *layers)

    @property
    def chained(self) -> tuple[FusedLayer, ...]:
        """Itself and the layers that run with it, in order."""
        return self._chain

    def _called(self, step: StepContext) -> tuple[FusedLayer, ...]:
        """The layers that run when the model calls this one: alone where `on_attend` must see each by itself."""
        return self._chain if step.on_attend is None else (self,)


class FusedDecoder(nn.Module):
    """Embedding, rotation's tables, one chain of layers, norm: in place of a decoder whose own loop adds nothing.

    Its children are the decoder's, under their names. Passes that look at single layers still go through its loop.

    Parameters
    ----------
    decoder
        transformers' own.
    embedding, norm
        Parts of it.
    rotation
        Part of it, or a table of what that makes.
    first
        The layer that the others are chained to.
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
        self._parts = (decoder, embedding, rotation, first, norm)  # in a tuple: not its children

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        quire: StepContext,
        **options: object,
    ) -> BaseModelOutputWithPast:
        """[1, T] and [1, T] to hidden states [1, T, hidden]; called as transformers' decoder."""
        if not self.runs_whole(quire):
            decoder = self._parts[0]
            return decoder(input_ids=input_ids, position_ids=position_ids, quire=quire, **options)
        hidden = self.run(input_ids, position_ids, quire)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    # `step` is the StepContext of the subclass' device.
    def runs_whole(self, step: Any) -> bool:
        """Whether a step needs nothing of the decoder's own loop."""
        return step.on_attend is None

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        """[1, T] and [1, T] to hidden states [1, T, hidden]."""
        raise NotImplementedError

    @property
    def last_norm(self) -> nn.Module:
        """What follows the layers."""
        return self._parts[-1]
