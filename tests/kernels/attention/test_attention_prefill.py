"""Prefill attention: correct by the reference, with the same bits for every division of a prompt into chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels.argument_checks import HEAD_DIMS
from quire.kernels.attention.attention_prefill import prefill_attention
from quire.kernels.attention.prefill_plan import plan_prefill
from quire.kernels.tuning import PrefillConfig
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
CONFIG = PrefillConfig(block_m=32, tile_tokens=16, num_warps=4, num_stages=2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def attend(batch, *, config=CONFIG, out=None, options=(), **plan_options):
    plan = plan_prefill(
        batch.cu_q,
        batch.kv_len,
        len(batch.q),
        *batch.shape,
        dtype=batch.q.dtype,
        config=config,
        **batch.values,
        **plan_options,
    )
    return prefill_attention(
        batch.q, batch.k, batch.v, batch.tables, batch.scale, plan, out=out, **dict(options)
    )


def rows(block_size):
    """(q_len, kv_len) pairs around the edges of blocks and tiles."""
    q_len = st.sampled_from([0, 1, 2, block_size - 1, block_size, block_size + 1]) | st.integers(
        0, 40
    )
    context = st.sampled_from([0, 1, 15, 16, 17, block_size]) | st.integers(0, 60)
    return st.lists(st.tuples(q_len, context), min_size=1, max_size=3)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_matches_the_reference_at_any_shape(paged_batch, close, data):
    group = data.draw(st.integers(1, 16), "group")
    kv_heads = data.draw(st.integers(1, 2), "kv_heads")
    block_size = data.draw(st.sampled_from([16, 32, 64]), "block_size")
    dtype = data.draw(st.sampled_from(FLOATS), "dtype")
    fp8 = data.draw(st.sampled_from([False, False, True]), "fp8")
    pairs = data.draw(rows(block_size), "rows")
    batch = paged_batch(
        [q for q, _ in pairs],
        [q + context for q, context in pairs],
        kv_heads * group,
        kv_heads,
        data.draw(st.sampled_from(HEAD_DIMS), "head_dim"),
        block_size,
        dtype,
        cache_dtype=torch.float8_e4m3fn if fp8 else None,
        seed=data.draw(st.integers(0, 9), "seed"),
    )
    local = data.draw(
        st.sampled_from([{}, {}, {"window": 1}, {"window": 20}, {"chunk": 12}, {"chunk": 48}]),
        "local",
    )
    options = {}
    if data.draw(st.booleans(), "softcap"):
        options["softcap"] = 3.0
    if data.draw(st.booleans(), "sinks"):
        options["sinks"] = torch.linspace(-2, 2, kv_heads * group, device=batch.q.device)
    if fp8:
        options["k_scale"] = torch.tensor([0.5, 2.0], device=batch.q.device)[:kv_heads].contiguous()
        options["v_scale"] = torch.tensor([3.0, 0.25], device=batch.q.device)[
            :kv_heads
        ].contiguous()
    config = replace(CONFIG, tile_tokens=data.draw(st.sampled_from([16, 32]), "tile"))
    result = attend(batch, config=config, min_query_tokens=1, options=options, **local)
    close(result, batch.expected(**options, **local), dtype)


def test_keys_unlike_their_values_and_large_groups(unlike, close):
    batch, options, local = unlike([11, 1, 0, 18], [11, 40, 3, 35])
    result = attend(batch, min_query_tokens=1, options=options, **local)
    assert result.shape == (*batch.q.shape[:2], batch.v.shape[3])
    close(result, batch.expected(**options, **local), batch.q.dtype)
    chunks = [
        attend(chunk, min_query_tokens=1, options=options, **local)
        for chunk in cut(batch.rows([3]), [5, 6])
    ]
    assert torch.equal(torch.cat(chunks), result[12:])


def cut(batch, boundaries):
    """Row 0 in chunks: one batch for each chunk, over the same cache."""
    start = int(batch.kv_len[0]) - len(batch.q)
    for low, high in zip([0, *boundaries], [*boundaries, len(batch.q)], strict=True):
        yield replace(
            batch,
            q=batch.q[low:high],
            cu_q=torch.tensor([0, high - low], dtype=torch.int32, device=batch.q.device),
            kv_len=torch.tensor([start + high], dtype=torch.int32, device=batch.q.device),
        )


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    boundaries=st.lists(st.integers(1, 44), max_size=3, unique=True).map(sorted),
    context=st.sampled_from([0, 5, 16]),
    group=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    local=st.sampled_from([{}, {"window": 18}, {"chunk": 20}]),
)
def test_chunks_do_not_change_a_bit(paged_batch, boundaries, context, group, dtype, local):
    batch = paged_batch([45], [45 + context], group, 1, 64, 16, dtype)
    whole = attend(batch, min_query_tokens=1, **local)
    chunks = [attend(chunk, min_query_tokens=1, **local) for chunk in cut(batch, boundaries)]
    assert torch.equal(torch.cat(chunks), whole)


def test_a_token_decoded_or_prefilled_has_the_same_bits(paged_batch):
    batch = paged_batch([20], [50], 2, 1, 64, 16, torch.bfloat16)
    whole = attend(batch)
    one_by_one = [attend(chunk, min_query_tokens=1) for chunk in cut(batch, range(1, 20))]
    assert torch.equal(torch.cat(one_by_one), whole)


def test_rows_do_not_change_each_other(paged_batch):
    batch = paged_batch([20, 1, 7, 33], [30, 40, 7, 64], 4, 2, 64, 16, torch.bfloat16)
    together = attend(batch)
    for row in (0, 2, 3):
        alone = attend(batch.rows([row]))
        assert torch.equal(alone, together[batch.cu_q[row] : batch.cu_q[row + 1]])


def test_decode_rows_are_left_alone(paged_batch):
    batch = paged_batch([3, 1, 0, 2], [20, 40, 8, 2], 2, 1, 64, 16, torch.float32)
    out = torch.full_like(batch.q, 7.0)
    attend(batch, out=out)
    untouched = (out == 7.0).flatten(1).all(1)
    assert untouched.tolist() == [False] * 3 + [True] + [False] * 2


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    q_lens=st.lists(st.integers(0, 600), min_size=1, max_size=6),
    group=st.sampled_from([1, 3, 16]),
    least=st.integers(1, 3),
)
def test_plan_covers_every_query_once(q_lens, group, least):
    device = DEVICE
    cu_q = torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32, device=device)
    kv_len = torch.tensor(q_lens, dtype=torch.int32, device=device)
    plan = plan_prefill(
        cu_q, kv_len, sum(q_lens), group, 1, 64, config=CONFIG, min_query_tokens=least
    )
    tiles = [tuple(tile) for tile in plan.tiles[: int(plan.num_tiles[0])].tolist()]
    step = CONFIG.block_m // group
    assert sorted(tiles) == [
        (row, first)
        for row, q_len in enumerate(q_lens)
        if q_len >= least
        for first in range(0, q_len, step)
    ]
    # Within a row the tile with the most keys comes first.
    assert tiles == sorted(tiles, key=lambda tile: (tile[0], -tile[1]))


def test_evicted_blocks_before_the_window_are_not_read(paged_batch, close):
    batch = paged_batch([20], [100], 2, 1, 64, 16, torch.float32)
    expected = batch.expected(window=20)
    batch.tables[0, :3] = 2**30  # the first query, at 80, sees keys from 61 on: block 3
    for tile in (16, 32):
        result = attend(batch, config=replace(CONFIG, tile_tokens=tile), window=20)
        close(result, expected, torch.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_tokens=-1), "num_tokens: must be between 0"),
        (dict(num_heads=129), "num_heads: must be 1 to 128 times num_kv_heads=1, got 129"),
        (dict(head_dim=100), r"head_dim: must be one of .*, got 100"),
        (dict(window=4, chunk=4), "window, chunk: at most one"),
        (dict(chunk=0), "chunk: must be between 1"),
        (dict(min_query_tokens=0), "min_query_tokens: must be between 1"),
        (dict(kv_len=torch.zeros(2)), r"kv_len: must be contiguous int32, got torch.float32"),
        (dict(kv_len=torch.zeros(3).int()), r"cu_q: must have shape \[4\], got \[3\]"),
        (dict(tiles=torch.zeros(2, 2).int()), r"tiles: must be int32 \[>= 4, 2\]"),
        (dict(config=replace(CONFIG, block_m=24)), "block_m: must be a power of two of at least 16, got 24"),
    ],
)  # fmt: skip
def test_wrong_plans_are_named(change, message):
    arguments = dict(
        cu_q=torch.tensor([0, 3, 8]).int(),
        kv_len=torch.tensor([3, 5]).int(),
        num_tokens=8,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        config=CONFIG,
    )
    with pytest.raises(ValueError, match=message):
        plan_prefill(**{**arguments, **change})


def test_a_batch_must_fit_its_plan(paged_batch):
    batch = paged_batch([5, 4], [9, 4], 4, 2, 64, 16, torch.float32)
    plan = plan_prefill(batch.cu_q, batch.kv_len, 9, *batch.shape, config=CONFIG)
    arguments = [batch.q, batch.k, batch.v, batch.tables, batch.scale, plan]
    for index, wrong, message in (
        (0, batch.q[:, :, :32], r"q: must be \[tokens, 4, 64\]"),
        (1, batch.k[:, :1], r"k_cache: must be \[blocks, 2, block_size, 64\]"),
        (3, batch.tables[:1], r"block_tables: must be int32 \[>= 2 rows"),
        (4, 0.0, "scale: must be > 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            prefill_attention(*arguments[:index], wrong, *arguments[index + 1 :])


def test_no_tokens_need_no_kernel(paged_batch):
    batch = paged_batch([0], [5], 4, 2, 64, 16, torch.float32)
    assert attend(batch).shape == (0, 4, 64)
