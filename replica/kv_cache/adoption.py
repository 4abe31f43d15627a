"""Adoption: this engine indexes blocks that other engines of the node have published, instead of computing them.

```
 sequence           b0  b1  b2  b3  b4  b5
 this engine knows  b0  b1
 the node's pool            b2  b3      b5        adopted: b2 and b3, as blocks of the host tier
```

An adopted block is a hint until an admission pins it (`PoolBlocks.pin`): then it is leased and its bytes are verified.
A recurrent model adopts nothing, because the pool has no snapshots of its states.
"""

from __future__ import annotations

import numpy as np

from quire.replica.kv_cache.pool_blocks import PoolBlocks
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import ContentChain, Entry, Hit


class Adoption:
    """Extends the prefix index by published blocks.

    Parameters
    ----------
    prefix
        The prefix index of both tiers.
    blocks
        The host tier's blocks.
    """

    def __init__(self, prefix: PrefixCache, blocks: PoolBlocks):
        self._prefix = prefix
        self._blocks = blocks
        groups = prefix.groups
        self._is_full = [group.is_full for group in groups]
        self.num_adopted = 0  # blocks

    def extend(self, hit: Hit, token_ids: np.ndarray, chain: ContentChain) -> bool:
        """Index published blocks that continue a hit. Returns whether there were any.

        Parameters
        ----------
        hit
            Result of `PrefixCache.match` for these tokens and this chain.
        """
        # A sliding-window group may lack blocks before the hit's end.
        begin = len(hit.entries) if all(self._is_full) else 0
        parent = hit.entries[begin - 1] if begin else None
        size, before = self._prefix.block_size, self.num_adopted
        for i in range(begin, (len(token_ids) - 1) // size):
            token_bytes = token_ids[i * size : (i + 1) * size].astype(np.int32).tobytes()
            if i == len(chain.digests):
                chain.extend(token_bytes)
            entry = self._adopt_block(chain, i, token_bytes, parent)
            if entry is None:
                break
            parent = entry
        return self.num_adopted > before

    def _adopt_block(
        self, chain: ContentChain, i: int, token_bytes: bytes, parent: Entry | None
    ) -> Entry | None:
        """Index the published blocks with this content. None if a full-attention group has none."""
        digest = chain.digests[i]
        known = self._prefix.get(digest)
        found: dict[int, int] = {}
        for g, is_full in enumerate(self._is_full):
            if known is not None and known.has(g, with_host=True):
                continue
            slot = self._blocks.find(digest, g)
            if slot is not None:
                found[g] = slot
            elif is_full:
                return None
        entry = self._prefix.find_or_add(chain, i, token_bytes, parent) if found else known
        if entry is None or not entry.is_content(token_bytes, chain.tenant, parent):
            return None
        for g, slot in found.items():
            if self._blocks.adopt(slot, digest, g):
                self._prefix.place_on_host(entry, g, slot)
                self.num_adopted += 1
            elif self._is_full[g]:
                self._prefix.drop_unused(entry)
                return None
        # Without a block of any group the entry leaves the index again.
        self._prefix.drop_unused(entry)
        return entry if entry.alive else None
