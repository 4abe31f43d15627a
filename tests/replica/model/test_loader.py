"""Loading: right weights from every layout, and no trust in what could run code or lie."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys

import model_zoo
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.replica.checkpoint.checkpoint import (
    check_header,
    count_parameters,
    resolve_checkpoint,
    weight_files,
    weights_revision,
)
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.model.loader import load_model


@pytest.fixture
def copy(zoo, tmp_path):
    return shutil.copytree(zoo("llama"), tmp_path / "copy")


def load(path):
    return load_model(ModelSpec.from_checkpoint(path), "cpu", "float32")


def test_loads_the_weights_in_eval_mode_with_our_attention(zoo):
    model = load(zoo("llama"))
    stored = load_file(zoo("llama") / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name])
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "quire_paged"


def test_sharded_equals_single_file(zoo, tmp_path):
    path = model_zoo.build("llama", tmp_path, max_shard_size="40KB")
    assert len(weight_files(path)) > 2
    sharded, single = load(path).state_dict(), load(zoo("llama")).state_dict()
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in single)
    assert count_parameters(path) == count_parameters(zoo("llama"))


def test_tensors_that_the_class_ignores_are_left_out(tmp_path, monkeypatch):
    """Checkpoints of Gemma 3n have projections of layers that read another layer's keys and values."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=173,
        vocab_size_per_layer_input=173,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        num_kv_shared_layers=1,
        layer_types=["full_attention"] * 2,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.1.self_attn.{name}_proj.weight": torch.ones(32, 32) for name in "kv"}
    save_file(stored | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # The tensors are read to their places, not by transformers.
    monkeypatch.setattr("quire.replica.model.loader._load_by_transformers", None)
    loaded = load(tmp_path).state_dict()
    assert stored.keys() <= loaded.keys() and not extra.keys() & loaded.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_tied_embeddings_are_one_tensor(zoo):
    model = load(zoo("llama_tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_are_converted_to_the_dtype_asked_for(zoo):
    model = load_model(ModelSpec.from_checkpoint(zoo("llama")), "cpu", "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_folder_resolves_and_an_unknown_name_is_refused(zoo):
    assert resolve_checkpoint(str(zoo("llama"))) == zoo("llama")
    with pytest.raises(CheckpointError, match="'no such' is neither"):
        resolve_checkpoint("no such")


def test_a_path_is_named_as_it_was_looked_for(copy, monkeypatch):
    monkeypatch.setenv("HOME", str(copy.parent))
    assert resolve_checkpoint(f"~/{copy.name}") == copy
    monkeypatch.chdir(copy.parent)
    assert resolve_checkpoint(f"./{copy.name}").samefile(copy)
    for name in ("./gone", "~/gone", f"{copy.parent}/gone"):
        with pytest.raises(CheckpointError, match=f"no folder {copy.parent}/.*gone on node '.+'"):
            resolve_checkpoint(name)


def test_a_hub_id_is_downloaded_without_code_or_pickles(zoo, monkeypatch):
    calls = []

    def download(model, revision, allow_patterns):
        calls.append((model, revision, allow_patterns))
        return str(zoo("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_checkpoint("owner/name", "v1") == zoo("llama")
    (call,) = calls
    assert call[:2] == ("owner/name", "v1")
    assert not any(
        pattern.endswith((".py", ".bin", "*")) and pattern != "tokenizer*" for pattern in call[2]
    )


def test_a_failed_download_names_model_and_revision(monkeypatch):
    def download(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"'owner/name' at revision 'v1'.*no route"):
        resolve_checkpoint("owner/name", "v1")


def test_weights_are_told_apart_by_commit_or_by_content(zoo, copy, tmp_path):
    original = weights_revision(zoo("llama"))
    assert weights_revision(copy) == original  # not by where they lie
    tensors = load_file(copy / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name][-1, -1] += 1.0
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert weights_revision(copy) != original
    commit = "0123456789abcdef0123456789abcdef01234567"
    downloaded = shutil.copytree(zoo("llama"), tmp_path / "models--a--b" / "snapshots" / commit)
    assert weights_revision(downloaded) == commit


def test_code_that_is_never_read_does_not_matter(copy):
    """Published Phi-3 checkpoints carry Python files and an auto_map beside a class that transformers has built in."""
    config = json.loads((copy / "config.json").read_text())
    auto_map = {
        "AutoConfig": "modeling_x.Config",
        "AutoModelForCausalLM": "modeling_x.Model",
    }
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    (copy / "modeling_x.py").write_text("raise SystemExit")
    assert resolve_checkpoint(str(copy)) == copy
    model = load_model(ModelSpec.from_checkpoint(copy), "cpu", "float32")
    assert type(model).__name__ == "LlamaForCausalLM"


def test_no_entry_of_a_configuration_runs_code_or_calls_a_server(copy, monkeypatch):
    """Entries in which transformers looks for code or kernels, at the top and in configurations inside."""
    calls = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: calls.append(args) or 1 / 0)
    code = {
        "auto_map": {"AutoConfig": "evil/repo--modeling_x.Config", "AutoModel": "modeling_x.Model"},
        "trust_remote_code": True,
        "configuration_files": ["other.json"],
        "custom_generate": "evil/repo",
        "attn_implementation": "evil/kernels",
        "_attn_implementation": "evil/kernels",
        "_attn_implementation_internal": "evil/kernels",
        "experts_implementation": "sonicmoe",  # of the hub's kernels
        "_experts_implementation": "sonicmoe",
        "use_kernels": True,
        "kernel_config": {"RMSNorm": "evil/kernels:RMSNorm"},
        "_name_or_path": "evil/repo",
        "adapter_kwargs": {"_adapter_model_path": "evil/repo"},
        "pretrained_backbone": "evil/repo",
        "backbone": "evil/repo",
        "use_timm_backbone": True,
    }
    inside = {**code, "model_type": "lightglue", "num_hidden_layers": 1, "hidden_act": "relu"}
    names = (
        "text_config",
        "vision_config",
        "audio_config",
        "encoder",
        "decoder",
        "backbone_config",
    )
    config = json.loads((copy / "config.json").read_text())
    evil = {**code, **config, **dict.fromkeys(names, inside)}
    (copy / "config.json").write_text(json.dumps(evil))
    (copy / "generation_config.json").write_text(json.dumps(code))
    (copy / "tokenizer_config.json").write_text(json.dumps({**code, "tokenizer_class": "X"}))
    (copy / "other.json").write_text("{}")
    for name in ("modeling_x.py", "generate.py", "custom_generate.py", "conftest.py", "setup.py"):
        (copy / name).write_text("raise SystemExit")
    spec = ModelSpec.from_checkpoint(resolve_checkpoint(str(copy)))
    model = load_model(spec, "cpu", "float32")
    assert type(model).__name__ == "LlamaForCausalLM" and calls == []
    left = {n for n in evil if "implementation" in n or "kernel" in n or "trust" in n}
    built = model.config.to_dict()
    assert not {n for n in left if built.get(n) == evil[n]} and model.config.hidden_act == "silu"
    assert not [name for name in sys.modules if "modeling_x" in name]


def test_the_configuration_that_was_judged_is_the_one_that_is_built(copy):
    """transformers itself would read the other file."""
    config = json.loads((copy / "config.json").read_text())
    other = {**config, "hidden_act": "relu", "num_hidden_layers": 2}
    (copy / "config.4.0.0.json").write_text(json.dumps(other))
    pointing = {**config, "configuration_files": ["config.4.0.0.json"]}
    (copy / "config.json").write_text(json.dumps(pointing))
    spec = ModelSpec.from_checkpoint(copy)
    model = load_model(spec, "cpu", "float32")
    assert spec.num_layers == config["num_hidden_layers"] == len(model.model.layers)
    assert model.config.hidden_act == "silu"


def test_an_adapter_is_not_a_model(copy):
    """transformers would read the base model that it names."""
    (copy / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "other"}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: .*adapter"):
        resolve_checkpoint(str(copy))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_pickles_alone_are_refused(copy, name):
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(CheckpointError, match=f"only as pickle .*{name}"):
        resolve_checkpoint(str(copy))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_missing_files_are_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        resolve_checkpoint(str(copy))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers_are_no_weights(copy, dtype):
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: '{name}' is stored as {kind}"):
        load(copy)


@pytest.mark.parametrize("num_bytes", [4, 100, 10_000])
def test_a_truncated_file_is_refused_by_name(copy, num_bytes):
    file = copy / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, num_bytes if num_bytes < 1000 else size - num_bytes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* bytes"):
        resolve_checkpoint(str(copy))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_stored", [True, False])
def test_an_output_head_is_stored_or_tied(copy, is_tied, is_stored):
    """transformers uses a stored head even where the configuration ties it."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
    if not is_stored:
        tensors = load_file(copy / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    if not is_tied and not is_stored:
        with pytest.raises(CheckpointError, match=r"1 missing tensors .*lm_head\.weight"):
            load(copy)
        return
    right = transformers.AutoModelForCausalLM.from_pretrained(copy)
    assert torch.equal(load(copy).lm_head.weight, right.lm_head.weight)


@pytest.mark.parametrize("change", ["missing", "surplus", "misshapen"])
def test_tensors_must_match_the_model_one_to_one(copy, change):
    tensors = load_file(copy / "model.safetensors")
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "surplus":
        tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(1)
    else:
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        load(copy)


def header_file(tmp_path, entries: dict, data: bytes, length: int | None = None):
    header = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    length = len(header) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + header + data)
    return file


def entry(shape, start, stop, dtype="F32"):
    return dict(dtype=dtype, shape=shape, data_offsets=[start, stop])


def test_an_honest_header_passes(tmp_path):
    file = header_file(tmp_path, {"a": entry([2], 0, 8), "b": entry([1, 1], 8, 12)}, bytes(12))
    assert set(check_header(file)) == {"a", "b"}


@pytest.mark.parametrize(
    "entries, size, message",
    [
        ({"a": entry([3], 0, 8)}, 8, r"F32\[3\] needs 12 bytes, its offsets give 8"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "b starts at byte 4, overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, 16, "leaves a gap"),
        ({"a": entry([2], 0, 8)}, 4, "end at byte 8, the file holds 4"),
        ({"a": entry([2], 0, 8)}, 9, "end at byte 8, the file holds 9"),
        ({"a": entry([-2], 0, 8)}, 8, "not counts"),
        ({"a": entry([True, 2], 0, 8)}, 8, "not counts"),
        ({"a": entry([2], 0, 8, "F33")}, 8, "unknown dtype 'F33'"),
        ({"a": {"shape": [2]}}, 8, "not a tensor entry"),
        ({"a": 7}, 8, "not a tensor entry"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entries, size, message):
    with pytest.raises(CheckpointError, match=message):
        check_header(header_file(tmp_path, entries, bytes(size)))


def test_header_lengths_that_lie_are_refused(tmp_path):
    for length in (0, 10**6, 2**63):
        with pytest.raises(CheckpointError, match=f"header length {length} does not fit"):
            check_header(header_file(tmp_path, {}, b"", length))
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="does not fit a file of 3 bytes"):
        check_header(tmp_path / "model.safetensors")


def test_an_index_may_not_leave_the_folder_nor_misplace_a_tensor(zoo, tmp_path):
    path = model_zoo.build("llama", tmp_path, max_shard_size="40KB")
    index_path = path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    name, first = next(iter(index["weight_map"].items()))
    other = next(file for file in index["weight_map"].values() if file != first)
    for value, message in [
        ("../x.safetensors", "beside the index"),
        ("x.bin", "beside the index"),
        ("gone.safetensors", r"gone\.safetensors: missing"),
        (other, "which the index places there"),
    ]:
        changed = {**index, "weight_map": {**index["weight_map"], name: value}}
        index_path.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            resolve_checkpoint(str(path))


# Only what transformers renames goes through its loader: not classes with some tensors in float32.
@pytest.mark.parametrize(
    "name, dtype, count",
    [("llama", "float32", 0), ("gpt_oss", "float16", 0), ("qwen2", "float32", 1)],
)
def test_remote_code_is_never_trusted(zoo, monkeypatch, name, dtype, count):
    seen = []
    if count:
        monkeypatch.setattr("quire.replica.model.loader.map_weights", lambda model, stored: None)
    for automatic in (transformers.AutoConfig, transformers.AutoModelForCausalLM):
        original = automatic.from_pretrained

        def spy(*args, original=original, **kwargs):
            seen.append(kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(automatic, "from_pretrained", spy)
    model = load_model(ModelSpec.from_checkpoint(zoo(name)), "cpu", dtype)
    is_mixed = name == "gpt_oss"
    assert (model.model.norm.weight.dtype == torch.float32) == (is_mixed or dtype == "float32")
    assert model.model.embed_tokens.weight.dtype == getattr(torch, dtype)
    assert [kwargs["trust_remote_code"] for kwargs in seen] == [False] * count
    assert all(kwargs["local_files_only"] is True for kwargs in seen if "dtype" in kwargs)
    assert all(kwargs["use_safetensors"] is True for kwargs in seen if "dtype" in kwargs)
