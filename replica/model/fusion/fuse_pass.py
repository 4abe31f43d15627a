"""The fuse pass: whole modules of transformers' model give way to fused ones, by structure and after proof.

One forward pass of a few random tokens through the model as it is shows each module's call: its arguments, the order
in which a layer calls its parts, what attention is called with. From these and the modules' parameters the pass
builds candidates, from the inside out::

    RMS norm      one vector of weights, an epsilon        ─┐
    MLP           gate, up, down, an activation            ─┼─ layer: norm, attention, norm, MLP, called in this order
    attention     q, k, v, output; norms of the heads      ─┘
    product       any linear layer left over, on the CPU (packed); an embedding tied to one becomes a look-up in it

and compares each with the module it stands for on random input: outputs, queries, and the keys and values in the
cache. A candidate that deviates is dropped, with the reason in the report; names of classes play no part, so a new
architecture is fused as far as it is built like the known ones and runs unfused where not. At last it finds out which
layers may run together, and whether the decoder does anything beside (`layer_chains.py`).

Memory: a layer's original weights live until its fused form is proven, so where they are packed the peak is the model
and one layer, or the model and the output head. Elsewhere merged weights are those that the loader laid side by side
(`placement.py`): nothing is copied.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.kernels.cpu.cpu_call_sequence import Workspace
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.fp8 import CODES, Fp8Linear
from quire.replica.model.fusion.fused_layer import FusedLayer
from quire.replica.model.fusion.fused_parts import (
    Activation,
    AttentionFacts,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    NormWeight,
    PackedEmbedding,
    Product,
)
from quire.replica.model.fusion.layer_chains import chain_layers, fused_decoder, fused_head
from quire.replica.model.fusion.probe import Probe
from quire.replica.model.output_head import split_model

logger = logging.getLogger(__name__)

# Root mean square of the difference over that of the unfused result. A wrong formula is off by tenths; rounding in
# between, which the fused form leaves out, by one in 2^9 a step in bfloat16.
_MAX_DEVIATION = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01, CODES: 0.05}
# Where products are FP8, a bfloat16 rounding in between moves one in 32 of their activations to another code, 9 % away:
# 1.6 % of a product's result, and each product of a layer adds its own. With exact products the bounds above hold.
_MAX_FP8_DEVIATION = 0.2


@dataclass(slots=True)
class FuseReport:
    """What was fused: modules by kind, and why others were not."""

    fused: Counter[str] = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)  # name: reason
    chains: list[int] = field(default_factory=list)  # lengths; see `chains`
    # Mean and largest over the products: root mean square of the difference over that of the result.
    int8_deviation: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        state: dict[str, Any] = {"fused": dict(self.fused), "dropped": list(self.dropped)}
        if self.chains:
            state["chains"] = list(self.chains)
        if self.int8_deviation is not None:
            state["int8_deviation"] = dict(zip(("mean", "max"), self.int8_deviation, strict=True))
        return state

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.fused.items()))
        text = f"fused: {parts or 'nothing'}"
        if self.chains:
            text += f"\nlayers that run together: {', '.join(map(str, self.chains))}"
        if self.int8_deviation is not None:
            mean, most = self.int8_deviation
            text += f"\nint8 products deviate by {mean:.2%} on average, {most:.2%} at most"
        return text + "".join(f"\nnot fused: {reason}" for reason in self.dropped)


@dataclass(slots=True)
class _Call:
    """A module's call in the probing pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _FuseError(Exception):
    """A candidate does not stand the comparison."""


def fuse(
    model: nn.Module,
    decoder: nn.Module,
    pool: KVPool,
    attentions: Sequence[PagedAttention],
    *,
    workspace: Workspace | None = None,
    int8: bool = False,
) -> FuseReport:
    """Replace what can be fused, in place.

    Parameters
    ----------
    model
        The causal language model; on the CPU the compiled library must be there.
    decoder
        Its part from token ids to hidden states.
    pool, attentions
        The runner's: the pass writes to the trash block only.
    workspace
        The runner's, where layers run as one call: as such they are compared.
    int8
        Store the packed weights in 8 bits, once their fused modules are proven; the output head keeps its own.
    """
    fuse_pass = _FusePass(model, decoder, pool, attentions, workspace)
    fuse_pass.run()
    if int8:
        fuse_pass.quantize()
    logger.info("%s", fuse_pass.report)
    return fuse_pass.report


