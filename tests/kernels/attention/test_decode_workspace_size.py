"""Slots of decode attention: enough for every split of a full cache, and not more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.attention.decode_workspace_size import (
    SHARED_READS,
    num_partial_slots,
    partial_bytes_per_token,
)
from quire.kernels.tuning import SPLIT_TOKENS


def splits_of(length, window=None, chunk=None):
    begin = 0
    if window is not None:
        begin = max(0, length - window)
    if chunk is not None:
        begin = (length - 1) // chunk * chunk
    return -(-length // SPLIT_TOKENS) - begin // SPLIT_TOKENS


@given(
    lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    spare=st.integers(0, 5000),
    reads=st.integers(1, SHARED_READS),
)
def test_every_split_of_rows_that_fit_the_cache_has_a_slot(lengths, spare, reads):
    """There are enough slots even if SHARED_READS rows read each block."""
    cache_tokens = max(-(-sum(lengths) // reads), max(lengths)) + spare
    kinds = [dict(share_prefixes=reads > 1)]
    kinds += [] if reads > 1 else [dict(window=1000), dict(window=257), dict(chunk=8192)]
    for kind in kinds:
        slots = num_partial_slots(cache_tokens, len(lengths), max(lengths), **kind)
        local = {name: value for name, value in kind.items() if name != "share_prefixes"}
        assert sum(splits_of(length, **local) for length in lengths) <= slots


def test_short_rows_and_windows_bound_the_slots():
    assert num_partial_slots(10**6, 257, 300) == 257 * 2
    assert num_partial_slots(10**7, 257, 10**6, window=4096) == 257 * 17
    # A full cache of an H200: 860k tokens of an 8B model.
    assert num_partial_slots(860_000, 257, 131_072) == 3360 + 257


def test_slots_cost_little_of_the_cache():
    kv_bytes = 32 * 8 * 128 * 2 * 2  # bytes per token of Llama 3.1 8B
    assert partial_bytes_per_token(32, 128, share_prefixes=True) < kv_bytes / 200


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_long_rows_of_a_full_cache_are_split(share_prefixes):
    """The memory that `PagedAttention` allocates has the size that sizing counts."""
    from quire.kernels.attention.paged_attention import PagedAttention
    from tests.kernels.compile.interpreter import kernel_device

    lengths = [65_000] * 13 + [1000] * 3  # 3317 splits
    num_blocks = -(-sum(lengths) // 64)
    k_cache = torch.zeros(1, 1, 64, 64, device=kernel_device()).expand(num_blocks, -1, -1, -1)
    attention = PagedAttention(
        k_cache, 2, max_rows=16, share_prefixes=share_prefixes, backend="triton"
    )
    cu_q = torch.arange(17).numpy()
    tables = torch.arange(16)[:, None].expand(-1, 1016).numpy()
    attention.plan(cu_q, torch.tensor(lengths).numpy(), tables)
    assert (attention.buffers()["row_slot"] >= 0).all()
