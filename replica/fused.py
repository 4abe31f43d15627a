"""Fused stand-ins for a decoder's modules; `fuse.py` decides where they go and proves that they fit.

```
 CPU   norm │ qkv │ norm, rotate, write │ attend │ o + residual │ norm │ gate, up │ act·mul │ down + residual
 GPU   norm │ qkv │ norm, rotate, write │ attend │ o │ residual + norm │ gate, up │ act·mul │ down │ residual +
```

On the CPU every part is a call into the compiled library, and a layer whose products are all packed is one call
(`kernels/cpu_sequence.py`); on a GPU the products are the vendor's, the rest are the kernels of `quire.kernels`.
Results differ from the unfused module's by rounding: a fused part rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from quire.kernels import cpu_attention_native, cpu_layer, cpu_linear
from quire.kernels.cpu_linear import PackedWeight, packed_linear
from quire.kernels.cpu_sequence import (
    LayerParts,
    LayerSequence,
    LayerStack,
    NormedProduct,
    NormPart,
    ProductPart,
    Selection,
)
from quire.kernels.paged_attention import Backend
from quire.replica.attention import RanAhead, StepContext
from quire.replica.fp8 import Fp8Linear, join_rows
from quire.replica.kv_pool import KVPool
from quire.replica.rotation import Rotation

Activation = Literal["silu", "gelu_tanh"]

# Multiplications that selecting tokens must save: they take about 0.3 ms, as do another plan and two more calls.
_MIN_WORK_SAVED = 2**28


class Product(nn.Module):
    """Linear layers of the same input as one product; packed on the CPU, but for those in FP8.

    Parameters
    ----------
    parts
        Their outputs follow each other. Weights that lie so in memory are used where they are, others are copied: then
        the parts can be freed afterwards.
    backend
        "cpu" for packed weights, where the compiled library takes them.

    Raises
    ------
    ValueError
        Some of the parts are in FP8 and some are not.
    """

    def __init__(self, parts: Sequence[nn.Linear | Fp8Linear], backend: Backend):
        super().__init__()
        weights = [part.weight.detach() for part in parts]
        self.in_features = weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights)
        first = weights[0]
        bias = _merged_bias(parts)
        self.packed: PackedWeight | None = None
        self.fp8: Fp8Linear | None = None
        if any(isinstance(part, Fp8Linear) for part in parts):
            if not all(isinstance(part, Fp8Linear) for part in parts):
                raise ValueError("some of the parts are in FP8 and some are not")
            self.fp8 = Fp8Linear.joined(parts, bias)
            self.bias = None
            return
        self.bias = bias
        if backend == "cpu" and cpu_linear.supports(self.in_features, first.dtype, first.device):
            self.packed = PackedWeight.pack(weights, self.out_features)
        else:
            self.weight = nn.Parameter(join_rows(weights), requires_grad=False)
        if self.packed is not None and self.bias is not None:
            self.bias = self.packed.pad_bias(self.bias)

    def quantize(self) -> bool:
        """Store packed bfloat16 weights in int8; False where they are of another kind."""
        if self.packed is None or self.packed.dtype != torch.bfloat16 or self.in_features % 4:
            return False
        self.packed = PackedWeight.pack([self.packed.unpack()], int8=True)
        return True

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features], residual and result [..., out_features]."""
        shape = (*x.shape[:-1], self.out_features)
        if self.packed is None:
            out = F.linear(x, self.weight, self.bias) if self.fp8 is None else self.fp8(x)
            return out if residual is None else out + residual
        rows = x.reshape(-1, self.in_features)
        if residual is not None:
            residual = residual.reshape(-1, self.out_features)
        return packed_linear(rows, self.packed, bias=self.bias, residual=residual).view(shape)


def _merged_bias(parts: Sequence[nn.Linear | Fp8Linear]) -> torch.Tensor | None:
    """Zeros where a part has none; None where no part has one."""
    given = [part.bias.detach() for part in parts if part.bias is not None]
    if not given:
        return None
    return torch.cat(
        [
            given[0].new_zeros(part.out_features) if part.bias is None else part.bias.detach()
            for part in parts
        ]
    )


