"""The FP8 KV cache: written and read with each head's scale, by the kernels and by torch, and its error."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import fp8_checkpoints
import interpreted_runner
import model_zoo
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_driver import engine_config, make_runner

from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.host_pool import HostPool
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.model.kv_scales import read_kv_scales
from quire.replica.model.loader import load_model
from quire.replica.runner.runner import Runner
from tests.kernels import reference

CODES = torch.float8_e4m3fn
LAYERS = 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scaled_pool(num_blocks=4, scales=None):
    groups = (
        LayerGroup(layers=(0, 2), window=None, chunk=None, num_kv_heads=2, head_dim=16),
        LayerGroup(layers=(1,), window=8, chunk=None, num_kv_heads=2, head_dim=16),
    )
    return KVPool(num_blocks, groups, 8, CODES, scales=scales)


# ----------------------------------------------------------------------------------------------------------
# The pool
# ----------------------------------------------------------------------------------------------------------


def test_keys_and_values_are_written_by_their_heads_scales():
    scales = {0: (torch.tensor([0.5, 2.0]), torch.tensor([0.01, 100.0]))}
    pool = scaled_pool(scales=scales)
    pool.poison()
    slots = torch.tensor([3, 17, 16, 9])
    for layer in range(LAYERS):
        k, v = (normal(4, 2, 16, seed=seed) * 30 for seed in (layer, layer + 9))
        k[0, 0, 0] = 1e6  # clamped
        rows = pool.rows_of(pool.group_of(layer), slots)
        pool.write(layer, k.bfloat16(), v.bfloat16(), rows)
        own = scales.get(layer, (torch.ones(2), torch.ones(2)))
        for cache, x, scale, kept in zip(
            (pool.keys(layer), pool.values(layer)), (k, v), own, pool.scales(layer), strict=True
        ):
            assert torch.equal(kept, scale)
            expected = torch.full_like(cache, float("nan"), dtype=torch.float32).to(CODES)
            codes = reference.quantise_e4m3(x.bfloat16(), scale)
            reference.write_slots(expected.view(torch.uint8), codes.view(torch.uint8), slots)
            assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_a_pool_of_another_type_has_no_scales():
    pool = KVPool(2, scaled_pool().groups, 8, torch.float32)
    assert pool.scales(0) == (None, None)
    assert pool.buffers().keys() == {"the KV pool"}


def test_scales_are_among_what_a_guard_watches():
    pool = scaled_pool()
    k_scale, v_scale = pool.scales(0)
    held = {name: tensor.data_ptr() for name, tensor in pool.buffers().items()}
    assert held["the KV pool"] == pool.data.data_ptr()
    assert held["key scales of layer 0"] == k_scale.data_ptr()
    assert held["value scales of layer 0"] == v_scale.data_ptr()
    assert len(held) == 1 + 2 * sum(len(group.layers) for group in pool.groups)


def test_blocks_cross_the_tiers_and_are_copied_byte_for_byte():
    pool = scaled_pool()
    tier = HostPool(3, pool, CpuDevice())
    tier.poison()
    bytes_of = pool.data.view(torch.uint8)
    bytes_of.copy_(torch.randint(0, 256, bytes_of.shape, dtype=torch.uint8))  # NaN among them
    before = bytes_of.clone()
    tier.move(np.array([[1, 2], [3, 0]]), np.empty((0, 2), np.int64))
    bytes_of[[1, 3]] = 0
    tier.move(np.empty((0, 2), np.int64), np.array([[2, 0], [0, 1]]))
    pool.copy_blocks([(2, 3)])
    assert torch.equal(bytes_of[[0, 1, 2, 3]], before[[1, 3, 2, 2]])
    assert tier.data.element_size() == 1


# ----------------------------------------------------------------------------------------------------------
# Scales of a checkpoint
# ----------------------------------------------------------------------------------------------------------

KV_ONLY = dict(
    quant_method="compressed-tensors",
    config_groups={},
    kv_cache_scheme=fp8_checkpoints.FLOAT8 | dict(strategy="tensor", dynamic=False),
)


def with_scales(source, folder, tensors, config=KV_ONLY):
    """A checkpoint in its own dtype with scales of the cache beside the weights."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    fp8_checkpoints.change_config(folder, quantization_config=config)
    return folder


