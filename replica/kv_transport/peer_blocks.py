"""Which blocks of a sequence another node may bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.kv_cache.prefix_entries import ContentChain
from quire.replica.kv_transport.block_messages import WantedBlock


def wanted_blocks(
    token_ids: np.ndarray,
    namespace: str,
    start: int,
    end: int,
    block_size: int,
    groups: Sequence[LayerGroup],
    key: Callable[[bytes, int], bytes],
) -> list[WantedBlock]:
    """The blocks that a request lacks to start at `end`, in the order of the sequence.

    Parameters
    ----------
    token_ids
        [tokens] int32, the request's tokens.
    namespace
        Of its blocks' names (`ContentChain.tenant`).
    start, end
        Leading tokens that this node holds, and that the other one holds; rounded to whole blocks. The last token is
        always computed, so its block is not wanted.
    key
        Returns the name of a block of a layer group in the pool (`PoolBlocks.key`).
    """
    end = min(end, len(token_ids) - 1) // block_size
    chain, wanted = ContentChain(namespace), []
    # The first block of each group that a token at `end` sees.
    first = [int(group.first_key(end * block_size)) // block_size for group in groups]
    raw, width = token_ids.astype(np.int32, copy=False).tobytes(), 4 * block_size
    for i in range(end):
        digest = chain.extend(raw[i * width : (i + 1) * width])
        if i >= start // block_size:
            wanted += [
                WantedBlock(key(digest, g), is_needed=group.is_full)
                for g, group in enumerate(groups)
                if i >= first[g]
            ]
    return wanted
