"""Both implementations of attention on the CPU: correct by the reference, with the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.cpu_attention import has_native, paged_attention, plan_attention
from quire.kernels.cpu.cpu_attention_torch import (
    TILE_TOKENS,
    choose_query_tokens,
    tile_tokens,
)
from tests.kernels import reference

torch.set_num_threads(1)

needs_native = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")
both_backends = pytest.mark.parametrize(
    "backend", [pytest.param("native", marks=needs_native), "torch"]
)


class Batch:
    """Random ragged rows over a permuted paged cache in the pool's layout; slots without a key contain NaN."""

    def __init__(self, rows, heads, kv_heads, head_dim, block_size, dtype=torch.float32, seed=0):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        counts = [-(-kv // block_size) for _, kv in rows]
        blocks = rng.permutation(sum(counts) + 3)
        pool = torch.full((len(blocks), 3, 2, kv_heads, block_size, head_dim), float("nan")).to(
            dtype
        )
        self.k, self.v = pool[:, 1, 0], pool[:, 1, 1]
        # Unused entries name a NaN block.
        self.tables = np.full((len(rows), max(counts, default=1) + 1), blocks[-1])
        start = 0
        for row, (count, (_, kv)) in enumerate(zip(counts, rows, strict=True)):
            self.tables[row, :count] = blocks[start : start + count]
            start += count
            for i in range(kv):
                for cache in (self.k, self.v):
                    cache[self.tables[row, i // block_size], :, i % block_size] = torch.randn(
                        kv_heads, head_dim
                    ).to(dtype)
        self.cu_q = np.concatenate([[0], np.cumsum([q for q, _ in rows])]).astype(int)
        self.kv_len = np.array([kv for _, kv in rows])
        self.q = torch.randn(int(self.cu_q[-1]), heads, head_dim).to(dtype)
        self.scale = head_dim**-0.5

    def run(self, rows=slice(None), function=paged_attention, **options):
        """Attention of some of the rows alone."""
        index = np.arange(len(self.kv_len))[rows]
        tokens = [np.arange(self.cu_q[i], self.cu_q[i + 1]) for i in index]
        cu_q = np.concatenate([[0], np.cumsum([len(t) for t in tokens])]).astype(int)
        arrays = (self.tables[index], cu_q, self.kv_len[index])
        q = self.q[np.concatenate(tokens)]
        return function(q, self.k, self.v, *map(torch.tensor, arrays), self.scale, **options)


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=6).map(
    lambda rows: [(min(q, kv), kv) for q, kv in rows]
)


@both_backends
@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    heads=st.sampled_from([(4, 2), (6, 2), (3, 3), (8, 1), (5, 1)]),
    head_dim=st.sampled_from([16, 24, 32]),
    block_size=st.sampled_from([8, 24, 32, 256]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    chunk=st.one_of(st.none(), st.integers(1, 200)),
    softcap=st.sampled_from([None, 5.0]),
    with_sinks=st.booleans(),
)
def test_equals_the_reference(
    backend, rows, heads, head_dim, block_size, window, chunk, softcap, with_sinks
):
    batch = Batch(rows, *heads, head_dim, block_size)
    options = dict(window=window, chunk=chunk, softcap=softcap)
    if with_sinks:
        options["sinks"] = torch.randn(heads[0])
    out = batch.run(backend=backend, **options)
    expected = batch.run(function=reference.paged_attention, **options)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


@both_backends
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision_pages_are_summed_in_float32(backend, dtype, tolerance):
    batch = Batch([(1, 150), (20, 60), (130, 200)], 4, 2, 32, 32, dtype)
    out = batch.run(backend=backend)
    assert out.dtype == dtype
    expected = batch.run(function=reference.paged_attention)
    # They differ by the rounding of the output, and of the weights where pairs of bfloat16 are multiplied.
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@both_backends
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "heads, head_dim", [((4, 2), 32), ((6, 2), 24), ((7, 1), 64), ((8, 8), 16)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(window=100, sinks=lambda heads: torch.linspace(-1, 2, heads)),
        dict(chunk=60, softcap=3.0),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(backend, threads, heads, head_dim, options):
    options = {name: make(heads[0]) if callable(make) else make for name, make in options.items()}
    torch.set_num_threads(threads)
    try:
        rows = [(1, n) for n in (1, 5, 31, 32, 33, 128, 129, 300, 400, 513)] + [
            (37, 37),
            (70, 250),
            (2, 140),
        ]
        batch = Batch(rows, *heads, head_dim, 32)
        tokens = choose_query_tokens(*heads, head_dim, 32)

        def run(rows=slice(None)):
            return batch.run(rows, function=with_query_tokens(tokens, backend), **options)

        together = run()
        for i in range(len(rows)):
            own = together[batch.cu_q[i] : batch.cu_q[i + 1]]
            assert torch.equal(run(slice(i, i + 1)), own)
        backwards = run(slice(None, None, -1))
        order = np.concatenate(
            [np.arange(batch.cu_q[i], batch.cu_q[i + 1]) for i in range(len(rows))[::-1]]
        )
        assert torch.equal(backwards, together[order])
    finally:
        torch.set_num_threads(1)


def with_query_tokens(query_tokens, backend):
    """`paged_attention` through a plan with this prefill tile."""

    def function(q, k, v, tables, cu_q, kv_len, scale, *, window=None, chunk=None, **options):
        plan = plan_attention(
            cu_q.numpy(),
            kv_len.numpy(),
            tables.numpy(),
            k,
            q.shape[1],
            window=window,
            chunk=chunk,
            query_tokens=query_tokens,
            backend=backend,
        )
        return paged_attention(q, k, v, tables, cu_q, kv_len, scale, plan=plan, **options)

    return function


@pytest.mark.parametrize(
    "options",
    [{}, dict(window=30), dict(chunk=48), dict(softcap=3.0), dict(sinks=torch.linspace(-1, 2, 6))],
)
@pytest.mark.parametrize(
    "backend, query_tokens",
    [pytest.param("native", None, marks=needs_native), ("torch", None), ("torch", 1)],
)
def test_a_token_has_the_same_bits_in_every_chunking(options, backend, query_tokens):
    length = 200
    batch = Batch([(length, length)], 6, 2, 32, 32)
    if query_tokens is None:
        query_tokens = choose_query_tokens(6, 2, 32, 32)
    run = with_query_tokens(query_tokens, backend)

    def chunk(start, end):
        arrays = (batch.tables, np.array([0, end - start]), np.array([end]))
        tensors = map(torch.tensor, arrays)
        return run(batch.q[start:end], batch.k, batch.v, *tensors, batch.scale, **options)

    whole = chunk(0, length)
    for boundary in range(1, length):
        pieces = torch.cat([chunk(0, boundary), chunk(boundary, length)])
        assert torch.equal(pieces, whole), boundary
    assert torch.equal(torch.cat([chunk(i, i + 1) for i in range(length)]), whole)


@both_backends
@pytest.mark.parametrize("options", [dict(window=20), dict(chunk=24), dict(softcap=4.0)])
def test_garbage_in_unused_slots_never_reaches_an_output(backend, options):
    batch = Batch([(1, 33), (5, 70)], 4, 2, 16, 32)
    out = batch.run(backend=backend, **options)
    assert torch.isfinite(out).all()
    holes = torch.isnan(batch.k)
    for filler in (float("inf"), 1e38):
        batch.k[holes] = filler
        batch.v[holes] = filler
        assert torch.equal(batch.run(backend=backend, **options), out)


@both_backends
@pytest.mark.parametrize("options", [dict(window=40), dict(chunk=65), dict(chunk=130, window=40)])
def test_blocks_that_fell_out_of_reach_are_not_read(backend, options):
    batch = Batch([(1, 200), (3, 200)], 4, 2, 16, 32)
    out = batch.run(backend=backend, **options)
    for row in range(2):
        # Tokens 0..127: the window starts at 158, the chunks at 195 and 130.
        batch.k[batch.tables[row, :4]] = float("nan")
        batch.v[batch.tables[row, :4]] = float("nan")
    assert torch.equal(batch.run(backend=backend, **options), out)


@both_backends
@pytest.mark.parametrize(
    "make", [lambda: torch.empty(1, 4, 16), lambda: torch.empty(1, 8, 16)[:, ::2]]
)
def test_out_is_written_in_place(backend, make):
    batch = Batch([(1, 5)], 4, 2, 16, 32)
    out = make()
    assert batch.run(backend=backend, out=out) is out
    assert torch.equal(out, batch.run(backend=backend))


@pytest.mark.parametrize("block_size, expected", [(8, 128), (32, 128), (24, 144), (256, 256)])
def test_tiles_are_whole_blocks_of_at_least_the_tile_size(block_size, expected):
    assert tile_tokens(block_size) == expected >= TILE_TOKENS


def test_misfits_are_refused_by_name():
    batch = Batch([(1, 5)], 4, 2, 16, 32)
    good = (batch.q, batch.k, batch.v)
    rest = (*map(torch.tensor, (batch.tables, batch.cu_q, batch.kv_len)), 1.0)
    cases = [
        ((batch.q[:, :3], *good[1:]), "multiple of the KV heads"),
        ((batch.q[..., :8], *good[1:]), "head sizes"),
        ((batch.q[0], *good[1:]), "q must be"),
        ((batch.q.bfloat16(), *good[1:]), "k_cache is"),
        (
            (batch.q, batch.k.transpose(1, 2).contiguous().transpose(1, 2), batch.v),
            "k_cache: heads of a block",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments, *rest)
