"""Fused stand-ins for the parts of a decoder's layers; `fuse_pass.py` decides where they go and proves that they fit.

On the CPU every part is a call into the compiled library; on a GPU the products are the vendor's, the rest are the
kernels of `quire.kernels`. Results differ from the unfused module's by rounding: a fused part rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.attention.paged_attention import Backend
from quire.kernels.cpu import cpu_linear, cpu_row_ops
from quire.kernels.cpu.cpu_call_sequence import NormPart, ProductPart
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear
from quire.replica.model.attention import StepContext, Tables
from quire.replica.model.fp8 import Fp8Linear, join_rows

Activation = Literal["silu", "gelu_tanh"]


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

    def constants(self) -> dict[str, torch.Tensor]:
        """What it reads and has not registered as a parameter."""
        return {} if self.bias is None else {"bias": self.bias}

    def part(self) -> ProductPart | None:
        """For the compiled library; None where it is not packed."""
        return None if self.packed is None else ProductPart(self.packed, self.bias)

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

    weight: torch.Tensor  # CPU: `cpu_row_ops.pad_weight`, with the 1 added; GPU: the model's own
    eps: float
    plus_one: bool  # scales by 1 + weight

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float, plus_one: bool, backend: Backend) -> NormWeight:
        """From a module's weight [columns]."""
        weight = weight.detach()
        if backend == "cpu":
            weight = cpu_row_ops.pad_weight(weight.float() + 1.0 if plus_one else weight)
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
            return cpu_row_ops.rms_norm(rows, self.weight.weight, self.weight.eps).view(x.shape)
        from quire.kernels.rows.norm import rms_norm

        w = self.weight
        return rms_norm(rows, w.weight, w.eps, gemma=w.plus_one).view(x.shape)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """On a GPU: the norm of x + residual, and x + residual."""
        from quire.kernels.rows.norm import rms_norm

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
            inner = cpu_row_ops.gated(gate_up, gelu=self.activation == "gelu_tanh")
        else:
            from quire.kernels.rows import activation

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
    # How often the rotation's tables lie side by side in a head's rotary dimensions. On a GPU it may be 2, if the
    # tables hold the angles of one half, or 0: the layer does not rotate.
    table_repeats: int = 1


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
        position_embeddings: Tables,
        residual: torch.Tensor | None = None,
        *,
        quire: StepContext,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states and residual [1, T, hidden], cos and sin [1, T, rotary]; transformers' attention module."""
        facts = self.facts
        qkv = self.qkv(hidden_states[0])
        write = self._write_cpu if self.backend == "cpu" else self._write_gpu
        q = write(qkv, position_embeddings, quire)
        out = quire.attend(facts.layer, q, facts.scaling, facts.softcap, facts.sinks)
        return self.output(out.view(1, len(qkv), -1), residual), None

    def _write_cpu(self, qkv: torch.Tensor, tables: Tables, step: StepContext) -> torch.Tensor:
        facts = self.facts
        cos, sin = (table.reshape(len(qkv), -1) for table in tables)
        norms = {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            norms = dict(q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps)
        rows = step.write_rows(step.pool.group_of(facts.layer))
        return cpu_row_ops.rotate_and_write(
            qkv, facts.num_heads, *step.pool.pages(facts.layer), rows, cos, sin, **norms
        )

    def _write_gpu(self, qkv: torch.Tensor, tables: Tables, step: StepContext) -> torch.Tensor:
        from quire.kernels.rows.kv_write import write_kv

        facts, pool = self.facts, step.pool
        rotation = step.rotation(tables, facts.table_repeats) if facts.table_repeats else None
        heads = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
        q, k, v = qkv.view(len(qkv), -1, facts.head_dim).split(heads, dim=1)
        given = {}
        if rotation is not None:
            given = dict(positions=rotation.rows, cos=rotation.cos, sin=rotation.sin)
        if self.norms is not None:
            q_norm, k_norm = self.norms
            given |= dict(
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
            k_scale=k_scale,
            v_scale=v_scale,
            q_out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            **given,
        )
