"""Sizing: the memory equation, and errors that hold the numbers."""

from __future__ import annotations

import dataclasses

import model_zoo
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels.attention.paged_attention import PagedAttention
from quire.kernels.cpu import cpu_attention, cpu_attention_native
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.checkpoint.weight_bytes import weight_bytes
from quire.replica.config import EngineArgs, SizingError
from quire.replica.host_machine import available_bytes
from quire.replica.kv_cache.groups import LayerKind
from quire.replica.startup import sizing
from quire.replica.startup.cpu_sizing import CpuSizing
from quire.replica.startup.device_sizing import GIB, DeviceSizing
from quire.replica.startup.gpu_sizing import GpuSizing, decode_bytes_per_block
from quire.replica.startup.memory_table import memory_table
from quire.replica.startup.sizing import resolve


@pytest.fixture(scope="module")
def spec(zoo) -> ModelSpec:
    return ModelSpec.from_checkpoint(zoo("llama"))


class TiledCpu(CpuSizing):
    """Of a CPU whose compiled attention takes a number of bytes; None: it cannot be used."""

    def __init__(self, native: int | None):
        super().__init__(num_threads=2)
        self._native = native

    def native_attention_bytes(self, spec, block_size):
        return self._native


def sizing_of(device: str, native: int | None = None) -> DeviceSizing:
    return GpuSizing() if device == "cuda" else TiledCpu(native)


def solve(spec, available=8 * GIB, device="cpu", max_model_len=512, native=None, host=None, **args):
    host = available if host is None else host
    sizes = (10**6, 512, max_model_len, available, host)
    return memory_table(EngineArgs(**args), spec, sizing_of(device, native), "float32", *sizes)


def big(spec, **changes):
    """An 8 B-parameter shape: blocks of 8 MiB."""
    shape = dict(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
    shape["kinds"] = (LayerKind(num_kv_heads=8, head_dim=128),) * 32
    return dataclasses.replace(spec, **{**shape, **changes})


def test_the_cpu_default_is_at_most_one_gib(spec):
    table = solve(big(spec), available=64 * GIB, max_model_len=10**6)
    assert GIB - 2 * table.block < table.kv_cache <= GIB


def test_the_cpu_default_is_what_fits_when_that_is_less(spec):
    table = solve(big(spec), available=GIB, max_model_len=10**6)
    assert table.kv_cache < GIB and 0 <= table.remainder < 2 * table.block


def test_the_pool_is_never_larger_than_all_requests_can_use(spec):
    table = solve(spec, max_running_requests=3, max_model_len=100, block_size=32)
    assert table.num_blocks == 3 * 4


def test_a_gpu_gets_all_that_is_left(spec):
    table = solve(big(spec), available=64 * GIB, device="cuda", max_model_len=10**6)
    assert table.kv_cache > 50 * GIB and 0 <= table.remainder < table.block + table.attention
    # The CPU's tiles are not on the device; partial results of decode rows are, in proportion to the blocks.
    per_block = decode_bytes_per_block(EngineArgs(), big(spec), table.block_size)
    assert table.attention == table.num_blocks * per_block
    assert 0 < table.attention < table.kv_cache / 100


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        (LayerKind(num_kv_heads=2, head_dim=64),) * 4,
        (LayerKind(num_kv_heads=2, head_dim=64), LayerKind(window=300, num_kv_heads=2, head_dim=64))
        * 2,
        (LayerKind(head_dim=96, value_dim=64, values_in_keys=True),) * 4,
    ],
)
def test_the_partial_results_of_a_gpu_are_counted_as_they_are_allocated(
    spec, prefix_caching, kinds
):
    """What is measured holds them for one block a group; the equation adds those of the pool's blocks."""
    shape = dict(num_heads=8, num_kv_heads=2, head_dim=64, num_layers=4, kinds=kinds)
    small = dataclasses.replace(spec, **shape)
    args = EngineArgs(prefix_caching=prefix_caching, block_size=64)

    def allocated(num_blocks):
        attentions = [
            PagedAttention(
                torch.zeros(num_blocks + 1, group.num_kv_heads, 64, group.head_dim),
                small.num_heads,
                max_rows=9,
                max_len=10**6,
                window=group.window,
                value_dim=group.value_size,
                values_in_keys=group.values_in_keys,
                share_prefixes=prefix_caching,
                backend="triton",
            )
            for group in small.groups
        ]
        return sum(x.nbytes for attention in attentions for x in attention.buffers().values())

    grown = allocated(400) - allocated(len(small.groups))
    counted = 400 * decode_bytes_per_block(args, small, 64)
    assert 0 < grown <= counted
    if all(kind.is_full for kind in kinds):  # a window bounds them by the rows
        assert grown > 0.9 * counted


