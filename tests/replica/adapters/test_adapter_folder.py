"""Folders that are refused, each by a message that names the reason; folders that change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_folders import save_adapter
from safetensors.torch import load_file, save_file

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import InvalidRequest
from quire.replica.adapters.adapter_folder import read_adapter
from quire.replica.adapters.adapter_library import AdapterLibrary
from quire.replica.model.layers.linear_parts import LinearPart

LAYERS = {
    name: LinearPart(name, 64, columns)
    for i in range(3)
    for name, columns in (
        (f"model.layers.{i}.self_attn.q_proj", 64),
        (f"model.layers.{i}.self_attn.v_proj", 32),
    )
}


@pytest.fixture
def folder(zoo, tmp_path) -> Path:
    return save_adapter(tmp_path / "a", zoo("llama"), rank=8, targets=("q_proj", "v_proj"))


def read(folder: Path, max_rank: int = 16):
    return read_adapter(folder, LAYERS, max_rank, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(peft_type="IA3"), "peft_type must be LORA, got 'IA3'"),
        (dict(use_dora=True), "DoRA is not supported"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(bias="all"), "bias must be 'none', got 'all'"),
        (dict(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (dict(alpha_pattern={"q_proj": 2}), "alpha_pattern"),
        (dict(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (dict(fan_in_fan_out=True), "fan_in_fan_out"),
        (dict(lora_bias=True), "lora_bias is True, which is not supported"),
        (dict(a_new_option={"x": 1}), "a_new_option"),
        (dict(r=17), r"r must be 1 to 16 \(max_adapter_rank\), got 17"),
        (dict(r=4), r"lora_A and lora_B must be \(4, 64\)"),
        (dict(lora_alpha="2"), "lora_alpha must be a number"),
    ],
)
def test_a_configuration_that_cannot_be_applied_is_refused(folder, change, message):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidRequest, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", (8, 64), "lm_head has lora_A alone"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (8, 64), "embeddings cannot be"),
        ("base_model.model.lm_head.weight", (8, 64), "no matrix of LoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", (8, 8), "must be"),
    ],
)
def test_a_tensor_that_cannot_be_applied_is_refused(folder, name, shape, message):
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(shape)}, path)
    with pytest.raises(InvalidRequest, match=message):
        read(folder)


def test_heads_are_refused(folder):
    path = folder / "adapter_model.safetensors"
    head = {
        f"base_model.model.lm_head.lora_{side}.weight": torch.zeros(shape)
        for side, shape in (("A", (8, 64)), ("B", (173, 8)))
    }
    save_file(load_file(path) | head, path)
    with pytest.raises(InvalidRequest, match="no linear layer 'lm_head' that can be adapted"):
        read(folder)


def test_infinite_numbers_and_missing_files_are_refused(folder, tmp_path):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = torch.inf
    save_file(tensors, path)
    with pytest.raises(InvalidRequest, match="not finite"):
        read(folder)
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
        read(tmp_path / "nowhere")


def test_scale_follows_rslora(folder):
    path = folder / "adapter_config.json"
    assert {part.scale for part in read(folder).values()} == {2.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    assert {part.scale for part in read(folder).values()} == {16 / 8**0.5}


def test_the_library_reads_a_folder_once_and_refuses_changed_files(folder):
    library = AdapterLibrary(lambda path: read(path), max_adapters=2)
    ref = AdapterRef.of_folder("a", str(folder))
    assert library.find(ref) is None
    adapter = library.get(ref)
    assert library.get(ref) is adapter is library.find(ref)
    assert library.num_reads == 1
    library.forget(ref.digest)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 1}))
    with pytest.raises(InvalidRequest, match="have changed since it was loaded"):
        library.get(ref)
    assert len(library) == 0, "a failed read is not kept"
    assert library.get(AdapterRef.of_folder("a", str(folder))).weights


def test_the_library_forgets_the_least_recently_used(folder):
    library = AdapterLibrary(lambda path: object(), max_adapters=2)
    refs = []
    path = folder / "adapter_config.json"
    for alpha in (1, 2, 3):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": alpha}))
        refs.append(AdapterRef.of_folder(str(alpha), str(folder)))
        library.get(refs[-1])
    assert [library.find(ref) is not None for ref in refs] == [False, True, True]
