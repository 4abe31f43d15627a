"""A model whose products add the adapters of a step's tokens.

```
 hidden x [T, in] ──▶ product W x ──▶ out [T, out]
                 └──▶ A of the token's slot ──▶ B of its slot ──▶ +          tokens in slot 0: nothing is added
```

Each linear layer of the decoder, merged with others or not, gets a hook that adds to its output. On the CPU, layers
that run as one call into C have the adapters in this call (`cpu_adapted_model.py`). A step without adapters runs as if
there were none.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from quire.replica.adapters.adapter_folder import LowRank, read_adapter
from quire.replica.core.adapter import AdapterLoad
from quire.replica.device.time_counters import MeanTime
from quire.replica.model.layers.linear_parts import LinearPart, parts_of


class AdaptedProduct(NamedTuple):
    """A product, and the linear layers that it computes, in the order of its columns."""

    module: nn.Module
    parts: tuple[LinearPart, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(part.out_features for part in self.parts)


class AdaptedModel(ABC):
    """The adapters of a model, by slot.

    Parameters
    ----------
    decoder
        After all replacements of its modules.
    num_slots
        Number of adapters in the device's memory.
    max_rank
        Largest rank of an adapter.
    dtype
        Type of hidden states and adapters.
    """

    def __init__(self, decoder: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype):
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        # Of a load, for each adapter. On a GPU the copies end later.
        self.load_time = MeanTime()
        self.products = list(_products(decoder))
        # Indices of the products that have been seen to add adapters.
        self._proven: set[int] = set()
        for index, product in enumerate(self.products):
            # An earlier runner of the model may have adapted it.
            if (handle := getattr(product.module, "adapter_hook", None)) is not None:
                handle.remove()
            hook = partial(self._on_call, index)
            product.module.adapter_hook = product.module.register_forward_hook(hook)

    @property
    def layers(self) -> Mapping[str, LinearPart]:
        """The linear layers that can be adapted, by name. Run a step with adapters before this is read."""
        return {part.name: part for i in sorted(self._proven) for part in self.products[i].parts}

    @property
    def all_layers(self) -> Mapping[str, LinearPart]:
        """The linear layers of all products, by name."""
        return {part.name: part for product in self.products for part in product.parts}

    def read(self, folder: Path) -> Any:
        """Read an adapter's folder to host memory, in the form of the device."""
        return self.pack(read_adapter(folder, self.layers, self.max_rank, self.dtype))

    def _on_call(
        self, index: int, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        """Add the adapters of the step to a product's output, in place."""
        adapters = module.quire_step.context.adapters
        if adapters is None:
            return
        product = self.products[index]
        x = args[0].reshape(-1, product.in_features)
        out = output.view(-1, sum(product.columns))
        if x.dtype != self.dtype or out.dtype != self.dtype or len(x) != len(adapters):
            return  # not proven, so no adapter has this layer
        self._proven.add(index)
        self._add(index, x, out, adapters)

    @abstractmethod
    def begin(self, slots: Any) -> Any:
        """Return `StepContext.adapters` for a step with these slots, [T] int32, of its tokens."""

    def load(self, loads: Sequence[AdapterLoad], sent_s: float = 0.0) -> None:
        """Put adapters, at least one, into slots.

        Parameters
        ----------
        sent_s
            Seconds that other ranks' parts of them took on their way, which count as time of the load.
        """
        began = time.perf_counter()
        self._load(loads)
        self.load_time.add((sent_s + time.perf_counter() - began) / len(loads))

    @abstractmethod
    def _load(self, loads: Sequence[AdapterLoad]) -> None:
        """Put adapters into slots."""

    @abstractmethod
    def pack(self, weights: Mapping[str, LowRank]) -> Any:
        """Convert an adapter to the form of the device; the result is in host memory."""

    @abstractmethod
    def _add(self, index: int, x: torch.Tensor, out: torch.Tensor, adapters: Any) -> None:
        """Add to a product's output [T, columns] of the input x [T, in]."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Tensors that captured steps read, by name."""
        return {}


def _products(decoder: nn.Module) -> Iterable[AdaptedProduct]:
    """The products of linear layers, without those of experts, whose rows are not the step's tokens."""
    inside: list[str] = []
    for name, module in decoder.named_modules():
        parts = parts_of(module)
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if parts:
            inside.append(f"{name}.")
            if not any("expert" in part.name for part in parts):
                yield AdaptedProduct(module, parts)


def slots_of(tokens: torch.Tensor) -> np.ndarray | None:
    """The slots of a step's tokens as numpy array; None if the step has no adapters."""
    return tokens.numpy() if len(tokens) else None
