"""The fuse pass replaces modules of transformers' model by fused ones, found by structure and verified one by one.

A trial pass of a few random tokens through the original model records each module's call: its arguments, the order in
which a layer calls its parts, and the arguments of attention. From these and from the modules' parameters the fuse pass
builds candidates (fused modules that may replace the original ones), from the inside out::

    RMS norm      one vector of weights, an epsilon        ─┐
    MLP           gate, up, down, an activation            ─┼─ layer: norm, attention, norm, MLP, called in this order
    attention     q, k, v, output; norms of the heads      ─┘
    product       any other linear layer; on the CPU only, with a packed weight, which a tied embedding reads too

Each candidate is compared with the original module on random input: outputs, queries, and the keys and values in the
cache must agree. A candidate that deviates is dropped, and the report has the reason. Names of classes are not used, so
modules of a new architecture are fused where their structure is known, and run unfused elsewhere. Finally the pass
finds out which layers can run together, and whether the decoder consists only of known parts (`layer_chains.py`).

Memory: a layer's original weights are freed once its fused form is verified. Packing weights therefore needs memory for
the model plus one layer, or plus the output head. Weights that are not packed are merged in place, because the loader
puts them next to each other (`weight_mapping.py`).
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
from quire.replica.model.layers.fp8 import CodedLinear
from quire.replica.model.sharded.shared_layers import group_of

logger = logging.getLogger(__name__)

# Bound of `deviation` for modules with FP8 matrix products. A bfloat16 rounding between two parts moves 1 in 32
# activations to another FP8 code, 9% away. This changes the result of a matrix product by 1.6%, and the errors of a
# layer's matrix products add up. The same modules are also compared with exact products, within `MAX_DEVIATION`.
_MAX_FP8_DEVIATION = 0.2


class _FuseError(Exception):
    """A candidate differs from the module it replaces."""


def fuse(
    model: nn.Module,
    decoder: nn.Module,
    pool: KVPool,
    attentions: Sequence[PagedAttention],
    backend: FusionBackend,
    *,
    int8: bool = False,
) -> FuseReport:
    """Replace the modules that can be fused, in place.

    Parameters
    ----------
    model
        The causal language model.
    decoder
        The part of the model from token ids to hidden states.
    pool, attentions
        The runner's KV cache, and its attention for each layer group. Only the trash block is written.
    backend
        Creates the fused modules.
    int8
        Convert packed weights to int8 after their fused modules are verified, except those of the output head.
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
        # Ranks decide alike, because a module's results may be sums of all ranks.
        self._ranks = group_of(model)

    @torch.inference_mode()
    def run(self) -> None:
        self._observe()
        # By path: a list of modules would keep the weights of all layers alive.
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
        """Convert packed weights to int8, except those of the output head."""
        deviations = self.backend.quantize(self.model, self.trial)
        self.report.fused["int8 products"] = len(deviations)
        if deviations:
            self.report.int8_deviation = (float(np.mean(deviations)), max(deviations))

    def _observe(self) -> None:
        """Run the trial pass and record how modules are called."""
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
    # Verification and replacement
    # ------------------------------------------------------------------------------------------------------

    def _fuse_layer(self, path: str) -> None:
        """Fuse the layer that has the attention at `path`, or only the attention if the layer has unknown parts."""
        layer_path, _, name = path.rpartition(".")
        layer = self.model.get_submodule(layer_path)
        # A hook changes what the layer computes, at positions that a trial need not have.
        if layer not in self.observed.calls or layer._forward_pre_hooks:
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
        """Return the first candidate that matches the module; None if none does, with the reasons in the report."""
        if module not in self.observed.calls:
            return None
        reasons: list[str] = []
        for build in builds:
            try:
                fused = build(module)
                if fused is not None:
                    self._compare(module, fused)
                    return fused
            except (
                _FuseError,
                AttributeError,
                TypeError,
                ValueError,
                IndexError,
                RuntimeError,
            ) as error:
                # These errors include unknown call signatures, and shapes that a kernel rejects.
                reasons.append(str(error))
        if reasons:
            name = f"{kind} {self._name(module)} ({type(module).__name__})"
            self.report.dropped.append(f"{name}: {'; '.join(reasons)}")
        return None

    def _put(self, kind: str, parent: nn.Module, name: str, fused: nn.Module) -> None:
        """Replace a module. Strings and numbers among its attributes are copied: the model's code may read them."""
        replaced = parent.get_submodule(name)
        for key, value in vars(replaced).items():
            if isinstance(value, (str, int, float)) and not hasattr(fused, key):
                setattr(fused, key, value)
        setattr(parent, name, fused)
        self.report.fused[kind] += 1
        self.observed.forget(replaced)

    def _compare(self, module: nn.Module, fused: nn.Module) -> None:
        """Compare both modules on random input. FP8 matrix products are computed exactly first, then in FP8."""
        if self.backend.is_proven:
            return
        layers = [
            m for root in (module, fused) for m in root.modules() if isinstance(m, CodedLinear)
        ]
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
        """Compare both modules on random input and with the other arguments of the trial pass."""
        call = self.observed.calls[module]
        args, kwargs = list(call.args), dict(call.kwargs)
        # Scale the input of a layer down, so that the residual does not hide the results of attention and MLP; the
        # norms before them undo the scale.
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
            if self._ranks is not None:
                deviates = self._ranks.largest(deviates)
            if not deviates <= bound:
                raise _FuseError(
                    f"{what} deviates by {deviates:.2g}, at most {bound:g} are rounding"
                )

    def _results(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return a module's output, the queries of its attention, and the keys and values that it wrote."""
        kwargs = dict(kwargs)
        context, calls = self.trial.noting_context() if "quire" in kwargs else (None, {})
        if context is not None:
            kwargs["quire"] = context
        output = module(*args, **kwargs)
        # A layer that returns a tuple must be replaced by one that does.
        results = {"first output": output[0]} if isinstance(output, tuple) else {"output": output}
        for layer, call in calls.items():
            assert context is not None
            results[f"q of layer {layer}"] = call["q"]
            g = self.pool.group_of(layer)
            for what, pages in zip(("k", "v"), self.pool.pages(layer), strict=True):
                pages_bytes = pages.view(torch.uint8)  # torch cannot index float8
                rows = pages_bytes[context.write_rows(g)].view(pages.dtype)
                results[f"{what} of layer {layer}"] = rows
        return results

    def _name(self, module: nn.Module) -> str:
        return next(name for name, other in self.model.named_modules() if other is module)

    def _fuse_decoder(self) -> None:
        """Replace the decoder if it does nothing but call known parts in order."""
        fused = fused_decoder(self.decoder, self.trial, self.backend)
        if fused is None:
            return
        ((parent, name),) = [(p, n) for p, n, m in _children(self.model) if m is self.decoder]
        self._put("decoders", parent, name, fused)
        if self.backend.fuse_head(self.model, fused, self.trial):
            self.report.fused["heads"] += 1


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, name, child) for every module below `model`."""
    return [(p, name, child) for p in model.modules() for name, child in p.named_children()]
