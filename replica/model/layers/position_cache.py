"""Gives positions to layers that derive them from the length of transformers' cache.

Llama 4 scales queries by their position in layers without rotation, and takes the number of cached tokens plus the
index in the call. A step has tokens of several requests in one call, and no cache of transformers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# Names of a layer's cache in versions of transformers.
_CACHES = ("cache", "past_key_values")


class PositionCache:
    """Stands for a cache whose length makes index + length the position of each token; it keeps no keys.

    Parameters
    ----------
    positions
        [T] positions of a step's tokens.
    """

    def __init__(self, positions: torch.Tensor):
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return [T]: what to add to each token's index in the call."""
        return self._lengths

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's keys and values, which paged attention writes."""
        return keys, values


def pass_positions(model: nn.Module) -> None:
    """Make each layer whose attention depends on the cache's length pass it a `PositionCache`."""
    for layer in model.modules():
        for attention in layer.children():
            if getattr(attention, "attn_temperature_tuning", False):
                parameters = inspect.signature(attention.forward).parameters
                name = next(name for name in _CACHES if name in parameters)
                layer.register_forward_pre_hook(_Hook(name), with_kwargs=True)


class _Hook:
    """Puts a `PositionCache` among a layer's keywords."""

    def __init__(self, name: str):
        self._name = name

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, self._name: PositionCache(kwargs["position_ids"][0])}
