"""Nothing compiles while an engine serves: warm-up asks Triton for every variant of every kernel.

The real loop, scheduler, runner and graphs serve mixed requests on Triton's own JIT, with a GPU that does not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_gpu_runner
import model_zoo
import pytest

from quire.kernels.tuning import SHARED_BYTES
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.proof.verdicts import TESTED_FOR_GPU

# Heads that the kernels serve; as few layers as show every kind.
SHAPE = dict(head_dim=64, intermediate_size=96)
LAYERS = {"gemma3": 5, "smollm3": 4}
# A child process, which imports for longer than it serves a model, serves those of one tuple: one for each served
# architecture, and two that mix kinds of layers.
MODELS = (
    ("llama", "qwen2", "qwen2_mixed", "qwen3", "mistral", "olmo2"),
    ("smollm3", "granite", "gemma2", "gemma3", "phi3", "gpt_oss", "qwen3_moe"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": dict(rows=256, config=dict(cuda_graphs="on")),
    "no graphs": dict(rows=64, config=dict(cuda_graphs="off")),
}
MORE_SETTINGS: dict[str, dict[str, Any]] = {
    "graphs, few rows": dict(rows=64, config=dict(cuda_graphs="on")),
    "no graphs, many rows": dict(rows=256, config=dict(cuda_graphs="off")),
    "mixed graphs": dict(rows=64, config=dict(q_padding=32, max_cached_graphs=12)),
    "step by step": dict(rows=64, config=dict(async_batching="off")),
    "float32": dict(rows=64, config=dict(dtype="float32")),
    "fp8 cache": dict(rows=64, config=dict(kv_cache_dtype="fp8")),
    "deterministic": dict(rows=64, config=dict(deterministic=True)),
}


@pytest.fixture(scope="module")
def wide_zoo(tmp_path_factory):
    """As `zoo`, with heads of 64 dimensions."""
    root = tmp_path_factory.mktemp("wide-zoo")

    def get(name: str) -> Path:
        path = root / name
        return (
            path
            if path.exists()
            else model_zoo.build(name, root, **SHAPE, num_hidden_layers=LAYERS.get(name, 2))
        )

    return get


def run(jobs: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """What a child process finds."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    child = subprocess.run(
        [sys.executable, fake_gpu_runner.__file__, folder / "jobs.json", folder / "found.json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def check_served(job: dict[str, Any], served: dict[str, Any]) -> None:
    """The requests did to the engine what they are for."""
    name, seen = job["name"], served["seen"]
    assert not served["errors"], name
    assert served["fused"], name
    assert seen["preemptions"] and seen["restores"] and seen["chunks"], (name, seen)
    assert bool(seen["replays"]) == (job["config"].get("cuda_graphs") != "off"), (name, seen)
    # One row more than a power of two that a vector over the rows may have.
    assert seen["max_rows"] > job["rows"] // 2, (name, seen)
    assert (seen["min_width"], seen["max_width"]) == (1, 20), (name, seen)


def late_ones(jobs: list[dict[str, Any]], found: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Of each job the variants that came after warm-up, if any."""
    for job in jobs:
        served = found[job["name"]]
        check_served(job, served)
        assert served["num_warmed"] > 5
        assert served["num_compiles"] == len(served["late"])
    return {name: served["late"] for name, served in found.items() if served["late"]}


@pytest.mark.parametrize("names", MODELS, ids=", ".join)
def test_nothing_compiles_after_warm_up(names, wide_zoo, tmp_path):
    jobs = [
        dict(name=f"{name}, {setting}", path=str(wide_zoo(name)), **options)
        for name in names
        for setting, options in SETTINGS.items()
    ]
    assert late_ones(jobs, run(jobs, tmp_path)) == {}


def test_nothing_compiles_for_latents_and_values_unlike_keys(tmp_path):
    """One of them with graphs, one without."""
    jobs = []
    for name, graphs in zip(model_zoo.UNLIKE_NAMES, ("on", "off"), strict=True):
        model_zoo.build_unlike(name, tmp_path / name)
        options = dict(rows=32, config=dict(cuda_graphs=graphs))
        jobs.append(dict(name=name, path=str(tmp_path / name), **options))
    assert late_ones(jobs, run(jobs, tmp_path)) == {}


def test_nothing_compiles_whatever_the_engine_is_configured_to(wide_zoo, tmp_path):
    jobs = [
        dict(name=f"{name}, {setting}", path=str(wide_zoo(name)), **options)
        for name in ("llama", "gemma2")
        for setting, options in MORE_SETTINGS.items()
    ]
    assert late_ones(jobs, run(jobs, tmp_path)) == {}


def test_it_shows_where_kernels_specialise_on_what_varies(wide_zoo, tmp_path):
    """With what the decorators rule out, the same requests do compile: these are the arguments that vary."""
    job = dict(name="all", path=str(wide_zoo("gemma2")), specialises_everything=True)
    job |= SETTINGS["no graphs"]
    late = run([job], tmp_path)["all"]["late"]
    named = {(line.split(":")[0], word) for line in late for word in line.split()}
    assert {
        ("_decode_kernel", "stride_table"),
        ("_prefill_kernel", "stride_table"),
        ("_prefill_kernel", "tables_ptr"),
        ("_prefill_kernel", "num_tiles_ptr"),
        ("_kv_write_kernel", "slots_ptr"),
    } <= named, late


@pytest.mark.slow
def test_what_a_served_llama_asks_for_compiles_for_a_gpu_and_fits_it(wide_zoo, tmp_path):
    job = dict(name="all", path=str(wide_zoo("llama")), compiles=True) | SETTINGS["graphs"]
    served = run([job], tmp_path)["all"]
    assert late_ones([job], {"all": served}) == {}
    for variant in served["variants"]:
        assert variant["registers"] > 0, variant
        assert variant["stack_bytes"] == 0, variant
        assert variant["shared_bytes"] <= SHARED_BYTES["sm_90"], variant


def test_every_served_architecture_is_among_the_models(wide_zoo):
    specs = [ModelSpec.from_checkpoint(wide_zoo(name)) for names in MODELS for name in names]
    assert {spec.architecture for spec in specs} == TESTED_FOR_GPU
