"""The routing hashes of a whole prompt."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quire.protos.wire import ROUTING_BLOCK_TOKENS, RoutingHasher, routing_weights
from quire.router import native_library


def prefix_hashes(hasher: RoutingHasher, token_ids: np.ndarray) -> np.ndarray:
    """What `hasher.hashes` says, by the compiled library if there is one: 16,000 tokens in half the time.

    Parameters
    ----------
    token_ids
        [tokens] integers, non-negative; the library takes int32.

    Returns
    -------
    [tokens // 64] uint64.
    """
    library = native_library.load()
    if library is None or token_ids.dtype != np.int32 or not token_ids.flags.c_contiguous:
        return hasher.hashes(token_ids)
    num_blocks = len(token_ids) // ROUTING_BLOCK_TOKENS
    hashes = np.empty(num_blocks, np.uint64)
    weights = _weights(num_blocks)
    library.quire_prefix_hashes(
        native_library.address(token_ids),
        weights.address,
        weights.sums_address,
        num_blocks,
        int(hasher.chain_seed),
        native_library.address(hashes),
    )
    return hashes


class _Weights(NamedTuple):
    """Those of `routing_weights`, and where they lie."""

    arrays: tuple[np.ndarray, np.ndarray]
    address: int
    sums_address: int


@functools.lru_cache(maxsize=1024)
def _weights(num_blocks: int) -> _Weights:
    arrays = routing_weights(num_blocks * ROUTING_BLOCK_TOKENS)
    return _Weights(arrays, *map(native_library.address, arrays))
