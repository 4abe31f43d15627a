"""Fused replacements for the parts of a decoder layer. `fuse_pass.py` decides where they fit and verifies them.

On a GPU, matrix products use the vendor's library, and other parts use the kernels of `quire.kernels`
(`gpu_fused_parts.py`). On the CPU, every part is a call into the compiled library (`cpu_fused_parts.py`). Results
differ from the unfused module's only by rounding: a fused part rounds its result once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from quire.replica.model.attention import StepContext, Tables
from quire.replica.model.layers.fp8 import CodedLinear, join_rows
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.sharded.shared_layers import SummedLinear

Activation = Literal["silu", "gelu_tanh"]
# Layers that a `Product` merges.
AnyLinear: TypeAlias = nn.Linear | CodedLinear | W4Linear


class Product(nn.Module):
    """Linear layers with the same input, merged into one matrix product.

    Parameters
    ----------
    parts
        The layers; their outputs are concatenated. Weights that are adjacent in memory are used in place. Other weights
        are copied, and the layers can be freed afterwards.

    Raises
    ------
    ValueError
        Some of the parts are in 8 or 4 bits and some are not, or `joined` rejects them.
    """

    def __init__(self, parts: Sequence[AnyLinear]):
        super().__init__()
        self.coded: CodedLinear | W4Linear | None = None
        if any(isinstance(part, W4Linear) for part in parts):
            self.coded = joined_w4(parts)
            self.in_features, self.out_features = self.coded.in_features, self.coded.out_features
            self.bias = None
            return
        weights = [part.weight.detach() for part in parts]
        self.in_features = weights[0].shape[1]
        self.out_features = sum(len(weight) for weight in weights)
        bias = merged_bias(parts)
        if any(isinstance(part, CodedLinear) for part in parts):
            kind = type(parts[0])
            if any(type(part) is not kind for part in parts):
                raise ValueError("some of the parts are in 8 bits and some are not")
            self.coded = kind.joined(parts, bias)
            self.bias = None
            return
        self.bias = bias
        self.weight = nn.Parameter(join_rows(weights), requires_grad=False)

    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that it reads but does not register as parameters."""
        return {} if self.bias is None else {"bias": self.bias}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features], residual and result [..., out_features]."""
        out = F.linear(x, self.weight, self.bias) if self.coded is None else self.coded(x)
        return out if residual is None else out + residual


class SummedProduct(Product):
    """`SummedLinear` with the products of its parts replaced.

    Parameters
    ----------
    layer
        The layer; its group and order of sums are kept.
    make
        Creates the product of one part.
    """

    def __init__(self, layer: SummedLinear, make: Callable[[Sequence[AnyLinear]], Product]):
        nn.Module.__init__(self)
        self.coded = None
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.products = nn.ModuleList(make([part]) for part in layer.parts)
        self._sums = layer.sums

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features], residual and result [..., out_features]."""
        out = self._sums(self.products, x)
        if self.bias is not None:
            out = out + self.bias
        return out if residual is None else out + residual


def joined_w4(parts: Sequence[AnyLinear]) -> W4Linear:
    """Merge layers in 4 bits; raises ValueError if some are not, or if `W4Linear.joined` rejects them."""
    layers = [part for part in parts if isinstance(part, W4Linear)]
    if len(layers) < len(parts):
        raise ValueError("some of the parts are in 4 bits and some are not")
    return W4Linear.joined(layers, merged_bias(parts))


def merged_bias(parts: Sequence[AnyLinear]) -> torch.Tensor | None:
    """Concatenated biases, zeros for parts without a bias; None if no part has one."""
    given = [part.bias.detach() for part in parts if part.bias is not None]
    if not given:
        return None
    return torch.cat(
        [
            given[0].new_zeros(part.out_features) if part.bias is None else part.bias.detach()
            for part in parts
        ]
    )


@dataclass(frozen=True, slots=True)
class NormWeight:
    """Weight of an RMS norm in the kernels' format."""

    weight: torch.Tensor  # GPU: the model's own; CPU: `cpu_row_ops.pad_weight`, with the 1 added
    eps: float
    plus_one: bool  # scales by 1 + weight
    dtype: torch.dtype  # of the model's own weight; code of some models reads it from the norm


class FusedNorm(nn.Module):
    """RMS norm: [..., columns] to the same."""

    def __init__(self, weight: NormWeight):
        super().__init__()
        self.weight = weight

    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that it reads but does not register as parameters."""
        return {"weight": self.weight.weight}


class FusedMLP(nn.Module, ABC):
    """down(act(gate x) * up x), with gate and up merged into one matrix product."""

    def __init__(self, gate_up: Product, down: Product, activation: Activation):
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x, residual and result [..., hidden]."""
        inner = self.gate(self.gate_up(x.reshape(-1, x.shape[-1])))
        return self.down(inner.view(*x.shape[:-1], -1), residual)

    @abstractmethod
    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """act(gate) * up: [tokens, 2 * inner] to [tokens, inner]."""


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Arguments and shape of a layer's attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    # How often the model's RoPE cos/sin tables are repeated to cover a head's rotary dimensions. On a GPU it may be 2
    # (the tables have the angles of half a head) or 0 (the layer applies no RoPE).
    table_repeats: int = 1


class FusedAttention(nn.Module, ABC):
    """q, k and v as one matrix product; head norms, RoPE and KV write as one pass; attention; output projection.

    Parameters
    ----------
    norms
        RMS norms that are applied to each head of q and of k, or None.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        qkv: Product,
        output: Product,
        norms: tuple[NormWeight, NormWeight] | None,
    ):
        super().__init__()
        self.facts = facts
        self.qkv = qkv
        self.output = output
        self.norms = norms

    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that it reads but does not register as parameters."""
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
        """hidden_states and residual [1, T, hidden], tables [1, T, rotary]; like transformers' attention."""
        facts = self.facts
        qkv = self.qkv(hidden_states[0])
        q = self.write(qkv, position_embeddings, quire)
        out = quire.attend(facts.layer, q, facts.scaling, facts.softcap, facts.sinks)
        return self.output(out.view(1, len(qkv), -1), residual), None

    # `step` is the StepContext of the subclass' device.
    @abstractmethod
    def write(self, qkv: torch.Tensor, tables: Tables, step: Any) -> torch.Tensor:
        """Normalise heads, apply RoPE, write keys and values: qkv [T, width] to q [T, heads, head_dim]."""