@pytest.mark.parametrize(
    "names",
    ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_proj.output_scale"],
)
def test_scales_are_read_under_every_name(zoo, tmp_path, names):
    tensors = {
        f"model.layers.0.{names.format('k')}": torch.tensor([0.25], dtype=torch.bfloat16),
        f"model.layers.0.{names.format('v')}": torch.tensor(0.5),
        f"model.layers.2.{names.format('k')}": torch.tensor([0.1, 0.2]),
        f"model.layers.2.{names.format('v')}": torch.tensor([[[3.0]], [[4.0]]]),
        "model.layers.0.self_attn.q_scale": torch.tensor([7.0]),
    }
    spec = ModelSpec.from_checkpoint(with_scales(zoo("qwen3"), tmp_path / "x", tensors))
    found = read_kv_scales(spec)
    assert found.keys() == {0, 2}
    expected = {0: ([0.25, 0.25], [0.5, 0.5]), 2: ([0.1, 0.2], [3.0, 4.0])}
    for layer, pair in expected.items():
        for scale, values in zip(found[layer], pair, strict=True):
            assert torch.equal(scale, torch.tensor(values)) and scale.is_contiguous()
    # They are no weights: the model loads as it does without, in its own dtype.
    model = load_model(spec, "cpu", "float32")
    plain = load_model(ModelSpec.from_checkpoint(zoo("qwen3")), "cpu", "float32")
    assert all(torch.equal(x, model.state_dict()[n]) for n, x in plain.state_dict().items())


def test_one_scale_may_be_both(zoo, tmp_path):
    tensors = {"model.layers.1.self_attn.kv_scale": torch.tensor([0.3])}
    spec = ModelSpec.from_checkpoint(with_scales(zoo("qwen3"), tmp_path / "x", tensors))
    ((layer, (k, v)),) = read_kv_scales(spec).items()
    assert layer == 1 and torch.equal(k, torch.tensor([0.3, 0.3])) and torch.equal(k, v)
    assert read_kv_scales(ModelSpec.from_checkpoint(zoo("qwen3"))) == {}


@pytest.mark.parametrize(
    "k, v, message",
    [
        ([1.0], None, "layer 0 has a scale of its cache for keys or for values only"),
        ([1.0], [0.0], r"v_scale' must be finite and positive, is \[0.0\]"),
        ([float("inf")], [1.0], "k_scale' must be finite"),
        ([1.0] * 3, [1.0], r"k_scale' must be one number or one for each of 2 heads, is \[3\]"),
    ],
)
def test_bad_scales_are_refused(zoo, tmp_path, k, v, message):
    given = {"k": k, "v": v}
    tensors = {
        f"model.layers.0.self_attn.{kind}_scale": torch.tensor(value)
        for kind, value in given.items()
        if value is not None
    }
    spec = ModelSpec.from_checkpoint(with_scales(zoo("qwen3"), tmp_path / "x", tensors))
    with pytest.raises(CheckpointError, match=message):
        read_kv_scales(spec)


# ----------------------------------------------------------------------------------------------------------
# A model's steps
# ----------------------------------------------------------------------------------------------------------


def test_attention_on_the_cpu_says_that_it_cannot(zoo):
    spec = ModelSpec.from_checkpoint(zoo("llama"))
    config = engine_config(spec, kv_cache_dtype="fp8")
    pool = KVPool(config.num_blocks, spec.groups, config.block_size, CODES)
    with pytest.raises(ValueError, match=r"float8_e4m3fn with backend 'triton', got .* 'cpu'"):
        Runner(config, spec, load_model(spec, "cpu", "float32"), pool)


