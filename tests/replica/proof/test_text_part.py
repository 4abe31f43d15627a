"""The text part of a class that takes images: loaded from transformers' own checkpoints, without the rest."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from families import default_entries, write_config

from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.checkpoint.checkpoint import weight_files
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec, build_config
from quire.replica.checkpoint.weight_bytes import weight_bytes
from quire.replica.model import loader
from quire.replica.model.text_part import text_tensor_names
from quire.replica.proof.model_proof import find_difference, tiny_entries

start = functools.partial(Engine, prove=False, num_threads=1)
PROMPTS = [list(range(3, 8)), [5 + 7 * i % 80 for i in range(70)]]
TEXT = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)


def llava():
    vision = dict(
        model_type="clip_vision_model", num_hidden_layers=3, image_size=8, patch_size=4, **VISION
    )
    text = dict(model_type="llama", **TEXT)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=95)


def qwen2_vl():
    """Tied, with a rope of three axes."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
    vision = dict(depth=2, embed_dim=32, num_heads=2, hidden_size=64)
    text = dict(rope_parameters=rope, tie_word_embeddings=True, **TEXT)
    tokens = dict(image_token_id=95, video_token_id=94)
    return transformers.Qwen2VLConfig(
        vision_config=vision, text_config=text, tie_word_embeddings=True, **tokens
    )


