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
(`weight_mapping.py`): nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.attention.paged_attention import PagedAttention
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.fp8 import Fp8Linear
from quire.replica.model.fusion.candidates import (
    Call,
    Candidates,
    Observed,
    is_attention,
    num_parameters,
)
from quire.replica.model.fusion.fuse_report import MAX_DEVIATION, FuseReport, deviation
from quire.replica.model.fusion.fused_layer import FusedLayer
from quire.replica.model.fusion.fusion_backend import FusionBackend
from quire.replica.model.fusion.layer_chains import chain_layers, fused_decoder
from quire.replica.model.fusion.trial_pass import TrialPass

logger = logging.getLogger(__name__)

# Where products are FP8, a bfloat16 rounding in between moves one in 32 of their activations to another code, 9 % away:
# 1.6 % of a product's result, and each product of a layer adds its own. With exact products the bounds above hold.
_MAX_FP8_DEVIATION = 0.2


class _FuseError(Exception):
    """A candidate does not stand the comparison."""


def fuse(
    model: nn.Module,
    decoder: nn.Module,
    pool: KVPool,
    attentions: Sequence[PagedAttention],
    backend: FusionBackend,
    *,
    int8: bool = False,
) -> FuseReport:
    """Replace what can be fused, in place.

    Parameters
    ----------
    model
        The causal language model.
    decoder
        Its part from token ids to hidden states.
    pool, attentions
        The runner's: the pass writes to the trash block only.
    backend
        Of the fused forms.
    int8
        Store the packed weights in 8 bits, once their fused modules are proven; the output head keeps its own.
    """
    fuse_pass = _FusePass(model, decoder, pool, attentions, backend)
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
        backend: FusionBackend,
    ):
        self.model = model
        self.decoder = decoder
        self.pool = pool
        self.backend = backend
        vocab_size = model.get_input_embeddings().num_embeddings
        self.trial = TrialPass(decoder, vocab_size, pool, attentions, backend.context)
        self.report = FuseReport()
        self.observed = Observed()
        self.candidates = Candidates(self.observed, backend, pool, self.trial.random)

    @torch.inference_mode()
    def run(self) -> None:
        self._observe()
        # By name: a list of the modules would keep the weights of all layers until its end.
        for path in [path for path, m in self.model.named_modules() if is_attention(m)]:
            self._fuse_layer(path)
        for kind, build in (("MLPs", self.candidates.mlp), ("norms", self.candidates.norm)):
            for parent, name, module in _children(self.model):
                if module in self.observed.calls:
                    self._replace(kind, parent, name, module, build)
        self.report.dropped += self.backend.replace_rest(self.model, self.trial, self._put)
        if self.backend.has_chains:
            firsts = chain_layers(self.decoder, self.trial)
            if firsts:
                self.backend.mark_last(firsts[-1].chained[-1], self.trial)
            self.report.chains = [len(first.chained) for first in firsts]
            self._fuse_decoder()

    @torch.inference_mode()
    def quantize(self) -> None:
        """See `fuse`."""
        deviations = self.backend.quantize(self.model, self.trial)
        self.report.fused["int8 products"] = len(deviations)
        if deviations:
            self.report.int8_deviation = (float(np.mean(deviations)), max(deviations))

    def _observe(self) -> None:
        """The probing pass."""
        parents = {child: parent for parent, _, child in _children(self.model)}

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.observed.calls.setdefault(module, Call(args, kwargs))
            if module in parents:
                self.observed.order.setdefault(parents[module], []).append(module)

        hooks = [
            module.register_forward_pre_hook(record, with_kwargs=True)
            for module in self.model.modules()
        ]
        context, self.observed.attention_calls = self.trial.noting_context()
        try:
            self.trial.run(context)
        finally:
            for hook in hooks:
                hook.remove()

    # ------------------------------------------------------------------------------------------------------
    # Proof and replacement
    # ------------------------------------------------------------------------------------------------------

    def _fuse_layer(self, path: str) -> None:
        """The attention at `path`, and its layer as a whole where that is built of nothing but known parts."""
        layer_path, _, name = path.rpartition(".")
        layer = self.model.get_submodule(layer_path)
        if layer not in self.observed.calls:
            return
        attention = layer.get_submodule(name)
        builds = [
            partial(self.candidates.attention, table_repeats=n) for n in self.backend.table_repeats
        ]
        fused = self._proven("attention", attention, *builds)
        if fused is None:
            return
        calls = [child for child in self.observed.order.get(layer, []) if num_parameters(child)]
        parts = {child for child in layer.children() if num_parameters(child)}
        whole = None
        if len(calls) == 4 and calls[1] is attention and set(calls) == parts:
            norm, mlp_norm = (self._proven("norm", calls[i], self.candidates.norm) for i in (0, 2))
            mlp = self._proven("MLP", calls[3], self.candidates.mlp)
            if norm is not None and mlp_norm is not None and mlp is not None:
                build = lambda _: self.backend.layer(norm, fused, mlp_norm, mlp)  # noqa: E731
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
        if module not in self.observed.calls:
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
        self.observed.forget(replaced)

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
        call = self.observed.calls[module]
        args, kwargs = list(call.args), dict(call.kwargs)
        # So small that the residual does not hide what is added to it: norms undo the scale.
        scale = 2.0**-6 if isinstance(fused, FusedLayer) else 1.0
        if args:
            args[0] = self.trial.normal(args[0], scale)
        else:
            first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            kwargs[first] = self.trial.normal(kwargs[first], scale)
        expected = self._results(module, args, kwargs)
        found = self._results(fused, args, kwargs)
        if expected.keys() != found.keys():
            raise _FuseError(f"calls {sorted(found)}, unfused {sorted(expected)}")
        for what, value in expected.items():
            bound = max(MAX_DEVIATION[value.dtype], least_bound)
            if found[what].shape != value.shape or found[what].dtype != value.dtype:
                raise _FuseError(
                    f"{what} is {list(found[what].shape)} {found[what].dtype}, unfused {list(value.shape)} "
                    f"{value.dtype}"
                )
            deviates = deviation(found[what].float(), value.float())
            if not deviates <= bound:
                raise _FuseError(
                    f"{what} deviates by {deviates:.2g}, at most {bound:g} are rounding"
                )

    def _results(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """A module's output, and what it left in the cache and asked of attention."""
        kwargs = dict(kwargs)
        context, calls = self.trial.noting_context() if "quire" in kwargs else (None, {})
        if context is not None:
            kwargs["quire"] = context
        output = module(*args, **kwargs)
        results = {"output": output[0] if isinstance(output, tuple) else output}
        for layer, call in calls.items():
            assert context is not None
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
        fused = fused_decoder(self.decoder, self.trial, self.backend)
        if fused is None:
            return
        ((parent, name),) = [(p, n) for p, n, m in _children(self.model) if m is self.decoder]
        self._put("decoders", parent, name, fused)
        if self.backend.fuse_head(self.model, fused, self.trial):
            self.report.fused["heads"] += 1


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and child of every module below `model`."""
    return [(p, name, child) for p in model.modules() for name, child in p.named_children()]
