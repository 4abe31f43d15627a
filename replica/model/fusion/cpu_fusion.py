"""`FusionBackend` of a CPU: packed weights, int8 weights, and last norm and output head as one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from quire.kernels.cpu.cpu_call_sequence import ProductPart, Workspace
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.replica.model.attention import Rotation
from quire.replica.model.cpu_step_context import CpuStepContext
from quire.replica.model.fusion.cpu_cos_sin_cache import tabled_rotation
from quire.replica.model.fusion.cpu_fused_layer import CpuDecoder, CpuLayer
from quire.replica.model.fusion.cpu_fused_parts import (
    CpuAttention,
    CpuMLP,
    CpuNorm,
    PackedEmbedding,
    PackedProduct,
    SortedW4Product,
    cpu_norm_weight,
    cpu_product,
    norm_part,
)
from quire.replica.model.fusion.fuse_report import MAX_DEVIATION, deviation, same_tensor
from quire.replica.model.fusion.fused_layer import FusedLayer
from quire.replica.model.fusion.fused_parts import AnyLinear, FusedNorm, NormWeight, Product
from quire.replica.model.fusion.fusion_backend import ContextFactory, FusionBackend, ReplaceProduct
from quire.replica.model.fusion.trial_pass import TrialPass
from quire.replica.model.layers.linear_parts import keep_parts
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.output_head import split_model
from quire.replica.model.packed_cache import Packer


class CpuFusion(FusionBackend):
    """`FusionBackend` of a CPU. Needs the compiled library.

    Parameters
    ----------
    workspace
        The runner's workspace for layers that run as one call; the fuse pass compares layers in this form. None: the
        parts of a layer run separately.
    packer
        Packs weights.
    """

    table_repeats: tuple[int, ...] = (1,)
    norm = CpuNorm
    mlp = CpuMLP
    attention = CpuAttention
    layer = CpuLayer
    decoder = CpuDecoder

    def __init__(self, workspace: Workspace | None, packer: Packer | None = None):
        self._packer = Packer() if packer is None else packer
        self.is_proven = self._packer.is_proven
        self.has_chains = workspace is not None
        self.context: ContextFactory = partial(CpuStepContext, workspace=workspace)

    def product(self, parts: Sequence[AnyLinear]) -> Product:
        """Return a product with packed weights, if the compiled library supports them."""
        return cpu_product(parts, self._packer)

    def norm_weight(self, weight: torch.Tensor, eps: float, plus_one: bool) -> NormWeight:
        """Pad the weight; add the 1 if `plus_one`."""
        return cpu_norm_weight(weight, eps, plus_one)

    def mark_last(self, layer: CpuLayer, trial: TrialPass) -> None:
        """Set `is_last` if all operations after the layer work on each token separately."""
        layer.is_last = _is_last(layer, trial)

    def rotations(
        self, rotation: nn.Module, like: torch.Tensor, trial: TrialPass
    ) -> Iterator[Rotation]:
        """Yield a cache of RoPE tables, if they can be cached; then the model's own module."""
        table = tabled_rotation(rotation, like, trial)
        if table is not None:
            yield table
        yield rotation

    def fuse_head(self, model: nn.Module, decoder: CpuDecoder, trial: TrialPass) -> bool:
        """See `FusionBackend.fuse_head`."""
        _, head = split_model(model)
        decoder.head = fused_head(head, decoder.last_norm, model.get_output_embeddings(), trial)
        return decoder.head is not None

    def replace_rest(
        self, model: nn.Module, trial: TrialPass, replace: ReplaceProduct
    ) -> list[str]:
        """Pack the remaining linear layers, one at a time. Embeddings tied to a layer then read its packed weight."""
        reasons: list[str] = []
        for path in [n for n, m in model.named_modules() if type(m) in (nn.Linear, W4Linear)]:
            parent_path, _, name = path.rpartition(".")
            module = model.get_submodule(path)
            users = [
                (p, n, m)
                for p in model.modules()
                for n, m in p.named_children()
                if type(module) is nn.Linear
                and m is not module
                and m._parameters.get("weight") is module.weight
            ]
            if any(type(m) is not nn.Embedding or m.max_norm is not None for _, _, m in users):
                kind = type(users[0][2]).__name__
                reasons.append(f"product {path}: shares its weight with {kind}")
                continue
            product = cpu_product([module], self._packer)
            if not isinstance(product, (PackedProduct, SortedW4Product)):
                continue
            dtype = module.dtype if isinstance(module, W4Linear) else module.weight.dtype
            x = _input_of(module, trial).to(dtype)
            deviates = 0.0
            if not self.is_proven:
                deviates = deviation(product(x).float(), module(x).float())
            if not deviates <= MAX_DEVIATION[x.dtype]:
                reasons.append(f"product {path}: deviates by {deviates:.2g}")
                continue
            keep_parts(product, [module])
            replace("products", model.get_submodule(parent_path), name, product)
            for p, n, _ in users:
                replace("embeddings", p, n, PackedEmbedding(product.packed))
        return reasons

    def quantize(self, model: nn.Module, trial: TrialPass) -> list[float]:
        """Convert packed weights to int8, except the output head's; return the deviations on normal input."""
        head = model.get_output_embeddings()
        deviations = []
        for module in model.modules():  # visits a layer before its products
            if isinstance(module, CpuLayer):
                module.forget_sequence()
            if not isinstance(module, PackedProduct) or module is head:
                continue
            x = _input_of(module, trial).to(module.packed.dtype)
            expected = module(x).float()
            if module.quantize():
                deviations.append(deviation(module(x).float(), expected))
        return deviations


def _input_of(module: nn.Linear | Product, trial: TrialPass) -> torch.Tensor:
    """Random normal input of a product, [tokens, in_features] float32."""
    return torch.randn(trial.num_tokens, module.in_features, generator=trial.random)


def fused_head(
    head: nn.Module, norm: nn.Module, product: nn.Module, trial: TrialPass
) -> NormedProduct | None:
    """Return last norm and output head as one call with the same bits; None if the bits differ.

    Parameters
    ----------
    head
        Head of `split_model`: normalised hidden states to logits.
    norm
        Norm before the head.
    product
        Linear layer of the head.
    """
    if not isinstance(norm, FusedNorm) or not isinstance(product, PackedProduct):
        return None
    fused = NormedProduct(norm_part(norm.weight), ProductPart(product.packed, product.bias))
    x = trial.normal(trial.run(trial.context())[0])
    # Several magnitudes, so that soft-capping of logits changes the result.
    for normed in (x / 64, x, x * 64):
        expected = head(inputs_embeds=normed[None], use_cache=False).logits[0]
        if not same_tensor(product(normed), expected):
            return None
    return fused if same_tensor(fused(x, Workspace()), product(norm(x))) else None


def _is_last(layer: FusedLayer, trial: TrialPass) -> bool:
    """Whether all operations after this layer work on each token separately.

    This holds if changing the layer's results for the other tokens does not change one token's output.
    """
    kept = trial.num_tokens // 2  # others before it and after it

    def change(_layer: FusedLayer, _args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        changed = trial.normal(result)
        changed[:, kept] = result[:, kept]
        return changed

    given = trial.input()
    expected = trial.run(trial.context(), given)
    with layer.register_forward_hook(change):
        found = trial.run(trial.context(), given)
    return torch.equal(found[:, kept], expected[:, kept])
