"""The paged KV cache: one tensor, block-major, blocks of equal bytes for all layer groups.

```
 data          [num_blocks + 1, elements of a block]
 group_view    [num_blocks + 1, layers of the group, 2, kv_heads, block_size, head_dim]

 block 0   | layer 0: K h0 h1 .. V h0 h1 .. | layer 1: K .. V .. | ...      one contiguous run: a block is one
 block 1   | ...                                                            copy to another tier
 ...
 block N   | trash: warm-up and padding write here, nobody reads it
```

Which layers a block holds depends on the group that owns it; a group with fewer or smaller layers than the largest
leaves the end of its blocks unused.

A pool of float8_e4m3fn holds x / scale, with a scale for the keys and one for the values of each head, fixed when the
pool is made. Copies to another tier are copies of bytes.
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
    """Elements of one block, keys and values: those of the largest group, in whole pages of every group."""
    largest = max(len(g.layers) * 2 * g.num_kv_heads * block_size * g.head_dim for g in groups)
    page = math.lcm(*(block_size * g.head_dim for g in groups))
    return -(-largest // page) * page


class KVPool:
    """Owns the KV memory; who may use which block is the block manager's affair.

    On the CPU the memory is an anonymous mapping: zero pages that the kernel backs when they are first
    written, so the resident size grows with use and a large pool costs nothing at start. A first write takes
    longer than all else that is done with a token's keys and values: see `pool_backing.py`.

    Parameters
    ----------
    num_blocks
        Usable blocks; one more is allocated, the trash block, with the id `num_blocks`.
    groups
        The model's layer groups; every layer is in one.
    block_size
        Tokens of a block.
    dtype
        Of keys and values; float8_e4m3fn for such of any dtype, scaled.
    scales
        By layer, of keys and of values, [kv_heads] float32 > 0 each; 1 for layers that are not named. Only for
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
        self._views = [self._view(group) for group in self.groups]
        self._places = {
            layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)
        }
        self.is_scaled = dtype == torch.float8_e4m3fn
        self._scales = self._fixed_scales(scales or {}) if self.is_scaled else {}

    def _fixed_scales(
        self, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for layer, (g, _) in self._places.items():
            one = torch.ones(self.groups[g].num_kv_heads)
            found[layer] = tuple(
                x.to(self.data.device, torch.float32).contiguous()
                for x in given.get(layer, (one, one))
            )
        return found

    def _view(self, group: LayerGroup) -> torch.Tensor:
        shape = (len(group.layers), 2, group.num_kv_heads, self.block_size, group.head_dim)
        return self.data[:, : math.prod(shape)].unflatten(1, shape)

    def group_view(self, g: int) -> torch.Tensor:
        """[num_blocks + 1, layers of the group, 2, kv_heads, block_size, head_dim] view."""
        return self._views[g]

    def group_of(self, layer: int) -> int:
        """Index of the layer's group."""
        return self._places[layer][0]

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, kv_heads, block_size, head_dim] view."""
        g, i = self._places[layer]
        return self._views[g][:, i, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, kv_heads, block_size, head_dim] view."""
        g, i = self._places[layer]
        return self._views[g][:, i, 1]

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Of the layer's keys and values, [kv_heads] float32; None unless the pool holds float8_e4m3fn."""
        return self._scales.get(layer, (None, None))

    def buffers(self) -> dict[str, torch.Tensor]:
        """All its memory, by name."""
        scales = {
            f"{what} of layer {layer}": scale
            for layer, pair in self._scales.items()
            for what, scale in zip(("key scales", "value scales"), pair, strict=True)
        }
        return {"the KV pool": self.data, **scales}

    def rows_of(self, g: int, slots: torch.Tensor) -> torch.Tensor:
        """Where the slots' keys of the group's first layer lie, for `write`; computed once a step.

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
            [tokens, kv_heads, head_dim] in the pool's dtype; of any float dtype if that is float8_e4m3fn.
        rows
            `rows_of` the tokens' slots of the layer's group.
        """
        for pages, x, scale in zip(self.pages(layer), (k, v), self.scales(layer), strict=True):
            if scale is None:
                scatter_rows(pages, rows, x)
            else:
                codes = (x.float() / scale[:, None]).clamp_(-MAX_E4M3, MAX_E4M3).to(pages.dtype)
                # torch scatters no numbers of 8 bits, but bytes.
                scatter_rows(pages.view(torch.uint8), rows, codes.view(torch.uint8))

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `rows_of` a layer's keys and values lie: [rows of memory, head_dim] each, contiguous."""
        g, i = self._places[layer]
        group = self.groups[g]
        flat = self.data.view(-1, group.head_dim)
        plane = group.num_kv_heads * self.block_size
        return flat[2 * i * plane :], flat[(2 * i + 1) * plane :]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks over all layers, in order; each pair is (from, to)."""
        for source, target in pairs:
            self.data[target].copy_(self.data[source])

    def poison(self) -> None:
        """Fill everything with NaN: a test's proof that nothing unwritten is ever read."""
        self.data.fill_(float("nan"))
