"""Checkpoints in MXFP4, FP8 and int8: each weight as its format defines it, each output as the decoded model's."""

from __future__ import annotations

import encoded_checkpoints
import fp8_checkpoints
import model_zoo
import numpy as np
import pytest
import torch
import transformers
from encoded_checkpoints import fp8_blocks, mxfp4, per_channel
from safetensors.torch import load_file, save_file
from step_driver import Driver, make_runner
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear
from quire.kernels.rows import fp8_linear, int8_linear
from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.checkpoint.weight_bytes import loading_bytes, weight_bytes
from quire.replica.config import EngineArgs, SizingError
from quire.replica.engine import Engine
from quire.replica.model.fusion.cpu_fused_parts import PackedProduct
from quire.replica.model.layers.fp8 import Fp8Linear, Int8Linear
from quire.replica.model.loader import load_model
from quire.replica.startup.sizing import resolve

E4M3 = torch.float8_e4m3fn
FLOAT = encoded_checkpoints.COMPRESSED
# A model of the zoo, its quantization_config, and the writer of its weights.
FORMATS = {
    "mxfp4": ("gpt_oss", encoded_checkpoints.MXFP4_CONFIG, mxfp4),
    "fp8 blocks": ("qwen3", encoded_checkpoints.BLOCK_CONFIG, fp8_blocks("_scale_inv")),
    "fp8 blocks, experts": (
        "qwen3_moe",
        encoded_checkpoints.BLOCK_CONFIG,
        fp8_blocks("_scale_inv"),
    ),
    "fp8 channels, experts": ("qwen3_moe", FLOAT, per_channel(E4M3)),
    "fp8 whole": ("llama", fp8_checkpoints.FP8, per_channel(E4M3, whole=True)),
    "compressed fp8 blocks": (
        "qwen3",
        encoded_checkpoints.FLOAT_BLOCK_CONFIG,
        fp8_blocks("_scale"),
    ),
    "compressed fp8 weights": ("qwen2", encoded_checkpoints.WEIGHT_ONLY_CONFIG, per_channel(E4M3)),
    "int8": ("qwen2", encoded_checkpoints.INT8_CONFIG, per_channel(torch.int8)),
    "int8, experts": ("qwen3_moe", encoded_checkpoints.INT8_CONFIG, per_channel(torch.int8)),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """``written(format)``: the folders of the encoded checkpoint and of the decoded one."""
    root = tmp_path_factory.mktemp("encoded")
    done = {}

    def get(name):
        if name not in done:
            model, config, encode = FORMATS[name]
            source = model_zoo.build(model, root / f"{name} source", intermediate_size=96)
            is_sharded = name in ("mxfp4", "fp8 blocks, experts")
            done[name] = encoded_checkpoints.write(
                source, root / name, config, encode, sharded=is_sharded
            )
        return done[name]

    return get


def load(path, dtype="float32", weights="auto"):
    return load_model(ModelSpec.from_checkpoint(path), "cpu", dtype, weights)


def logits_of(runner) -> np.ndarray:
    driver = Driver(runner)
    rng = np.random.default_rng(3)
    sequences = [driver.add(rng.integers(3, 173, n).tolist(), 1) for n in (20, 1, 7, 30)]
    driver.generate(sequences, 1, chunk=10)
    return np.stack([row for s in sequences for row in s.logits])


def error(found, expected):
    return np.sqrt(np.square(found - expected).mean()) / expected.std()


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_decoded_to_what_their_format_means(written, monkeypatch, name):
    monkeypatch.setattr("quire.replica.model.stored.encoded_weights._ROWS", 10)
    encoded, plain = written(name)
    for dtype in ("float32", "bfloat16") if "int8" not in name else ("float32",):
        found, expected = load(encoded, dtype).state_dict(), load(plain, dtype).state_dict()
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key
        total = sum(tensor.nbytes for tensor in found.values())
        assert weight_bytes(encoded, dtype, "auto") == total
        codes = max(
            tensor.nbytes
            for file in encoded.glob("*.safetensors")
            for tensor in load_file(file).values()
            if tensor.element_size() == 1
        )
        assert loading_bytes(encoded, dtype, "auto") == total + codes


def test_mxfp4_is_decoded_as_transformers_decodes_it(written):
    encoded, _ = written("mxfp4")
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        encoded,
        dtype=torch.bfloat16,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).state_dict()
    found = load(encoded, "bfloat16").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_fp8_blocks_are_decoded_as_transformers_decodes_them(tmp_path):
    """Its decoder takes blocks that divide the weight only."""
    block = (32, 16)
    config = encoded_checkpoints.BLOCK_CONFIG | dict(weight_block_size=list(block))
    source = model_zoo.build("qwen3", tmp_path / "source", intermediate_size=96)
    encoded, _ = encoded_checkpoints.write(
        source, tmp_path, config, fp8_blocks("_scale_inv", block)
    )
    stored = load_file(encoded / "model.safetensors")
    found = load(encoded, "bfloat16").state_dict()
    decoder = Fp8Dequantize(None)
    names = [name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")]
    assert len(names) == 3 * 7
    for name in names:
        scales = stored[f"{name}_scale_inv"]
        expected = decoder._dequantize_one(stored[name], scales, torch.bfloat16)
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("name", ["mxfp4", "fp8 blocks, experts"])
def test_an_engine_gives_the_tokens_of_the_decoded_model(written, tmp_path, monkeypatch, name):
    """From disk in two shards, with the proof at load."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    encoded, plain = written(name)
    prompts = [np.random.default_rng(n).integers(3, 173, n).tolist() for n in (5, 70)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    with Engine(
        model=str(encoded), device="cpu", dtype="float32", num_blocks=64, num_threads=1
    ) as engine:
        outputs = engine.generate(prompts, params)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = torch.tensor([prompt + output.token_ids])
        with torch.inference_mode():
            expected = torch.log_softmax(reference(tokens).logits[0].double(), -1)
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == output.token_ids
        found = [entry.logprob for entry in output.logprobs]
        right = expected[len(prompt) - 1 : -1].amax(-1).numpy()
        assert np.abs(np.array(found) - right).max() < 1e-3


# ----------------------------------------------------------------------------------------------------------
# Formats that keep their codes
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    fp8_linear.missing("cpu") is not None, reason=f"no FP8: {fp8_linear.missing('cpu')}"
)
def test_fp8_layers_keep_codes_and_experts_do_not(written):
    encoded, plain = written("fp8 channels, experts")
    spec = ModelSpec.from_checkpoint(encoded)
    resolved = resolve(EngineArgs(device="cpu", model=str(encoded)), spec)
    assert (resolved.weights, resolved.dtype) == ("fp8", "bfloat16")
    model, decoded = load(encoded, "bfloat16", "fp8"), load(plain, "bfloat16")
    layers = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    assert len(layers) == 3 * 4 + 3  # attention, and the one layer without experts
    for key, stack in model.named_parameters():
        if ".experts." in key:
            assert torch.equal(stack, decoded.get_parameter(key)), key
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(encoded, "bfloat16", "fp8") == total
    # Other dtypes have no product with codes.
    resolved = resolve(EngineArgs(device="cpu", model=str(encoded), dtype="float32"), spec)
    assert (resolved.weights, resolved.dtype) == ("auto", "float32")


@pytest.mark.parametrize(
    "name, weights, message",
    [
        ("fp8 blocks", "fp8", "weights is 'fp8', and .* is stored in FP8 .fp8., which is not conv"),
        ("int8", "fp8", "weights is 'fp8', and .* is stored in INT8 .compressed-tensors."),
    ],
)
def test_formats_are_not_converted_into_each_other(written, name, weights, message):
    path = written(name)[0]
    with pytest.raises(SizingError, match=message):
        args = EngineArgs(device="cpu", model=str(path), weights=weights)
        resolve(args, ModelSpec.from_checkpoint(path))


@pytest.mark.skipif(not has_native(), reason="installed without a C compiler")
def test_int8_layers_keep_their_codes(written):
    """Fused, activations stay bfloat16, so the result is the decoded model's but for the rounding of its weights.

    Unfused, activations are int8 too: 1 part in 254 of the largest number of a row, 0.8 % of a product."""
    encoded, plain = written("int8")
    bf16 = dict(dtype="bfloat16", deterministic=False)
    exact = logits_of(make_runner(plain))
    decoded = error(logits_of(make_runner(plain, **bf16)), exact)
    runner = make_runner(encoded, **bf16)
    coded = [m for m in runner.model.modules() if isinstance(m, PackedProduct)]
    assert sum(m.packed.scales is not None for m in coded) == 3 * 4  # all but the output head
    model = load(encoded, "bfloat16")
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == 3 * 7
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(encoded, "bfloat16", "auto") == total
    fused = error(logits_of(runner), exact)
    unfused = error(logits_of(make_runner(encoded, **bf16, fuse="off")), exact)
    print(f"decoded {decoded:.4f}, fused {fused:.4f}, unfused {unfused:.4f}")
    assert fused < 1.2 * decoded
    assert decoded < unfused < 0.1


def test_a_product_in_int8_is_off_by_the_rounding_of_its_input():
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (48, 64), generator=random).to(torch.int8)
    scales = torch.rand(48, 1, generator=random) + 0.1
    bias = torch.randn(48, generator=random).bfloat16()
    for rows in (1, 16, 50):
        x = torch.randn(rows, 64, generator=random).bfloat16()
        x[0] = 0.0
        x_codes, x_scales = int8_linear.quantise_rows(x)
        rounded = x_codes.double() * x_scales
        assert ((rounded - x.double()).abs() <= x_scales * 0.5001).all()
        found = int8_linear.scaled_product(x_codes, x_scales, codes, scales, bias)
        expected = rounded @ (codes.double() * scales).t() + bias.double()
        assert torch.allclose(found.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.skipif(not has_native(), reason="installed without a C compiler")
def test_packed_codes_are_the_codes():
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (70, 32), generator=random).to(torch.int8)
    scales = torch.rand(70, generator=random) + 0.1
    packed = PackedWeight.from_codes(codes, scales)
    x = torch.randn(3, 32, generator=random).bfloat16()
    # The product rounds a code times its scale to bfloat16.
    expected = x.double() @ (codes.float() * scales[:, None]).bfloat16().double().t()
    assert torch.allclose(packed_linear(x, packed).double(), expected, rtol=2**-8, atol=1e-3)
    with pytest.raises(ValueError, match="codes: must be int8 with a multiple of 4"):
        PackedWeight.from_codes(codes[:, :30], scales)


# ----------------------------------------------------------------------------------------------------------
# Damaged checkpoints
# ----------------------------------------------------------------------------------------------------------

DOWN = "model.layers.1.mlp.down_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("mxfp4", lambda t: t.update({BLOCKS: t[BLOCKS][..., :8]}), "must be uint8 .experts, n, k / 32, 16"),
        ("mxfp4", lambda t: t.pop(SCALES), "scales of .*down_proj_blocks' must be .* are missing"),
        ("mxfp4", lambda t: t.update({SCALES: t[SCALES].float()}), "are torch.float32"),
        ("mxfp4", lambda t: t[SCALES].fill_(255), "down_proj_scales' has 255, must be at most 254"),
        ("mxfp4", lambda t: t.pop(BLOCKS), "tensors are not those of GptOssForCausalLM: surplus .*_scales"),
        ("fp8 blocks", lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(3, 4)}),
         r"down_proj.weight_scale_inv' must be \[4, 4\] or .* a weight \[64, 96\], is \[3, 4\]"),
        ("fp8 blocks", lambda t: t[f"{DOWN}_scale_inv"].fill_(-1), "must be finite and positive, is"),
        ("fp8 blocks", lambda t: t.pop(f"{DOWN}_scale_inv"), "down_proj.weight' is stored in 8 bits"),
        ("fp8 blocks", lambda t: t[DOWN].view(torch.uint8)[3].fill_(0x7F), "1.mlp.down_proj.weight holds NaN"),
        ("int8", lambda t: t.pop(f"{DOWN}_scale"), "down_proj.weight' is stored in 8 bits"),
        ("int8", lambda t: t["model.norm.weight"][5].fill_(float("nan")), "model.norm.weight holds NaN, so every"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_refused_by_name(written, tmp_path, name, change, message):
    tensors = {}
    for file in written(name)[0].glob("*.safetensors"):
        tensors.update(load_file(file))
    change(tensors)
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((written(name)[0] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_numbers_that_float16_does_not_hold_are_refused(written, tmp_path):
    tensors = {}
    for file in written("mxfp4")[0].glob("*.safetensors"):
        tensors.update(load_file(file))
    tensors[SCALES][0, 0, 0] = 145
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((written("mxfp4")[0] / "config.json").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"has 145, numbers up to 1.57286e.06 that torch\.float16"
    ):
        load(tmp_path, "float16")
    model = load(tmp_path, "bfloat16")
    assert model.model.layers[1].mlp.experts.down_proj.isfinite().all()


def test_a_nan_is_named_when_an_engine_starts(zoo, tmp_path):
    tensors = load_file(zoo("llama") / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((zoo("llama") / "config.json").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"layers.2.self_attn.q_proj.weight holds NaN.*damaged"
    ):
        Engine(model=str(tmp_path), device="cpu", num_blocks=16, num_threads=1)