@pytest.mark.parametrize(
    "asked, device, size", [(None, "cpu", 32), (None, "cuda", 64), (16, "cuda", 16)]
)
def test_the_block_size_follows_the_device(spec, asked, device, size):
    assert solve(big(spec), 64 * GIB, device, 10**6, block_size=asked).block_size == size


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    available=st.integers(2**24, 2**40),
    percent=st.floats(0.05, 1),
    block_size=st.sampled_from([8, 32, 256]),
    kv_cache_gib=st.one_of(st.none(), st.floats(0.001, 50)),
    node_pool_gib=st.one_of(st.none(), st.just(0.0), st.floats(0.001, 50)),
    device=st.sampled_from(["cpu", "cuda"]),
    native=st.one_of(st.none(), st.integers(0, 2**26)),
)
def test_the_terms_never_exceed_the_budget(
    spec, available, percent, block_size, kv_cache_gib, node_pool_gib, device, native
):
    args = dict(
        max_memory_percent=percent,
        block_size=block_size,
        kv_cache_gib=kv_cache_gib,
        node_pool_gib=node_pool_gib,
    )
    try:
        table = solve(big(spec), available, device, 4096, native, **args)
    except SizingError as error:
        numbers = ("available", "KV cache", "host tier")
        assert all(number in str(error) for number in numbers) or "node_pool_gib" in str(error)
        return
    used = table.weights + table.activations + table.attention + table.logits + table.kv_cache
    used += table.host_tier if device == "cpu" else 0
    assert table.num_blocks >= 1
    assert used + table.remainder == table.budget == int(available * percent)
    assert table.remainder >= 0
    if kv_cache_gib is not None:
        assert table.kv_cache <= kv_cache_gib * GIB


def test_native_attention_takes_the_threads_tiles_and_splits_and_no_more():
    if not cpu_attention.has_native():
        pytest.skip("installed without a C compiler")
    cache = torch.zeros(65, 1, 64, 256)
    lengths = np.array([64 * 64] * 3)
    tables = np.tile(np.arange(64), (3, 1))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        plan = cpu_attention.plan_attention(np.arange(4), lengths, tables, cache, 16)
    finally:
        torch.set_num_threads(before)
    assert len(plan.partials), "a case that splits"
    used = plan.scratch.nbytes + plan.partials.nbytes
    assert used <= cpu_attention_native.workspace_bytes(4, 256) + 4 * 64


@pytest.mark.parametrize("block_size, expected", [(32, True), (12, False)])
def test_the_torch_path_is_sized_where_native_attention_cannot_run(spec, block_size, expected):
    size = CpuSizing(num_threads=2).native_attention_bytes(spec, block_size)
    assert (size is not None) == (expected and cpu_attention.has_native())


def test_the_host_tier_is_taken_from_the_same_memory_on_the_cpu_only(spec):
    plain, tiered = (solve(spec, node_pool_gib=gib, kv_cache_gib=1) for gib in (None, 2))
    assert plain.num_host_blocks == 0
    assert tiered.num_host_blocks == 2 * GIB // tiered.block
    assert plain.remainder - tiered.remainder == tiered.host_tier
    assert "blocks, of the same memory" in str(tiered)
    shape = dict(device="cuda", host=100 * GIB, max_model_len=10**6)
    default, small = solve(big(spec), **shape), solve(big(spec), **shape | {"host": 8 * GIB})
    assert (default.host_tier, small.host_tier) == (4 * GIB, 2 * GIB)
    assert solve(big(spec), **shape, node_pool_gib=0).num_host_blocks == 0
    more = solve(big(spec), **shape, node_pool_gib=50)
    assert (more.host_tier, more.remainder) == (50 * GIB, default.remainder)
    with pytest.raises(SizingError, match=r"node_pool_gib must be at most 90.000, .* got 91"):
        solve(big(spec), **shape, node_pool_gib=91)


def test_the_host_tier_asked_for_is_in_the_configuration(spec):
    config = resolve(EngineArgs(device="cpu", node_pool_gib=0.01), spec)
    assert config.num_host_blocks == int(0.01 * GIB) // (24 * 1024)


