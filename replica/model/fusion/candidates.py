"""Builds candidates by structure: RMS norms, MLPs, attentions.

A candidate is a fused module that may replace a module of the model; the fuse pass keeps it only if both give the same
results. The trial pass is a run of a few random tokens through the original model, which records how modules are
called. Names of classes are not used. A module's parameters, its children's names, and its call in the trial pass
decide which candidate is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quire.replica.device.kv_pool import KVPool
from quire.replica.model.fusion.fuse_report import deviation
from quire.replica.model.fusion.fused_parts import (
    Activation,
    AnyLinear,
    AttentionFacts,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    Product,
    SummedProduct,
)
from quire.replica.model.fusion.fusion_backend import FusionBackend
from quire.replica.model.layers.fp8 import Fp8Linear, Int8Linear
from quire.replica.model.layers.linear_parts import keep_parts
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.sharded.shared_layers import SummedLinear


@dataclass(slots=True)
class Call:
    """Arguments of a module's call in the trial pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Observed:
    """Calls that were recorded in the trial pass."""

    calls: dict[nn.Module, Call] = field(default_factory=dict)
    order: dict[nn.Module, list[nn.Module]] = field(
        default_factory=dict
    )  # children of each module, in the order in which it called them
    # Arguments of each layer's attention, by layer.
    attention_calls: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def forget(self, replaced: nn.Module) -> None:
        """Drop all references to a replaced module, so that its weights are freed."""
        for children in self.order.values():
            children[:] = [child for child in children if child is not replaced]
        for module in replaced.modules():
            self.calls.pop(module, None)
            self.order.pop(module, None)


class Candidates:
    """Builds candidates. A method returns None if the module does not have the structure that it looks for.

    Parameters
    ----------
    observed
        Record of the trial pass.
    backend
        Creates the fused modules.
    pool
        KV cache; its layer groups have the shapes of keys and values.
    random
        Generator of random input.
    """

    def __init__(
        self, observed: Observed, backend: FusionBackend, pool: KVPool, random: torch.Generator
    ):
        self._observed = observed
        self._backend = backend
        self._pool = pool
        self._random = random

    def norm(self, module: nn.Module) -> FusedNorm | None:
        """Build an RMS norm. Random input shows whether the module scales by weight or by 1 + weight."""
        weight, eps = _norm_parameters(module)
        if weight is None:
            return None
        x = torch.randn(4, len(weight), generator=self._random)
        x = x.to(weight.dtype).to(weight.device)
        expected = module(x).float()
        rms = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        deviations = {
            plus_one: deviation(x.float() * rms * (weight.float() + plus_one), expected)
            for plus_one in (False, True)
        }
        best = min(deviations, key=deviations.__getitem__)
        return self._backend.norm(self._backend.norm_weight(weight.detach(), eps, best))

    def mlp(self, module: nn.Module) -> FusedMLP | None:
        """Build an MLP of gate, up and down projections; None also if the kernels lack its activation."""
        linears = _linears(module)
        if set(linears) == {"gate_proj", "up_proj", "down_proj"}:
            parts = [linears["gate_proj"], linears["up_proj"]]
        elif set(linears) == {"gate_up_proj", "down_proj"}:
            parts = [linears["gate_up_proj"]]
        else:
            return None
        others = [child for name, child in module.named_children() if name not in linears]
        if any(num_parameters(child) for child in others):
            return None
        activation = _activation_of(module)
        if activation is None:
            return None
        product = self._product
        return self._backend.mlp(product(parts), product([linears["down_proj"]]), activation)

    def _product(self, parts: Sequence[AnyLinear | SummedLinear]) -> Product:
        if len(parts) == 1 and isinstance(parts[0], SummedLinear):
            return SummedProduct(parts[0], self._named_product)
        if any(isinstance(part, SummedLinear) for part in parts):
            raise ValueError("layers whose sums are divided are not merged")
        return self._named_product(parts)

    def _named_product(self, parts: Sequence[AnyLinear]) -> Product:
        product = self._backend.product(parts)
        keep_parts(product, parts)
        return product

    def attention(self, module: nn.Module, table_repeats: int) -> FusedAttention | None:
        """Build an attention.

        Parameters
        ----------
        table_repeats
            How often the model's RoPE cos/sin tables are repeated to cover the rotary dimensions of a head: 1, or 2 if
            the tables have the angles of half a head; 0 if the layer applies no RoPE.
        """
        linears = _linears(module)
        call = self._observed.attention_calls.get(module.layer_idx)
        group = self._pool.groups[self._pool.group_of(module.layer_idx)]
        # 512 is `MAX_HEAD_DIM` of the compiled library (`kernels/cpu/native/attention.h`).
        if call is None or group.head_dim > 512:
            return None
        # transformers hands its keys and values on to later layers.
        if any(source == module.layer_idx for _, source in group.readers):
            return None
        if table_repeats == 2 and not self._has_half_tables(module, group.head_dim):
            return None
        norms = None
        others = {n: child for n, child in module.named_children() if n not in linears}
        others = {n: child for n, child in others.items() if num_parameters(child)}
        if others:
            if set(others) != {"q_norm", "k_norm"}:
                return None
            q_norm, k_norm = self.norm(others["q_norm"]), self.norm(others["k_norm"])
            if q_norm is None or k_norm is None or q_norm.weight.eps != k_norm.weight.eps:
                return None
            weights = [_norm_parameters(norm)[0] for norm in others.values()]
            if any(weight is None or len(weight) != group.head_dim for weight in weights):
                return None
            norms = (q_norm.weight, k_norm.weight)
        sinks = call["sinks"]
        names = ("q_proj", "k_proj", "v_proj") if "q_proj" in linears else ("qkv_proj",)
        facts = AttentionFacts(
            layer=module.layer_idx,
            num_heads=call["q"].shape[1],
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            scaling=call["scaling"],
            softcap=call["softcap"],
            sinks=None if sinks is None else self._backend.sinks(sinks),
            table_repeats=table_repeats,
        )
        width = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
        if sum(linears[name].out_features for name in names) != width:
            return None
        qkv = self._product([linears[name] for name in names])
        output = self._product([linears["o_proj"]])
        return self._backend.attention(facts, qkv, output, norms)

    def _has_half_tables(self, module: nn.Module, head_dim: int) -> bool:
        """Whether the RoPE tables passed to `module` in the trial pass have the angles of half a head."""
        tables = self._observed.calls[module].kwargs.get("position_embeddings")
        return tables is not None and 2 * tables[0].shape[-1] == head_dim


