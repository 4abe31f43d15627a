"""The paged KV cache: one tensor, block-major.

```
 pool  [num_blocks + 1, layers, 2, kv_heads, block_size, head_dim]

 block 0   | layer 0: K h0 h1 .. V h0 h1 .. | layer 1: K .. V .. | ...      one contiguous run: a block is one
 block 1   | ...                                                            copy to another tier
 ...
 block N   | trash: warm-up and padding write here, nobody reads it
```
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable

import torch


def block_bytes(
    num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers, keys and values."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


class KVPool:
    """Owns the KV memory; who may use which block is the block manager's affair.

    On the CPU the memory is an anonymous mapping: zero pages that the kernel backs when they are first
    written, so the resident size grows with use and a large pool costs nothing at start.

    Parameters
    ----------
    num_blocks
        Usable blocks; one more is allocated, the trash block, with the id `num_blocks`.
    block_size
        Tokens of a block.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.trash_block = num_blocks
        shape = (num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim)
        if device == "cpu":
            # torch.zeros would write every page; the mapping lives as long as the tensor refers to it.
            memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
            self.data = torch.frombuffer(memory, dtype=dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._rows = self.data.view(
            -1, head_dim
        )  # [blocks * layers * 2 * kv_heads * block_size, head_dim]

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, kv_heads, block_size, head_dim] view."""
        return self.data[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, kv_heads, block_size, head_dim] view."""
        return self.data[:, layer, 1]

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the slots' keys of layer 0 lie, for `write`; computed once a step for all layers.

        Parameters
        ----------
        slots
            [tokens] int64, block id * block_size + offset.

        Returns
        -------
        [tokens * kv_heads] int64.
        """
        _, layers, _, kv_heads, block_size, _ = self.data.shape
        first = slots // block_size * (layers * 2 * kv_heads * block_size) + slots % block_size
        heads = torch.arange(kv_heads, device=slots.device) * block_size
        return (first[:, None] + heads).view(-1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the keys and values of one layer.

        Parameters
        ----------
        k, v
            [tokens, kv_heads, head_dim] in the pool's dtype.
        rows
            `rows_of` the tokens' slots.
        """
        _, _, _, kv_heads, block_size, head_dim = self.data.shape
        plane = kv_heads * block_size
        for part, x in ((2 * layer, k), (2 * layer + 1, v)):
            self._rows[part * plane :].index_copy_(0, rows, x.reshape(-1, head_dim))

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks over all layers, in order; each pair is (from, to)."""
        for source, target in pairs:
            self.data[target].copy_(self.data[source])

    def poison(self) -> None:
        """Fill everything with NaN: a test's proof that nothing unwritten is ever read."""
        self.data.fill_(float("nan"))
