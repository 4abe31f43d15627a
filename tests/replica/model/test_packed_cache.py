"""An engine that finds packed weights in a file generates the bits of the engine that has packed them."""

from __future__ import annotations

import json
import logging
import stat
import struct
from pathlib import Path

import model_zoo
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_linear import PackedWeight
from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.checkpoint import weights_revision
from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.config import EngineArgs, SizingError
from quire.replica.engine import Engine
from quire.replica.model import packed_cache
from quire.replica.model.packed_cache import unread_names
from quire.replica.model.stored.weights import list_tensors
from quire.replica.startup.gpu_sizing import GpuSizing

pytestmark = pytest.mark.skipif(
    native_library.load() is None, reason="weights are packed by the compiled library"
)
PROMPTS = [[5, 9, 80, 3, 7], list(range(3, 60))]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture
def packed(tmp_path, monkeypatch) -> Path:
    """The folder of the files."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    return tmp_path / "packed"


def start(path: Path, **changes: object) -> Engine:
    options = dict(dtype="bfloat16", num_blocks=100, num_threads=1, cache_packed_weights=True)
    args = EngineArgs(model=str(path), device="cpu", **{**options, **changes})
    return Engine(args, prove=False)


def told(engine: Engine) -> list[tuple]:
    return [(o.token_ids, o.logprobs) for o in engine.generate(PROMPTS, PARAMS)]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("the packed weights are in the file")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "qwen2_mixed", "phi3", "olmo2", "qwen3_moe"]
)
def test_the_second_start_reads_packed_weights(zoo, packed, monkeypatch, name, dtype):
    """Neither are the weights of packed layers read, nor anything packed."""
    folder = zoo(name)
    with start(folder, dtype=dtype) as first:
        expected, fused = told(first), first.fused
        assert not unread_names(first.model)
    (file,) = packed.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setattr(PackedWeight, "pack", refuse)
    with start(folder, dtype=dtype) as second:
        assert unread_names(second.model) and second.fused == fused
        assert told(second) == expected


def test_weights_are_not_kept_if_a_product_is_not_packed(zoo, packed, caplog):
    """The head of this model is its embedding, of a class of its own."""
    caplog.set_level(logging.INFO)
    start(zoo("gemma3")).close()
    assert not packed.exists()
    assert "packed weights are not kept: product lm_head" in caplog.text


def test_weights_are_not_kept_unless_asked_for(zoo, packed):
    start(zoo("llama"), cache_packed_weights=False).close()
    assert not packed.exists()


def test_each_dtype_has_a_file_and_other_sources_replace_it(zoo, packed, monkeypatch):
    folder = zoo("llama")
    for dtype in ("bfloat16", "float32"):
        start(folder, dtype=dtype).close()
    before = set(packed.iterdir())
    assert len(before) == 2
    monkeypatch.setattr(packed_cache, "sources_digest", lambda: "other")
    start(folder).close()
    assert len(set(packed.iterdir()) - before) == 1 and len(list(packed.iterdir())) == 2


def test_weights_that_were_written_again_are_packed_again(packed, tmp_path):
    """A change that no sample of the folder's revision covers."""
    folder = model_zoo.build("llama", tmp_path / "zoo", intermediate_size=4096)
    (file,) = folder.glob("*.safetensors")
    with start(folder) as first:
        before = told(first)
    # A matrix is other numbers of the same size, but where the revision looks.
    tensors = list_tensors([file])
    tensor = tensors["model.layers.0.mlp.down_proj.weight"]
    data, first_byte = bytearray(file.read_bytes()), min(t.offset for t in tensors.values())
    spacing = (len(data) - first_byte) / 256
    for at in range(tensor.offset, tensor.offset + tensor.num_bytes, 4):
        if 4096 < (at - first_byte) % spacing < spacing - 4:
            data[at : at + 4] = struct.pack("<f", -struct.unpack("<f", data[at : at + 4])[0])
    file.write_bytes(data)
    assert weights_revision(folder) == first.config.revision
    with start(folder) as second:
        assert not unread_names(second.model)
        found = told(second)
    with start(folder, cache_packed_weights=False) as alone:
        assert found == told(alone)
    assert found != before


@pytest.mark.parametrize("content", [b"", b"{", b"\x08" + b"\0" * 7 + b'{"a": 1}'])
def test_a_damaged_file_is_replaced(zoo, packed, content):
    folder = zoo("llama")
    with start(folder) as first:
        expected = told(first)
    (file,) = packed.iterdir()
    file.write_bytes(content)
    for is_kept in (False, True):
        with start(folder) as again:
            assert told(again) == expected
            assert bool(unread_names(again.model)) == is_kept


def test_a_file_with_other_layers_is_removed_and_named(zoo, packed):
    folder = zoo("llama")
    with start(folder) as first:
        expected = told(first)
    (file,) = packed.iterdir()
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["packed"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    about[1], about[2] = about[2], about[1]
    save_file(tensors, file, {"packed": json.dumps(about)})
    with pytest.raises(
        CheckpointError, match=f"{file.name}: packed weight 1 is not that of model.layers"
    ):
        start(folder)
    assert not file.exists()
    with start(folder) as third:
        assert told(third) == expected


def test_a_file_that_is_removed_during_a_start_ends_it(zoo, packed, monkeypatch):
    folder = zoo("llama")
    start(folder).close()
    (file,) = packed.iterdir()
    load = packed_cache.mark_unread

    def mark(model: torch.nn.Module, names: frozenset[str]) -> None:
        load(model, names)
        file.unlink()

    monkeypatch.setattr("quire.replica.model.loader.mark_unread", mark)
    with pytest.raises(CheckpointError, match="was removed while the engine started"):
        start(folder)


def test_a_folder_that_cannot_be_written_costs_the_file_only(zoo, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    with start(zoo("llama")) as engine:
        assert told(engine)
    assert "packed weights are not kept" in caplog.text


def test_a_gpu_refuses_packed_weights():
    args = EngineArgs(cache_packed_weights=True)
    with pytest.raises(SizingError, match="cache_packed_weights is True, which needs device 'cpu'"):
        GpuSizing().check_args(args, "auto", "bfloat16")


def test_a_file_with_more_weights_than_are_used_is_removed(zoo, packed):
    folder = zoo("llama")
    start(folder).close()
    (file,) = packed.iterdir()
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["packed"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    about.append([["model.norm.weight"], 8, 8, "bfloat16", False])
    save_file(tensors, file, {"packed": json.dumps(about)})
    with pytest.raises(CheckpointError, match="packed weights are used"):
        start(folder)
    assert not file.exists()