def num_parameters(module: nn.Module) -> int:
    """Count the parameter tensors of a module and its descendants."""
    return sum(1 for _ in module.parameters())


def _linears(module: nn.Module) -> dict[str, AnyLinear | SummedLinear]:
    kinds = (nn.Linear, Fp8Linear, Int8Linear, W4Linear, SummedLinear)
    return {n: child for n, child in module.named_children() if type(child) in kinds}


def is_attention(module: nn.Module) -> bool:
    """Whether a module has the linear layers and the attribute `layer_idx` of an attention."""
    names = set(_linears(module))
    return hasattr(module, "layer_idx") and names in (
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"qkv_proj", "o_proj"},
    )


def _norm_parameters(module: nn.Module) -> tuple[torch.Tensor | None, float]:
    """Return weight and epsilon if a module may be an RMS norm, else (None, 0)."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
        return None, 0.0
    return (parameters["weight"], eps) if isinstance(eps, float) else (None, 0.0)


def _activation_of(module: nn.Module) -> Activation | None:
    """Identify a module's activation function by its results; None if the kernels do not have it."""
    for name in ("act_fn", "activation_fn"):
        function = getattr(module, name, None)
        if not callable(function):
            continue
        x = torch.linspace(-6.0, 6.0, 97)
        known: dict[Activation, torch.Tensor] = {
            "silu": F.silu(x),
            "gelu_tanh": F.gelu(x, approximate="tanh"),
        }
        for activation, expected in known.items():
            # The bound must distinguish the exact GELU, which differs from the tanh form by up to 5e-4.
            if (function(x) - expected).abs().max() < 1e-5:
                return activation
    return None