class PackedEmbedding(nn.Module):
    """An embedding whose table is the packed weight of the output head."""

    def __init__(self, packed: PackedWeight):
        super().__init__()
        self.packed = packed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] int64 to [..., hidden]."""
        return self.packed.rows(ids)


@dataclass(frozen=True, slots=True)
class NormWeight:
    """An RMS norm's weight in the form the kernels want."""

    weight: torch.Tensor  # CPU: `cpu_layer.pad_weight`, with the 1 added; GPU: the model's own
    eps: float
    plus_one: bool  # scales by 1 + weight

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float, plus_one: bool, backend: Backend) -> NormWeight:
        """From a module's weight [columns]."""
        weight = weight.detach()
        if backend == "cpu":
            weight = cpu_layer.pad_weight(weight.float() + 1.0 if plus_one else weight)
        return cls(weight, eps, plus_one)

    def part(self) -> NormPart:
        """For the compiled library."""
        return NormPart(self.weight, self.eps)


class FusedNorm(nn.Module):
    """RMS norm, of a sum if a residual is given."""

    def __init__(self, weight: NormWeight, backend: Backend):
        super().__init__()
        self.weight = weight
        self.backend = backend

    def constants(self) -> dict[str, torch.Tensor]:
        """What it reads and has not registered as a parameter."""
        return {"weight": self.weight.weight}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] to the same."""
        rows = x.reshape(-1, x.shape[-1])
        if self.backend == "cpu":
            return cpu_layer.rms_norm(rows, self.weight.weight, self.weight.eps).view(x.shape)
        from quire.kernels.norm import rms_norm

        w = self.weight
        return rms_norm(rows, w.weight, w.eps, gemma=w.plus_one).view(x.shape)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """On a GPU: the norm of x + residual, and x + residual."""
        from quire.kernels.norm import rms_norm

        w, columns = self.weight, x.shape[-1]
        out, total = rms_norm(
            x.reshape(-1, columns),
            w.weight,
            w.eps,
            residual=residual.reshape(-1, columns),
            gemma=w.plus_one,
        )
        return out.view(x.shape), total.view(x.shape)


class FusedMLP(nn.Module):
    """down(act(gate x) * up x), gate and up as one product."""

    def __init__(self, gate_up: Product, down: Product, activation: Activation, backend: Backend):
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.backend = backend

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x, residual and result [..., hidden]."""
        gate_up = self.gate_up(x.reshape(-1, x.shape[-1]))
        if self.backend == "cpu":
            inner = cpu_layer.gated(gate_up, gelu=self.activation == "gelu_tanh")
        else:
            from quire.kernels import activation

            gated = activation.silu_mul if self.activation == "silu" else activation.gelu_tanh_mul
            inner = gated(gate_up)
        return self.down(inner.view(*x.shape[:-1], -1), residual)


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What a layer's attention is called with, and its shape."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]