def test_explicit_values_are_honoured(zoo, spec):
    args = EngineArgs(
        num_blocks=40, max_batch_tokens=77, max_model_len=99, num_threads=1, dtype="bfloat16"
    )
    config = resolve(args, spec)
    assert (config.num_blocks, config.max_batch_tokens, config.max_model_len) == (40, 77, 99)
    assert (config.num_threads, config.dtype, config.deterministic) == (1, "bfloat16", False)
    assert config.max_running_requests == 77, "a decode step has one token of each"
    assert (
        resolve(EngineArgs(kv_cache_gib=0.01), spec).num_blocks
        == int(0.01 * GIB) // (24 * 1024) - 1
    )


def test_the_scheduler_gets_what_was_asked_for(spec):
    config = resolve(EngineArgs(device="cpu"), spec)
    assert (config.scheduler, config.max_prefill_ms, config.demotion_order) == (
        "shortest_first",
        100,
        "lru",
    )
    assert config.resume_margin == pytest.approx(0.3)
    assert resolve(EngineArgs(device="cpu", safety_margin=0.95), spec).resume_margin == 1
    asked = dict(scheduler="priority", max_prefill_ms=None, resume_margin=0.7)
    config = resolve(EngineArgs(device="cpu", demotion_order="most_recent", **asked), spec)
    assert {name: getattr(config, name) for name in asked} == asked
    assert config.demotion_order == "most_recent"


def test_weights_and_cache_count_with_the_bytes_they_have(zoo, spec, monkeypatch):
    tables = []

    def solved(*args):
        tables.append(memory_table(*args))
        return tables[-1]

    monkeypatch.setattr(sizing, "memory_table", solved)
    for weights in ("auto", "int8", "fp8"):
        resolve(EngineArgs(device="cpu", dtype="bfloat16", weights=weights), spec)
        assert tables[-1].weights == weight_bytes(zoo("llama"), "bfloat16", weights)
    plain, int8, fp8 = (table.weights for table in tables)
    # Embedding and head, 173 by 64 each, stay as they are, and of this model's widths 88 is no multiple of 16.
    assert int8 < fp8 < plain and int8 < 0.75 * plain
    shape = dict(device="cuda", available=64 * GIB, max_model_len=10**6, native=0)
    shape["max_running_requests"] = 4096
    plain, narrow = (solve(big(spec), **shape, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert plain.block == 4 * narrow.block  # the test's dtype is float32
    # Partial results are as large beside a narrow block.
    caches = [table.kv_cache + table.attention for table in (plain, narrow)]
    assert abs(caches[1] - caches[0]) < 2 * plain.block
    assert narrow.num_blocks > 3.9 * plain.num_blocks
    assert narrow.num_host_blocks == 4 * plain.num_host_blocks > 0


def test_int8_must_fit_in_bfloat16_while_it_is_read(spec, monkeypatch):
    monkeypatch.setattr(sizing, "loading_bytes", lambda *args: 1 << 60)
    with pytest.raises(
        SizingError, match=r"weights is 'int8', which needs .* GiB while the weights"
    ):
        resolve(EngineArgs(device="cpu", dtype="bfloat16", weights="int8"), spec)


def test_a_processor_without_the_product_is_told(spec, monkeypatch):
    monkeypatch.setattr(sizing.fp8_linear, "missing", lambda device: f"a better {device}")
    with pytest.raises(SizingError, match="weights is 'fp8', which needs a better cpu"):
        resolve(EngineArgs(device="cpu", weights="fp8"), spec)


def test_an_fp8_cache_of_latents_is_refused(tmp_path, monkeypatch):
    model_zoo.build_unlike("deepseek_v3", tmp_path)
    monkeypatch.setattr(sizing, "choose_sizing", lambda *args: GpuSizing())
    with pytest.raises(SizingError, match="kv_cache_dtype is 'fp8', and DeepseekV3ForCausalLM has"):
        resolve(EngineArgs(kv_cache_dtype="fp8"), ModelSpec.from_checkpoint(tmp_path))


def test_fp8_weights_choose_bfloat16(spec):
    config = resolve(EngineArgs(device="cpu", weights="fp8"), spec)
    assert (config.dtype, config.weights, config.deterministic) == ("bfloat16", "fp8", False)
    assert config.number_format == "bfloat16,weights=fp8"
    assert (
        dataclasses.replace(config, kv_cache_dtype="fp8").number_format
        == "bfloat16,weights=fp8,kv_cache=fp8"
    )
    assert resolve(EngineArgs(device="cpu"), spec).number_format == "float32"


def test_the_share_of_the_memory_is_honoured(spec):
    whole = solve(big(spec), available=64 * GIB, device="cuda", max_model_len=10**6)
    half = solve(big(spec), 64 * GIB, "cuda", 10**6, max_memory_percent=0.45)
    assert half.budget == whole.budget // 2
    spared = whole.kv_cache + whole.attention - half.kv_cache - half.attention
    assert abs(spared - half.budget) <= 2 * whole.block


def test_the_memory_table_is_logged(spec, caplog):
    with caplog.at_level("INFO"):
        config = resolve(EngineArgs(device="cpu"), spec)
    for term in ("weights", "activations", "logits", f"{config.num_blocks} + 1 blocks"):
        assert term in caplog.text


def test_defaults_on_the_cpu(spec):
    config = resolve(EngineArgs(device="cpu"), spec)
    assert (config.dtype, config.deterministic, config.max_batch_tokens) == ("float32", True, 512)
    assert (config.max_model_len, config.vocab_size, config.eos_token_ids) == (512, 173, (2,))
    assert not resolve(EngineArgs(device="cpu", deterministic=False), spec).deterministic


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_is_deterministic_in_any_dtype_when_asked(spec, monkeypatch, dtype):
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizing, "available_bytes", lambda device: 64 * GIB)
    asked = EngineArgs(device="cuda", dtype=dtype, deterministic=True)
    assert resolve(asked, spec).deterministic
    assert not resolve(EngineArgs(device="cuda", dtype=dtype), spec).deterministic
    eight_bits = EngineArgs(device="cuda", dtype=dtype, deterministic=True, kv_cache_dtype="fp8")
    assert resolve(eight_bits, spec).deterministic


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(weights="fp8"), "on device 'cuda' needs weights 'auto'; they are 'fp8'"),
        (dict(weights="int8"), "on device 'cuda' needs weights 'auto'; they are 'int8'"),
        (dict(fuse="off"), "on device 'cuda' needs fuse 'auto'; it is 'off'"),
    ],
)
def test_what_a_deterministic_gpu_cannot_serve_is_named(spec, monkeypatch, changes, message):
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        SizingError, match=f"deterministic is true, which {message}.* deterministic"
    ):
        resolve(EngineArgs(device="cuda", deterministic=True, **changes), spec)


