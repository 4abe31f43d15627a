"""The paged KV cache: one tensor, block-major, blocks of equal bytes for all layer groups.

```
 data          [num_blocks + 1, elements of a block]
 keys, values  [num_blocks + 1, kv_heads, block_size, elements of a key or a value] of one layer

 block 0   | layer 0: K h0 h1 .. V h0 h1 .. | layer 1: K .. V .. | ...      one contiguous run: a block is one
 block 1   | ...                                                            copy to another tier
 ...
 block N   | trash block: warm-up and padding write here; it is never read
```

Keys and values may have unequal sizes. In latent attention a value is the beginning of its key, and `values` is a part
of `keys`.

Each block in use belongs to one layer group and has keys and values of the layers of this group only. A group with
fewer or smaller layers than the largest group leaves the end of its blocks unused.

A pool of float8_e4m3fn stores x / scale. Each head has one scale for keys and one for values, fixed when the pool is
created. The host tier stores the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from quire.kernels.cpu.cpu_scatter import scatter_rows
from quire.kernels.rows.fp8_linear import MAX_E4M3
from quire.replica.device.open_device import allocate_zeros
from quire.replica.kv_cache.groups import LayerGroup


def block_elements(groups: Sequence[LayerGroup], block_size: int) -> int:
    """Return the elements of one block: keys and values of the largest group, rounded up.

    The result is a multiple of each group's pages, the keys or the values of one block in one head of one layer.
    It is a page if no layer has keys and values.
    """
    largest = max(1, *(len(g.layers) * block_size * g.token_elements for g in groups))
    sizes = [size for g in groups for size in _page_sizes(g)]
    page = math.lcm(*(block_size * size for size in sizes))
    return -(-largest // page) * page


def _page_sizes(group: LayerGroup) -> tuple[int, ...]:
    """Return the elements of a stored key, and of a value that is stored apart from it."""
    return (group.head_dim,) if group.values_in_keys else (group.head_dim, group.value_size)


class KVPool:
    """Owns the KV memory. The block manager decides which request uses which block.

    On the CPU the pages take no memory until they are written, so the resident size grows with use and a large pool
    costs nothing at start (`cpu_prefault.py` writes pages while the engine is idle).

    Parameters
    ----------
    num_blocks
        Usable blocks. One more is allocated: the trash block, with id `num_blocks`.
    groups
        The model's layer groups; every layer is stored or read in one group.
    block_size
        Tokens of a block.
    dtype
        Dtype of stored keys and values. In float8_e4m3fn, values of any float dtype are stored, divided by scales.
    scales
        Scales of keys and values by layer, [kv_heads] float32 > 0 each; 1 for missing layers. Only used with
        float8_e4m3fn.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[LayerGroup],
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
        scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.trash_block = num_blocks
        self.groups = tuple(groups)
        shape = (num_blocks + 1, block_elements(groups, block_size))
        self.data = allocate_zeros(shape, dtype, device)
        self._places = {
            layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)
        }
        for layer, source in (pair for group in groups for pair in group.readers):
            self._places[layer] = self._places[source]
        self._stored = frozenset(layer for group in groups for layer in group.layers)
        self.is_scaled = dtype == torch.float8_e4m3fn
        self._scales = self._fixed_scales(scales or {}) if self.is_scaled else {}

    def _fixed_scales(
        self, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for layer in self._stored:
            g = self.group_of(layer)
            one = torch.ones(self.groups[g].num_kv_heads)
            k_scale, v_scale = (
                x.to(self.data.device, torch.float32).contiguous()
                for x in given.get(layer, (one, one))
            )
            found[layer] = k_scale, k_scale if self.groups[g].values_in_keys else v_scale
        found |= {layer: found[source] for group in self.groups for layer, source in group.readers}
        return found

    def group_view(self, g: int) -> torch.Tensor:
        """[num_blocks + 1, layers of the group, 2, kv_heads, block_size, head_dim] view; sizes must be equal."""
        group = self.groups[g]
        shape = (len(group.layers), 2, group.num_kv_heads, self.block_size, group.head_dim)
        return self.data[:, : math.prod(shape)].unflatten(1, shape)

    def group_of(self, layer: int) -> int:
        """Index of the layer's group."""
        return self._places[layer][0]

    def stores(self, layer: int) -> bool:
        """Whether the layer stores keys and values; else it reads those of an earlier layer."""
        return layer in self._stored

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, kv_heads, block_size, head_dim] view."""
        return self._pages_of_blocks(layer, is_value=False)

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, kv_heads, block_size, elements of a value] view."""
        group = self.groups[self.group_of(layer)]
        if group.values_in_keys:
            return self.keys(layer)[..., : group.value_size]
        return self._pages_of_blocks(layer, is_value=True)

    def _start(self, layer: int, is_value: bool) -> tuple[int, int]:
        """Return where a layer's keys or values begin in a block, and the size of one of them, in elements."""
        g, i = self._places[layer]
        group, block_size = self.groups[g], self.block_size
        start = i * block_size * group.token_elements
        if not is_value:
            return start, group.head_dim
        return start + group.num_kv_heads * block_size * group.head_dim, group.value_size

    def _pages_of_blocks(self, layer: int, is_value: bool) -> torch.Tensor:
        start, size = self._start(layer, is_value)
        shape = (self.groups[self.group_of(layer)].num_kv_heads, self.block_size, size)
        return self.data[:, start : start + math.prod(shape)].unflatten(1, shape)

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Scales of the layer's keys and values, [kv_heads] float32 each; None unless the pool is float8_e4m3fn."""
        return self._scales.get(layer, (None, None))

    def buffers(self) -> dict[str, torch.Tensor]:
        """All memory of the pool, by name."""
        scales = {
            f"{what} of layer {layer}": scale
            for layer, pair in self._scales.items()
            for what, scale in zip(("key scales", "value scales"), pair, strict=True)
        }
        return {"the KV pool": self.data, **scales}

    def rows_of(self, g: int, slots: torch.Tensor) -> torch.Tensor:
        """Compute the argument `rows` of `write`: where tokens are stored, for any layer of the group.

        Parameters
        ----------
        slots
            [tokens] int64, block id * block_size + offset.

        Returns
        -------
        [tokens * kv_heads] int64.
        """
        group, block_size = self.groups[g], self.block_size
        block_rows = self.data.shape[1] // group.head_dim
        first = slots // block_size * block_rows + slots % block_size
        heads = torch.arange(group.num_kv_heads, device=slots.device) * block_size
        return (first[:, None] + heads).view(-1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the keys and values of one layer.

        Parameters
        ----------
        k, v
            [tokens, kv_heads, elements] in the pool's dtype, or in any float dtype if the pool is float8_e4m3fn.
            Values that are the beginning of their keys are not written.
        rows
            Result of `rows_of` for the tokens' slots in the layer's group.
        """
        group = self.groups[self.group_of(layer)]
        k_pages, v_pages = self.pages(layer)
        k_scale, v_scale = self.scales(layer)
        _scatter(k_pages, rows, k, k_scale)
        if group.values_in_keys:
            return
        if group.value_size != group.head_dim:
            # A block has another number of rows of this size.
            k_rows, v_rows = (self.data.shape[1] // size for size in _page_sizes(group))
            rows = rows // k_rows * v_rows + rows % k_rows
        _scatter(v_pages, rows, v, v_scale)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the pool for keys and for values of a layer, [rows, elements of a key or a value].

        `rows_of` indexes the keys, and the values if they have the same size.
        """
        group = self.groups[self.group_of(layer)]
        k_pages = self._rows_from(*self._start(layer, is_value=False))
        if group.values_in_keys:
            return k_pages, k_pages[:, : group.value_size]
        return k_pages, self._rows_from(*self._start(layer, is_value=True))

    def _rows_from(self, start: int, size: int) -> torch.Tensor:
        flat = self.data.view(-1)[start:]
        return flat[: len(flat) // size * size].view(-1, size)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, in order. Each pair is (source block, target block)."""
        for source, target in pairs:
            self.data[target].copy_(self.data[source])

    def poison(self) -> None:
        """Fill the pool with NaN, so that tests detect reads of unwritten memory."""
        self.data.fill_(float("nan"))


def _scatter(
    pages: torch.Tensor, rows: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Store x [tokens, kv_heads, elements] in rows of pages; with a scale [kv_heads] as float8."""
    if scale is None:
        scatter_rows(pages, rows, x)
    else:
        codes = (x.float() / scale[:, None]).clamp_(-MAX_E4M3, MAX_E4M3).to(pages.dtype)
        # torch cannot scatter float8, but can scatter bytes.
        scatter_rows(pages.view(torch.uint8), rows, codes.view(torch.uint8))
