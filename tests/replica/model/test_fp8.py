"""FP8 weights: exactly the codes that were asked for, in every layer, from every kind of checkpoint; their error."""

from __future__ import annotations

import copy

import fp8_checkpoints
import model_zoo
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_driver import Driver, make_runner
from torch import nn

from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.rows import fp8_linear
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.checkpoint.weight_bytes import loading_bytes, weight_bytes
from quire.replica.config import EngineArgs, SizingError
from quire.replica.engine import Engine
from quire.replica.model.fusion.cpu_fused_parts import PackedEmbedding, PackedProduct
from quire.replica.model.fusion.fused_parts import FusedMLP, Product
from quire.replica.model.layers.fp8 import Fp8Linear, join_rows
from quire.replica.model.loader import load_model
from quire.replica.model.stored import weights
from quire.replica.startup.sizing import resolve
from tests.kernels import reference
from tests.replica.model.fusion.test_fuse_pass import EXPECTED

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="installed without a C compiler"),
    pytest.mark.skipif(
        fp8_linear.missing("cpu") is not None, reason=f"no FP8: {fp8_linear.missing('cpu')}"
    ),
]
FP8 = dict(dtype="bfloat16", deterministic=False, weights="fp8")
# The products left over in EXPECTED are in FP8 already, but the output head; and layers in FP8 are no one call.
FUSED_IN_FP8 = {
    name: {
        kind: 1 if kind == "products" else count
        for kind, count in kinds.items()
        if kind not in ("decoders", "heads")
    }
    for name, kinds in EXPECTED.items()
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """``wide(name)``: as `zoo`, with MLPs whose width FP8 takes."""
    root = tmp_path_factory.mktemp("wide")

    def get(name):
        path = root / name
        return path if path.exists() else model_zoo.build(name, root, intermediate_size=96)

    return get


def load(path, dtype="bfloat16", weights="fp8"):
    return load_model(ModelSpec.from_checkpoint(path), "cpu", dtype, weights)


def logits_of(runner) -> np.ndarray:
    """[prompts, vocab], the first token of each."""
    driver = Driver(runner)
    rng = np.random.default_rng(3)
    sequences = [driver.add(rng.integers(3, 173, n).tolist(), 1) for n in (20, 1, 7, 30, 4)]
    driver.generate(sequences, 1, chunk=10)
    return np.stack([row for s in sequences for row in s.logits])


def error(found, expected):
    return np.sqrt(np.square(found - expected).mean()) / expected.std()


def same_bits(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


# ----------------------------------------------------------------------------------------------------------
# Loading
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3", "qwen3_moe"])
def test_every_linear_layer_but_the_head_has_its_weights_codes(zoo, monkeypatch, name):
    monkeypatch.setattr(weights, "_STAGING_BYTES", 1000)
    plain, model = load(zoo(name), "float32", "auto"), load(zoo(name))
    head = model.get_output_embeddings()
    layers = dict(model.named_modules())
    for key, linear in plain.named_modules():
        if type(linear) is not nn.Linear:
            continue
        fits = linear.in_features % 16 == linear.out_features % 16 == 0
        assert (type(layers[key]) is Fp8Linear) == (fits and layers[key] is not head)
        if type(layers[key]) is Fp8Linear:
            codes, scales = reference.quantise_rows(linear.weight, float("inf"))
            assert same_bits(layers[key].weight, codes)
            assert torch.equal(layers[key].weight_scale, scales)
            assert (layers[key].bias is None) == (linear.bias is None)
    others = {n: p for n, p in model.named_parameters() if p.dtype != torch.float8_e4m3fn}
    expected = load(zoo(name), "bfloat16", "auto").state_dict()
    for key, parameter in others.items():
        if not key.endswith("weight_scale"):
            assert torch.equal(parameter, expected[key]), key
    assert sum(type(m) is Fp8Linear for m in layers.values()) >= 6


@pytest.mark.parametrize("weights", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_the_memory_table_counts_the_bytes_that_are_loaded(zoo, name, weights):
    """Of int8, which is packed in panels of 64 columns, what the panels hold."""
    path = zoo(name)
    if weights == "int8":
        runner = make_runner(path, dtype="bfloat16", deterministic=False, weights="int8")
        total, seen = 0, set()
        for module in runner.model.modules():
            if isinstance(module, (PackedProduct, PackedEmbedding)):
                packed = module.packed
                if id(packed) not in seen:
                    seen.add(id(packed))
                    is_int8 = packed.scales is not None
                    total += packed.columns * packed.depth * (1 if is_int8 else 2)
                    total += packed.columns * packed.scales.shape[1] * 4 if is_int8 else 0
        # Norms are padded, and biases float32: both are the width of a row, beside matrices.
        total += sum(p.nbytes for p in runner.model.parameters())
        small = 0.02 * total
    else:
        model = load(path, weights=weights)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        total, small = sum(storage.nbytes() for storage in storages.values()), 0
    assert abs(weight_bytes(path, "bfloat16", weights) - total) <= small
    expected = "auto" if weights == "int8" else weights
    assert loading_bytes(path, "bfloat16", weights) == weight_bytes(path, "bfloat16", expected)


def test_what_transformers_had_to_load_is_quantised_afterwards(zoo, monkeypatch):
    expected = load(zoo("qwen2")).state_dict()
    monkeypatch.setattr("quire.replica.model.loader.map_weights", lambda model, stored: None)
    spec = ModelSpec.from_checkpoint(zoo("qwen2"))
    # Without the rounding to bfloat16 that comes first on this way.
    found = load_model(spec, "cpu", "float32", "fp8").state_dict()
    assert found.keys() == expected.keys()
    assert sum(x.dtype == torch.float8_e4m3fn for x in found.values()) == 3 * 4
    for key, tensor in expected.items():
        if tensor.dtype == torch.float8_e4m3fn or key.endswith("weight_scale"):
            assert same_bits(found[key].contiguous(), tensor.contiguous()), key


def test_weights_that_are_merged_lie_side_by_side(wide):
    for weight_format in ("auto", "fp8"):
        model = load(wide("qwen3"), weights=weight_format)
        for layer in model.model.layers:
            for module, names in ((layer.self_attn, "qkv"), (layer.mlp, ("gate", "up"))):
                parts = [getattr(module, f"{name}_proj").weight.detach() for name in names]
                joined = join_rows(parts)
                assert joined.data_ptr() == parts[0].data_ptr()
                assert same_bits(joined, torch.cat(parts))
                assert joined.untyped_storage().nbytes() == joined.nbytes


def test_weights_that_lie_elsewhere_are_copied():
    whole = torch.arange(48.0).view(12, 4)
    near = [whole[:4], whole[4:6], whole[6:]]
    assert join_rows(near).data_ptr() == whole.data_ptr()
    # Another order, a gap, columns of a wider matrix, other memory.
    for parts in (
        [whole[4:6], whole[:4]],
        [whole[:4], whole[5:]],
        [whole[:4, :2], whole[4:, :2]],
        [whole[:4], whole[4:].clone()],
    ):
        joined = join_rows(parts)
        assert torch.equal(joined, torch.cat(parts))
        assert joined.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


# ----------------------------------------------------------------------------------------------------------
# Error
# ----------------------------------------------------------------------------------------------------------


def test_each_layer_is_off_by_two_roundings_to_four_bits(wide):
    """3.7 % of a product's root mean square, see `quire.kernels.rows.fp8_linear`; these are small, so it scatters.

    Less than that, because scales by the largest number of a row leave the binades near it filled unevenly."""
    model = load(wide("qwen3"))
    plain = dict(load(wide("qwen3"), weights="auto").named_modules())
    random = torch.Generator().manual_seed(0)
    deviations = []
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Linear):
            x = torch.randn(50, layer.in_features, generator=random).bfloat16()
            expected = plain[name](x).float()
            deviations.append(((layer(x).float() - expected).norm() / expected.norm()).item())
    assert len(deviations) == 3 * 7
    assert 0.030 < min(deviations) and max(deviations) < 0.045
    assert 0.035 < np.mean(deviations) < 0.040


class _Rounded(nn.Module):
    """An FP8 layer's weights, and its input rounded to FP8, multiplied as float32: the error of FP8 and no other."""

    def __init__(self, layer: Fp8Linear):
        super().__init__()
        self.weight, self.bias = layer.weight.float() * layer.weight_scale, layer.bias

    def forward(self, x):
        codes, scales = reference.quantise_rows(x.reshape(-1, x.shape[-1]), float("inf"))
        out = (codes.float() * scales) @ self.weight.t()
        out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("name", ["qwen3", "llama_mha", "olmo2"])
def test_what_a_model_is_off_by_is_what_rounding_its_factors_does(wide, monkeypatch, name):
    """The bfloat16 model whose linear layers round their factors says the same, but for the order of sums.

    That it is below 0.3 of the logits' spread is these models': three deep layers of random weights, whose seven
    products each add 3.7 % and pass on what they get."""
    exact = logits_of(make_runner(wide(name), fuse="off"))
    unfused = FP8 | dict(fuse="off")
    found = logits_of(make_runner(wide(name), **unfused))
    coarse = logits_of(make_runner(wide(name), **unfused | dict(weights="auto")))

    def rounded(*args, **options):
        model = load_model(*args, **options)
        for key, layer in list(model.named_modules()):
            if isinstance(layer, Fp8Linear):
                model.set_submodule(key, _Rounded(layer))
        return model

    monkeypatch.setattr("quire.replica.runner.runner.load_model", rounded)
    explained = logits_of(make_runner(wide(name), **unfused))
    print(name, error(coarse, exact), error(found, exact), error(found, explained))
    assert error(coarse, exact) < error(found, exact) < 0.3
    assert error(found, explained) < 0.1 * error(coarse, exact)


# ----------------------------------------------------------------------------------------------------------
# Fusing
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED_IN_FP8)
def test_fp8_layers_are_fused_as_others_are(wide, name):
    runner = make_runner(wide(name), **FP8)
    assert {k: n for k, n in runner.fused.fused.items() if n} == FUSED_IN_FP8[name]
    layers = [m for m in runner.model.modules() if isinstance(m, Fp8Linear)]
    assert layers and not any(layer.is_exact for layer in layers)
    plain = make_runner(wide(name), **FP8, fuse="off")
    exact = logits_of(make_runner(wide(name), fuse="off"))
    assert error(logits_of(runner), exact) < 1.5 * error(logits_of(plain), exact)


def test_merged_fp8_products_give_the_bits_of_their_parts_and_take_no_memory(wide):
    model = load(wide("qwen2"))  # with biases
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    product = Product(parts)
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(product(x), torch.cat([part(x) for part in parts], dim=-1))
    assert product.coded.weight.data_ptr() == parts[0].weight.data_ptr()
    residual = torch.randn(5, product.out_features).bfloat16()
    assert torch.equal(product(x, residual), product(x) + residual)
    with pytest.raises(ValueError, match="some of the parts are in 8 bits"):
        Product([parts[0], nn.Linear(64, 64)])
    other = copy.deepcopy(parts[1])
    other.bound = 3.0
    with pytest.raises(ValueError, match=r"different bounds: \['3.0', 'None'\]"):
        Product([parts[0], other])


def test_a_wrong_formula_is_found_out_behind_the_noise_of_fp8(wide, monkeypatch):
    """6 % are less than FP8 may move a layer's result by; with exact products they show."""
    original = FusedMLP.forward
    monkeypatch.setattr(FusedMLP, "forward", lambda self, *args: original(self, *args) * 1.06)
    runner = make_runner(wide("qwen3"), **FP8)
    assert not runner.fused.fused["layers"] and not runner.fused.fused["MLPs"]
    assert sum("MLP" in reason and "0.05 are" in reason for reason in runner.fused.dropped) >= 3
    assert not any(m.is_exact for m in runner.model.modules() if isinstance(m, Fp8Linear))


# ----------------------------------------------------------------------------------------------------------
# Checkpoints stored in FP8
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_shape", ["channel", "vector"])
@pytest.mark.parametrize(
    "config", [fp8_checkpoints.COMPRESSED, fp8_checkpoints.FBGEMM, fp8_checkpoints.FP8]
)
def test_a_stored_checkpoint_equals_the_one_quantised_while_it_is_read(
    wide, tmp_path, config, scale_shape
):
    extra = {
        "model.layers.0.self_attn.k_scale": torch.tensor([0.5]),
        "model.layers.0.mlp.gate_proj.input_scale_ub": torch.tensor([1200.0]),
    }
    path = fp8_checkpoints.write(
        wide("qwen3"),
        tmp_path / "x",
        config,
        scale_shape=scale_shape,
        extra=extra,
        input_scales=True,
    )
    spec = ModelSpec.from_checkpoint(path)
    resolved = resolve(EngineArgs(device="cpu", model=str(path)), spec)
    assert (resolved.weights, resolved.dtype) == ("fp8", "bfloat16")
    model, expected = load(path), load(wide("qwen3"))
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert same_bits(state[key].contiguous(), tensor.contiguous()), key
    bound = 1200.0 if config is fp8_checkpoints.FBGEMM else None
    assert {m.bound for m in model.modules() if isinstance(m, Fp8Linear)} == {bound}
    found = logits_of(make_runner(path, **FP8))
    assert np.array_equal(
        found, logits_of(make_runner(wide("qwen3"), **FP8))
    )  # nothing reaches 1200
    counted = weight_bytes(path, "bfloat16", "fp8")
    assert counted == weight_bytes(wide("qwen3"), "bfloat16", "fp8")


@pytest.mark.parametrize("scale_shape", ["tensor", "number"])
def test_a_scale_of_the_whole_weight_is_every_channels(wide, tmp_path, scale_shape):
    path = fp8_checkpoints.write(
        wide("qwen3"), tmp_path / "x", fp8_checkpoints.FP8, scale_shape=scale_shape
    )
    stored = load_file(path / "model.safetensors")
    model = load(path)
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Linear):
            assert same_bits(layer.weight, stored[f"{name}.weight"])
            assert (layer.weight_scale == stored[f"{name}.weight_scale"]).all()
    exact = logits_of(make_runner(wide("qwen3"), fuse="off"))
    assert error(logits_of(make_runner(path, **FP8)), exact) < 0.3