@pytest.mark.parametrize("device, by_default", [("cpu", False), ("cuda", True)])
def test_a_step_is_in_flight_by_default_only_beside_a_device_that_queues(
    spec, monkeypatch, device, by_default
):
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizing.torch.cuda, "mem_get_info", lambda: (8 * GIB, 8 * GIB))
    found = {
        asked: resolve(EngineArgs(device=device, async_batching=asked), spec).plans_ahead
        for asked in ("auto", "on", "off")
    }
    assert found == {"auto": by_default, "on": True, "off": False}


def test_memory_of_a_gpu_that_torch_keeps_for_reuse_is_available(monkeypatch):
    monkeypatch.setattr(sizing.torch.cuda, "mem_get_info", lambda: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(sizing.torch.cuda, "memory_reserved", lambda: 4 * GIB)
    monkeypatch.setattr(sizing.torch.cuda, "memory_allocated", lambda: 1 * GIB)
    assert available_bytes("cuda") == 6 * GIB


@pytest.mark.parametrize(
    "device, args, expected",
    [
        ("cuda", {}, 256),
        ("cuda", dict(cuda_graphs="on"), 256),
        ("cuda", dict(cuda_graphs="off"), None),
        ("cuda", dict(q_padding=0), None),
        ("cuda", dict(q_padding=64), 64),
        ("cuda", dict(max_batch_tokens=100), 100),  # no larger than a step
        ("cuda", dict(max_model_len=40), 40),  # nor than a request
        ("cuda", dict(max_model_len=3), None),
        ("cpu", {}, None),
    ],
)
def test_mixed_steps_are_padded_by_default_where_they_may_be_captured(
    spec, monkeypatch, device, args, expected
):
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizing.torch.cuda, "mem_get_info", lambda: (8 * GIB, 8 * GIB))
    assert resolve(EngineArgs(device=device, **args), spec).q_padding == expected


def test_a_length_left_open_is_cut_to_the_cache(spec):
    assert resolve(EngineArgs(device="cpu", num_blocks=4), spec).max_model_len == 4 * 32


