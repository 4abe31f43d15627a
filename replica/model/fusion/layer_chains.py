"""Layers that run together, and what the model does around them: found by watching it, kept after proof.

```
 the model      embedding │ rotation's tables │ layer │ layer │ ... │ layer │ norm │ output head
 chains, CPU                                  └───────── one call ─────────┘└───── one call ─────┘
 chains, GPU                                  └─ no addition between them ──┘
 FusedDecoder   └──────────────── in place of the model's own loop ───────────────┘
```

A chain is a sequence of layers. The model gives each of them nothing but the result of the one before it, and the same
tables.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from quire.kernels.cpu.cpu_call_sequence import ProductPart, Workspace
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.fusion.cos_sin_cache import CosSinCache
from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer
from quire.replica.model.fusion.fused_parts import FusedNorm, Product
from quire.replica.model.fusion.probe import Probe

_FAR = 1 << 22  # a position beyond what any model was trained on
_CALLED_OTHERWISE = (TypeError, ValueError, AttributeError, RuntimeError)  # what a part then raises


def chain_layers(decoder: nn.Module, probe: Probe) -> list[int]:
    """Join the layers of `decoder` to chains, and mark the last layer where it is one; the chains' lengths."""
    chains: list[list[FusedLayer]] = []
    last: tuple[torch.Tensor, torch.Tensor, object] | None = None  # result, its copy, tables
    pool = probe.pool

    def begin(layer: FusedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal last
        x = args[0] if args else kwargs["hidden_states"]
        if not layer.runs_chained(pool):
            return
        if (
            last is None
            or x is not last[0]
            or not torch.equal(x, last[1])
            or kwargs["position_embeddings"] is not last[2]
            or not _run_alike(chains[-1][-1], layer, pool)
        ):
            chains.append([])
        chains[-1].append(layer)

    def end(
        layer: FusedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        nonlocal last
        last = None
        if layer.runs_chained(pool):
            last = result, result.clone(), kwargs["position_embeddings"]

    layers = [module for module in decoder.modules() if isinstance(module, FusedLayer)]
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(end, with_kwargs=True))
        probe.run(probe.context())
    for chain in chains:
        for i, layer in enumerate(chain):
            layer.chain(chain[i + 1 :])
    if chains and not chains[-1][-1].is_on_gpu:
        chains[-1][-1].is_last = _is_last(chains[-1][-1], probe)
    return [len(chain) for chain in chains]


def fused_decoder(decoder: nn.Module, probe: Probe) -> FusedDecoder | None:
    """`decoder` without its own loop, where that has no bit of its own; None where it has."""
    calls = _calls(decoder, probe)
    layers = calls[2:-1]
    if not layers or not all(isinstance(layer, FusedLayer) for layer in layers):
        return None
    if layers[0].chained != tuple(layers):
        return None
    embedding, rotation, norm = calls[0], calls[1], calls[-1]
    on_gpu = layers[0].is_on_gpu
    if on_gpu and not isinstance(norm, FusedNorm):
        return None
    given = probe.input()
    expected = probe.run(probe.context(), given)
    # A table looks at the positions, which on a GPU the host does not know.
    tabled = None if on_gpu else tabled_rotation(rotation, expected, probe)
    for rotate in (tabled, rotation):
        if rotate is None:
            continue
        fused = FusedDecoder(decoder, embedding, rotate, layers[0], norm)
        try:
            found = probe.run(probe.context(), given, fused)
        except _CALLED_OTHERWISE:
            continue
        if torch.equal(found, expected):
            return fused
    return None


def fused_head(
    head: nn.Module, norm: nn.Module, product: nn.Module, probe: Probe
) -> NormedProduct | None:
    """The last norm and the output head as one call, where that has every bit of both; None where it has not.

    Parameters
    ----------
    head
        Of `split_model`: normed hidden states to logits.
    norm
        Before it.
    product
        Part of it, which may be all of it.
    """
    if not isinstance(norm, FusedNorm) or not isinstance(product, Product) or not product.packed:
        return None
    fused = NormedProduct(norm.weight.part(), ProductPart(product.packed, product.bias))
    x = probe.normal(probe.run(probe.context())[0])
    # Of several sizes: a bound on the logits must show.
    for normed in (x / 64, x, x * 64):
        expected = head(inputs_embeds=normed[None], use_cache=False).logits[0]
        if not _is_same(product(normed), expected):
            return None
    return fused if _is_same(fused(x, Workspace()), product(norm(x))) else None


def tabled_rotation(rotation: nn.Module, like: torch.Tensor, probe: Probe) -> CosSinCache | None:
    """A table of what `rotation` makes, where a position's cos and sin are a function of that position alone.

    With scaling that goes by the longest of a batch, or of all so far, they are not.
    """
    table = CosSinCache(rotation)
    try:
        for near, far in (([3], []), ([3, 700, 41], []), ([3, 700, 41], [_FAR]), ([41], [])):
            made = rotation(probe.normal(like), torch.tensor([near + far]))
            tabled = table(probe.normal(like), torch.tensor([near]))
            for own, found in zip(made, tabled, strict=True):
                if not _is_same(found, own[:, : len(near)]):
                    return None
    except _CALLED_OTHERWISE:
        return None
    finally:
        with suppress(*_CALLED_OTHERWISE):
            rotation(like, torch.tensor([[0]]))  # one that has seen the far position forgets it
    return table


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _calls(decoder: nn.Module, probe: Probe) -> list[nn.Module]:
    """The modules that `decoder` itself calls, in order."""
    calls: list[nn.Module] = []
    depth = 0

    def begin(module: nn.Module, _: tuple[Any, ...]) -> None:
        nonlocal depth
        if not depth:
            calls.append(module)
        depth += 1

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as hooks:
        for module in decoder.modules():
            if module is not decoder:
                hooks.enter_context(module.register_forward_pre_hook(begin))
                hooks.enter_context(module.register_forward_hook(end))
        probe.run(probe.context())
    return calls


def _run_alike(one: FusedLayer, other: FusedLayer, pool: KVPool) -> bool:
    """Whether two layers may be parts of the same chain: on the CPU that is one call."""
    if one.is_on_gpu:
        return True
    groups = {pool.group_of(layer.attention.facts.layer) for layer in (one, other)}
    kinds = {layer.sequence(pool).kind for layer in (one, other)}
    return len(groups) == len(kinds) == 1


def _is_last(layer: FusedLayer, probe: Probe) -> bool:
    """Whether what the model makes of a token after this layer is a function of that token's result alone."""
    kept = probe.num_tokens // 2  # others before it and after it

    def change(_layer: FusedLayer, _args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        changed = probe.normal(result)
        changed[:, kept] = result[:, kept]
        return changed

    given = probe.input()
    expected = probe.run(probe.context(), given)
    with layer.register_forward_hook(change):
        found = probe.run(probe.context(), given)
    return torch.equal(found[:, kept], expected[:, kept])