@dataclasses.dataclass
class Steps:
    """What the interpreted runners and those of the CPU computed, by name."""

    logits: dict[str, np.ndarray]
    reports: dict[str, dict]

    def error(self, found: str, expected: str) -> float:
        """Root mean square of the difference over the spread of what is expected."""
        a, b = self.logits[found], self.logits[expected]
        return float(np.sqrt(np.square(a - b).mean()) / b.std())


JOBS = {
    "float32": dict(dtype="float32"),
    "kv": dict(dtype="float32", kv_cache_dtype="fp8"),
    "kv unfused": dict(dtype="float32", kv_cache_dtype="fp8", fuse="off"),
    "kv and weights": dict(kv_cache_dtype="fp8", weights="fp8"),
    "weights": dict(weights="fp8"),
}
MODELS = {
    "qwen3": {},
    "gemma3": dict(
        num_hidden_layers=LAYERS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
interpreted = pytest.mark.timeout(900)  # some 10 s a model on an idle machine


@pytest.fixture(scope="module", params=sorted(MODELS))
def steps(request, tmp_path_factory):
    """One step of a few prompts, by the kernels of a GPU in the interpreter and by the CPU's."""
    folder = tmp_path_factory.mktemp("kv")
    changes = MODELS[request.param]
    plain = model_zoo.build(request.param, folder, head_dim=64, intermediate_size=96, **changes)
    heads = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([0.02, 0.6]) * (layer + 1)
        for layer in range(LAYERS)
        for kind in "kv"
    }
    path = with_scales(plain, folder / "scaled", heads)
    jobs = [dict(name=name, path=str(path), config=config) for name, config in JOBS.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    modules = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": modules}
    script = Path(interpreted_runner.__file__)
    run = subprocess.run(
        [sys.executable, script, folder / "jobs.json", folder / "found.npz"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = np.load(folder / "found.npz")
    logits = {name: found[name] for name in JOBS}
    reports = {name: json.loads(str(found[f"{name} report"])) for name in JOBS}
    logits["exact"] = interpreted_runner.logits_of(make_runner(path, fuse="off"), 1)
    scales = read_kv_scales(ModelSpec.from_checkpoint(path))
    original = KVPool.write

    def rounded(self, layer, k, v, rows):
        one = torch.ones(k.shape[1])
        pairs = zip((k, v), scales.get(layer, (one, one)), strict=True)
        codes = (reference.quantise_e4m3(x, s).float() * s[:, None] for x, s in pairs)
        original(self, layer, *codes, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVPool, "write", rounded)
        logits["rounded"] = interpreted_runner.logits_of(make_runner(path, fuse="off"), 1)
    return Steps(logits, reports)


@interpreted
def test_the_kernels_attend_to_exactly_the_rounded_keys_and_values(steps):
    """In float32 nothing but the cache is rounded: a model whose keys and values are rounded says the same.

    Fused and unfused: written by the kernel with the rotation, and by the pool. Measured: 1e-6, where the rounding
    itself is 0.1 and 0.06. A key next to a boundary between two codes may fall to either side."""
    print({name: steps.error(name, "exact") for name in steps.logits})
    assert steps.error("float32", "exact") < 1e-4
    for name in ("kv", "kv unfused"):
        assert steps.error(name, "rounded") < 0.02 * steps.error(name, "exact")
        assert 0.005 < steps.error(name, "exact") < 0.2


@interpreted
def test_the_errors_of_cache_and_weights_add_as_independent_ones(steps):
    parts = [steps.error(name, "exact") for name in ("kv", "weights")]
    together = steps.error("kv and weights", "exact")
    assert 0.5 * max(parts) < together < 1.5 * sum(parts)


@interpreted
def test_layers_are_fused_with_a_cache_and_weights_in_fp8(steps):
    whole = steps.reports["float32"]
    assert whole["fused"].get("layers", 0) + whole["fused"].get("attentions", 0) >= LAYERS
    for name in ("kv", "kv and weights", "weights"):
        assert steps.reports[name] == whole, name
    assert not steps.reports["kv unfused"]["fused"]
