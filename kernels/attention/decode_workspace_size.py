"""How many partial results decode attention keeps: what `paged_attention` allocates and sizing counts. Pure arithmetic.

A slot is the partial result of one row and split. Rows beyond the slots are not split, nor wrong: one program a head
walks each of them, many times slower for a long row. So there are slots for all that the cache can hold::

    cache of N tokens    rows of n1 + n2 + ... <= N tokens have at most N / SPLIT + rows splits
    shared prefixes      a shared block counts for each row that reads it: SHARED_READS times as many
    short rows           never more than max_rows rows of the longest length
"""

from __future__ import annotations

from quire.kernels.tuning import SPLIT_TOKENS

# 128 rows that share 4096 tokens have 2200 splits, in a cache that need not hold 1700. A slot is 0.05% of the bytes of
# its keys and values in an 8B model, so these are 0.4% of the cache.
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
    """Slots of the layers of one kind.

    Parameters
    ----------
    cache_tokens
        That the blocks of these layers hold.
    max_rows, max_len
        Most rows of a batch, and most tokens of one of them.
    window, chunk
        Keys that a query sees, or the size of local attention's chunks.
    share_prefixes
        Rows may begin with the same blocks.
    """
    seen = min(max_len, cache_tokens, window or chunk or max_len)
    # What a window or chunk sees may begin and end inside a split.
    longest = -(-seen // SPLIT_TOKENS) + (window is not None or chunk is not None)
    reads = SHARED_READS if share_prefixes else 1
    return min(max_rows * longest, max_rows + -(-cache_tokens * reads // SPLIT_TOKENS))


def partial_bytes_per_token(num_heads: int, head_dim: int, share_prefixes: bool) -> float:
    """Device memory that a token of the cache adds: accumulator, maximum, sum, item and run of its slots."""
    slot = 4 * (num_heads * (head_dim + 2) + (2 + 16) + 16)
    return slot * (SHARED_READS if share_prefixes else 1) / SPLIT_TOKENS
