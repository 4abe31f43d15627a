"""Memory of recurrent states: one slot for each running request.

A layer with attention keeps keys and values of every token. A recurrent layer (Mamba, gated delta rule, short
convolution, linear attention) keeps a state of fixed size instead, which each token replaces.

```
 data       [num_slots, bytes of a slot] uint8

 slot 0   | layer 0: conv | layer 0: recurrent | layer 1: conv | ...     one contiguous run: a slot is one copy
 slot 1   | ...
 ...
 slot R   | trash slot: warm-up and padding write here; it is never read by a request
```

A running request's slot has the number of its row in the request table. So rows and slots are claimed and given back
together, and a step knows its slots from its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.replica.device.open_device import allocate_zeros

# Names of a layer's states: (conv | recurrent | linear, index among the states of this kind).
StateName = tuple[str, int]

# Each state begins at a multiple of this number of bytes, which suits every dtype.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of one layer."""

    layer: int
    name: StateName
    shape: tuple[int, ...]  # for one request
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def slot_bytes(layout: Iterable[StateShape]) -> int:
    """Return the bytes of one slot."""
    return sum(_aligned(state.num_bytes) for state in layout)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class StatePool:
    """Owns the memory of all states.

    Parameters
    ----------
    layout
        Every state of every layer.
    num_slots
        Number of slots. One more is allocated: the trash slot, with number `num_slots`.
    """

    def __init__(self, layout: Sequence[StateShape], num_slots: int, device: str = "cpu"):
        self.num_slots = num_slots
        self.trash_slot = num_slots
        self.data = allocate_zeros((num_slots + 1, slot_bytes(layout)), torch.uint8, device)
        # By layer and name: [num_slots + 1, *shape of the state] views.
        self._views: dict[int, dict[StateName, torch.Tensor]] = {}
        start = 0
        for state in layout:
            part = self.data[:, start : start + state.num_bytes].view(state.dtype)
            self._views.setdefault(state.layer, {})[state.name] = part.unflatten(1, state.shape)
            start += _aligned(state.num_bytes)

    def load(self, layer: int, slots: torch.Tensor) -> dict[StateName, torch.Tensor]:
        """Copy the states of a layer, [n, *shape] each, from `slots` [n] int64."""
        return {name: view[slots] for name, view in self._views[layer].items()}

    def store(
        self, layer: int, slots: torch.Tensor, states: Mapping[StateName, torch.Tensor]
    ) -> None:
        """Store all states of a layer, [n, *shape] each, in `slots` [n] int64.

        Raises
        ------
        RuntimeError
            The layer has other states than when the model was loaded.
        """
        views = self._views[layer]
        if states.keys() != views.keys():
            raise RuntimeError(f"layer {layer} has states {[*states]}, at load it had {[*views]}")
        for name, view in views.items():
            view[slots] = states[name].to(view.dtype)

    def buffers(self) -> dict[str, torch.Tensor]:
        """All memory of the pool, by name."""
        return {"the states": self.data}

    def poison(self) -> None:
        """Fill the pool with NaN, so that tests detect reads of another request's state."""
        for views in self._views.values():
            for view in views.values():
                view.fill_(float("nan"))
