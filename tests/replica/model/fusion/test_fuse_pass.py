"""The fuse pass: what it fuses, that it proves it, and that the fused model is the model."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from step_driver import Driver, engine_config, make_runner
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_attention import has_native
from quire.kernels.cpu.cpu_decoder_layer import PreparedLayer
from quire.kernels.cpu.cpu_layer_stack import LayerStack
from quire.kernels.cpu.cpu_linear import PackedWeight
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.device.kv_pool import KVPool
from quire.replica.engine import Engine
from quire.replica.model.attention import StepContext
from quire.replica.model.fusion import cpu_fused_layer as fused_layer_module
from quire.replica.model.fusion import fuse_pass as fuse_module
from quire.replica.model.fusion.cpu_cos_sin_cache import tabled_rotation
from quire.replica.model.fusion.cpu_fused_layer import CpuLayer
from quire.replica.model.fusion.cpu_fused_parts import CpuAttention, PackedEmbedding, PackedProduct
from quire.replica.model.fusion.fused_layer import FusedLayer
from quire.replica.model.fusion.fused_parts import Product
from quire.replica.model.fusion.trial_pass import TrialPass
from quire.replica.model.loader import load_model
from quire.replica.runner import runner as runner_module
from quire.replica.runner.runner import Runner

pytestmark = pytest.mark.skipif(not has_native(), reason="installed without a C compiler")

# What each architecture's own form allows; norms and products left over are fused by themselves.
EXPECTED = {
    "llama": dict(decoders=1, heads=1, layers=3, norms=1, products=1),
    "llama_tied": dict(decoders=1, heads=1, layers=3, norms=1, products=1, embeddings=1),
    "llama_yarn": dict(decoders=1, heads=1, layers=3, norms=1, products=1),
    "llama_mha": dict(decoders=1, heads=1, layers=3, norms=1, products=1),  # biases
    "qwen2": dict(decoders=1, heads=1, layers=3, norms=1, products=1),  # biases of q, k and v only
    "qwen3": dict(decoders=1, heads=1, layers=3, norms=1, products=1),  # norms of the heads
    "phi3": dict(decoders=1, heads=1, layers=3, norms=1, products=1),  # merged in the checkpoint
    "mistral": dict(decoders=1, heads=1, layers=3, norms=1, products=1),
    "smollm3": {
        "layers": 3,
        "MLPs": 1,
        "norms": 3,
        "products": 5,
        "embeddings": 1,
    },  # one layer does not rotate
    "olmo2": {"MLPs": 3, "norms": 13, "products": 13},  # norms after, and over all heads
    "granite": {"attentions": 3, "MLPs": 3, "norms": 7, "products": 1},  # scaled residuals
    "gemma2": {
        "attentions": 3,
        "MLPs": 3,
        "norms": 13,
    },  # norms before and after; a scaled embedding is tied
    "gpt_oss": {"norms": 7, "products": 13},  # another rotation; experts
    "qwen3_moe": {"attentions": 2, "layers": 1, "norms": 5, "products": 1},
}


def logits_of(runner, lengths=(20, 1, 7), steps=2) -> np.ndarray:
    """[steps * rows, vocab] of prompts and of greedy decoding after them."""
    driver = Driver(runner)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 173, n).tolist() for n in lengths]
    sequences = [driver.add(p, 3) for p in prompts]
    driver.generate(sequences, steps, chunk=10)
    return np.stack([row for s in sequences for row in s.logits])


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_fused_follows_from_the_structure(zoo, name):
    runner = make_runner(zoo(name))
    assert dict(runner.fused.fused) == EXPECTED[name]
    plain = make_runner(zoo(name), fuse="off")
    assert not plain.fused.fused
    found, expected = logits_of(runner), logits_of(plain)
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "smollm3"])
def test_bfloat16_is_as_close_to_float32_fused_as_unfused(zoo, name):
    # One step: beyond it the rounding may have chosen another token.
    exact = logits_of(make_runner(zoo(name), fuse="off"), steps=1)
    errors = {}
    for mode in ("auto", "off"):
        runner = make_runner(zoo(name), dtype="bfloat16", deterministic=False, fuse=mode)
        errors[mode] = np.sqrt(np.square(logits_of(runner, steps=1) - exact).mean()) / exact.std()
    # The fused form rounds less often; random weights amplify rounding by chance in either.
    assert errors["auto"] < 1.3 * errors["off"]


def test_half_precision_without_packed_products(zoo):
    runner = make_runner(zoo("qwen3"), dtype="float16", deterministic=False)
    assert dict(runner.fused.fused) == {"layers": 3, "norms": 1}
    expected = logits_of(make_runner(zoo("qwen3")), steps=1)
    assert np.abs(logits_of(runner, steps=1) - expected).max() < 0.05 * np.abs(expected).max()


def test_int8_weights_are_all_but_the_heads_and_their_error_is_told(zoo):
    exact = logits_of(make_runner(zoo("qwen3"), fuse="off"), steps=1)
    errors = {}
    for weights in ("auto", "int8"):
        runner = make_runner(zoo("qwen3"), dtype="bfloat16", deterministic=False, weights=weights)
        errors[weights] = (
            np.sqrt(np.square(logits_of(runner, steps=1) - exact).mean()) / exact.std()
        )
    state = runner.fused.to_dict()
    assert state["fused"]["int8 products"] == 3 * 4
    assert runner.model.lm_head.packed.scales is None
    assert 0.003 < state["int8_deviation"]["mean"] < state["int8_deviation"]["max"] < 0.03
    assert errors["auto"] < errors["int8"] < 0.3  # deep random models amplify a hundredth


def test_merged_weights_replace_the_original_ones(zoo):
    runner = make_runner(zoo("llama_tied"))
    decoder = runner.model.model
    assert all(isinstance(layer, FusedLayer) for layer in decoder.layers)
    assert isinstance(decoder.embed_tokens, PackedEmbedding)
    assert decoder.embed_tokens.packed is runner.model.lm_head.packed
    assert all(layer.hidden_size == 64 for layer in decoder.layers), "the model's code may ask it"
    assert not [m for m in runner.model.modules() if type(m) in (nn.Linear, nn.Embedding)]
    # Panels of 64 columns are padded, which weighs much in a small model; nothing exists twice.
    packed = {
        m.packed.data.data_ptr(): m.packed
        for m in runner.model.modules()
        if isinstance(m, PackedProduct)
    }
    assert sum(p.columns * p.depth for p in packed.values()) + sum(
        p.numel() for p in runner.model.parameters()
    ) <= sum(p.numel() for p in load(zoo("llama_tied")).parameters())


def test_the_weights_of_a_replaced_layer_are_freed_before_the_next_one_is_packed(zoo, monkeypatch):
    original = {}  # path: a weight of the model as it was loaded
    alive = []
    observe, put = fuse_module._FusePass._observe, fuse_module._FusePass._put

    def observe_and_note(self):
        observe(self)
        for path, module in self.model.named_modules():
            if path.endswith("self_attn"):
                original[path] = weakref.ref(module.q_proj.weight)

    def put_and_count(self, *args):
        put(self, *args)
        alive.append(sum(weight() is not None for weight in original.values()))

    monkeypatch.setattr(fuse_module._FusePass, "_observe", observe_and_note)
    monkeypatch.setattr(fuse_module._FusePass, "_put", put_and_count)
    runner = make_runner(zoo("qwen3"))
    assert runner.fused.fused["layers"] == len(original) == 3
    # The one that is being replaced is held by who replaces it.
    assert alive[:3] == [3, 2, 1]
    assert alive[3:] and not any(alive[3:])


def test_products_of_a_gpu_are_views_of_the_loaded_weights(zoo):
    layer = load(zoo("qwen3"), "bfloat16").model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for parts in (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [mlp.gate_proj, mlp.up_proj],
    ):
        product = Product(parts)
        assert product.weight.data_ptr() == parts[0].weight.data_ptr()
        assert torch.equal(product.weight, torch.cat([part.weight for part in parts]))


def load(path, dtype="float32"):
    return load_model(ModelSpec.from_checkpoint(path), "cpu", dtype)


def runner_of(model, path, **changes) -> Runner:
    spec = ModelSpec.from_checkpoint(path)
    config = engine_config(spec, **changes)
    pool = KVPool(config.num_blocks, spec.groups, config.block_size, torch.float32)
    return Runner(config, spec, model, pool)


class Attribute(nn.Module):
    """Any module, by another class and with the same structure."""

    def __init__(self, inner: nn.Module, change):
        super().__init__()
        self.__dict__.update({k: v for k, v in inner.__dict__.items() if k != "forward"})
        self._inner_class, self._change = type(inner), change

    def forward(self, *args, **kwargs):
        return self._change(self._inner_class.forward(self, *args, **kwargs))


@pytest.mark.parametrize("part", ["mlp", "input_layernorm"])
def test_classes_play_no_part_but_what_they_compute_does(zoo, part):
    """The same structure under another class is fused; one that computes something else is found out."""
    same, other = load(zoo("llama")), load(zoo("llama"))
    for model, change in ((same, lambda y: y), (other, lambda y: y * 1.01)):
        layer = model.model.layers[1]
        setattr(layer, part, Attribute(getattr(layer, part), change))
    assert runner_of(same, zoo("llama")).fused.fused["layers"] == 3
    runner = runner_of(other, zoo("llama"))
    assert runner.fused.fused["layers"] == 2
    assert any(
        "layers.1" in reason and "deviates by 0.0" in reason for reason in runner.fused.dropped
    )
    found, expected = logits_of(runner), logits_of(make_runner(zoo("llama"), fuse="off"))
    assert np.abs(found - expected).max() > 1e-3 * np.abs(expected).max(), "the change must be kept"


def test_without_the_compiled_library_the_model_stays_as_it_is(zoo, monkeypatch):
    expected = logits_of(make_runner(zoo("llama"), fuse="off"))
    monkeypatch.setattr(native_library, "load", lambda: None)
    runner = make_runner(zoo("llama"))
    assert runner.fused.to_dict() == {"fused": {}, "dropped": []}
    assert np.abs(logits_of(runner) - expected).max() < 2e-4 * np.abs(expected).max()


def test_a_module_that_cannot_be_probed_stays(zoo):
    class Gated(nn.Module):
        """A norm by its parameters, called with two arguments."""

        def __init__(self, inner):
            super().__init__()
            self.weight, self.variance_epsilon, self.inner = inner.weight, 1e-6, [inner]

        def forward(self, x, gate):
            return self.inner[0](x) * gate

    class Caller(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.gated = Gated(inner)

        def forward(self, x):
            return self.gated(x, 1.0)

    model = load(zoo("llama"))
    model.model.norm = Caller(model.model.norm)
    runner = runner_of(model, zoo("llama"))
    assert dict(runner.fused.fused) == {"decoders": 1, "layers": 3, "products": 1}
    assert any("norms model.norm.gated (Gated)" in reason for reason in runner.fused.dropped)
    plain = make_runner(zoo("llama"), fuse="off")
    assert np.abs(logits_of(runner) - logits_of(plain)).max() < 1e-3


@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_a_wrong_query_key_or_value_is_found_out(zoo, what, monkeypatch):
    """Were only outputs compared, a few tokens with flat scores would hide it."""
    original = CpuAttention.write

    def wrong(self, qkv, tables, step):
        q = original(self, qkv, tables, step)
        rows = step.write_rows(step.pool.group_of(self.facts.layer))
        k_pages, v_pages = step.pool.pages(self.facts.layer)
        if what == "q":
            return q * 1.001
        pages = k_pages if what == "k" else v_pages
        pages[rows] *= 1.001
        return q

    monkeypatch.setattr(CpuAttention, "write", wrong)
    runner = make_runner(zoo("llama"))
    assert runner.fused.fused["layers"] == runner.fused.fused["attentions"] == 0
    assert sum("attention model.layers" in reason for reason in runner.fused.dropped) == 3


def count_stacks(monkeypatch) -> list[int]:
    """How many layers each call ran, in order."""
    ran = []
    original = LayerStack.__call__

    def counted(self, *args, **kwargs):
        ran.append(len(self.layers))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LayerStack, "__call__", counted)
    return ran


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama_mha", {}),
        ("qwen3", {}),
        ("mistral", {}),  # a window
        ("qwen3", dict(dtype="bfloat16", deterministic=False)),
        ("qwen3", dict(dtype="bfloat16", deterministic=False, weights="int8")),
    ],
)
def test_layers_as_one_call_have_the_bits_of_their_parts(zoo, name, changes, monkeypatch):
    runner = make_runner(zoo(name), **changes)
    assert runner.fused.chains == [3]
    ran = count_stacks(monkeypatch)
    together = logits_of(runner)
    assert len(ran) > 2 and set(ran) == {3}
    ran.clear()
    runner._forward._workspace = None
    apart = logits_of(runner)
    assert not ran
    assert np.array_equal(together, apart)


def count_selected(monkeypatch) -> list[int | None]:
    """How many tokens each call of layers selected, in order; None: all."""
    selected = []
    original = LayerStack.__call__

    def counted(self, *args, selection=None, **kwargs):
        selected.append(None if selection is None else len(selection.tokens))
        return original(self, *args, selection=selection, **kwargs)

    monkeypatch.setattr(LayerStack, "__call__", counted)
    return selected


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama_mha", {}),
        ("qwen3", {}),
        ("mistral", {}),  # a window
        ("qwen2_mixed", {}),  # of several groups
        ("qwen3", dict(dtype="bfloat16", deterministic=False, weights="int8")),
    ],
)
def test_the_last_layer_runs_for_the_tokens_that_are_read(zoo, name, changes, monkeypatch):
    runner = make_runner(zoo(name), **changes)
    selected = count_selected(monkeypatch)
    expected = logits_of(runner)
    assert set(selected) == {None}  # so small a layer runs as fast for all of them
    selected.clear()
    monkeypatch.setattr(fused_layer_module, "_MIN_WORK_SAVED", 1)
    found = logits_of(runner)
    chains = len(runner.fused.chains)
    # The last token of each of three rows; when all decode, there is nobody to leave out.
    last = selected[chains - 1 :: chains]
    assert None in last and set(last) - {None} and set(last) <= {None, 1, 2, 3}
    del selected[chains - 1 :: chains]
    assert set(selected) <= {None}
    assert np.array_equal(found, expected)


def test_a_model_that_mixes_tokens_after_its_layers_has_all_of_them_run(zoo, monkeypatch):
    """As one with a convolution over its hidden states would."""

    def mix(module, args, kwargs, output):
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + hidden.roll(1, dims=1)
        return output

    def load(*args, **options):
        model = load_model(*args, **options)
        model.model.register_forward_hook(mix, with_kwargs=True)
        return model

    plain = make_runner(zoo("llama"))
    monkeypatch.setattr(runner_module, "load_model", load)
    mixed = make_runner(zoo("llama"))
    assert plain.fused.chains == mixed.fused.chains == [3]
    last = [runner.model.model.layers[-1].is_last for runner in (plain, mixed)]
    assert last == [True, False]
    assert [runner.fused.fused["decoders"] for runner in (plain, mixed)] == [1, 0]
    selected = count_selected(monkeypatch)
    monkeypatch.setattr(fused_layer_module, "_MIN_WORK_SAVED", 1)
    logits_of(mixed)
    assert set(selected) == {None}


def test_a_head_that_does_more_than_its_product_stays_the_models(zoo, monkeypatch):
    """As one with a scale does, or a bound on its logits."""

    def scale(module, args, kwargs, output):
        output.logits = output.logits * 0.5
        return output

    def load(*args, **options):
        model = load_model(*args, **options)
        model.register_forward_hook(scale, with_kwargs=True)
        return model

    plain = make_runner(zoo("llama"))
    monkeypatch.setattr(runner_module, "load_model", load)
    scaled = make_runner(zoo("llama"))
    assert [runner.fused.fused["heads"] for runner in (plain, scaled)] == [1, 0]
    assert scaled.fused.fused["decoders"] == 1
    # Halves are exact, and the largest stays the largest.
    assert np.array_equal(logits_of(scaled), logits_of(plain) * 0.5)


def test_one_call_for_norm_and_head_has_the_bits_of_the_models_own(zoo):
    runner = make_runner(zoo("qwen3"), dtype="bfloat16", deterministic=False)
    expected = logits_of(runner)
    assert runner.model.model.head is not None
    runner.model.model.head = None
    apart = Runner.with_pool(runner.config, runner.spec, runner.model, fused=runner.fused)
    assert np.array_equal(logits_of(apart), expected)


def rotation_of(**rope) -> nn.Module:
    parameters = dict(rope_theta=10000.0, **rope)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


_ORIGINAL = dict(original_max_position_embeddings=128)
_FACTORS = [1.0 + i / 4 for i in range(8)]


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="default"),
        dict(rope_type="linear", factor=2.0),
        dict(rope_type="yarn", factor=4.0, **_ORIGINAL),
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            **_ORIGINAL,
        ),
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_rotations_has_the_models_bits(rope, dtype):
    x = torch.zeros(1, 1, 64, dtype=dtype)
    trial = TrialPass(nn.Identity(), 1, SimpleNamespace(data=x, block_size=16), [], StepContext)
    rotation = rotation_of(**rope)
    table = tabled_rotation(rotation, x, trial)
    assert table is not None
    for positions in ([0], [1023], [1024, 5, 3000], [70_000], list(range(100))):
        given = torch.tensor([positions])
        for found, expected in zip(table(x, given), rotation(x, given), strict=True):
            assert found.is_contiguous() and found.dtype == dtype
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="dynamic", factor=2.0),
        dict(rope_type="longrope", short_factor=_FACTORS, long_factor=_FACTORS[::-1], **_ORIGINAL),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotations_that_go_by_the_longest_have_no_table(rope):
    x = torch.zeros(1, 1, 64)
    trial = TrialPass(nn.Identity(), 1, SimpleNamespace(data=x, block_size=16), [], StepContext)
    rotation, untouched = rotation_of(**rope), rotation_of(**rope)
    assert tabled_rotation(rotation, x, trial) is None
    given = torch.tensor([[1, 100]])
    for found, expected in zip(rotation(x, given), untouched(x, given), strict=True):
        assert torch.equal(found, expected)


def test_a_part_that_is_called_otherwise_has_no_table():
    x = torch.zeros(1, 1, 64)
    trial = TrialPass(nn.Identity(), 1, SimpleNamespace(data=x, block_size=16), [], StepContext)
    assert tabled_rotation(nn.Linear(64, 64), x, trial) is None


def test_layers_with_other_products_run_part_by_part(zoo, monkeypatch):
    ran = count_stacks(monkeypatch)
    runner = make_runner(zoo("qwen3"), dtype="float16", deterministic=False)
    logits_of(runner, steps=1)
    assert runner.fused.fused["layers"] == 3 and not ran and not runner.fused.chains


def test_a_layer_whose_input_the_model_changes_begins_another_call(zoo, monkeypatch):
    expected = logits_of(make_runner(zoo("llama")))

    def change(module, args):
        if isinstance(module, FusedLayer) and module.attention.facts.layer == 1:
            return (args[0] * 1.0, *args[1:])
        return None

    hook = nn.modules.module.register_module_forward_pre_hook(change)
    try:
        runner = make_runner(zoo("llama"))
        ran = count_stacks(monkeypatch)
        found = logits_of(runner)
    finally:
        hook.remove()
    assert runner.fused.chains == [1, 2] and ran[:4] == [1, 2, 1, 2]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("without, chains", [(0, [2]), (1, [1, 1]), (2, [2])])
def test_a_layer_that_is_no_call_ends_a_chain(zoo, without, chains, monkeypatch):
    expected = logits_of(make_runner(zoo("llama")))
    original = CpuLayer._make_sequence

    def make(self, pool):
        return None if self.attention.facts.layer == without else original(self, pool)

    monkeypatch.setattr(CpuLayer, "_make_sequence", make)
    runner = make_runner(zoo("llama"))
    assert runner.fused.chains == chains
    assert np.array_equal(logits_of(runner), expected)


def test_layers_of_several_groups_are_several_calls(zoo):
    runner = make_runner(zoo("qwen2_mixed"))
    groups = [runner.pool.group_of(i) for i in range(len(runner.model.model.layers))]
    assert len(set(groups)) > 1
    runs = [len(list(run)) for _, run in itertools.groupby(groups)]
    assert runner.fused.chains == runs


def test_a_model_that_calls_its_layers_otherwise_is_stopped(zoo, monkeypatch):
    monkeypatch.setattr(fuse_module, "fused_decoder", lambda *args: None)
    runner = make_runner(zoo("llama"))
    del runner.model.model.layers[1]
    with pytest.raises(RuntimeError, match="otherwise than when it was loaded"):
        logits_of(runner, steps=1)


@pytest.mark.parametrize("what", ["q", "k", "v", "output"])
def test_it_is_the_one_call_that_is_proven(zoo, what, monkeypatch):
    original, queries = LayerStack.__call__, PreparedLayer.queries

    def wrong(self, x, step, *args, **kwargs):
        out = original(self, x, step, *args, **kwargs)
        if what == "output":
            return out * 1.001
        if what != "q":
            parts = self.layers[0]._parts
            pages = parts.k_pages if what == "k" else parts.v_pages
            pages[step.kept[0]] *= 1.001
        return out

    monkeypatch.setattr(LayerStack, "__call__", wrong)
    if what == "q":
        monkeypatch.setattr(PreparedLayer, "queries", lambda *args: queries(*args) * 1.001)
    fused = make_runner(zoo("llama")).fused
    assert fused.fused["layers"] == 0 and fused.fused["attentions"] == 3
    assert sum("layer model.layers" in reason for reason in fused.dropped) == 3


def test_int8_does_not_keep_the_weights_it_replaces(zoo):
    def wide_weights() -> list[PackedWeight]:
        gc.collect()
        return [w for w in gc.get_objects() if isinstance(w, PackedWeight) and w.scales is None]

    before = {id(weight) for weight in wide_weights()}
    runner = make_runner(zoo("qwen3"), dtype="bfloat16", deterministic=False, weights="int8")
    logits_of(runner, steps=1)
    assert runner.fused.chains == [3]
    kept = [weight for weight in wide_weights() if id(weight) not in before]
    assert len(kept) == 1 and kept[0] is runner.model.get_output_embeddings().packed
    for layer in runner.model.model.layers:
        parts = layer._sequence[1]._parts
        assert parts.qkv.weight is layer.attention.qkv.packed
        assert parts.down.weight is layer.mlp.down.packed
        assert all(
            part.weight.scales is not None
            for part in (parts.qkv, parts.output, parts.gate_up, parts.down)
        )


def test_a_model_follows_its_runner_to_another_pool(zoo):
    first = make_runner(zoo("llama"))
    expected = logits_of(first)
    second = Runner.with_pool(first.config, first.spec, first.model, fused=first.fused)
    assert np.array_equal(logits_of(second), expected)
    assert first.model.model.layers[0]._sequence[0] is second.pool


def test_an_engine_tells_what_is_fused():
    with Engine(model="embedded", num_blocks=16, num_threads=1) as engine:
        fused = engine.snapshot()["fused"]
    assert fused["fused"]["layers"] >= 1 and fused["dropped"] == []
    with Engine(model="embedded", num_blocks=16, num_threads=1, fuse="off") as engine:
        assert engine.snapshot()["fused"] == {"fused": {}, "dropped": []}