def test_an_activation_bound_clamps(wide, tmp_path):
    config = fp8_checkpoints.FBGEMM | dict(activation_scale_ub=0.25)
    path = fp8_checkpoints.write(wide("qwen3"), tmp_path / "x", config)
    layer = load(path).model.layers[0].mlp.down_proj
    free = load(wide("qwen3")).model.layers[0].mlp.down_proj
    x = torch.randn(4, layer.in_features).bfloat16()
    assert torch.equal(layer(x), free(x.clamp(-0.25, 0.25)))
    assert not torch.equal(layer(x), free(x))


def test_an_engine_serves_a_stored_checkpoint(wide, tmp_path):
    path = fp8_checkpoints.write(wide("qwen3"), tmp_path / "x", fp8_checkpoints.COMPRESSED)
    with Engine(model=str(path), device="cpu", num_blocks=16, num_threads=1) as engine:
        assert engine.hello("r").dtype == "bfloat16,weights=fp8"
        fused = engine.snapshot()["fused"]
    assert fused["fused"]["layers"] == 3
    with pytest.raises(SizingError, match=r"weights is 'int8', .* stored in FP8 \(compressed-tens"):
        Engine(model=str(path), device="cpu", weights="int8")
    with pytest.raises(SizingError, match="weights is 'fp8', which needs dtype 'bfloat16'"):
        Engine(model=str(path), device="cpu", dtype="float16", weights="fp8")


