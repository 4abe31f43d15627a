"""`AdaptedModel` of a GPU: slots of fixed shape in device memory, so that captured graphs stay valid.

```
 flat   slot 0 (never read) | slot 1: down, up of product 0 | down, up of product 1 | ... | slot 2 ...
 host   pinned memory of the same layout, one copy for each load
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from quire.kernels.adapters.grouped_adapters import RANK_STEP, add_adapters
from quire.replica.adapters.adapted_model import AdaptedModel, AdaptedProduct
from quire.replica.adapters.adapter_folder import LowRank
from quire.replica.core.adapter import Adapter, AdapterLoad
from quire.replica.device.device import Device, Event, Stream


class HostSlot(NamedTuple):
    """An adapter in pinned host memory, in the layout of a slot."""

    weights: torch.Tensor  # [slot_size]
    scales: torch.Tensor  # [parts of all products] float32


class _SlotViews(NamedTuple):
    """A product's matrices in slots: down [slots, P, R, in], up [slots, columns, R], scales [slots, P]."""

    down: torch.Tensor
    up: torch.Tensor
    scales: torch.Tensor


class GpuAdaptedModel(AdaptedModel):
    """`AdaptedModel` of a GPU.

    Parameters
    ----------
    device
        Its compute stream copies adapters to slots, between two steps.
    """

    def __init__(
        self,
        decoder: nn.Module,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: Device,
    ):
        super().__init__(decoder, num_slots, max_rank, dtype)
        self._device = device
        self._rank = -(-max_rank // RANK_STEP) * RANK_STEP
        sizes = [self._size(product) for product in self.products]
        self._slot_size = sum(sizes)
        self._num_scales = sum(len(product.parts) for product in self.products)
        self._flat = device.empty((num_slots + 1, self._slot_size), dtype)
        self._scales = device.empty((num_slots + 1, self._num_scales), torch.float32)
        self._flat.zero_()
        self._scales.zero_()
        self._views = self._slot_views(self._flat, self._scales)
        # Adapters whose copies may still run.
        self._copying: list[tuple[Event, Adapter]] = []

    def _size(self, product: AdaptedProduct) -> int:
        down = len(product.parts) * self._rank * product.in_features
        return down + sum(product.columns) * self._rank

    def _slot_views(self, flat: torch.Tensor, scales: torch.Tensor) -> list[_SlotViews]:
        """Views of each product's matrices in [slots, slot_size] and [slots, parts]."""
        views, at, first = [], 0, 0
        for product in self.products:
            num_parts = len(product.parts)
            down_size = num_parts * self._rank * product.in_features
            end = at + self._size(product)
            down = flat[:, at : at + down_size].unflatten(
                1, (num_parts, self._rank, product.in_features)
            )
            up = flat[:, at + down_size : end].unflatten(1, (sum(product.columns), self._rank))
            views.append(_SlotViews(down, up, scales[:, first : first + num_parts]))
            at, first = end, first + num_parts
        return views

    def begin(self, slots: torch.Tensor) -> torch.Tensor:
        """See `AdaptedModel.begin`."""
        return slots

    def _load(self, loads: Sequence[AdapterLoad]) -> None:
        """Queue the copies of adapters to their slots, after the steps that are queued."""
        copying = [(event, adapter) for event, adapter in self._copying if not event.is_done()]
        for slot, adapter in loads:
            host: HostSlot = adapter.weights
            name = f"adapter {adapter.ref.name}"
            self._device.copy(Stream.COMPUTE, self._flat[slot], host.weights, name)
            self._device.copy(Stream.COMPUTE, self._scales[slot], host.scales, name)
            copying.append((self._device.record(Stream.COMPUTE, "adapter copied"), adapter))
        self._copying = copying

    def pack(self, weights: Mapping[str, LowRank]) -> HostSlot:
        """See `AdaptedModel.pack`."""
        flat = self._device.pinned((1, self._slot_size), self.dtype)
        scales = self._device.pinned((1, self._num_scales), torch.float32)
        flat.zero_()
        scales.zero_()
        for product, view in zip(self.products, self._slot_views(flat, scales), strict=True):
            column = 0
            for p, part in enumerate(product.parts):
                own = weights.get(part.name)
                if own is not None:
                    rank = len(own.down)
                    view.down[0, p, :rank] = own.down
                    view.up[0, column : column + part.out_features, :rank] = own.up
                    view.scales[0, p] = own.scale
                column += part.out_features
        return HostSlot(flat[0], scales[0])

    def _add(self, index: int, x: torch.Tensor, out: torch.Tensor, adapters: torch.Tensor) -> None:
        add_adapters(x, out, adapters, *self._views[index], self.products[index].columns)

    def buffers(self) -> dict[str, torch.Tensor]:
        """See `AdaptedModel.buffers`."""
        return {"adapters": self._flat, "scales of adapters": self._scales}
