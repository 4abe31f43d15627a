"""Native attention: the division of the work changes no bit in any dtype, and bad arguments never reach C."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu import cpu_attention_native, cpu_attention_work, native_library
from quire.kernels.cpu.cpu_attention import has_native, paged_attention, plan_attention
from tests.kernels import reference

pytestmark = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ROWS = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 1200)), min_size=1, max_size=4).map(
    lambda rows: [(min(q, kv), kv) for q, kv in rows]
)
OPTIONS = st.fixed_dictionaries(
    dict(
        window=st.one_of(st.none(), st.integers(1, 700)),
        chunk=st.one_of(st.none(), st.integers(1, 700)),
        softcap=st.sampled_from([None, 5.0]),
    )
)


class Batch:
    """Random ragged rows; blocks are in random order in a pool that contains NaN in slots without a token."""

    def __init__(self, rows, heads, kv_heads, head_dim, block_size, dtype, seed=0):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-kv // block_size) for _, kv in rows]
        blocks = rng.permutation(sum(counts) + 1)
        shape = (len(blocks), 2, 2, kv_heads, block_size, head_dim)
        pool = torch.full(shape, float("nan"), dtype=dtype)
        self.k, self.v = pool[:, 1, 0], pool[:, 1, 1]
        # Entries without a key must be ignored: a read at an id far outside the pool would crash.
        self.tables = np.full((len(rows), max(counts, default=0) + 1), 1 << 40)
        start = 0
        for row, (count, (_, kv)) in enumerate(zip(counts, rows, strict=True)):
            own = blocks[start : start + count]
            self.tables[row, :count] = own
            start += count
            for cache in (self.k, self.v):
                tokens = torch.randn(kv, kv_heads, head_dim, generator=generator).to(dtype)
                for i, block in enumerate(own):
                    part = tokens[i * block_size : (i + 1) * block_size]
                    cache[block, :, : len(part)] = part.transpose(0, 1)
        self.q_len = np.array([q for q, _ in rows])
        self.cu_q = np.concatenate([[0], np.cumsum(self.q_len)]).astype(np.int64)
        self.kv_len = np.array([kv for _, kv in rows])
        self.q = torch.randn(int(self.cu_q[-1]), heads, head_dim, generator=generator).to(dtype)

    def run(self, first=None, last=None, isa=None, softcap=None, sinks=None, **span):
        """Attention of each row's queries [first, last), over the keys up to the last of them.

        first and last: [rows]; None for all queries.
        """
        first = np.zeros_like(self.q_len) if first is None else first
        last = self.q_len if last is None else last
        tokens = [
            np.arange(a, b)
            for a, b in zip(self.cu_q[:-1] + first, self.cu_q[:-1] + last, strict=True)
        ]
        cu_q = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int64)
        kv_len = self.kv_len - self.q_len + last
        plan = plan_attention(
            cu_q, kv_len, self.tables, self.k, self.q.shape[1], backend="native", **span
        )
        q = self.q[np.concatenate(tokens)]
        out = torch.empty_like(q)
        scale = q.shape[-1] ** -0.5
        cpu_attention_native.attend(
            q, self.k, self.v, scale, plan, softcap=softcap, sinks=sinks, out=out, isa=isa
        )
        return out

    def expected(self, **options):
        """The reference, with tables without the invalid entries."""
        tables = np.where(self.tables < len(self.k), self.tables, 0)
        arrays = (torch.tensor(x) for x in (tables, self.cu_q, self.kv_len))
        scale = self.q.shape[-1] ** -0.5
        return reference.paged_attention(self.q, self.k, self.v, *arrays, scale, **options)


def available_isas():
    """Instruction sets to test; empty without the library, so that the module can be collected and its tests fail."""
    library = native_library.load()
    return () if library is None else library.isas


@settings(max_examples=80, deadline=None)
@given(
    rows=ROWS,
    heads=st.sampled_from([(1, 1), (6, 2), (16, 1), (5, 5), (12, 4), (70, 2)]),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256, 512]),
    block_size=st.sampled_from([8, 16, 40, 128]),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(native_library.ISAS),
    options=OPTIONS,
    with_sinks=st.booleans(),
)
def test_equals_the_reference(rows, heads, head_dim, block_size, dtype, isa, options, with_sinks):
    if isa not in available_isas():
        return
    batch = Batch(rows, *heads, head_dim, block_size, dtype)
    if with_sinks:
        options = options | {"sinks": torch.linspace(-2, 3, heads[0])}
    out = batch.run(isa=isa, **options)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        out.float(), batch.expected(**options), atol=tolerance, rtol=max(tolerance, 1e-4)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), rows=ROWS, heads=st.sampled_from([(2, 2), (6, 2), (16, 2)]), options=OPTIONS)
def test_a_token_has_the_same_bits_however_the_batch_is_cut(dtype, data, rows, heads, options):
    batch = Batch(rows, *heads, 40, 16, dtype)
    whole = batch.run(**options)
    cut = np.array([data.draw(st.integers(0, int(n))) for n in batch.q_len])
    before, after = batch.run(last=cut, **options), batch.run(first=cut, **options)
    for row, boundary in enumerate(cut):
        own = whole[batch.cu_q[row] : batch.cu_q[row + 1]]
        starts = [int(x[:row].sum()) for x in (cut, batch.q_len - cut)]
        assert torch.equal(before[starts[0] :][:boundary], own[:boundary])
        assert torch.equal(after[starts[1] :][: len(own) - boundary], own[boundary:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, dict(window=300), dict(chunk=700, softcap=3.0)])
def test_a_decoded_token_has_the_bits_of_a_prefilled_one(dtype, options):
    batch = Batch([(20, 1100), (70, 70)], 6, 2, 64, 32, dtype)
    whole = batch.run(**options)
    for step in (0, 1, 7, 19):
        decoded = batch.run(
            first=np.array([step, step]), last=np.array([step + 1, step + 1]), **options
        )
        assert torch.equal(decoded[0], whole[step])
        assert torch.equal(decoded[1], whole[20 + step])


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_many_rows_a_unit_has_changes_no_bit(monkeypatch, dtype):
    batch = Batch([(80, 1200), (70, 90), (1, 600)], 8, 2, 64, 32, dtype)
    for isa, options in itertools.product(available_isas(), ({}, dict(window=300))):
        results = []
        for rows in (32, 128, cpu_attention_native.MAX_ROWS):
            monkeypatch.setattr(cpu_attention_native, "_most_rows", lambda *_, rows=rows: rows)
            results.append(batch.run(isa=isa, **options))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_tiles_are_tall_only_where_every_thread_still_has_enough(monkeypatch):
    batch = Batch([(80, 200)], 8, 2, 64, 32, torch.bfloat16)  # 320 rows of each KV head
    monkeypatch.setattr(
        cpu_attention_native, "_most_rows", lambda *_: cpu_attention_native.MAX_ROWS
    )

    def tokens(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        plan = plan_attention(batch.cu_q, batch.kv_len, batch.tables, batch.k, 8, backend="native")
        return plan.tiles[:, 1].tolist()

    assert tokens(threads=1) == [64, 16]
    assert tokens(threads=2) == [32, 32, 16]  # two tiles of two KV heads are fewer than 4 a thread


def share_prefixes(batch, shared):
    """Replace the first `shared` blocks of each row by those of the previous row."""
    for row, count in enumerate(shared, 1):
        batch.tables[row, :count] = batch.tables[row - 1, :count]


def trunks(plan):
    """(keys, branches, tokens) of each trunk of a plan."""
    return [tuple(tile[[4, 6, 1]].tolist()) for tile in plan.tiles if tile[6]]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 9, 40, 70]),
            st.builds(operator.add, st.sampled_from([1100, 700, 600, 150]), st.integers(0, 70)),
        ),
        min_size=2,
        max_size=7,
    ),
    shared=st.lists(st.sampled_from([28, 17, 21, 4, 3, 0]), min_size=6, max_size=6),
    heads=st.sampled_from([(6, 2), (2, 2), (16, 1)]),
    head_dim=st.sampled_from([64, 80]),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(native_library.ISAS),
    options=OPTIONS,
    with_sinks=st.booleans(),
    threads=st.sampled_from([1, 3]),
)
def test_rows_that_share_a_prefix_have_the_bits_of_rows_alone(
    rows, shared, heads, head_dim, dtype, isa, options, with_sinks, threads
):
    if isa not in available_isas():
        isa = None
    batch = Batch(rows, *heads, head_dim, 32, dtype)
    # Only whole blocks that both rows have written.
    full = [(kv - q) // 32 for q, kv in rows]
    share_prefixes(batch, [min(n, *full[i : i + 2]) for i, n in enumerate(shared[: len(rows) - 1])])
    options = dict(options, sinks=torch.linspace(-1, 1, heads[0]) if with_sinks else None, isa=isa)
    torch.set_num_threads(threads)
    try:
        together = batch.run(**options)
        nobody = np.zeros(len(rows), int)
        for row, (q_len, _) in enumerate(rows):
            alone = nobody.copy()
            alone[row] = q_len
            one = batch.run(first=nobody, last=alone, **options)
            assert torch.equal(one, together[batch.cu_q[row] : batch.cu_q[row + 1]])
    finally:
        torch.set_num_threads(1)
    assert together.isfinite().all()


def test_a_shared_prefix_is_read_once_for_all_its_rows(monkeypatch):
    lengths = [300, 290, 700, 1100, 1100, 1090, 500, 64]
    batch = Batch([(1, kv) for kv in lengths], 4, 2, 64, 32, torch.float32)
    # Rows 0 to 2 share at most 9 blocks, rows 3 to 5 most of 1024 tokens, the other rows nothing.
    share_prefixes(batch, [9, 8, 0, 32, 32, 0, 0])

    def plan(threads=1, **span):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return plan_attention(
            batch.cu_q, batch.kv_len, batch.tables, batch.k, 4, backend="native", **span
        )

    assert sorted(trunks(plan())) == [(256, 3, 3), (1024, 3, 3)]
    assert len(plan().units) == 2 + 2
    assert sorted(plan().tokens.tolist()) == list(range(8))
    # 8 rows x 2 heads are 16 items; with two threads 8 are wanted, so that two tiles may be one.
    assert sorted(trunks(plan(threads=2))) == [(256, 2, 2), (1024, 2, 2)]
    assert trunks(plan(threads=4)) == []
    assert trunks(plan(window=64)) == []  # the first key differs between the rows
    order = np.argsort(np.array([3, 0, 6, 1, 4, 7, 2, 5]))  # for any order of the rows
    batch.kv_len, batch.tables = batch.kv_len[order], batch.tables[order]
    assert sorted(trunks(plan())) == [(256, 3, 3), (1024, 3, 3)]


def test_a_trunk_is_longer_where_that_saves_more_than_more_branches_do():
    batch = Batch([(1, 1100)] * 3 + [(1, 200)], 4, 2, 64, 32, torch.float32)
    share_prefixes(batch, [32, 32, 5])
    plan = plan_attention(batch.cu_q, batch.kv_len, batch.tables, batch.k, 4, backend="native")
    assert trunks(plan) == [(1024, 3, 3)]  # with the last row it would be 128


@pytest.mark.parametrize("dtype", DTYPES)
def test_splitting_a_long_row_over_threads_changes_no_bit(dtype, monkeypatch):
    batch = Batch([(1, 3000), (3, 1500), (1, 10)], 4, 2, 64, 32, dtype)
    sinks = torch.linspace(-1, 1, 4)
    outputs = []
    for items_per_thread, partial_bytes in ((0, 1 << 24), (1000, 1 << 24), (1000, 20_000)):
        monkeypatch.setattr(cpu_attention_native, "ITEMS_PER_THREAD", items_per_thread)
        monkeypatch.setattr(cpu_attention_native, "MAX_PARTIAL_BYTES", partial_bytes)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            try:
                outputs += [batch.run(sinks=sinks) for _ in range(3)]
            finally:
                torch.set_num_threads(1)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_tiles_keep_their_partial_results_apart_in_any_order_of_the_units(dtype, monkeypatch):
    batch = Batch([(80, 640), (1, 1100)], 6, 2, 64, 32, dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # nothing is split
    expected = batch.run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    plan = plan_attention(batch.cu_q, batch.kv_len, batch.tables, batch.k, 6, backend="native")
    assert (plan.tiles[:, 5] >= 0).all()  # 42 and 38 tokens of the first row, and the second row
    assert len(plan.units) == 2 + 2 + 3

    used = np.zeros(len(plan.partials), int)
    for _, tokens, _, begin, end, first, _ in plan.tiles:
        splits = -(-end // cpu_attention_work.SPLIT_TOKENS) - (
            begin // cpu_attention_work.SPLIT_TOKENS
        )
        used[first : first + splits * tokens * 6] += 1
    assert (used == 1).all()

    # Simulates every order in which threads may finish: one thread, with the units in another order.
    for order in itertools.islice(itertools.permutations(range(len(plan.units))), 0, None, 50):
        plan.partials.fill(np.nan)
        other = dataclasses.replace(plan, units=plan.units[list(order)], num_threads=1)
        out = paged_attention(batch.q, batch.k, batch.v, None, None, None, 64**-0.5, plan=other)
        assert torch.equal(out, expected)


def test_long_rows_are_split_only_where_threads_would_idle_and_memory_allows(monkeypatch):
    batch = Batch([(1, 3000), (1, 1500)], 4, 2, 64, 32, torch.float32)

    def units(threads, rows=1):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        cu_q = np.arange(2 * rows + 1)
        # Each row has its own blocks: shared ones would be read together.
        tables = np.concatenate([(batch.tables + row) % len(batch.k) for row in range(rows)])
        arrays = (cu_q, np.tile(batch.kv_len, rows), tables)
        plan = plan_attention(*arrays, batch.k, 4, backend="native")
        assert plan.partials.nbytes <= cpu_attention_native.MAX_PARTIAL_BYTES
        return len(plan.units), len(plan.partials)

    assert units(1) == (2, 0)
    # 2 rows x 2 heads are 4 items, 8 are wanted: the longer row becomes its 6 splits.
    assert units(2) == (7, 6 * 2 * 2)
    assert units(4) == (9, 9 * 2 * 2)
    assert units(2, rows=8) == (16, 0)
    monkeypatch.setattr(cpu_attention_native, "MAX_PARTIAL_BYTES", 8000)
    assert units(4) == (4, 3 * 2 * 2)  # only the shorter row's 3 splits fit


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 3), st.integers(3, 1300)), min_size=1, max_size=6),
    heads=st.sampled_from([(8, 8), (16, 8), (4, 2), (18, 6), (20, 20)]),
    head_dim=st.sampled_from([64, 128]),
    block_size=st.sampled_from([8, 16, 24, 32, 40, 64, 256]),
    isa=st.sampled_from(native_library.ISAS),
    options=OPTIONS,
    with_sinks=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
)
def test_heads_that_are_read_together_have_the_bits_of_heads_alone(
    rows, heads, head_dim, block_size, isa, options, with_sinks, threads
):
    """With a prompt in the batch, every thread takes one head at a time."""
    if isa not in available_isas():
        isa = None
    batch = Batch([*rows, (30, 40)], *heads, head_dim, block_size, torch.bfloat16)
    options = dict(options, sinks=torch.linspace(-1, 1, heads[0]) if with_sinks else None, isa=isa)
    own = np.where(np.arange(len(rows) + 1) < len(rows), batch.q_len, 0)
    torch.set_num_threads(threads)
    try:
        alone = batch.run(**options)[: batch.cu_q[-2]]
        together = batch.run(last=own, **options)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together, alone)
    assert together.isfinite().all()


@pytest.mark.skipif("amx_bf16" in available_isas(), reason="matrix registers take head by head")
def test_threads_take_as_many_heads_together_as_leave_them_enough_to_share():
    def heads_of(rows, dtype=torch.bfloat16, threads=2, kv_heads=8):
        batch = Batch(rows, 2 * kv_heads, kv_heads, 128, 32, dtype)
        torch.set_num_threads(threads)
        try:
            arrays = (batch.cu_q, batch.kv_len, batch.tables, batch.k, 2 * kv_heads)
            plan = plan_attention(*arrays, backend="native")
        finally:
            torch.set_num_threads(1)
        q, out = batch.q, torch.empty_like(batch.q)
        call = cpu_attention_native.AttentionCall.of(
            batch.k, batch.v, 2 * kv_heads, 1.0, None, None
        )
        call.q, call.q_token_stride, call.q_head_stride = q.data_ptr(), q.stride(0), q.stride(1)
        call.out, call.out_token_stride, call.plan = out.data_ptr(), out.stride(0), plan.part
        library = native_library.load()
        library.functions.quire_attention(
            ctypes.byref(call), library.best_isa, library.parallel, threads
        )
        return call.item_heads

    decode = [(1, 40)] * 8
    assert heads_of(decode) == 8  # 8 rows for 2 threads: 4 each
    assert heads_of(decode[:3]) == 2  # 3 rows of 4 pairs of heads
    assert heads_of(decode[:1]) == 4  # one row: half of it for each
    assert heads_of(decode[:1], threads=1) == 8
    assert heads_of(decode, kv_heads=20, threads=1) == 10  # not more than fit the memory
    assert heads_of([*decode, (30, 40)]) == 1  # a prompt's keys are packed, one head at a time
    assert heads_of(decode, torch.float32) == 1


def test_float32_has_the_same_bits_on_every_instruction_set_with_fused_multiply_add():
    batch = Batch([(1, 700), (70, 300)], 6, 2, 80, 16, torch.float32)
    options = dict(window=250, softcap=4.0, sinks=torch.linspace(-1, 2, 6))
    isas = [isa for isa in available_isas() if isa != "generic"]
    outputs = [batch.run(isa=isa, **options) for isa in isas]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_queries_may_lie_head_first(threads):
    batch = Batch([(40, 600)], 6, 2, 64, 32, torch.bfloat16)
    expected = batch.run()
    batch.q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    plan = plan_attention(batch.cu_q, batch.kv_len, batch.tables, batch.k, 6, backend="native")
    out = paged_attention(batch.q, batch.k, batch.v, None, None, None, 64**-0.5, plan=plan)
    assert torch.equal(out, expected)


def test_a_query_without_keys_gives_zeros():
    batch = Batch([(0, 0), (1, 1)], 2, 1, 16, 8, torch.float32)
    cu_q, kv_len = np.array([0, 1, 2]), np.array([0, 1])
    plan = plan_attention(cu_q, kv_len, batch.tables, batch.k, 2, backend="native")
    q = torch.randn(2, 2, 16)
    out = paged_attention(q, batch.k, batch.v, None, None, None, 1.0, plan=plan)
    assert torch.equal(out[0], torch.zeros(2, 16))
    assert torch.equal(out[1], batch.v[batch.tables[1, 0], :, 0].expand(2, 16))


class Decoding:
    """The last steps of a decoding batch, each planned from the previous plan."""

    def __init__(self, lengths, heads=(6, 2), dtype=torch.bfloat16, steps=8):
        self.batch = Batch([(1, kv) for kv in lengths], *heads, 64, 32, dtype)
        self.steps = steps

    def plan(self, step, before=None, **changes):
        batch = self.batch
        given = dict(
            cu_q=batch.cu_q,
            kv_len=batch.kv_len - self.steps + 1 + step,
            block_tables=batch.tables.copy(),
            k_cache=batch.k,
            num_heads=batch.q.shape[1],
            backend="native",
        )
        return plan_attention(**(given | changes), before=before)

    def attend(self, plan):
        out = torch.empty_like(self.batch.q)
        scale = self.batch.q.shape[-1] ** -0.5
        cpu_attention_native.attend(
            self.batch.q, self.batch.k, self.batch.v, scale, plan, softcap=None, sinks=None, out=out
        )
        return out


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.builds(operator.add, st.sampled_from([1100, 1025, 520, 150]), st.integers(0, 70)),
        min_size=1,
        max_size=6,
    ),
    shared=st.lists(st.sampled_from([28, 17, 4, 3, 0]), min_size=5, max_size=5),
    # (step, row, column, the column whose block it gets)
    moves=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 5), st.integers(0, 35), st.integers(0, 35)),
        max_size=3,
    ),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 3]),
)
def test_a_plan_that_goes_on_from_the_one_before_changes_no_bit(
    lengths, shared, moves, dtype, threads
):
    decoding = Decoding(lengths, dtype=dtype)
    batch = decoding.batch
    full = [(kv - decoding.steps) // 32 for kv in lengths]
    share_prefixes(
        batch, [min(n, *full[i : i + 2]) for i, n in enumerate(shared[: len(lengths) - 1])]
    )
    torch.set_num_threads(threads)
    try:
        plan = None
        for step in range(decoding.steps):
            for at, row, to, source in moves:
                if at == step and row < len(lengths) and max(to, source) < full[row]:
                    batch.tables[row, to] = batch.tables[row, source]
            plan = decoding.plan(step, before=plan)
            assert torch.equal(decoding.attend(plan), decoding.attend(decoding.plan(step)))
    finally:
        torch.set_num_threads(1)


def test_a_plan_goes_on_while_the_same_rows_decode():
    decoding = Decoding([300, 301, 700, 90], steps=20)
    share_prefixes(decoding.batch, [8, 0, 0])
    before = decoding.plan(0)
    assert trunks(before) == [(256, 2, 2)]
    for step in range(1, 20):
        plan, anew = decoding.plan(step, before), decoding.plan(step)
        assert plan.scratch is before.scratch, step
        for name in ("tokens", "key_begin", "key_end", "tiles", "units", "kv_len", "block_tables"):
            assert np.array_equal(getattr(plan, name), getattr(anew, name)), name
        before = plan


def test_a_plan_does_not_go_on_to_another_step():
    decoding = Decoding([300, 290, 700], steps=2)
    share_prefixes(decoding.batch, [8, 0])
    before, batch = decoding.plan(0), decoding.batch
    kv_len, tables = batch.kv_len, batch.tables
    assert before.following(batch.cu_q, kv_len, tables) is not None
    others = tables.copy()
    others[0, 7] = others[0, 6]  # in the trunk of these rows
    for name, arguments in {
        "the same step": (batch.cu_q, kv_len - 1, tables),
        "one row waited": (batch.cu_q, kv_len - [0, 1, 0], tables),
        "two rows": (batch.cu_q[:3], kv_len[:2], tables[:2]),
        "a row has two": (np.array([0, 2, 3, 4]), kv_len + np.array([1, 0, 0]), tables),
        "a wider table": (batch.cu_q, kv_len, np.pad(tables, ((0, 0), (0, 1)))),
        "a trunk's rows part": (batch.cu_q, kv_len, others),
    }.items():
        assert before.following(*arguments) is None, name
    for span in (dict(window=64), dict(chunk=64)):
        assert decoding.plan(0, **span).following(batch.cu_q, kv_len, tables) is None
    prompt = decoding.plan(0, cu_q=np.array([0, 2, 3, 4]))
    assert prompt.following(np.array([0, 2, 3, 4]), kv_len, tables) is None
    split = Decoding([300, 513], steps=2)  # the second row begins a new split
    batch = split.batch
    assert split.plan(0).following(batch.cu_q, batch.kv_len, batch.tables) is None


def test_a_plan_that_goes_on_checks_the_blocks_it_will_read():
    decoding = Decoding([65, 40], steps=2)  # the first row begins a new block
    batch = decoding.batch
    for row, column in ((0, 2), (1, 0)):
        before = decoding.plan(0)
        good, batch.tables[row, column] = batch.tables[row, column], -1
        with pytest.raises(ValueError, match=f"row {row}, column {column} must be between 0 and"):
            decoding.plan(1, before)
        batch.tables[row, column] = good
    batch.tables[0, 2] = 1 << 40
    before = decoding.plan(0)  # the entry is not read yet, and the table does not change afterwards
    with pytest.raises(ValueError, match="row 0, column 2 must be between 0 and"):
        decoding.plan(1, before)


def test_a_plan_that_goes_on_checks_tables_that_were_changed_in_place():
    decoding = Decoding([70, 40], steps=2)
    tables = decoding.batch.tables.copy()
    before = decoding.plan(0, block_tables=tables)
    tables[1, 0] = 1 << 40
    with pytest.raises(ValueError, match="row 1, column 0 must be between 0 and"):
        decoding.plan(1, before, block_tables=tables)


def test_blocks_outside_the_cache_or_the_table_are_refused():
    batch = Batch([(1, 5), (1, 40)], 2, 1, 16, 8, torch.float32)
    for wrong in (-1, len(batch.k)):
        batch.tables[1, 3] = wrong
        message = rf"row 1, column 3 must be between 0 and {len(batch.k) - 1}, got {wrong}"
        with pytest.raises(ValueError, match=message):
            batch.run()
    with pytest.raises(
        ValueError, match="row 1 needs 7 blocks for 49 tokens, the table has 6 columns"
    ):
        plan_attention(batch.cu_q, np.array([5, 49]), batch.tables, batch.k, 2, backend="native")


def test_a_plan_of_other_shapes_is_refused():
    batch = Batch([(3, 5)], 2, 1, 16, 8, torch.float32)
    plan = plan_attention(batch.cu_q, batch.kv_len, batch.tables, batch.k, 2, backend="native")
    for q in (batch.q[:2], batch.q.repeat(1, 2, 1)):
        with pytest.raises(ValueError, match="plan: made for 3 tokens of 2 heads"):
            paged_attention(q, batch.k, batch.v, None, None, None, 1.0, plan=plan)


@pytest.mark.parametrize(
    "shape, heads",
    [((2, 1, 8, 12), 1), ((2, 1, 8, 520), 1), ((2, 1, 12, 16), 1), ((2, 1, 8, 16), 129)],
)
def test_other_shapes_go_to_torch_and_native_refuses_them(shape, heads):
    cache = torch.zeros(shape)
    arguments = (np.array([0, 1]), np.array([1]), np.array([[0]]), cache, heads)
    assert not isinstance(plan_attention(*arguments), cpu_attention_native.NativePlan)
    with pytest.raises(
        ValueError, match=r"backend 'native' needs .* a head_dim that is a multiple"
    ):
        plan_attention(*arguments, backend="native")
    with pytest.raises(ValueError, match="backend must be"):
        plan_attention(*arguments, backend="numba")


def test_python_and_c_agree_on_the_arguments():
    library = native_library.load()
    assert ctypes.sizeof(cpu_attention_native.AttentionCall) == library.functions.quire_call_bytes()


@pytest.mark.parametrize("isa", range(len(native_library.ISAS)))
def test_weights_are_exact_to_one_unit_in_the_last_place(isa):
    """2^x of the softmax: against float64 on every 997th float, and at the edges of its range.

    The tolerance is two units where products are rounded before they are added.
    """
    library = native_library.load()
    if isa > library.last_isa:
        pytest.skip(f"this processor has no {native_library.ISAS[isa]}")
    bits = np.arange(0, np.float32(125).view(np.uint32), 997, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), -bits.view(np.float32), [0, -125]])
    x = np.ascontiguousarray(x[: len(x) // 16 * 16], np.float32)
    y = np.empty_like(x)
    library.functions.quire_exp2(x.ctypes.data, y.ctypes.data, len(x), isa)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(y - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= (1.0 if isa > 0 else 2.0)
    assert (y[x == 0] == 1).all()
    edges = np.array([-np.inf, -1e30, -125.5, np.nan] + [-200.0] * 12, np.float32)
    y = np.empty_like(edges)
    library.functions.quire_exp2(edges.ctypes.data, y.ctypes.data, 16, isa)
    assert (y[:3] == 0).all() and np.isnan(y[3]) and (y[4:] == 0).all()