class FusedAttention(nn.Module):
    """q, k and v as one product; norm of the heads, rotation and KV write in one pass; attention; output.

    Parameters
    ----------
    norms
        Of each head of q and of k, or None.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        qkv: Product,
        output: Product,
        norms: tuple[NormWeight, NormWeight] | None,
        backend: Backend,
    ):
        super().__init__()
        self.facts = facts
        self.qkv = qkv
        self.output = output
        self.norms = norms
        self.backend = backend

    def constants(self) -> dict[str, torch.Tensor]:
        """What it reads and has not registered as a parameter."""
        q_norm, k_norm = (None, None) if self.norms is None else (n.weight for n in self.norms)
        given = {"q_norm": q_norm, "k_norm": k_norm, "sinks": self.facts.sinks}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        residual: torch.Tensor | None = None,
        *,
        quire: StepContext,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states and residual [1, T, hidden], cos and sin [1, T, rotary]; transformers' attention module."""
        facts = self.facts
        qkv = self.qkv(hidden_states[0])
        cos, sin = (table.reshape(len(qkv), -1) for table in position_embeddings)
        write = self._write_cpu if self.backend == "cpu" else self._write_gpu
        q = write(qkv, cos, sin, quire)
        out = quire.attend(facts.layer, q, facts.scaling, facts.softcap, facts.sinks)
        return self.output(out.view(1, len(qkv), -1), residual), None

    def _write_cpu(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        facts = self.facts
        norms = {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            norms = dict(q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps)
        rows = step.write_rows[step.pool.group_of(facts.layer)]
        return cpu_layer.rotate_and_write(
            qkv, facts.num_heads, *step.pool.pages(facts.layer), rows, cos, sin, **norms
        )

    def _write_gpu(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        from quire.kernels.kv_write import write_kv

        facts, pool = self.facts, step.pool
        heads = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
        q, k, v = qkv.view(len(qkv), -1, facts.head_dim).split(heads, dim=1)
        norms = {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            norms = dict(
                q_norm=q_norm.weight,
                k_norm=k_norm.weight,
                eps=q_norm.eps,
                gemma=q_norm.plus_one,
            )
        k_scale, v_scale = pool.scales(facts.layer)
        return write_kv(
            q,
            k,
            v,
            pool.keys(facts.layer),
            pool.values(facts.layer),
            step.slots[pool.group_of(facts.layer)],
            positions=torch.arange(len(qkv), device=qkv.device),
            cos=cos.float(),
            sin=sin.float(),
            k_scale=k_scale,
            v_scale=v_scale,
            q_out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            **norms,
        )


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
        self._sequence: tuple[KVPool, LayerSequence | None] | None = None
        # This layer, and those that the model then calls with what the one before them made; not its children.
        self._chain: tuple[FusedLayer, ...] = (self,)
        # What the model makes of its result, it makes of each token by itself: what nobody reads may be left out.
        self.is_last = False
        self._stack: LayerStack | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        quire: StepContext,
        **_: object,
    ) -> torch.Tensor:
        """[1, T, hidden] to the same; called as transformers calls a decoder layer."""
        if quire.workspace is not None:
            if quire.ran_ahead:
                quire.ran_ahead.passes(self, hidden_states, position_embeddings)
                return hidden_states
            if self.sequence(quire.pool) is not None:
                return self.run_chained(hidden_states, position_embeddings, quire)
        step = dict(position_embeddings=position_embeddings, quire=quire)
        normed = self.attention_norm(hidden_states)
        if self.attention.backend == "cpu":  # the products add the residual
            middle, _ = self.attention(normed, residual=hidden_states, **step)
            return self.mlp(self.mlp_norm(middle), middle)
        mixed, _ = self.attention(normed, **step)
        normed, middle = self.mlp_norm.add(mixed, hidden_states)
        return middle + self.mlp(normed)

    def forget_sequence(self) -> None:
        """Its products have changed, or will: nothing here may keep the ones before."""
        self._sequence = self._stack = None

    def sequence(self, pool: KVPool) -> LayerSequence | None:
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

    def _make_sequence(self, pool: KVPool) -> LayerSequence | None:
        attention, mlp = self.attention, self.mlp
        facts = attention.facts
        k_cache = pool.keys(facts.layer)
        products = [_part(p) for p in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
        if (
            attention.backend != "cpu"
            or any(product is None for product in products)
            or not cpu_attention_native.supports(k_cache, facts.num_heads)
        ):
            return None
        qkv, output, gate_up, down = products
        k_pages, v_pages = pool.pages(facts.layer)
        norms = attention.norms
        return LayerSequence(
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
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: StepContext,
    ) -> torch.Tensor:
        """As `forward`, with the layers that are chained to it; each has a form as one call."""
        facts = self.attention.facts
        tables = step.layer_step(step.pool.group_of(facts.layer), position_embeddings)
        # Whoever wants to know of each layer's attention gets it from a layer alone.
        chain = self._chain if step.on_attend is None else (self,)
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
    """Embedding, rotation's tables, the layers as one call, norm: a decoder whose own loop adds nothing.

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
        decoder, norm = self._parts[0], self.last_norm
        if quire.workspace is None or quire.on_attend is not None:
            return decoder(input_ids=input_ids, position_ids=position_ids, quire=quire, **options)
        x = self.before_norm(input_ids[0], position_ids[0], quire)
        return BaseModelOutputWithPast(last_hidden_state=norm(x)[None])

    def before_norm(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """[T] and [T] to what the last norm gets, [T, hidden]; `step` has a workspace."""
        _, embedding, rotation, first, _ = self._parts
        x = embedding(token_ids)
        return first.run_chained(x, rotation(x[None], positions[None]), step)

    @property
    def last_norm(self) -> nn.Module:
        """What follows the layers."""
        return self._parts[-1]


def _part(product: Product) -> ProductPart | None:
    return None if product.packed is None else ProductPart(product.packed, product.bias)
