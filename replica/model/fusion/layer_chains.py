"""Finds chains of layers that can run together, by observing the model, and fuses the decoder around them.

```
 the model      embedding │    RoPE tables    │ layer │ layer │ ... │ layer │ norm │ output head
 chains, CPU                                  └───────── one call ─────────┘└───── one call ─────┘
 chains, GPU                                  └─ no addition between them ──┘
 FusedDecoder   └──────────────── replaces the model's own loop ──────────────────┘
```

A chain is a sequence of layers in which the model calls each layer with the result of the previous one, the same RoPE
tables and no other input.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer
from quire.replica.model.fusion.fusion_backend import FusionBackend
from quire.replica.model.fusion.trial_pass import CALLED_OTHERWISE, TrialPass


def chain_layers(decoder: nn.Module, trial: TrialPass) -> list[FusedLayer]:
    """Join the layers of `decoder` to chains and return the first layer of each chain."""
    chains: list[list[FusedLayer]] = []
    # Of the previous layer: result, a copy of it (it may change in place), RoPE tables.
    last: tuple[torch.Tensor, torch.Tensor, object] | None = None
    pool = trial.pool

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
            or not chains[-1][-1].runs_like(layer, pool)
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
        trial.run(trial.context())
    for chain in chains:
        for i, layer in enumerate(chain):
            layer.chain(chain[i + 1 :])
    return [chain[0] for chain in chains]


def fused_decoder(
    decoder: nn.Module, trial: TrialPass, backend: FusionBackend
) -> FusedDecoder | None:
    """Return a `FusedDecoder` whose results have the same bits as those of `decoder`; None if that is impossible."""
    calls = _calls(decoder, trial)
    layers = calls[2:-1]
    if not layers or not all(isinstance(layer, FusedLayer) for layer in layers):
        return None
    if layers[0].chained != tuple(layers):
        return None
    embedding, rotation, norm = calls[0], calls[1], calls[-1]
    if not backend.takes_last_norm(norm):
        return None
    given = trial.input()
    expected = trial.run(trial.context(), given)
    for rotate in backend.rotations(rotation, expected, trial):
        fused = backend.decoder(decoder, embedding, rotate, layers[0], norm)
        try:
            found = trial.run(trial.context(), given, fused)
        except CALLED_OTHERWISE:
            continue
        if torch.equal(found, expected):
            return fused
    return None


def _calls(decoder: nn.Module, trial: TrialPass) -> list[nn.Module]:
    """Modules that `decoder` calls directly, in order."""
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
        trial.run(trial.context())
    return calls
