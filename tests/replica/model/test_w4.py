"""Weights of 4 bits: every format gives the dequantised weight exactly, and an engine its log-probabilities."""

from __future__ import annotations

import model_zoo
import numpy as np
import pytest
import torch
import transformers
import w4_checkpoints
from safetensors.torch import load_file, save_file
from step_driver import Driver, make_runner
from w4_checkpoints import config_of

from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.rows import w4_linear
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.checkpoint.weight_bytes import weight_bytes
from quire.replica.config import EngineArgs, SizingError
from quire.replica.engine import Engine
from quire.replica.model.deterministic.cpu_tiled_linear import make_deterministic
from quire.replica.model.deterministic.gpu_fixed_products import fix_products
from quire.replica.model.fusion.fused_parts import Product
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.loader import load_model
from quire.replica.startup.sizing import resolve

IDS = torch.arange(3, 60)[None] % 173
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint whose inputs are multiples of 128."""
    root = tmp_path_factory.mktemp("w4")
    return model_zoo.build("qwen3", root, hidden_size=128, intermediate_size=256, head_dim=32)


def load(path, dtype="float32"):
    return load_model(ModelSpec.from_checkpoint(path), "cpu", dtype)


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, W4Linear)}


def log_probs(logits):
    return torch.as_tensor(logits).float().log_softmax(-1)


def transformers_log_probs(path, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        return log_probs(model(IDS).logits[0])


def runner_log_probs(path, **changes):
    driver = Driver(make_runner(path, deterministic=False, **changes))
    sequence = driver.add(IDS[0].tolist(), 1)
    driver.generate([sequence], 1, IDS.shape[1])
    return log_probs(np.stack(sequence.logits))[-1]


CASES = [
    ("gptq", 32, True, {}),
    ("gptq", 64, False, {}),
    ("gptq", 128, False, dict(checkpoint_format="gptq_v2")),
    ("gptq", -1, True, {}),
    ("gptq", 32, False, dict(desc_act=True)),
    ("awq", 32, False, {}),
    ("awq", 128, False, {}),
    ("compressed-tensors", 32, True, {}),
    ("compressed-tensors", 128, False, {}),
    ("compressed-tensors", -1, True, {}),
]


def written(source, tmp_path, method, size, symmetric=True, **changes):
    config = config_of(method, size, symmetric, **changes)
    is_sorted = not changes.get("desc_act")
    return w4_checkpoints.write(
        source, tmp_path / "x", config, size=size, symmetric=symmetric, sorted_inputs=is_sorted
    )


@pytest.mark.parametrize("method, size, symmetric, changes", CASES)
def test_a_layer_is_the_dequantised_one_and_an_engine_has_its_log_probabilities(
    source, tmp_path, method, size, symmetric, changes
):
    path, plain = written(source, tmp_path, method, size, symmetric, **changes)
    spec = ModelSpec.from_checkpoint(path)
    resolved = resolve(EngineArgs(device="cpu", model=str(path)), spec)
    assert (resolved.weights, resolved.dtype) == ("auto", "bfloat16")
    assert not resolved.deterministic
    model, weights = load(path), load_file(plain / "model.safetensors")
    layers = layers_of(model)
    assert len(layers) == 7 * spec.num_layers
    for name, layer in layers.items():
        assert (layer.order is None) == (not changes.get("desc_act"))
        expected = layer.arranged(weights[f"{name}.weight"])
        found = w4_linear.dequantise(layer.words, layer.scales, layer.zeros)
        assert torch.equal(found, expected), name
    loaded = sum(p.nbytes for p in model.parameters())
    counted = weight_bytes(path, "float32", "auto")
    # An upper bound, which has 6 bytes for each group and float32 inputs' orders.
    assert loaded <= counted <= 1.3 * loaded
    expected = transformers_log_probs(plain)[-1]
    # In float32 the layers dequantise; in bfloat16 the compiled library multiplies.
    assert (runner_log_probs(path, dtype="float32") - expected).abs().max() < 1e-4
    rounding = (transformers_log_probs(plain, torch.bfloat16)[-1] - expected).abs().max()
    assert (runner_log_probs(path, dtype="bfloat16") - expected).abs().max() < 2 * rounding


@pytest.mark.skipif(not has_native(), reason="installed without a C compiler")
@pytest.mark.parametrize("desc_act, chains", [(False, [3]), (True, [])])
def test_an_engine_fuses_layers_in_four_bits(source, tmp_path, desc_act, chains):
    path, _ = written(source, tmp_path, "gptq", 32, desc_act=desc_act)
    with Engine(model=str(path), device="cpu", num_blocks=16, num_threads=1) as engine:
        assert engine.hello("r").dtype == "bfloat16"
        fused = engine.snapshot()["fused"]
    assert fused["fused"]["layers"] == 3 and not fused["dropped"]
    assert (len(fused["chains"]) == 1 and fused["chains"] == chains) if chains else True


def test_options_that_four_bits_do_not_allow_are_refused(source, tmp_path):
    path, _ = written(source, tmp_path, "awq", 32, False)
    spec = ModelSpec.from_checkpoint(path)
    for weights in ("int8", "fp8"):
        with pytest.raises(SizingError, match=f"weights is '{weights}', .* in 4 bits .awq., which"):
            resolve(EngineArgs(device="cpu", model=str(path), weights=weights), spec)
    with pytest.raises(SizingError, match=r"deterministic is true, .* in 4 bits .awq., whose prod"):
        resolve(EngineArgs(device="cpu", model=str(path), deterministic=True), spec)
    for replace in (make_deterministic, fix_products):
        with pytest.raises(ValueError, match="q_proj is in 4 bits"):
            replace(load(path))


def test_layers_of_different_orders_are_not_merged(source, tmp_path):
    path, _ = written(source, tmp_path, "gptq", 32, desc_act=True)
    q, k = (layers_of(load(path))[f"model.layers.0.self_attn.{n}_proj"] for n in "qk")
    x = torch.randn(3, q.in_features)
    assert torch.equal(Product([q, k])(x), torch.cat([q(x), k(x)], 1))
    k.order.data = k.order.flip(0)
    with pytest.raises(ValueError, match="inputs in different orders"):
        Product([q, k])
    with pytest.raises(ValueError, match="some of the parts are in 4 bits"):
        Product([q, torch.nn.Linear(q.in_features, 8)])


def test_a_stored_bias_of_a_layer_without_one_is_added(source, tmp_path):
    path, _ = written(source, tmp_path, "gptq", 32)
    spoil(path, lambda t: t.update({f"{UP}.bias": torch.arange(256.0)}))
    layer = layers_of(load(path))[UP]
    x = torch.zeros(1, 128)
    assert torch.equal(layer(x)[0], torch.arange(256.0))


def spoil(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "method, change, message",
    [
        ("gptq", lambda t: t.pop(f"{UP}.scales"), f"{UP}.qweight has no tensor {UP}.scales"),
        ("gptq", lambda t: t.pop(f"{UP}.qzeros"), f"{UP}.qweight has no tensor {UP}.qzeros"),
        ("gptq", lambda t: t.update({f"{UP}.scales": torch.ones(3, 256).half()}),
         f"{UP}.scales must have groups of 32 of 128 input features, has 3 groups"),
        ("gptq", lambda t: t.update({f"{UP}.qweight": torch.ones(15, 256).int()}),
         rf"{UP}.qweight must be \[16, 256\], is \[15, 256\]"),
        ("awq", lambda t: t.update({f"{UP}.qzeros": torch.ones(4, 31).int()}),
         rf"{UP}.qzeros must be \[4, 32\], is \[4, 31\]"),
        ("awq", lambda t: t.update({f"{UP}.qweight": torch.ones(128, 32)}),
         f"{UP}.qweight must be torch.int32, is torch.float32"),
        ("awq", lambda t: t[f"{UP}.scales"].fill_(float("nan")), f"{UP}.scales must be finite"),
        ("gptq", lambda t: t[f"{UP}.g_idx"].fill_(4), r"g_idx must be in \[0, 4\), is between 4 and 4"),
        ("gptq", lambda t: t[f"{UP}.g_idx"].fill_(1), "g_idx must have 32 input .* has 0 to 128"),
        ("compressed-tensors", lambda t: t.pop(f"{UP}.weight_packed"),
         f"4 bits, or divided among ranks, and its tensors .* missing {UP}.weight"),
        ("gptq", lambda t: t.update({"model.x.experts.0.up_proj.qweight": torch.ones(1, 1).int()}),
         "experts.0.up_proj.qweight' is stored in 4 bits; served are linear .* without the experts"),
        ("gptq", lambda t: t.update({"lm_head.qweight": torch.ones(1, 1).int()}),
         "'lm_head.qweight' is stored in 4 bits; served are linear layers, without the output head"),
    ],
)  # fmt: skip
def test_a_stored_checkpoint_that_is_not_whole_is_refused(
    source, tmp_path, method, change, message
):
    path, _ = written(source, tmp_path, method, 32)
    spoil(path, change)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_configuration_without_tensors_in_four_bits_is_refused(source, tmp_path):
    _, plain = written(source, tmp_path, "gptq", 32)
    w4_checkpoints.change_config(plain, quantization_config=config_of("awq", 32))
    with pytest.raises(CheckpointError, match=r"is 'awq', but no tensor is named .*qweight"):
        load(plain)


COMPRESSED = config_of("compressed-tensors", 32)


def group(**changes):
    only = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | dict(config_groups=dict(g=only | changes))


def group_weights(**changes):
    return group(weights=COMPRESSED["config_groups"]["group_0"]["weights"] | changes)


@pytest.mark.parametrize(
    "config, message",
    [
        ("gptq", "must be a JSON object, is 'gptq'"),
        (["awq"], "must be a JSON object"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True),
         "'bitsandbytes' is not served; served are .* awq, mxfp4"),
        (dict(quant_method="hqq"), "'hqq' is not served"),
        (config_of("gptq", 32, bits=3), "bits must be one of 4, is 3"),
        (config_of("gptq", 32, bits=True), "bits must be one of 4, is True"),
        (config_of("gptq", 48), "group_size must be one of 32, 64, 128, -1, is 48"),
        (config_of("gptq", 32, checkpoint_format="marlin"), "checkpoint_format must be .* 'marlin'"),
        (config_of("gptq", 32, lm_head=True), "lm_head must be one of False, is True"),
        (config_of("gptq", 32, dynamic={"+:.*up": dict(bits=8)}), r"dynamic gives '\+:\.\*up' entries"),
        (config_of("gptq", 32, dynamic=["x"]), "dynamic gives 'x'"),
        (config_of("awq", 32, bits="4"), "bits must be one of 4, is '4'"),
        (config_of("awq", 32, version="gemv"), "version must be one of gemm, is 'gemv'"),
        (config_of("awq", 32, zero_point=False), "zero_point must be one of True, is False"),
        (group_weights(num_bits=8), "config_groups.g.weights.num_bits must be one of 4, is 8"),
        (group_weights(type="float"), "weights.type must be one of int, is 'float'"),
        (group_weights(group_size=48), "group_size must be one of 32, 64, 128, is 48"),
        (group_weights(strategy="tensor"), "strategy must be one of group, channel, is 'tensor'"),
        (group(input_activations=dict(num_bits=8)), "config_groups.g.input_activations must be null"),
        (group(weights=None), "config_groups.g.weights must be an object, is None"),
        (COMPRESSED | dict(config_groups={}), "config_groups must be an object with entries, is {}"),
        (COMPRESSED | dict(kv_cache_scheme=dict(num_bits=8)), "kv_cache_scheme is not served"),
        (COMPRESSED | dict(sparsity_config=dict(format="2:4")), "sparsity_config is not served"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_served_are_refused(source, tmp_path, config, message):
    w4_checkpoints.copy_json(source, tmp_path / "x", quantization_config=config)
    with pytest.raises(CheckpointError, match=f"quantization_config:? .*{message}"):
        ModelSpec.from_checkpoint(tmp_path / "x")
