"""What a checkpoint says about itself, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil

import model_zoo
import pytest
import transformers

from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.checkpoint.weight_formats import FORMATS
from quire.replica.kv_cache.groups import LayerKind
from quire.replica.proof.verdicts import TESTED_FOR_GPU


@pytest.fixture
def checkpoint(zoo, tmp_path):
    """A copy of the tiny Llama and a function that changes one of its JSON files."""
    path = shutil.copytree(zoo("llama"), tmp_path / "copy")

    def change(file: str = "config.json", **entries):
        target = path / file
        content = json.loads(target.read_text()) if target.exists() else {}
        target.write_text(json.dumps({**content, **entries}))
        return path

    return change


def test_reads_the_shape(zoo):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        "Qwen3ForCausalLM", 3, 4, 2, 32,
    )  # fmt: skip
    assert (spec.vocab_size, spec.max_position_embeddings, spec.eos_token_ids) == (173, 512, (2,))
    assert spec.checkpoint_dtype == "float32"


@pytest.mark.parametrize(
    "name, windows",
    [
        ("llama", (None, None, None)),
        ("qwen2", (None, None, None)),
        ("qwen2_mixed", (None, 24, 24)),
        ("mistral", (40, 40, 40)),
        ("gemma2", (24, None, 24)),
        ("gemma3", (24, 24, None, 24, 24)),
        ("gpt_oss", (20, None, 20)),
    ],
)
def test_reads_each_layers_window(zoo, name, windows):
    assert ModelSpec.from_checkpoint(zoo(name)).windows == windows


def _gemma4(**changes):
    """Two sliding layers, a global one, and the same again; the checkpoints' names of sizes."""
    return transformers.Gemma4TextConfig(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "global_head_dim": 512} | changes,
    )


def _kinds_of(tmp_path, config):
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    return ModelSpec.from_checkpoint(tmp_path).kinds


def test_layers_have_their_own_heads_and_read_earlier_layers(tmp_path):
    kinds = _kinds_of(
        tmp_path,
        _gemma4(attention_k_eq_v=True, num_global_key_value_heads=2, num_kv_shared_layers=2),
    )
    sliding = LayerKind(window=512, num_kv_heads=4, head_dim=256)
    full = LayerKind(num_kv_heads=2, head_dim=512)
    assert kinds == (
        *(sliding, sliding, full, sliding),
        dataclasses.replace(sliding, source=3),
        dataclasses.replace(full, source=2),
    )


def test_layers_that_read_a_type_that_no_layer_stores_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="num_kv_shared_layers is 4 of 6 layers"):
        _kinds_of(tmp_path, _gemma4(num_kv_shared_layers=4))


def test_the_classes_that_need_no_proof_on_a_gpu_are_those_of_the_zoo(zoo):
    built = {ModelSpec.from_checkpoint(zoo(name)).architecture for name in model_zoo.NAMES}
    assert built == TESTED_FOR_GPU


@pytest.mark.parametrize("eos_token", ["<end>", {"content": "<end>"}])
@pytest.mark.parametrize(
    "tokenizer",
    [
        dict(added_tokens=[{"id": 9, "content": "<end>"}, {"id": 8, "content": "<x>"}]),
        dict(model={"vocab": {"<end>": 9, "<x>": 8}}),
    ],
)
def test_any_of_the_checkpoints_ends_ends_a_sequence(checkpoint, eos_token, tokenizer):
    """A chat fine-tune: config.json has the base model's id, the turn ends with the tokenizer's."""
    checkpoint("generation_config.json", eos_token_id=[5, 6, 2])
    checkpoint("tokenizer_config.json", eos_token=eos_token)
    checkpoint("tokenizer.json", **tokenizer)
    assert ModelSpec.from_checkpoint(checkpoint(eos_token_id=0)).eos_token_ids == (5, 6, 2, 0, 9)
    checkpoint("generation_config.json", eos_token_id=None)
    assert ModelSpec.from_checkpoint(checkpoint(eos_token_id=None)).eos_token_ids == (9,)