def spoil(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(f"{GATE}_scale"), f"{GATE}' is stored in 8 bits; served are .* a scale"),
        (lambda t: t[f"{GATE}_scale"].fill_(-1), "gate_proj.weight_scale' must be finite and pos"),
        (lambda t: t[f"{GATE}_scale"].fill_(float("nan")), "weight_scale' must be finite"),
        (lambda t: t.update({f"{GATE}_scale": torch.ones(3)}), "its tensors are not those"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
         "'model.norm.weight' is stored in 8 bits"),
        (lambda t: t.update({"model.layers.1.mlp.gate_proj.weight_scale_inv": torch.ones(1)}),
         "surplus model.layers.1.mlp.gate_proj.weight_scale_inv; missing none"),
        (lambda t: t.update({"model.x.experts.0.up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}),
         "experts.0.up_proj.weight' is stored in 8 bits"),
    ],
)  # fmt: skip
def test_a_stored_checkpoint_that_is_not_whole_is_refused(wide, tmp_path, change, message):
    path = fp8_checkpoints.write(wide("qwen3"), tmp_path / "x", fp8_checkpoints.COMPRESSED)
    spoil(path, change)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_codes_without_a_word_in_the_configuration_are_refused(wide, tmp_path):
    path = fp8_checkpoints.write(wide("qwen3"), tmp_path / "x", {})
    with pytest.raises(CheckpointError, match="is stored in 8 bits"):
        load(path, weights="auto")


