"""Memory of recurrent states: a slot for each running request, and slots for snapshots.

A layer with attention keeps keys and values of every token. A recurrent layer (Mamba, gated delta rule, short
convolution, linear attention) keeps a state of fixed size instead, which each token replaces.

```
 data       [num_slots, bytes of a slot] uint8

 slot 0   | layer 0: conv | layer 0: recurrent | layer 1: conv | ...     one contiguous run: a slot is one copy
 slot 1   | ...
 ...
 slot R   | trash slot: warm-up and padding write here; it is never read by a request
 slot R+1 | a snapshot ...

 host_data  [num_host_slots, bytes of a slot] uint8, pinned if the device is a GPU; its first slot has the next number
```

A running request's slot has the number of its row in the request table. So rows and slots are claimed and given back
together, and a step knows its slots from its rows. `kv_cache/state_snapshots.py` owns the slots of snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.replica.device.open_device import allocate_zeros

Allocate = Callable[..., torch.Tensor]

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
    num_rows
        Number of slots of running requests, R. Slot R is the trash slot.
    num_snapshots
        Number of slots of snapshots: R + 1 and those after it.
    num_host_snapshots
        Number of slots of snapshots in host memory.
    pinned
        Allocates this memory.
    """

    def __init__(
        self,
        layout: Sequence[StateShape],
        num_rows: int,
        num_snapshots: int = 0,
        num_host_snapshots: int = 0,
        *,
        device: str = "cpu",
        pinned: Allocate = torch.empty,
    ):
        self.layout = tuple(layout)
        self.trash_slot = num_rows
        num_slots = num_rows + 1 + num_snapshots
        self.data = allocate_zeros((num_slots, slot_bytes(layout)), torch.uint8, device)
        self.host_data = pinned((num_host_snapshots, slot_bytes(layout)), dtype=torch.uint8)
        # By layer and name: [slots, *shape of the state] views.
        self._views: dict[int, dict[StateName, torch.Tensor]] = {}
        start = 0
        for state in layout:
            part = self.data[:, start : start + state.num_bytes].view(state.dtype)
            self._views.setdefault(state.layer, {})[state.name] = part.unflatten(1, state.shape)
            start += _aligned(state.num_bytes)

    def copy(self, pairs: np.ndarray) -> None:
        """Copy whole slots in this order, [k, 2] int64 (from, to)."""
        for source, target in pairs.tolist():
            self._slot(target).copy_(self._slot(source), non_blocking=True)

    def _slot(self, slot: int) -> torch.Tensor:
        num_slots = len(self.data)
        return self.data[slot] if slot < num_slots else self.host_data[slot - num_slots]

    def views(self, layer: int) -> Mapping[StateName, torch.Tensor]:
        """Return the states of a layer, [slots, *shape] each, as views of the memory."""
        return self._views[layer]

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

    def poison(self) -> None:
        """Fill the pool with NaN, so that tests detect reads of another request's state."""
        for views in self._views.values():
            for view in views.values():
                view.fill_(float("nan"))
