"""`AdaptedModel` of a CPU: adapters are added by the compiled library, or by torch where it is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from quire.kernels.adapters.cpu_adapters import (
    AdapterRows,
    PackedAdapter,
    ProductAdapters,
    pieces_of,
)
from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_decoder_layer import AdapterCalls, LayerAdapters
from quire.kernels.cpu.cpu_row_ops import AdapterDownCall, AdapterUpCall
from quire.replica.adapters.adapted_model import AdaptedModel, AdaptedProduct
from quire.replica.adapters.adapter_folder import LowRank
from quire.replica.core.adapter import AdapterLoad
from quire.replica.model.deterministic.cpu_tiles import TILE_ROWS, tiled_linear
from quire.replica.model.fusion.cpu_fused_layer import CpuLayer


class TorchProductAdapters:
    """`ProductAdapters` without the compiled library: torch multiplies each run of tokens with its adapter.

    Products have tiles of fixed height, so a row's bits do not depend on the other rows.
    """

    def __init__(self, columns: tuple[int, ...]):
        self._columns = columns
        self._parts: dict[int, tuple[LowRank | None, ...]] = {}

    def put(self, slot: int, parts: tuple[LowRank | None, ...]) -> None:
        """Set the adapters of all parts in a slot."""
        self._parts[slot] = parts

    def add(self, x: torch.Tensor, out: torch.Tensor, slots: np.ndarray) -> None:
        """See `ProductAdapters.add`."""
        for begin, end, slot in pieces_of(slots).tolist():
            column = 0
            parts = self._parts.get(slot, (None,) * len(self._columns))
            for part, columns in zip(parts, self._columns, strict=True):
                target = out[begin:end, column : column + columns]
                column += columns
                if part is None:
                    continue
                inner = tiled_linear(x[begin:end].float(), part.down.float(), TILE_ROWS[:1])
                added = tiled_linear(inner, part.up.float(), TILE_ROWS[:1])
                target.copy_(target.float() + part.scale * added)


class CpuAdaptedModel(AdaptedModel):
    """`AdaptedModel` of a CPU. A slot holds pointers to host memory, so loading a slot copies nothing."""

    def __init__(self, decoder: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype):
        super().__init__(decoder, num_slots, max_rank, dtype)
        self._rows = AdapterRows()
        self._is_native = native_library.load() is not None
        self._adapters = [self._product_adapters(product) for product in self.products]
        if self._is_native:
            self._adapt_layers(decoder)

    def _product_adapters(self, product: AdaptedProduct) -> ProductAdapters | TorchProductAdapters:
        if not self._is_native:
            return TorchProductAdapters(product.columns)
        return ProductAdapters(
            product.in_features, product.columns, self.num_slots, self.dtype, self._rows
        )

    def _adapt_layers(self, decoder: nn.Module) -> None:
        """Give each layer that may run as one call the calls of its adapters."""
        index = {product.module: i for i, product in enumerate(self.products)}

        def calls(product: nn.Module) -> AdapterCalls:
            adapters = self._adapters[index[product]]
            assert isinstance(adapters, ProductAdapters)
            return adapters.call(AdapterDownCall), adapters.call(AdapterUpCall)

        for layer in decoder.modules():
            if not isinstance(layer, CpuLayer):
                continue
            attention, mlp = layer.attention, layer.mlp
            products = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
            if not all(product in index for product in products):
                continue  # sums over ranks are several products, and no part of a call
            layer.adapters = LayerAdapters(*(calls(product) for product in products))
            layer.forget_sequence()
            # The calls are in the layer, or else the hooks of its products run.
            self._proven |= {index[product] for product in products}

    def begin(self, slots: np.ndarray) -> np.ndarray:
        """See `AdaptedModel.begin`."""
        self._rows.set(slots)
        return slots

    def _load(self, loads: Sequence[AdapterLoad]) -> None:
        for slot, adapter in loads:
            for product, adapters in zip(self.products, self._adapters, strict=True):
                adapters.put(slot, tuple(adapter.weights.get(part.name) for part in product.parts))

    def pack(self, weights: Mapping[str, LowRank]) -> Mapping[str, LowRank | PackedAdapter]:
        """See `AdaptedModel.pack`."""
        if not self._is_native:
            return weights
        return {name: PackedAdapter.pack(*part) for name, part in weights.items()}

    def _add(self, index: int, x: torch.Tensor, out: torch.Tensor, adapters: np.ndarray) -> None:
        target = self._adapters[index]
        if isinstance(target, ProductAdapters):
            target.add(x if x.stride(1) == 1 else x.contiguous(), out)
        else:
            target.add(x, out, adapters)