@pytest.fixture(scope="module", params=[llava, qwen2_vl], ids=lambda make: make.__name__)
def checkpoint(request, tmp_path_factory):
    """A folder with several files of weights, and transformers' model."""
    folder = tmp_path_factory.mktemp(request.param.__name__)
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(request.param()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder, model


def test_the_engine_generates_what_the_class_generates(checkpoint):
    folder, model = checkpoint
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with start(model=str(folder), device="cpu", dtype="float32", num_blocks=60) as engine:
        outputs = [output.token_ids for output in engine.generate(PROMPTS, params)]
        embedded = engine.generate(PROMPTS, SamplingParams(pooling="mean"))
    model.generation_config.eos_token_id = None
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert tokens == made[0, len(prompt) :].tolist()
    for prompt, output in zip(PROMPTS, embedded, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
        found = torch.from_numpy(output.embedding)
        torch.testing.assert_close(found, states[0].mean(0), rtol=1e-3, atol=1e-4)


def test_tensors_for_images_are_neither_read_nor_counted(checkpoint, monkeypatch):
    folder, _ = checkpoint
    spec = ModelSpec.from_checkpoint(folder)
    read = []

    def recorded(stored, *args, **options):
        stored = list(stored)
        read.extend(tensor.name for tensor in stored)
        return read_tensors(stored, *args, **options)

    read_tensors = loader.read_tensors
    monkeypatch.setattr(loader, "read_tensors", recorded)
    loaded = loader.load_model(spec, "cpu", "float32")
    tensors = dict(loaded.named_parameters())
    assert read and set(read) == tensors.keys()
    assert not [name for name in tensors if "vision" in name or "visual" in name]
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    names = text_tensor_names(spec)
    assert weight_bytes(folder, "float32", "auto", names) == total
    assert weight_bytes(folder, "float32", "auto") > total
    stored = set().union(*(loader.list_tensors([file]) for file in weight_files(folder)))
    assert names < stored


def test_a_missing_tensor_of_the_text_is_named(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = checkpoint
    tensors = {k: v for file in weight_files(folder) for k, v in load_file(file).items()}
    gone = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"1 missing tensors.*layers\.1\.mlp\.up_proj"):
        loader.load_model(ModelSpec.from_checkpoint(tmp_path), "cpu", "float32")


def changed(folder, **text):
    entries = json.loads(json.dumps(llava().to_dict(), default=str))
    entries |= {"architectures": ["LlavaForConditionalGeneration"]}
    entries["text_config"] |= text
    return write_config(folder / "changed", entries)


def test_entries_of_nested_configurations_are_left_out_as_others_are(tmp_path):
    evil = {
        "auto_map": {"AutoModel": "modeling_x.Model"},
        "trust_remote_code": True,
        "_attn_implementation": "evil/kernel",
        "experts_implementation": "sonicmoe",
        "use_kernels": True,
        "text_config": {"model_type": "bert"},
    }
    folder = changed(tmp_path, **evil)
    entries = json.loads((folder / "config.json").read_text())
    entries["vision_config"] = {"model_type": "timm_wrapper", "backbone": "evil/repo"}
    (folder / "config.json").write_text(json.dumps(entries))
    config = build_config(ModelSpec.from_checkpoint(folder).raw_config)
    built = config.text_config.to_dict()
    assert not {name for name in evil if built.get(name) == evil[name]}
    assert config.vision_config.model_type == "clip_vision_model"


@pytest.mark.parametrize(
    "text, message",
    [
        ({"model_type": "clip_vision_model"}, "'clip_vision_model' is not one of a language model"),
        ({"model_type": "gemma3"}, "'gemma3' is not one of a language model"),
        ({"model_type": ["llama"]}, "is not one of a language model"),
        ({"is_causal": False}, "is_causal is false: only causal attention"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    ],
)
def test_nested_entries_are_refused_by_name(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_checkpoint(changed(tmp_path, **text))


def test_modules_for_images_that_cannot_be_made_are_left_out(tmp_path):
    """The class's own defaults for images do not fit together: 1152 elements in 14 heads."""
    entries = default_entries("aya_vision")
    with pytest.raises(ValueError, match="embed_dim must be divisible by num_heads"):
        transformers.AutoModelForImageTextToText.from_config(transformers.AyaVisionConfig())
    spec = ModelSpec.from_checkpoint(write_config(tmp_path / "config", entries))
    assert find_difference(tiny_entries(spec), "cpu", start) is None


def test_widths_on_which_text_and_images_must_agree_are_those_of_the_checkpoint(tmp_path):
    entries = default_entries("granite_docling")
    entries["text_config"]["hidden_size"] = entries["vision_config"]["out_hidden_size"] = 512
    entries["vision_config"]["num_channels"] = 77
    spec = ModelSpec.from_checkpoint(write_config(tmp_path / "config", entries))
    vision = build_config(spec.raw_config).vision_config
    assert (vision.out_hidden_size, vision.num_channels) == (512, 3)
    tiny = build_config(tiny_entries(spec))
    assert tiny.vision_config.out_hidden_size == tiny.text_config.hidden_size < 512


def test_a_text_configuration_that_only_its_wrapper_names_is_one_of_a_language_model(tmp_path):
    spec = ModelSpec.from_checkpoint(
        write_config(tmp_path / "own", default_entries("paddleocr_vl"))
    )
    assert spec.architecture == "PaddleOCRVLForConditionalGeneration"
    text = transformers.Mistral4Config(eos_token_id=2, pad_token_id=0).to_dict()
    entries = default_entries("mistral3") | {"text_config": json.loads(json.dumps(text))}
    spec = ModelSpec.from_checkpoint(write_config(tmp_path / "other", entries))
    assert find_difference(tiny_entries(spec), "cpu", start) is None


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_the_text_part_is_proven_against_the_wrapper(tmp_path, model_type):
    spec = ModelSpec.from_checkpoint(
        write_config(tmp_path / model_type, default_entries(model_type))
    )
    assert find_difference(tiny_entries(spec), "cpu", start) is None


def test_chunks_and_scales_that_depend_on_the_position_are_exact(tmp_path, monkeypatch):
    """Llama 4: chunked attention, layers without rotation whose queries are scaled by position, experts."""
    spec = ModelSpec.from_checkpoint(write_config(tmp_path / "config", default_entries("llama4")))
    entries = tiny_entries(spec)
    assert {kind.chunk for kind in spec.kinds} == {8192, None}
    assert find_difference(entries, "cpu", start) is None
    # The proof sees a position that is off.
    monkeypatch.setattr(loader, "pass_positions", lambda model: None)
    assert "log-probability" in (find_difference(entries, "cpu", start) or "")
