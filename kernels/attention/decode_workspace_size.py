"""Number and size of the partial results that decode attention keeps. Pure arithmetic, without Triton.

`paged_attention` allocates this memory, and the engine counts it when it sizes the KV cache. A slot holds the partial
result of one row and split. A row without slots is not split: the result is the same, but one program per KV head
computes the whole row, which is many times slower for a long row. So there are slots for all rows that the cache can
hold::

    cache of N tokens    rows of n1 + n2 + ... <= N tokens have at most N / SPLIT + rows splits
    shared prefixes      a shared block counts for each row that reads it: SHARED_READS times as many
    short rows           never more than max_rows rows of the longest length
"""

from __future__ import annotations

from quire.kernels.tuning import SPLIT_TOKENS

# Example: 128 rows that share 4096 tokens have 2200 splits, while their own keys may need less than 1700 slots. In an
# 8B model a slot has 0.05% of the bytes of the keys and values of its split, so 8 reads cost 0.4% of the cache.
SHARED_READS = 8


def num_partial_slots(
    cache_tokens: int,
    max_rows: int,
    max_len: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    share_prefixes: bool = False,
) -> int:
    """Number of slots for the layers that share a window or chunk.

    Parameters
    ----------
    cache_tokens
        Capacity of these layers' blocks, in tokens.
    max_rows
        Most rows of a batch.
    max_len
        Most tokens of a row.
    window, chunk
        Keys that a query sees (sliding window), or tokens of a chunk of local attention.
    share_prefixes
        Whether several rows may start with the same blocks.
    """
    seen = min(max_len, cache_tokens, window or chunk or max_len)
    # A window or chunk may start and end inside a split, so it may touch one split more.
    longest = -(-seen // SPLIT_TOKENS) + (window is not None or chunk is not None)
    reads = SHARED_READS if share_prefixes else 1
    return min(max_rows * longest, max_rows + -(-cache_tokens * reads // SPLIT_TOKENS))


def partial_bytes_per_token(num_heads: int, value_dim: int, share_prefixes: bool) -> float:
    """Bytes of workspace for each token of the cache: accumulator, maximum, sum, item and run of its slots."""
    slot = 4 * (num_heads * (value_dim + 2) + (2 + 16) + 16)
    return slot * (SHARED_READS if share_prefixes else 1) / SPLIT_TOKENS