def test_a_tokenizers_end_that_the_model_cannot_produce_is_left_out(checkpoint):
    checkpoint("tokenizer_config.json", eos_token="<end>")
    path = checkpoint("tokenizer.json", added_tokens=[{"id": 999, "content": "<end>"}])
    assert ModelSpec.from_checkpoint(path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "rope, tokens",
    [
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), 2048),
        (dict(rope_scaling={"type": "yarn", "factor": 4.0}), 2048),  # older
        # Qwen's published recipe, and gpt-oss' form, which states the scaled length too
        (
            dict(
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            ),
            2048,
        ),
        (
            dict(
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 16,
                }
            ),
            512,
        ),
        (dict(rope_scaling={"rope_type": "linear", "factor": 2.0}), 1024),
        (
            dict(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            ),
            512,
        ),
        ({}, 512),
    ],
)
def test_rope_scaling_lengthens_the_context(checkpoint, rope, tokens):
    path = checkpoint(rope_parameters=None, rope_theta=10000.0, **rope)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    assert ModelSpec.from_checkpoint(path).max_position_embeddings == tokens


@pytest.mark.parametrize(
    "entries, message",
    [
        (
            dict(architectures=["FooForCausalLM"], auto_map={"AutoModel": "x.Y"}),
            "FooForCausalLM.*auto_map.*never run",
        ),
        # The class is chosen by model_type: another one would run under this architecture's name.
        (
            dict(model_type="lightglue", trust_remote_code=True),
            "LlamaForCausalLM.*'lightglue' is None",
        ),
        (dict(model_type="qwen2"), "LlamaForCausalLM.*'qwen2' is Qwen2ForCausalLM"),
        (dict(model_type="unheard_of"), "model_type is 'unheard_of', which the installed transf"),
        (dict(model_type=None), "model_type is None"),
        (dict(architectures="LlamaForCausalLM"), "architectures is LlamaForCausalLM"),
        (dict(architectures=["BloomForCausalLM"]), "BloomForCausalLM"),
        (dict(architectures=[]), "architectures"),
        (dict(quantization_config={"quant_method": "awq"}), "quantization_config.*awq"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (dict(is_causal=False), "is_causal is false"),
        (
            dict(rope_parameters={"rope_type": "unheard_of", "rope_theta": 1e4, "factor": 2.0}),
            "rope type 'unheard_of'",
        ),
        (dict(num_key_value_heads=3), "num_attention_heads 4 .* num_key_value_heads 3"),
        (dict(dtype="float64"), "float64"),
        (
            dict(eos_token_id=173),
            r"/config\.json: eos_token_id must be in \[0, vocab_size 173\), is 173",
        ),
        (dict(eos_token_id=[2, "x"]), r"Field 'eos_token_id' with value .*'x'"),
        (dict(num_hidden_layers=0), "num_layers"),
        (dict(num_hidden_layers="two"), "num_hidden_layers"),
    ],
)
def test_what_is_not_served_is_refused_by_name(checkpoint, entries, message):
    checkpoint("generation_config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_checkpoint(checkpoint(**entries))


@pytest.mark.parametrize(
    "file, entries, message",
    [
        ("generation_config.json", dict(eos_token_id=[2, 999]), "eos_token_id must be .* is 999"),
        ("generation_config.json", dict(eos_token_id={"a": 1}), "eos_token_id must be .* is {'a'"),
        ("generation_config.json", dict(eos_token_id=True), "eos_token_id must be .* is True"),
        ("tokenizer.json", dict(added_tokens={}, model=[1]), "added_tokens must be .* list"),
        ("tokenizer.json", dict(added_tokens=[{"content": "<e>", "id": "9"}]), "'<e>' .* is '9'"),
        ("tokenizer.json", dict(added_tokens=[{"content": "<e>"}]), "'<e>' .* is None"),
        ("tokenizer.json", dict(model={"vocab": {"<e>": -1}}), "'<e>' .* is -1"),
    ],
)
def test_a_bad_value_in_another_file_is_refused_by_file_and_field(
    checkpoint, file, entries, message
):
    checkpoint("tokenizer_config.json", eos_token="<e>")
    with pytest.raises(CheckpointError, match=f"{file}: .*{message}"):
        ModelSpec.from_checkpoint(checkpoint(file, **entries))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_formats_are_served_or_refused_as_they_are_declared(checkpoint, form):
    path = checkpoint(**({"quantization_config": form.example} if form.example else {}))
    if form.is_served:
        ModelSpec.from_checkpoint(path)
        return
    with pytest.raises(
        CheckpointError, match=r"config\.json: quantization_config: .* (served|must)"
    ):
        ModelSpec.from_checkpoint(path)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        ModelSpec.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must be a JSON object, is list"):
        ModelSpec.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        ModelSpec.from_checkpoint(tmp_path)
