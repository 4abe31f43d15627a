"""Fused layers and decoders: what a layer's parts are called with, and in which order.

```
 CPU   norm │ qkv │ norm, rotate, write │ attend │ o + residual │ norm │ gate, up │ act·mul │ down + residual
 GPU   residual + norm │ qkv │ norm, rotate, write │ attend │ o │ residual + norm │ gate, up │ act·mul │ down
```

Consecutive layers form a chain (`layer_chains.py`): the call of the first runs all of them. On the CPU a layer whose
products are all packed is one call into the compiled library, and so is a chain (`kernels/cpu/cpu_layer_stack.py`). On
a GPU a layer of a chain hands on its residual stream and what is still to be added to it, and the norm that comes next
adds them: that of the next layer, or the decoder's last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.kernels.cpu import cpu_attention_native
from quire.kernels.cpu.cpu_decoder_layer import LayerParts, PreparedLayer, Selection
from quire.kernels.cpu.cpu_layer_stack import LayerStack
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import RanAhead, StepContext, Tables
from quire.replica.model.fusion.cos_sin_cache import Rotation
from quire.replica.model.fusion.fused_parts import FusedAttention, FusedMLP, FusedNorm

# Multiplications that selecting tokens must save: they take about 0.3 ms, as do another plan and two more calls.
_MIN_WORK_SAVED = 2**28


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
        # All of it as one call, made for a pool; or None for that pool, where some of it has no such form.
        self._sequence: tuple[KVPool, PreparedLayer | None] | None = None
        # This layer, and those that the model then calls with the result of the one before them; not its children.
        self._chain: tuple[FusedLayer, ...] = (self,)
        # The model treats each token of its result by itself, so tokens that are not read may be left out.
        self.is_last = False
        self._stack: LayerStack | None = None

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
        if self.is_on_gpu:
            x, addend = self.run_unsummed(hidden_states, position_embeddings, quire)
            out = x + addend
            quire.ran_ahead = RanAhead(self._called(quire)[1:], out, position_embeddings)
            return out
        if quire.workspace is not None and self.sequence(quire.pool) is not None:
            return self.run_chained(hidden_states, position_embeddings, quire)
        # The products add the residual.
        step = dict(position_embeddings=position_embeddings, quire=quire)
        normed = self.attention_norm(hidden_states)
        middle, _ = self.attention(normed, residual=hidden_states, **step)
        return self.mlp(self.mlp_norm(middle), middle)

    @property
    def is_on_gpu(self) -> bool:
        """Whether its parts are the GPU's kernels, or their interpreted form."""
        return self.attention.backend != "cpu"

    def runs_chained(self, pool: KVPool) -> bool:
        """Whether it may be a part of a chain: on the CPU only as one call."""
        return self.is_on_gpu or self.sequence(pool) is not None

    def run_unsummed(
        self, x: torch.Tensor, tables: Tables, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """On a GPU: its chain, from [1, T, hidden] to two tensors of that shape whose sum is the result."""
        addend = None
        for layer in self._called(step):
            if addend is None:
                normed = layer.attention_norm(x)
            else:
                normed, x = layer.attention_norm.add(addend, x)
            mixed, _ = layer.attention(normed, tables, quire=step)
            normed, x = layer.mlp_norm.add(mixed, x)
            addend = layer.mlp(normed)
        return x, addend

    def _called(self, step: StepContext) -> tuple[FusedLayer, ...]:
        """The layers that run when the model calls this one: alone where `on_attend` must see each by itself."""
        return self._chain if step.on_attend is None else (self,)

    def forget_sequence(self) -> None:
        """Its products have changed, or will: nothing here may keep the ones before."""
        self._sequence = self._stack = None

    def sequence(self, pool: KVPool) -> PreparedLayer | None:
        """All of it as one call; None where some of it has no such form."""
        if self._sequence is None or self._sequence[0] is not pool:
            self._sequence = pool, self._make_sequence(pool)
        return self._sequence[1]

    def chain(self, layers: Sequence[FusedLayer]) -> None:
        """From now on run these with it: the model calls each with what the one before it made, and the same tables."""
        self._chain = (self, *layers)

    @property
    def chained(self) -> tuple[FusedLayer, ...]:
        """Itself and the layers that run with it, in order."""
        return self._chain

    def selection(self, step: StepContext) -> Selection | None:
        """The tokens it runs for where that saves more than it costs; None for all."""
        if not self.is_last or step.selected is None:
            return None
        left_out = int(step.cu_q[-1]) - len(step.selected)
        if left_out * self.sequence(step.pool).selectable_work < _MIN_WORK_SAVED:
            return None
        return step.selection(step.pool.group_of(self.attention.facts.layer))

    def _make_sequence(self, pool: KVPool) -> PreparedLayer | None:
        attention, mlp = self.attention, self.mlp
        facts = attention.facts
        k_cache = pool.keys(facts.layer)
        products = [p.part() for p in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
        if (
            attention.backend != "cpu"
            or any(product is None for product in products)
            or not cpu_attention_native.supports(k_cache, facts.num_heads)
        ):
            return None
        qkv, output, gate_up, down = products
        k_pages, v_pages = pool.pages(facts.layer)
        norms = attention.norms
        return PreparedLayer(
            LayerParts(
                attention_norm=self.attention_norm.weight.part(),
                qkv=qkv,
                head_norms=None if norms is None else (norms[0].part(), norms[1].part()),
                num_heads=facts.num_heads,
                scale=facts.scaling,
                softcap=facts.softcap,
                sinks=facts.sinks,
                output=output,
                mlp_norm=self.mlp_norm.weight.part(),
                gate_up=gate_up,
                gelu=mlp.activation == "gelu_tanh",
                down=down,
                k_cache=k_cache,
                v_cache=pool.values(facts.layer),
                k_pages=k_pages,
                v_pages=v_pages,
            )
        )

    def run_chained(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tables,
        step: StepContext,
    ) -> torch.Tensor:
        """On the CPU: as `forward`, with the layers that are chained to it; each has a form as one call."""
        facts = self.attention.facts
        tables = step.layer_step(step.pool.group_of(facts.layer), position_embeddings)
        chain = self._called(step)
        sequences = tuple(layer.sequence(step.pool) for layer in chain)
        if self._stack is None or self._stack.layers != sequences:
            self._stack = LayerStack(sequences)
        selection = chain[-1].selection(step)
        x = hidden_states.contiguous()
        out = self._stack(x, tables, step.workspace, selection=selection)
        step.ran_ahead = RanAhead(chain[1:], out, position_embeddings)
        if step.on_attend is not None:
            q = sequences[0].queries(step.workspace)
            step.on_attend(facts.layer, q, facts.scaling, facts.softcap, facts.sinks)
        return out


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

    Attributes
    ----------
    head
        The norm and the model's output head as one call, for hidden states of `before_norm`; None where the head does
        anything else.
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
        self.head: NormedProduct | None = None

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        quire: StepContext,
        **options: object,
    ) -> BaseModelOutputWithPast:
        """[1, T] and [1, T] to hidden states [1, T, hidden]; called as transformers' decoder."""
        decoder, embedding, rotation, first, norm = self._parts
        if quire.on_attend is not None or (quire.workspace is None and not first.is_on_gpu):
            return decoder(input_ids=input_ids, position_ids=position_ids, quire=quire, **options)
        if not first.is_on_gpu:
            x = self.before_norm(input_ids[0], position_ids[0], quire)
            return BaseModelOutputWithPast(last_hidden_state=norm(x)[None])
        x = embedding(input_ids)
        x, addend = first.run_unsummed(x, rotation(x, position_ids), quire)
        normed, _ = norm.add(addend, x)
        return BaseModelOutputWithPast(last_hidden_state=normed)

    def before_norm(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """On the CPU: [T] and [T] to what the last norm gets, [T, hidden]; `step` has a workspace."""
        _, embedding, rotation, first, _ = self._parts
        x = embedding(token_ids)
        return first.run_chained(x, rotation(x[None], positions[None]), step)

    @property
    def last_norm(self) -> nn.Module:
        """What follows the layers."""
        return self._parts[-1]