COMPRESSED = fp8_checkpoints.COMPRESSED


def group(**changes):
    only = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | dict(config_groups=dict(g=only | changes))


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(quant_method="hqq"), "quant_method 'hqq' is not served; .* awq, mxfp4. Use the checkpoint"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), "quant_method 'bitsandbytes' is not"),
        (dict(load_in_4bit=True), "quant_method None is not served"),
        ("gptq", "must be a JSON object, is 'gptq'"),
        (["fp8"], r"must be a JSON object, is \['fp8'\]"),
        (False, "must be a JSON object, is False"),
        (dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128]),
         r"weight_block_size must be two positive integers, is \[128\]"),
        (dict(quant_method="fp8", activation_scheme="dynamic", expert_dtype="fp4"), "expert_dtype"),
        (dict(quant_method="fp8"), "activation_scheme must be one of dynamic, static, is None"),
        (dict(quant_method="fp8", activation_scheme="dynamic", fmt="e5m2"), "fmt must be .* 'e5m2'"),
        (dict(quant_method="fbgemm_fp8", activation_scale_ub=-1), "activation_scale_ub must be"),
        (COMPRESSED | dict(format="marlin-24"), "format must be one of float-quantized"),
        (COMPRESSED | dict(config_groups={}), "config_groups must not be empty"),
        (COMPRESSED | dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config"),
        (COMPRESSED | dict(transform_config=dict(a=1)), "transform_config"),
        (COMPRESSED | dict(kv_cache_scheme=dict(type="int", num_bits=8)), "kv_cache_scheme: type"),
        (group(weights=dict(type="int", num_bits=4)), r"g.weights: type, num_bits .* \('int', 4"),
        (group(weights="fp8"), "g.weights must be an object, is 'fp8'"),
        (group(weights=fp8_checkpoints.FLOAT8 | dict(strategy="group")), "strategy must be .*'group'"),
        (group(input_activations=dict(type="int", num_bits=8)), "g.input_activations: type, num_bits"),
        (COMPRESSED | dict(config_groups=[1]), r"config_groups must be an object, is \[1\]"),
        (COMPRESSED | dict(config_groups=dict(g=None)), "config_groups.g must be an object, is None"),
        (group(output_activations=fp8_checkpoints.FLOAT8), "output_activations is not served"),
    ],
)  # fmt: skip
def test_other_quantisations_are_refused_by_name(wide, tmp_path, config, message):
    path = fp8_checkpoints.write(wide("qwen3"), tmp_path / "x", config)
    with pytest.raises(CheckpointError, match=f"quantization_config:? .*{message}"):
        ModelSpec.from_checkpoint(path)
