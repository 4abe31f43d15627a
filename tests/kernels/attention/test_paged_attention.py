"""`PagedAttention` on both devices: against the reference, and in a transformers model."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from quire.kernels.attention.paged_attention import PagedAttention
from quire.kernels.cpu.cpu_attention import has_native
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import BlockTables, SamplingBatch, StepPlan
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.loader import load_model
from quire.replica.runner.runner import Runner
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
BACKENDS = ["triton", "cpu"] if DEVICE == "cpu" else ["triton"]
OPTIONS = {
    "full": {},
    "window": {"window": 20},
    "chunk": {"chunk": 32},
    "softcap_and_sinks": {"softcap": 5.0, "sinks": True},
}


@pytest.mark.parametrize("uniform", [False, True])
def test_buffers_are_all_the_memory_that_outlives_a_call(uniform):
    k_cache = torch.zeros(4, 2, 16, 64, device=DEVICE)
    attention = PagedAttention(
        k_cache, 4, max_rows=3, share_prefixes=True, uniform=uniform, backend="triton"
    )
    held = attention.buffers()
    assert bool(held) != uniform  # rows with one token are computed by the decode kernel
    workspace = vars(attention)["_workspace"]
    for name, tensor in held.items():
        owner = workspace if hasattr(workspace, name) else workspace.shared
        assert getattr(owner, name).data_ptr() == tensor.data_ptr()
    assert uniform or {"items", "partial_acc", "partial_ml", "runs", "num_led"} <= held.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_uniform_attention_gives_a_decode_the_bits_of_a_prefill(paged_batch, dtype):
    batch = paged_batch([9, 1, 17], [70, 33, 40], 4, 2, 64, 16, dtype)
    attention = PagedAttention(batch.k, 4, max_rows=8, uniform=True, backend="triton")

    def attend(part):
        plan = attention.plan(*(x.cpu().numpy() for x in (part.cu_q, part.kv_len, part.tables)))
        assert plan.decode is None
        return attention(part.q, part.k, part.v, part.scale, plan), plan.prefill.config

    together, high = attend(batch)
    for row in range(3):  # only its last token
        part = batch.rows([row])
        part.q, part.cu_q = part.q[-1:], torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        alone, low = attend(part)
        assert torch.equal(alone[0], together[batch.cu_q[row + 1] - 1])
    if DEVICE == "cpu":  # as on Hopper
        heights = (64, 128) if dtype == torch.bfloat16 else (32, 32)
        assert (low.block_m, high.block_m) == heights


_COMPARE_HEIGHTS = """
from dataclasses import replace
import torch
from tests.kernels.compile import compile_attention
from quire.kernels import tuning
from tests.kernels.compile.offline_compile import compile_entry, matrix_instructions
for entry in compile_attention._attention("sm_90", torch.bfloat16, 128):
    if "/prefill/" in entry.name:
        low = tuning.low_prefill_config("sm_90", 128, torch.bfloat16)
        options = tuning.launch_options("sm_90", low.num_warps, low.num_stages)
        lower = replace(entry, constants=entry.constants | {"BLOCK_M": low.block_m}, options=options)
        assert entry.constants["BLOCK_M"] != low.block_m
        found = matrix_instructions(entry), matrix_instructions(lower)
        assert found[0] == found[1] != set(), found
        record = compile_entry(lower)
        assert not record.problems, record
        assert 2 * (record.shared_bytes + 1024) <= tuning.SHARED_BYTES["sm_90"], record
        print("compared")
