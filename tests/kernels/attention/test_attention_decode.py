"""Decode attention: correct by the reference, with the same bits for every division of the work."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels.argument_checks import HEAD_DIMS
from quire.kernels.attention import attention_call
from quire.kernels.attention.attention_decode import decode_attention
from quire.kernels.attention.decode_plan import allocate_decode_workspace, plan_decode
from quire.kernels.tuning import DecodeConfig
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
CONFIG = DecodeConfig(
    split_tokens=32,
    tile_tokens=16,
    num_warps=4,
    num_stages=2,
    programs_per_sm=2,
    merge_splits=3,
    merge_unroll=2,
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def workspace_for(batch, *, config=CONFIG, max_slots=32, num_programs=3, **local):
    return allocate_decode_workspace(
        len(batch.kv_len) + 1,
        max_slots,
        *batch.shape,
        batch.q.device,
        dtype=batch.q.dtype,
        config=config,
        num_programs=num_programs,
        **batch.values,
        **local,
    )


def plan_for(batch, ws):
    return plan_decode(ws, batch.cu_q, batch.kv_len, batch.tables, batch.k.shape[2])


def attend(batch, *, permute=None, out=None, options=(), **workspace):
    ws = workspace_for(batch, **workspace)
    plan = plan_for(batch, ws)
    if permute is not None:
        count = int(ws.counts[0])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(permute))
        ws.items[:count] = ws.items[order.to(ws.items.device)]
    return decode_attention(
        batch.q, batch.k, batch.v, batch.tables, batch.scale, plan, out=out, **dict(options)
    )


def lengths(block_size, longest):
    edges = sorted(
        {
            n
            for n in (0, 1, 31, 32, 33, 64, block_size - 1, block_size, block_size + 1)
            if n <= longest
        }
    )
    return st.lists(st.sampled_from(edges) | st.integers(0, longest), min_size=1, max_size=3)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_matches_the_reference_at_any_shape(paged_batch, close, data):
    group = data.draw(st.integers(1, 16), "group")
    kv_heads = data.draw(st.integers(1, 2), "kv_heads")
    block_size = data.draw(st.sampled_from([16, 32, 64]), "block_size")
    dtype = data.draw(st.sampled_from(FLOATS), "dtype")
    fp8 = data.draw(st.sampled_from([False, False, True]), "fp8")
    kv_lens = data.draw(lengths(block_size, 100), "kv_lens")
    batch = paged_batch(
        [1] * len(kv_lens),
        kv_lens,
        kv_heads * group,
        kv_heads,
        data.draw(st.sampled_from(HEAD_DIMS), "head_dim"),
        block_size,
        dtype,
        cache_dtype=torch.float8_e4m3fn if fp8 else None,
        seed=data.draw(st.integers(0, 9), "seed"),
    )
    local = data.draw(
        st.sampled_from([{}, {}, {"window": 1}, {"window": 40}, {"chunk": 24}]), "local"
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
    result = attend(
        batch,
        options=options,
        config=replace(CONFIG, tile_tokens=data.draw(st.sampled_from([16, 32]), "tile")),
        max_slots=data.draw(st.sampled_from([3, 32]), "slots"),
        num_programs=data.draw(st.integers(1, 4), "programs"),
        **local,
    )
    close(result, batch.expected(**options, **local), dtype)


def test_keys_unlike_their_values_and_large_groups(unlike, close):
    """Rows of one split, of several and of more than are merged at a time; some without slots; one of padding."""
    batch, options, local = unlike([1] * 4, [31, 130, 0, 70])
    result = attend(batch, options=options, max_slots=5, num_programs=2, **local)
    assert result.shape == (*batch.q.shape[:2], batch.v.shape[3])
    close(result, batch.expected(**options, **local), batch.q.dtype)
    split = attend(batch, options=options, config=replace(CONFIG, merge_unroll=1), **local)
    assert torch.equal(split, result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("local", [{}, {"window": 45}])
def test_bits_do_not_depend_on_batch_grid_order_or_slots(paged_batch, dtype, local):
    batch = paged_batch([1] * 4, [130, 7, 64, 97], 3, 1, 64, 16, dtype)
    together = attend(batch, **local)
    for row in range(4):
        assert torch.equal(attend(batch.rows([row]), **local)[0], together[row])
    for other in (
        dict(num_programs=1),
        dict(num_programs=7, permute=1),
        dict(max_slots=1),  # no row is split: one program computes each
        dict(max_slots=6, permute=2),
        dict(config=replace(CONFIG, merge_unroll=5)),
        dict(share_prefixes=not local),
    ):
        assert torch.equal(attend(batch, **local, **other), together), other


@pytest.mark.parametrize("num_splits", [1, 3, 4, 9, 10, 17])
def test_a_long_row_is_merged_by_runs_of_splits_in_order(paged_batch, close, num_splits):
    """The merge stores a run's result in the slot of its first split, and merges these for the row."""
    batch = paged_batch([1, 1], [32 * num_splits, 40], 2, 1, 64, 16, torch.float32)
    ws = workspace_for(batch)
    plan = plan_for(batch, ws)
    out = decode_attention(batch.q, batch.k, batch.v, batch.tables, batch.scale, plan)
    parts = [split_result(batch, range(32 * split, 32 * split + 32)) for split in range(num_splits)]
    runs = [reduce(merge_results, parts[i : i + 3]) for i in range(0, num_splits, 3)]
    assert ws.counts.tolist()[2] == int(num_splits > 3)
    if num_splits > 3:
        slots = range(int(ws.row_slot[0]), int(ws.row_slot[0]) + num_splits, 3)
        for slot, (m, total, acc) in zip(slots, runs, strict=True):
            close(ws.partial_ml[slot], torch.stack([m, total], 1), torch.float32)
            close(ws.partial_acc[slot], acc, torch.float32)
    _, total, acc = reduce(merge_results, runs)
    close(out[0], acc / total[:, None], torch.float32)