@pytest.mark.parametrize(
    "args, message",
    [
        (
            dict(num_blocks=4, max_model_len=200),
            "max_model_len 200 needs 7 blocks, the cache has 4",
        ),
        (dict(max_model_len=513), "513 exceeds .* 512"),
        (dict(num_blocks=10**9), "num_blocks 1000000000 does not fit, at most"),
        (dict(kv_cache_gib=1e-6), "cannot hold one block"),
        (dict(max_memory_percent=1e-6), "model alone does not fit"),
        (dict(max_memory_percent=1.5), r"max_memory_percent must be a number in \(0, 1\], got 1.5"),
        (dict(max_memory_percent=float("nan")), "max_memory_percent"),
        (dict(safety_margin=1.0), "safety_margin"),
        (
            dict(scheduler="lifo"),
            "scheduler must be one of shortest_first, fifo, prefill_first, priority, got 'lifo'",
        ),
        (dict(demotion_order="mru"), "demotion_order must be one of lru, most_recent, got 'mru'"),
        (dict(max_prefill_ms=0.5), "max_prefill_ms must be a number of at least 1, got"),
        (dict(q_padding=3), r"q_padding must be 0 or in \[4, 512\].*got 3"),
        (dict(q_padding=513), r"q_padding must be 0 or in \[4, 512\].*got 513"),
        (dict(q_padding=False), "q_padding must be an integer of at least 0, got False"),
        (dict(max_prefill_ms=float("nan")), "max_prefill_ms must be a number of at least 1, got"),
        (
            dict(safety_margin=0.4, resume_margin=0.3),
            r"resume_margin \(0.3\) must be at least safety_margin \(0.4\)",
        ),
        (dict(kv_cache_gib=float("inf")), "kv_cache_gib"),
        (dict(node_pool_gib=-1.0), "node_pool_gib must be a number of at least 0, got -1.0"),
        (dict(node_pool_gib=float("nan")), "node_pool_gib"),
        (dict(node_pool_gib=1e-6), "1e-06 holds no block of .* bytes; 0 turns it off"),
        (dict(node_pool_gib=1e6), "node_pool_gib 1000000.0 does not fit beside the model"),
        (dict(block_size=0), r"block_size must be an integer in \[8, 256\], got 0"),
        (dict(num_threads=True), "num_threads"),
        (dict(max_running_requests=0), "max_running_requests"),
        (dict(device="tpu"), "device must be one of"),
        (dict(dtype="int4"), "dtype must be one of"),
        (
            dict(deterministic=True, dtype="bfloat16"),
            "deterministic is true, .* needs dtype 'float32'; it is 'bfloat16'; use .* device 'cuda'",
        ),
        (dict(weights="int4"), "weights must be one of auto, int8, fp8, got 'int4'"),
        (dict(weights="fp8", dtype="float32"), "weights is 'fp8', .* 'bfloat16'; it is 'float32'"),
        (dict(kv_cache_dtype="int8"), "kv_cache_dtype must be one of auto, fp8, got 'int8'"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype is 'fp8', .* device 'cuda'; it is 'cpu'"),
        (dict(weights="int8", dtype="float32"), "weights is 'int8', which needs .* 'float32'"),
        (dict(weights="int8", dtype="bfloat16", fuse="off"), "weights is 'int8', .* 'off'"),
        (dict(fuse="on"), "fuse must be one of auto, off, got 'on'"),
    ],
)
def test_bad_values_are_refused_with_the_numbers(spec, args, message):
    with pytest.raises(SizingError, match=message):
        resolve(EngineArgs(**{"device": "cpu", **args}), spec)


def test_cuda_without_a_gpu_is_refused(spec, monkeypatch):
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SizingError, match="no CUDA device"):
        resolve(EngineArgs(device="cuda"), spec)


@pytest.mark.parametrize(
    "device, parameters, flags, expected",
    [
        ("cuda", 10**6, set(), "bfloat16"),
        ("cpu", 10**6, {"avx512_bf16"}, "float32"),
        ("cpu", 10**9, {"avx512_bf16"}, "bfloat16"),
        ("cpu", 10**9, {"amx_bf16"}, "bfloat16"),
        ("cpu", 10**9, {"avx2"}, "float32"),
    ],
)
def test_automatic_dtype(device, parameters, flags, expected):
    assert sizing_of(device).choose_dtype("bfloat16", parameters, frozenset(flags)) == expected


def test_the_table_prints_every_term(spec):
    text = str(solve(spec))
    for word in (
        "available",
        "budget",
        "weights",
        "activations",
        "attention",
        "logits",
        "KV cache",
        "left",
    ):
        assert word in text
