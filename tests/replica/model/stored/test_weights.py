"""Streaming: the tensors of transformers' own loader, in any pieces, within a shard's memory."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time

import model_zoo
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.kernels.rows import fp8_linear
from quire.replica.checkpoint.checkpoint import weight_files
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.model import loader
from quire.replica.model.attention import register
from quire.replica.model.stored import weights
from quire.replica.model.stored.weights import LoadProgress, list_tensors, read_tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_every_tensor_equals_that_of_transformers_loader(zoo, monkeypatch, name, dtype):
    spec = ModelSpec.from_checkpoint(zoo(name))
    register()
    reference = loader._load_by_transformers(spec, getattr(torch, dtype))
    used = []

    def instead(*args):
        used.append(args)
        return reference

    monkeypatch.setattr(loader, "_load_by_transformers", instead)
    monkeypatch.setattr(weights, "_STAGING_BYTES", 1000)  # many pieces, the last ones short
    model = loader.load_model(spec, "cpu", dtype)
    assert not used
    for kind in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(m, kind)()) for m in (model, reference))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert torch.equal(found[key], tensor), key


def test_a_tied_weight_may_be_stored_under_the_heads_name(zoo, tmp_path):
    for file in zoo("llama_tied").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": table}, tmp_path / "model.safetensors")
    model = loader.load_model(ModelSpec.from_checkpoint(tmp_path), "cpu", "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, table)


def test_a_file_that_ends_early_is_refused(tmp_path):
    save_file({"a": torch.arange(100.0)}, tmp_path / "x.safetensors")
    stored = list_tensors([tmp_path / "x.safetensors"])
    with (tmp_path / "x.safetensors").open("r+b") as stream:
        stream.truncate((tmp_path / "x.safetensors").stat().st_size - 40)
    with pytest.raises(CheckpointError, match="ends 40 bytes before the end of 'a'"):
        list(read_tensors(stored.values(), lambda t: torch.empty(t.shape)))


def test_progress_is_a_line_every_five_seconds(caplog):
    now = [100.0]
    progress = LoadProgress(8_000_000_000, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(12):
            now[0] += 1.0
            progress.add(500_000_000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "loading weights: 2.50 of 8.00 GB, 0.50 GB/s, 11 s left",
        "loading weights: 5.00 of 8.00 GB, 0.50 GB/s, 6 s left",
    ]


def test_on_a_terminal_progress_is_a_bar_with_speed_and_time_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with weights.load_progress(4_000_000_000) as on_bytes:
        time.sleep(0.15)  # more than the bar's shortest interval
        on_bytes(1_000_000_000)
    text = capsys.readouterr().err
    bar = r"loading weights: +25%.* 1.00G/4.00G \[\d\d:\d\d<\d\d:\d\d, [\d.]+[kMG]B/s\]"
    assert re.search(bar, text)


def test_bytes_told_are_those_of_the_tensors(zoo):
    stored = list_tensors(weight_files(zoo("llama")))
    told = []
    for dtype in (torch.float32, torch.float16):
        told.clear()
        targets = read_tensors(
            stored.values(), lambda t, d=dtype: torch.empty(t.shape, dtype=d), on_bytes=told.append
        )
        assert len(list(targets)) == len(stored)
        assert sum(told) == sum(t.num_bytes for t in stored.values())


LAYOUTS = ("sharded", "single")
FORMATS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"))
MEASURE = """
import gc, json, sys
from pathlib import Path
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.host_machine import give_back_free_memory
from quire.replica.model import loader
small, large, cases = sys.argv[1:]

def load(path, dtype, weights):
    return loader.load_model(ModelSpec.from_checkpoint(Path(path)), "cpu", dtype, weights)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

found = []
for layout, dtype, weights in json.loads(cases):
    load(small, dtype, weights)  # what libraries allocate once
    gc.collect()
    give_back_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    model = load(Path(large) / layout, dtype, weights)
    found.append([status("VmHWM") - before, sum(p.nbytes for p in model.parameters())])
    del model
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """220 MB of float32, by size of the largest shard: at most 60 MB, and all in one file."""
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("large")
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, size in (("sharded", "60MB"), ("single", "1GB")):
        model.save_pretrained(path / name, max_shard_size=size)
    return path


@pytest.fixture(scope="module")
def peaks(zoo, large) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Of each case the most bytes that loading took, and the model's bytes; measured in a process of its own."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    has_fp8 = fp8_linear.missing("cpu") is None
    cases = [(layout, *one) for layout in LAYOUTS for one in FORMATS if one[1] != "fp8" or has_fp8]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, zoo("llama"), large, json.dumps(cases)],
        # From the heap memory does not go back before all above it does.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, weight_format", FORMATS)
def test_peak_memory_is_the_model_and_at_most_a_shard(peaks, large, layout, dtype, weight_format):
    """Of a single file no more either: beside the model there are two pieces and, for FP8, a tensor of 11.5 MB."""
    if (layout, dtype, weight_format) not in peaks:
        pytest.skip("no FP8 on this processor")
    shards = [file.stat().st_size for file in weight_files(large / "sharded")]
    assert len(shards) > 3 and len(weight_files(large / "single")) == 1
    peak, model_bytes = peaks[layout, dtype, weight_format]
    assert peak > 0.9 * model_bytes, "the measurement must see the model"
    assert peak <= model_bytes + 1.1 * max(shards), (peak, model_bytes, shards)
    print(
        f"{layout} {dtype} {weight_format}: beside the model {(peak - model_bytes) / 1e6:.1f} MB, shard "
        f"{max(shards) / 1e6:.1f} MB"
    )
