"""The start of an engine with a draft model: what is refused by name, and memory for both models."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import model_zoo
import pytest
import transformers

from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.checkpoint.weight_bytes import weight_bytes
from quire.replica.config import EngineArgs, SizingError
from quire.replica.device.kv_pool import block_elements
from quire.replica.startup import draft_model, runtime
from quire.replica.startup.device_memory import measure_memory
from quire.replica.startup.device_sizing import GIB
from quire.replica.startup.draft_model import draft_bytes, find_draft_model
from quire.replica.startup.sizing import resolve
from tests.replica.startup.test_device_memory import Start, capture_all


def args_of(draft: object, **options: object) -> EngineArgs:
    speculation = dict(method="draft_model", draft_model=str(draft))
    return EngineArgs(device="cpu", dtype="float32", speculation=speculation, **options)


def refusal(draft: object, target: ModelSpec) -> str:
    with pytest.raises(SizingError) as caught:
        find_draft_model(args_of(draft), target)
    return str(caught.value)


@pytest.fixture(scope="module")
def llama(zoo) -> ModelSpec:
    return ModelSpec.from_checkpoint(zoo("llama"))


def saved(config: transformers.PretrainedConfig, folder: Path) -> Path:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def recurrent(folder: Path) -> Path:
    shape = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    layers = ["conv", "full_attention"]
    ids = dict(vocab_size=173, eos_token_id=2, pad_token_id=0)
    config = transformers.Lfm2Config(**shape, **ids, layer_types=layers, num_hidden_layers=2)
    return saved(config, folder)


def test_a_checkpoint_that_is_not_there_is_refused(llama):
    assert refusal("/nowhere", llama).startswith(
        "speculation.draft_model: model '/nowhere': there is no folder /nowhere on node"
    )


def test_models_that_cannot_draft_are_refused(zoo, llama, tmp_path):
    shape = dict(hidden_size=32, n_head=4, n_layer=1, vocab_size=173, seq_length=64)
    bloom = transformers.BloomConfig(**shape, pad_token_id=0, eos_token_id=2)
    for path, reason in (
        (recurrent(tmp_path / "lfm2"), "recurrent layers"),
        (saved(bloom, tmp_path / "bloom"), "an attention of its own"),
        (zoo("mistral"), "layers without full attention, or of several shapes"),
        (zoo("gemma3"), "layers without full attention, or of several shapes"),
    ):
        message = refusal(path, llama)
        assert message.startswith(f"speculation.draft_model is {str(path)!r}, whose ")
        assert message.endswith(f" has {reason}, which a draft model must not have")


def test_targets_that_cannot_have_a_draft_model_are_refused(zoo, llama, tmp_path):
    for path, kind in (
        (recurrent(tmp_path / "lfm2"), "recurrent layers"),
        (zoo("mistral"), "no layer with full attention"),
    ):
        message = refusal(llama.path, ModelSpec.from_checkpoint(path))
        assert message.endswith(f"has {kind}; use another method")


def test_another_vocabulary_is_refused(llama, tmp_path):
    assert refusal("embedded", llama) == (
        "speculation.draft_model is 'embedded', whose vocab_size is 1024; it must be 173, as that of the served model"
    )
    other = shutil.copytree(CHECKPOINT, tmp_path / "other")
    target = ModelSpec.from_checkpoint(Path(CHECKPOINT))
    assert find_draft_model(args_of(other), target) is not None
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    *_, first, second = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "whose tokenizer.json has a vocabulary of digest" in refusal(other, target)
    (other / "tokenizer.json").unlink()
    assert find_draft_model(args_of(other), target) is not None


def test_the_cache_is_divided_between_both_models(llama, zoo):
    draft = find_draft_model(args_of(zoo("llama_mha")), llama)
    own = block_elements(llama.groups, 32) * 4
    assert draft_bytes(draft) == (
        weight_bytes(draft.spec.path, "float32", "auto"),
        block_elements(draft.spec.groups, 32) * 4,
    )
    both = own + draft.num_bytes.block
    assert both == 3 * own  # twice the KV heads
    gib = 100.5 * both / GIB
    args = args_of(zoo("llama_mha"), kv_cache_gib=gib, max_model_len=64)
    assert resolve(args, llama, draft=draft.num_bytes).num_blocks == 99
    alone = dataclasses.replace(args, speculation={})
    assert resolve(alone, llama).num_blocks > 290


def test_the_pools_get_what_both_models_leave_when_all_graphs_are_there(zoo, monkeypatch, tmp_path):
    path = model_zoo.build("llama_mha", tmp_path, num_hidden_layers=1)
    speculation = dict(method="draft_model", draft_model=str(path))
    start = Start(zoo, monkeypatch, 6_000_000, speculation=speculation)
    monkeypatch.setattr(draft_model, "load_model", runtime.load_model)

    def measure(*args: object):
        start.device._rehearsed = None  # it would keep the other model's trial
        return measure_memory(*args)

    monkeypatch.setattr(draft_model, "measure_memory", measure)
    started = start.run()
    capture_all(started)
    capture_all(dataclasses.replace(started, runner=started.draft_runner))
    pools = (started.runner.pool, started.draft_runner.pool)
    block = sum(pool.data[0].nbytes for pool in pools)
    assert start.budget - 2 * block < start.used <= start.budget
    assert started.config.num_blocks == pools[0].num_blocks == pools[1].num_blocks > 10