class _FusePass:
    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module,
        pool: KVPool,
        attentions: Sequence[PagedAttention],
        workspace: Workspace | None,
    ):
        self.model = model
        self.decoder = decoder
        self.pool = pool
        self.backend: Backend = attentions[0].backend
        vocab_size = model.get_input_embeddings().num_embeddings
        self.probe = Probe(decoder, vocab_size, pool, attentions, workspace)
        self.as_one_call = workspace is not None
        self.report = FuseReport()
        self.calls: dict[nn.Module, _Call] = {}
        self.order: dict[nn.Module, list[nn.Module]] = {}  # of a parent's children
        self.attention_calls: dict[int, dict[str, Any]] = {}

    @torch.inference_mode()
    def run(self) -> None:
        self._observe()
        # By name: a list of the modules would keep the weights of all layers until its end.
        for path in [path for path, m in self.model.named_modules() if _is_attention(m)]:
            self._fuse_layer(path)
        for kind, build in (("MLPs", self._mlp), ("norms", self._norm)):
            for parent, name, module in _children(self.model):
                if module in self.calls:
                    self._replace(kind, parent, name, module, build)
        if self.backend == "cpu":
            self._pack_products()
        if self.as_one_call or self.backend != "cpu":
            self.report.chains = chain_layers(self.decoder, self.probe)
            self._fuse_decoder()

    @torch.inference_mode()
    def quantize(self) -> None:
        """Products but the output head's to int8, with the deviation of each on normal input."""
        head = self.model.get_output_embeddings()
        deviations = []
        for module in self.model.modules():  # a layer before its products
            if isinstance(module, FusedLayer):
                module.forget_sequence()
            if not isinstance(module, Product) or module is head or module.packed is None:
                continue
            x = self._rows(module).to(module.packed.dtype)
            expected = module(x).float()
            if module.quantize():
                deviations.append(_deviation(module(x).float(), expected))
        self.report.fused["int8 products"] = len(deviations)
        if deviations:
            self.report.int8_deviation = (float(np.mean(deviations)), max(deviations))

    def _observe(self) -> None:
        """The probing pass."""
        parents = {child: parent for parent, _, child in _children(self.model)}

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls.setdefault(module, _Call(args, kwargs))
            if module in parents:
                self.order.setdefault(parents[module], []).append(module)

        hooks = [
            module.register_forward_pre_hook(record, with_kwargs=True)
            for module in self.model.modules()
        ]
        context, self.attention_calls = self.probe.noting_context()
        try:
            self.probe.run(context)
        finally:
            for hook in hooks:
                hook.remove()

    # ------------------------------------------------------------------------------------------------------
    # Candidates: None where the structure is another
    # ------------------------------------------------------------------------------------------------------

    def _norm(self, module: nn.Module) -> FusedNorm | None:
        weight, eps = _norm_parameters(module)
        if weight is None:
            return None
        x = torch.randn(4, len(weight), generator=self.probe.random)
        x = x.to(weight.dtype).to(weight.device)
        expected = module(x).float()
        rms = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        deviations = {
            plus_one: _deviation(x.float() * rms * (weight.float() + plus_one), expected)
            for plus_one in (False, True)
        }
        best = min(deviations, key=deviations.__getitem__)
        return FusedNorm(NormWeight.of(weight, eps, best, self.backend), self.backend)

    def _mlp(self, module: nn.Module) -> FusedMLP | None:
        linears = _linears(module)
        if set(linears) == {"gate_proj", "up_proj", "down_proj"}:
            parts = [linears["gate_proj"], linears["up_proj"]]
        elif set(linears) == {"gate_up_proj", "down_proj"}:
            parts = [linears["gate_up_proj"]]
        else:
            return None
        others = [child for name, child in module.named_children() if name not in linears]
        if any(_num_parameters(child) for child in others):
            return None
        activation = _activation_of(module)
        if activation is None:
            return None
        gate_up = Product(parts, self.backend)
        down = Product([linears["down_proj"]], self.backend)
        return FusedMLP(gate_up, down, activation, self.backend)

    def _attention_with_half_tables(self, module: nn.Module) -> FusedAttention | None:
        """On a GPU: where the rotation's tables hold the angles of one half of a head for both."""
        group = self.pool.groups[self.pool.group_of(module.layer_idx)]
        tables = self.calls[module].kwargs.get("position_embeddings")
        if self.backend == "cpu" or tables is None or 2 * tables[0].shape[-1] != group.head_dim:
            return None
        return self._attention(module, table_repeats=2)

    def _attention_without_rotation(self, module: nn.Module) -> FusedAttention | None:
        """On a GPU: of a layer that makes no use of positions."""
        return None if self.backend == "cpu" else self._attention(module, table_repeats=0)

    def _attention(self, module: nn.Module, table_repeats: int = 1) -> FusedAttention | None:
        linears = _linears(module)
        call = self.attention_calls.get(module.layer_idx)
        group = self.pool.groups[self.pool.group_of(module.layer_idx)]
        if call is None or group.head_dim > 512:
            return None
        norms = None
        others = {n: child for n, child in module.named_children() if n not in linears}
        others = {n: child for n, child in others.items() if _num_parameters(child)}
        if others:
            if set(others) != {"q_norm", "k_norm"}:
                return None
            fused = [self._norm(others[name]) for name in ("q_norm", "k_norm")]
            if any(norm is None for norm in fused) or fused[0].weight.eps != fused[1].weight.eps:
                return None
            if any(len(_norm_parameters(m)[0]) != group.head_dim for m in others.values()):
                return None
            norms = (fused[0].weight, fused[1].weight)
        names = ("q_proj", "k_proj", "v_proj") if "q_proj" in linears else ("qkv_proj",)
        facts = AttentionFacts(
            layer=module.layer_idx,
            num_heads=call["q"].shape[1],
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            scaling=call["scaling"],
            softcap=call["softcap"],
            sinks=self._sinks(call["sinks"]),
            table_repeats=table_repeats,
        )
        width = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
        if sum(linears[name].out_features for name in names) != width:
            return None
        qkv = Product([linears[name] for name in names], self.backend)
        output = Product([linears["o_proj"]], self.backend)
        return FusedAttention(facts, qkv, output, norms, self.backend)

    def _sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """As attention reads them; on a GPU a layer would convert them in every step."""
        return sinks if sinks is None or self.backend == "cpu" else sinks.detach().float()

    # ------------------------------------------------------------------------------------------------------
    # Proof and replacement
    # ------------------------------------------------------------------------------------------------------

    def _fuse_layer(self, path: str) -> None:
        """The attention at `path`, and its layer as a whole where that is built of nothing but known parts."""
        layer_path, _, name = path.rpartition(".")
        layer = self.model.get_submodule(layer_path)
        if layer not in self.calls:
            return
        attention = layer.get_submodule(name)
        fused = self._proven(
            "attention",
            attention,
            self._attention,
            self._attention_with_half_tables,
            self._attention_without_rotation,
        )
        if fused is None:
            return
        calls = [child for child in self.order.get(layer, []) if _num_parameters(child)]
        parts = {child for child in layer.children() if _num_parameters(child)}
        whole = None
        if len(calls) == 4 and calls[1] is attention and set(calls) == parts:
            norm, mlp_norm = (self._proven("norm", calls[i], self._norm) for i in (0, 2))
            mlp = self._proven("MLP", calls[3], self._mlp)
            if norm is not None and mlp_norm is not None and mlp is not None:
                build = lambda _: FusedLayer(norm, fused, mlp_norm, mlp)  # noqa: E731
                whole = self._proven("layer", layer, build)
        if whole is None:
            self._put("attentions", layer, name, fused)
            return
        (place,) = [(p, n) for p, n, child in _children(self.model) if child is layer]
        self._put("layers", *place, whole)

    def _replace(
        self,
        kind: str,
        parent: nn.Module,
        name: str,
        module: nn.Module,
        build: Callable[[Any], nn.Module | None],
    ) -> None:
        fused = self._proven(kind, module, build)
        if fused is not None:
            self._put(kind, parent, name, fused)

    def _proven(
        self, kind: str, module: nn.Module, *builds: Callable[[Any], nn.Module | None]
    ) -> Any:
        """The first of a module's fused forms that does not deviate; None where there is none."""
        if module not in self.calls:
            return None
        reasons: list[str] = []
        for build in builds:
            try:
                fused = build(module)
                if fused is not None:
                    self._compare(module, fused)
                    return fused
            except (_FuseError, TypeError, ValueError, IndexError, RuntimeError) as error:
                # Also modules called otherwise than the known ones, and shapes that a kernel refuses.
                reasons.append(str(error))
        if reasons:
            name = f"{kind} {self._name(module)} ({type(module).__name__})"
            self.report.dropped.append(f"{name}: {'; '.join(reasons)}")
        return None

    def _put(self, kind: str, parent: nn.Module, name: str, fused: nn.Module) -> None:
        """Replace a module; what the model's own code may ask it, such as its kind of attention, it still answers."""
        replaced = parent.get_submodule(name)
        for key, value in vars(replaced).items():
            if isinstance(value, (str, int, float)) and not hasattr(fused, key):
                setattr(fused, key, value)
        setattr(parent, name, fused)
        self.report.fused[kind] += 1
        # Nothing else may keep its weights.
        for children in self.order.values():
            children[:] = [child for child in children if child is not replaced]
        for module in replaced.modules():
            self.calls.pop(module, None)
            self.order.pop(module, None)

    def _compare(self, module: nn.Module, fused: nn.Module) -> None:
        """Both on the same random input; where products are in FP8, also with exact ones."""
        layers = [m for root in (module, fused) for m in root.modules() if isinstance(m, Fp8Linear)]
        try:
            for layer in layers:
                layer.is_exact = True
            self._compare_results(module, fused, 0.0)
        finally:
            for layer in layers:
                layer.is_exact = False
        if layers:
            self._compare_results(module, fused, _MAX_FP8_DEVIATION)

    def _compare_results(self, module: nn.Module, fused: nn.Module, least_bound: float) -> None:
        """With the arguments of the probing pass beside the input."""
        call = self.calls[module]
        args, kwargs = list(call.args), dict(call.kwargs)
        # So small that the residual does not hide what is added to it: norms undo the scale.
        scale = 2.0**-6 if isinstance(fused, FusedLayer) else 1.0
        if args:
            args[0] = self.probe.normal(args[0], scale)
        else:
            first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            kwargs[first] = self.probe.normal(kwargs[first], scale)
        expected = self._results(module, args, kwargs)
        found = self._results(fused, args, kwargs)
        if expected.keys() != found.keys():
            raise _FuseError(f"calls {sorted(found)}, unfused {sorted(expected)}")
        for what, value in expected.items():
            bound = max(_MAX_DEVIATION[value.dtype], least_bound)
            if found[what].shape != value.shape or found[what].dtype != value.dtype:
                raise _FuseError(
                    f"{what} is {list(found[what].shape)} {found[what].dtype}, unfused {list(value.shape)} "
                    f"{value.dtype}"
                )
            deviation = _deviation(found[what].float(), value.float())
            if not deviation <= bound:
                raise _FuseError(
                    f"{what} deviates by {deviation:.2g}, at most {bound:g} are rounding"
                )

    def _results(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """A module's output, and what it left in the cache and asked of attention."""
        kwargs = dict(kwargs)
        context, calls = self.probe.noting_context() if "quire" in kwargs else (None, {})
        if context is not None:
            kwargs["quire"] = context
        output = module(*args, **kwargs)
        results = {"output": output[0] if isinstance(output, tuple) else output}
        for layer, call in calls.items():
            results[f"q of layer {layer}"] = call["q"]
            g = self.pool.group_of(layer)
            for what, pages in zip(("k", "v"), self.pool.pages(layer), strict=True):
                pages_bytes = pages.view(torch.uint8)  # devices index no numbers of 8 bits
                rows = pages_bytes[context.write_rows(g)].view(pages.dtype)
                results[f"{what} of layer {layer}"] = rows
        return results

    def _name(self, module: nn.Module) -> str:
        return next(name for name, other in self.model.named_modules() if other is module)

    def _fuse_decoder(self) -> None:
        """The decoder as a whole, where all it does is to call known parts in order."""
        fused = fused_decoder(self.decoder, self.probe)
        if fused is None:
            return
        ((parent, name),) = [(p, n) for p, n, m in _children(self.model) if m is self.decoder]
        self._put("decoders", parent, name, fused)
        _, head = split_model(self.model)
        product = self.model.get_output_embeddings()
        fused.head = fused_head(head, fused.last_norm, product, self.probe)
        if fused.head is not None:
            self.report.fused["heads"] += 1

    # ------------------------------------------------------------------------------------------------------
    # Packing, on the CPU
    # ------------------------------------------------------------------------------------------------------

    def _rows(self, module: nn.Linear | Product) -> torch.Tensor:
        """Normal input of a product [probe's tokens, in_features] float32."""
        return torch.randn(self.probe.num_tokens, module.in_features, generator=self.probe.random)

    def _pack_products(self) -> None:
        """Pack the linear layers left over, one at a time; an embedding tied to one becomes a look-up."""
        for parent, name, module in _children(self.model):
            if type(module) is not nn.Linear:
                continue
            users = [
                (p, n, m)
                for p, n, m in _children(self.model)
                if m is not module and m._parameters.get("weight") is module.weight
            ]
            if any(type(m) is not nn.Embedding or m.max_norm is not None for _, _, m in users):
                self.report.dropped.append(
                    f"product {self._name(module)}: shares its weight with {type(users[0][2]).__name__}"
                )
                continue
            product = Product([module], self.backend)
            if product.packed is None:
                continue
            x = self._rows(module).to(module.weight.dtype)
            deviation = _deviation(product(x).float(), module(x).float())
            if not deviation <= _MAX_DEVIATION[x.dtype]:
                self.report.dropped.append(
                    f"product {self._name(module)}: deviates by {deviation:.2g}"
                )
                continue
            self._put("products", parent, name, product)
            for p, n, _ in users:
                self._put("embeddings", p, n, PackedEmbedding(product.packed))


# ----------------------------------------------------------------------------------------------------------
# What modules are made of
# ----------------------------------------------------------------------------------------------------------


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and child of every module below `model`."""
    return [(p, name, child) for p in model.modules() for name, child in p.named_children()]


def _num_parameters(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


def _linears(module: nn.Module) -> dict[str, nn.Linear | Fp8Linear]:
    kinds = (nn.Linear, Fp8Linear)
    return {n: child for n, child in module.named_children() if type(child) in kinds}


def _is_attention(module: nn.Module) -> bool:
    names = set(_linears(module))
    return hasattr(module, "layer_idx") and names in (
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"qkv_proj", "o_proj"},
    )


def _norm_parameters(module: nn.Module) -> tuple[torch.Tensor | None, float]:
    """The weight and epsilon of what may be an RMS norm."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
        return None, 0.0
    return (parameters["weight"], eps) if isinstance(eps, float) else (None, 0.0)


def _activation_of(module: nn.Module) -> Activation | None:
    """Which activation the module's is, by what it computes."""
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
            # The exact GELU is off by 5e-4.
            if (function(x) - expected).abs().max() < 1e-5:
                return activation
    return None


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    difference = (found - expected).pow(2).mean().sqrt()
    return (difference / expected.pow(2).mean().sqrt().clamp_min(1e-30)).item()