def split_result(batch, positions):
    """(m, l, acc) of the first row over some of its keys, in float32."""
    block_size = batch.k.shape[2]
    at = [(int(batch.tables[0, p // block_size]), p % block_size) for p in positions]
    k, v = (torch.stack([x[block, 0, slot] for block, slot in at]) for x in (batch.k, batch.v))
    s = batch.q[0] @ k.T * (batch.scale * 1.4426950408889634)
    m = s.max(1).values
    p = torch.exp2(s - m[:, None])
    return m, p.sum(1), p @ v


def merge_results(a, b):
    m = torch.maximum(a[0], b[0])
    x, y = torch.exp2(a[0] - m), torch.exp2(b[0] - m)
    return m, a[1] * x + b[1] * y, a[2] * x[:, None] + b[2] * y[:, None]


def share(batch, tree):
    """Replace first blocks of rows by other rows' blocks, in order: (row, other row, number of blocks)."""
    for row, leader, blocks in tree:
        batch.tables[row, :blocks] = batch.tables[leader, :blocks]


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_shared_prefixes_give_the_same_bits(paged_batch, close, data):
    group = data.draw(st.sampled_from([1, 3, 4, 8, 16]), "group")
    block_size = data.draw(st.sampled_from([16, 32, 64]), "block_size")
    dtype, cache_dtype = data.draw(
        st.sampled_from(
            [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)]
        ),
        "dtypes",
    )
    kv_lens = data.draw(st.lists(st.integers(0, 330), min_size=2, max_size=5), "kv_lens")
    q_lens = [data.draw(st.sampled_from([1, 1, 1, 2]), "q_len") if n > 2 else 1 for n in kv_lens]
    head_dim, value_dim = data.draw(
        st.sampled_from([(64, 64), (64, 64), (80, 80), (128, 128), (32, 20), (56, 40)]), "sizes"
    )
    batch = paged_batch(
        *(q_lens, kv_lens, group, 1, head_dim, block_size, dtype),
        cache_dtype=cache_dtype,
        value_dim=value_dim,
        values_in_keys=head_dim == 56,
    )
    for row in range(1, len(kv_lens)):
        leader = data.draw(st.integers(0, row - 1), "leader")
        most = max(0, min(kv_lens[row], kv_lens[leader]) - 2) // block_size
        share(batch, [(row, leader, data.draw(st.integers(0, most), "blocks"))])
    options = {}
    if data.draw(st.booleans(), "softcap"):
        options["softcap"] = 2.0
    if data.draw(st.booleans(), "sinks"):
        options["sinks"] = torch.linspace(-2, 2, group, device=batch.q.device)
    if cache_dtype is not None:
        scale = torch.tensor([0.5], device=batch.q.device)
        options |= {"k_scale": scale, "v_scale": 2 * scale}
    out = torch.zeros_like(batch.q[..., :value_dim])
    apart = attend(batch, options=options, out=out.clone(), max_slots=64)
    decodes = [int(batch.cu_q[i]) for i, n in enumerate(q_lens) if n == 1]
    close(apart[decodes], batch.expected(**options)[decodes], dtype)
    together = attend(
        batch,
        share_prefixes=True,
        max_slots=data.draw(st.sampled_from([4, 9, 17, 64]), "max_slots"),
        options=options,
        permute=3,
        out=out.clone(),
    )
    assert torch.equal(together, apart)


def test_a_shared_split_is_read_once_for_as_many_rows_as_fill_a_tile(paged_batch):
    # 4 query heads for each KV head: 4 rows fill the 16-row tile.
    batch = paged_batch([1] * 7, [130, 140, 100, 90, 200, 170, 65], 8, 2, 64, 16, torch.bfloat16)
    # Splits have two blocks. All rows except 6 share the first split; rows 1, 4, 5 the second, rows 4, 5 two more.
    share(batch, [(r, 0, 2) for r in range(1, 6)] + [(4, 1, 4), (5, 4, 8)])
    ws = workspace_for(batch, share_prefixes=True, max_slots=64)
    plan_for(batch, ws)
    items = ws.items[: int(ws.counts[0])].tolist()
    shared = sorted(item for item in items if item[3] >= 0)
    assert shared == [
        [0, 1, 0, 1, 2, 3],
        [0, 1, 4, 5, -1, -1],
        [1, 2, 1, 4, 5, -1],
        [2, 3, 4, 5, -1, -1],
        [3, 4, 4, 5, -1, -1],
    ]
    reads = [(split, row) for split, _, *rows in items for row in rows if row >= 0]
    splits = [-(-n // 32) for n in batch.kv_len.tolist()]
    assert sorted(reads) == sorted((s, row) for row, n in enumerate(splits) for s in range(n))
    assert torch.equal(
        attend(batch, share_prefixes=True, max_slots=64), attend(batch, max_slots=64)
    )


def test_equal_blocks_after_a_difference_are_not_shared(paged_batch):
    batch = paged_batch([1, 1], [100, 100], 2, 1, 64, 16, torch.bfloat16)
    batch.tables[1, 1:4] = batch.tables[0, 1:4]
    ws = workspace_for(batch, share_prefixes=True)
    plan_for(batch, ws)
    assert ws.counts[0] == 8 and (ws.items[:8, 3:] == -1).all()


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=7),
    max_slots=st.integers(1, 40),
    local=st.sampled_from([{}, {"window": 1}, {"window": 70}, {"chunk": 50}]),
)
def test_work_list_covers_every_split_once(paged_batch, rows, max_slots, local):
    device = DEVICE
    cu_q = torch.tensor(
        [0, *torch.tensor([q for q, _ in rows]).cumsum(0)], dtype=torch.int32, device=device
    )
    kv_len = torch.tensor([n for _, n in rows], dtype=torch.int32, device=device)
    ws = allocate_decode_workspace(
        8, max_slots, 4, 2, 64, device, config=CONFIG, num_programs=1, **local
    )
    tables = torch.zeros(len(rows), 26, dtype=torch.int32, device=device)
    plan_decode(ws, cu_q, kv_len, tables, 16)
    num_items, num_merges, num_long = ws.counts.tolist()
    listed = {}
    for first, end, row, *others in ws.items[:num_items].tolist():
        assert set(others) == {-1}
        listed.setdefault(row, []).append((first, end))
    taken = set()
    merged, long = [], []
    for row, (q_len, length) in enumerate(rows):
        if q_len != 1 or length == 0:
            assert row not in listed
            merged += [row] * (q_len == 1)
            continue
        begin = 0
        if "window" in local:
            begin = max(0, length - local["window"])
        if "chunk" in local:
            begin = (length - 1) // 50 * 50
        first, end = begin // 32, -(-length // 32)
        slot = int(ws.row_slot[row])
        if slot >= 0:
            assert sorted(listed[row]) == [(split, split + 1) for split in range(first, end)]
            slots = set(range(slot, slot + end - first))
            assert len(slots) > 1 and max(slots) < max_slots and not slots & taken
            taken |= slots
            merged.append(row)
            long += [row] * (end - first > CONFIG.merge_splits)
        else:
            assert listed[row] == [(first, end)]
    found = ws.merge_rows[:num_merges].tolist()
    assert found[:num_long] == long and sorted(found) == merged


def test_an_unknown_option_is_refused(paged_batch):
    batch = paged_batch([1], [20], 2, 1, 64, 16, torch.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'soft_cap'"):
        attend(batch, options={"soft_cap": 3.0})


def test_padding_rows_are_zero_and_prefill_rows_are_left_alone(paged_batch):
    batch = paged_batch([1, 3, 1], [20, 40, 0], 2, 1, 64, 16, torch.float32)
    out = torch.full_like(batch.q, 7.0)
    attend(batch, out=out, options={"sinks": torch.zeros(2, device=out.device)})
    assert torch.equal(out[1:4], torch.full_like(out[1:4], 7.0))
    assert torch.equal(out[4], torch.zeros_like(out[4]))
    assert not torch.equal(out[0], torch.full_like(out[0], 7.0))


def test_evicted_blocks_before_the_window_are_not_read(paged_batch, close):
    batch = paged_batch([1], [100], 2, 1, 64, 16, torch.float32)
    expected = batch.expected(window=20)
    batch.tables[0, :5] = 2**30
    for tile in (16, 32):
        result = attend(batch, window=20, config=replace(CONFIG, tile_tokens=tile))
        close(result, expected, torch.float32)


def test_q_and_out_may_be_slices_of_wider_buffers(paged_batch):
    batch = paged_batch([1, 1], [40, 9], 4, 2, 64, 16, torch.float32)
    expected = attend(batch)
    wide = torch.zeros(2, 8, 64, device=batch.q.device)
    wide[:, :4] = batch.q
    out = torch.zeros_like(wide)
    attend(replace(batch, q=wide[:, :4]), out=out[:, 4:])
    assert torch.equal(out[:, 4:], expected) and not out[:, :4].any()


def test_blocks_lie_beyond_two_gibi_elements(paged_batch):
    batch = paged_batch([1], [30], 2, 1, 64, 16, torch.float32, cache_dtype=torch.float8_e4m3fn)
    stride = 2**29 + 16
    storage = torch.empty(5 * stride, dtype=torch.uint8, device=batch.q.device).view(
        torch.float8_e4m3fn
    )
    far = storage.as_strided((5, 1, 16, 64), (stride, 1024, 64, 1))
    for i, block in enumerate(batch.tables[0, :2].tolist()):
        far[4 - i] = batch.k[block]
    tables = torch.tensor([[4, 3]], dtype=torch.int32, device=far.device)
    near = batch.k.clone()
    expected = attend(replace(batch, k=near, v=near))
    assert torch.equal(attend(replace(batch, k=far, v=far, tables=tables)), expected)


def test_e4m3_bits_are_decoded_without_hardware(paged_batch, monkeypatch):
    batch = paged_batch(
        [1, 1], [50, 16], 4, 2, 64, 16, torch.bfloat16, cache_dtype=torch.float8_e4m3fn
    )
    native = attend(batch)
    monkeypatch.setattr(
        "quire.kernels.attention.attention_math.has_fp8_conversion", lambda device: False
    )
    attention_call._checked.cache_clear()
    bits = attend(batch)
    attention_call._checked.cache_clear()
    assert torch.equal(bits, native)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=lambda x: x[:, :2]), r"q: must be \[tokens, 4, 64\]"),
        (dict(q=lambda x: x.double()), "q: must be bfloat16, float16 or float32, got torch.float64"),
        (dict(q=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)), "q: heads of a token"),
        (dict(k=lambda x: x.half()), "k_cache: must be torch.float32"),
        (dict(v=lambda x: x[:, :1]), r"v_cache: must have shape"),
        (dict(k=lambda x: x[:, :, ::2], v=lambda x: x[:, :, ::2]), "block_size: must be one of"),
        (dict(v=lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)), "v_cache: blocks must be contiguous"),
        (dict(tables=lambda x: x.long()), "block_tables: must be int32"),
        (dict(tables=lambda x: x[:1]), "block_tables: must be int32"),
        (dict(scale=lambda x: -x), "scale: must be > 0, got -0.125"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(paged_batch, change, message):
    batch = paged_batch([1, 1], [20, 9], 4, 2, 64, 16, torch.float32)
    changed = {name: function(getattr(batch, name)) for name, function in change.items()}
    plan = plan_for(batch, workspace_for(batch))
    x = replace(batch, **changed)
    with pytest.raises(ValueError, match=message):
        decode_attention(x.q, x.k, x.v, x.tables, x.scale, plan)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(softcap=0.0), "softcap: must be > 0 or None, got 0.0"),
        (dict(sinks=torch.zeros(3)), r"sinks: must have shape \[4\], got \[3\]"),
        (dict(k_scale=torch.ones(2)), "k_scale, v_scale: must be given together"),
        (dict(k_scale=torch.ones(2), v_scale=torch.ones(2)), "only with a float8_e4m3fn cache"),
        (dict(out=torch.zeros(2, 4, 64).half()), "out: must be torch.float32"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(paged_batch, options, message):
    batch = paged_batch([1, 1], [20, 9], 4, 2, 64, 16, torch.float32)
    plan = plan_for(batch, workspace_for(batch))
    options = {
        name: x.to(batch.q.device) if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(batch.q, batch.k, batch.v, batch.tables, batch.scale, plan, **options)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(max_rows=0), "max_rows: must be between 1 and 4096, got 0"),
        (dict(max_slots=0), "max_slots: must be between 1"),
        (dict(num_heads=258, num_kv_heads=2), "num_heads: must be 1 to 128 times num_kv_heads=2, got 258"),
        (dict(head_dim=72), r"head_dim: must be one of .*, got 72"),
        (dict(head_dim=512, value_dim=64), "head_dim with values of 64: must be between 8 and 256, got 512"),
        (dict(value_dim=512), "value_dim with keys of 64: must be between 8 and 256, got 512"),
        (dict(head_dim=640, value_dim=576, values_in_keys=True), "value_dim with values in keys: .* 512, got 576"),
        (dict(head_dim=256, value_dim=128, values_in_keys=True), "head_dim - value_dim .* between 1 and 64, got 128"),
        (dict(window=4, chunk=4), "window, chunk: at most one"),
        (dict(window=0), "window: must be between 1"),
        (dict(config=replace(CONFIG, tile_tokens=24)), "tile_tokens: must be a power of two"),
        (dict(config=replace(CONFIG, split_tokens=48)), "split_tokens: must be a power of two of at least 16"),
        (dict(config=replace(CONFIG, split_tokens=8)), "split_tokens: must be a power of two of at least 16"),
        (dict(share_prefixes=True, window=4), "share_prefixes: must be False .* got window=4, chunk=None"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(change, message):
    sizes = dict(max_rows=4, max_slots=4, num_heads=4, num_kv_heads=2, head_dim=64, device="cpu")
    with pytest.raises(ValueError, match=message):
        allocate_decode_workspace(**{**sizes, **change})


def test_a_batch_must_fit_its_workspace(paged_batch):
    batch = paged_batch([1] * 4, [5, 5, 5, 5], 1, 1, 64, 16, torch.float32)
    ws = workspace_for(batch.rows([0, 1]))
    with pytest.raises(ValueError, match="rows of kv_len: must be between 1 and 3, got 4"):
        plan_for(batch, ws)
    with pytest.raises(ValueError, match=r"cu_q: must have shape \[5\]"):
        plan_for(replace(batch, cu_q=batch.cu_q[:-1]), ws)
    with pytest.raises(ValueError, match="block_tables: must be int32"):
        plan_for(replace(batch, tables=batch.tables.long()), workspace_for(batch))