"""


def test_both_heights_of_uniform_attention_use_the_same_instructions(tmp_path):
    """On a device equal bits need the same instructions, which the interpreter cannot show."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", _COMPARE_HEIGHTS], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "compared\n"), run.stderr[-4000:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_decodes_and_chunks_in_one_batch_match_the_reference(
    paged_batch, close, backend, uniform, kind
):
    options = dict(OPTIONS[kind])
    what_is_seen = {name: options.pop(name, None) for name in ("window", "chunk")}
    batch = paged_batch([1, 17, 1, 5], [70, 17, 1, 40], 4, 2, 64, 16, torch.float32)
    sinks = torch.linspace(-1, 2, 4, device=DEVICE) if options.pop("sinks", False) else None
    expected = batch.expected(sinks=sinks, **what_is_seen, **options)
    attention = PagedAttention(
        batch.k, 4, max_rows=8, uniform=uniform, backend=backend, **what_is_seen
    )
    lists = (x.cpu().numpy() for x in (batch.cu_q, batch.kv_len, batch.tables))
    plan = attention.plan(*lists)
    out = attention(batch.q, batch.k, batch.v, batch.scale, plan, sinks=sinks, **options)
    close(out, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_alike_read_their_blocks_together(paged_batch, dtype):
    """With the default configuration: splits of 256 tokens. Row 2 is prefilled, row 3 shares nothing."""
    batch = paged_batch([1, 1, 3, 1, 1], [530, 600, 540, 300, 270], 4, 2, 64, 32, dtype, shared=16)
    batch.tables[3] = batch.tables[3].flip(0).roll(10)
    batch.tables[3, :10] = torch.arange(10)
    batch.tables[4, 8] = batch.tables[2, 16]
    results = []
    for share_prefixes in (False, True):
        attention = PagedAttention(
            batch.k.nan_to_num(), 4, max_rows=8, share_prefixes=share_prefixes, backend="triton"
        )
        plan = attention.plan(*(x.cpu().numpy() for x in (batch.cu_q, batch.kv_len, batch.tables)))
        caches = (x.nan_to_num() for x in (batch.k, batch.v))
        results.append(attention(batch.q, *caches, batch.scale, plan))
        workspace = plan.decode.workspace
        items = workspace.items[: int(workspace.counts[0])].tolist()
        shared = [item[:6] for item in items if item[3] >= 0]
        expected = [[0, 1, 0, 1, 4, -1], [1, 2, 0, 1, -1, -1]] if share_prefixes else []
        assert sorted(shared) == expected
    assert torch.equal(*results)


def test_prefixes_are_shared_by_full_attention_alone(paged_batch):
    batch = paged_batch([1], [1], 4, 2, 64, 16, torch.float32)
    for kind, shares in (({}, True), ({"window": 9}, False), ({"chunk": 9}, False)):
        attention = PagedAttention(
            batch.k, 4, max_rows=2, share_prefixes=True, backend="triton", **kind
        )
        assert ("runs" in attention.buffers()) == shares


def test_an_unknown_backend_is_refused(paged_batch):
    batch = paged_batch([1], [1], 2, 1, 64, 16, torch.float32)
    with pytest.raises(ValueError, match="backend must be 'cpu', 'triton' or None, got 'fast'"):
        PagedAttention(batch.k, 2, max_rows=1, backend="fast")


@pytest.fixture(scope="module", params=["mistral", "qwen3"])
def checkpoint(request, tmp_path_factory):
    """Layers with a window, or with norms of the heads."""
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    options = dict(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
    )
    if request.param == "mistral":
        config = transformers.MistralConfig(**options, sliding_window=24)
    else:
        config = transformers.Qwen3Config(**options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_a_model_gives_the_same_logits_on_both_paths(checkpoint):
    spec = ModelSpec.from_checkpoint(checkpoint)
    config = EngineConfig(
        model_name="m",
        revision="",
        device=DEVICE,
        dtype="float32",
        vocab_size=97,
        eos_token_ids=(),
        max_model_len=128,
        block_size=16,
        num_blocks=32,
        max_batch_tokens=64,
        max_running_requests=4,
        max_waiting_requests=4,
        safety_margin=0.2,
        scheduler="fifo",
        max_prefill_ms=None,
        resume_margin=0.0,
        prefix_caching=False,
        deterministic=False,
        num_threads=1,
        groups=spec.groups,
    )
    ids = np.random.default_rng(0).integers(0, 97, 50).astype(np.int32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.from_numpy(ids).long()[None]).logits[0]
    for backend in BACKENDS:
        pool = KVPool(32, spec.groups, 16, torch.float32, DEVICE)
        pool.poison()
        model = load_model(spec, DEVICE, "float32")
        runner = Runner(config, spec, model, pool, attention_backend=backend)
        if backend == "triton" or has_native():
            assert runner.fused.fused["layers"] == 2 and not runner.fused.dropped
        if backend == "triton":
            # Prefix caching is off here.
            assert not any(name.endswith(".runs") for name in vars(runner)["_forward"].buffers())
            cached = dataclasses.replace(config, prefix_caching=True)
            shares = Runner(
                cached, spec, model, pool, attention_backend=backend, fused=runner.fused
            )
            held = vars(shares)["_forward"].buffers()
            has_windows = any(group.window for group in spec.groups)
            assert ("attention 0.runs" in held) != has_windows
        pool.poison()
        for begin, end in ((0, 33), (33, 49), (49, 50)):  # two chunks, then a decode
            found = runner.forward(chunk(ids, begin, end, len(spec.groups)))
            torch.testing.assert_close(found.cpu()[0], logits[end - 1], rtol=1e-4, atol=1e-4)


def chunk(ids: np.ndarray, begin: int, end: int, num_groups: int) -> StepPlan:
    """A step of one row in blocks 4, 5, ... of every group."""
    positions = np.arange(begin, end, dtype=np.int32)
    tables = np.tile(np.arange(4, 8, dtype=np.int32), (num_groups, 1, 1))
    return StepPlan(
        step=1,
        token_ids=ids[begin:end],
        positions=positions,
        cu_q=np.array([0, end - begin], np.int32),
        num_sampled=np.ones(1, np.int32),
        kv_len=np.array([end], np.int32),
        block_tables=BlockTables.of(tables),
        slots=np.tile(4 * 16 + positions.astype(np.int64), (num_groups, 1)),
        sampling=SamplingBatch(
            token_index=np.array([end - begin - 1], np.int32),
            columns=records(1, temperature=0.0),
            position=np.array([end], np.int64),
        ),
    )
