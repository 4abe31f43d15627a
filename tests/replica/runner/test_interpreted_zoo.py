"""Every served architecture on a GPU's path: its logits in Triton's interpreter, its captured steps without data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import model_zoo
import numpy as np
import pytest
import torch
import transformers
import triton
from interpreted_runner import interpreted_runner
from meta_device import MetaDevice, recorded_kernels, to_meta
from step_driver import Driver, engine_config, make_runner
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2Config, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quire.replica.core.step_plan import PoolTargets
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.fusion.fused_layer import FusedLayer
from quire.replica.proof.model_proof import save_random_model
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.runner import Runner
from tests.kernels.compile.interpreter import repair_interpreter

pytestmark = [
    pytest.mark.timeout(300),  # some 2 s a model on an idle core
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret, reason="the kernels are not interpreted"
    ),
]
LENGTHS, CHUNK, STEPS = (7, 1, 3), 4, 2

# The smallest shapes that the kernels take; windows that the prompts leave.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_mixed": dict(sliding_window=4),
    "mistral": dict(sliding_window=4),
    "phi3": dict(sliding_window=4),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "gemma2": dict(sliding_window=4),
    "gemma3": dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(sliding_window=4),
}
# What the structure allows on a GPU, and the lengths of the chains.
WHOLE = dict(layers=2, norms=1, decoders=1), [2]
FUSED: dict[str, tuple[dict[str, int], list[int]]] = {
    **dict.fromkeys(model_zoo.NAMES, WHOLE),
    "olmo2": (dict(MLPs=2, norms=9), []),  # norms after, and over all heads
    "granite": (dict(attentions=2, MLPs=2, norms=5), []),  # scaled residuals
    "gemma2": (dict(attentions=2, MLPs=2, norms=9), []),  # norms before and after
    "gemma3": (dict(attentions=2, MLPs=2, norms=9), []),
    "gpt_oss": (dict(attentions=2, norms=5), []),  # experts
    "qwen3_moe": (dict(attentions=1, layers=1, norms=3), [1]),  # experts in one of the layers
}


def build(name: str, folder: Path) -> Path:
    changes = dict(num_hidden_layers=2, head_dim=64, **CHANGES.get(name, {}))
    return model_zoo.build(name, folder, **changes)


def generate(
    runner: Runner, lengths: tuple[int, ...] = LENGTHS
) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens of a few prompts in chunks beside decodes, and the logits [n, vocab] that they come from."""
    driver = Driver(runner)
    rng = np.random.default_rng(3)
    sequences = [driver.add(rng.integers(3, 173, n).tolist(), STEPS) for n in lengths]
    tokens = driver.generate(sequences, STEPS, CHUNK)
    return tokens, np.stack([row for s in sequences for row in s.logits])


def pooled(runner: Runner) -> np.ndarray:
    """Sums of hidden states, of a whole prompt and of its last token."""
    driver = Driver(runner)
    plan, _ = driver.plan([(driver.add(list(range(3, 8))), 5)])
    targets = (PoolTargets(0, 0, 5, 5, True), PoolTargets(0, 4, 5, 5, True))
    return np.stack(runner.run(plan._replace(pooling=targets)).pooled)


@pytest.fixture(scope="module", params=model_zoo.NAMES)
def served(request, tmp_path_factory) -> tuple[str, Path, Runner]:
    """Name, checkpoint, and runner with the kernels of a GPU."""
    repair_interpreter()
    path = build(request.param, tmp_path_factory.mktemp("zoo"))
    return request.param, path, interpreted_runner(path, dtype="float32")


def test_a_gpus_kernels_give_the_logits_of_the_cpus(served):
    name, path, runner = served
    fused, chains = FUSED[name]
    assert (dict(runner.fused.fused), runner.fused.chains) == (fused, chains)
    tokens, logits = generate(runner)
    plain = make_runner(path, fuse="off")
    expected_tokens, expected = generate(plain)
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    if name == "llama":
        expected = pooled(plain)
        assert np.abs(pooled(runner) - expected).max() < 1e-4 * expected.std()


def test_captured_steps_need_nothing_of_the_host(served):
    *_, interpreted = served
    check_captured(interpreted)


def check_captured(interpreted: Runner, num_attentions: int | None = None) -> None:
    """Capture every kind of step of the same model, without data."""
    spec = interpreted.spec
    options = dict(dtype="bfloat16", deterministic=False, q_padding=16)
    config = engine_config(spec, has_states=spec.has_states, **options)
    model = to_meta(interpreted.model, torch.bfloat16)
    pool = KVPool(config.num_blocks, spec.groups, config.block_size, torch.bfloat16, "meta")
    device = dict(device=MetaDevice(), attention_backend="triton")
    with recorded_kernels():
        runner = Runner(config, spec, model, pool, fused=interpreted.fused, **device)
        graphs = runner.graphs
        for part in GraphPart:
            graphs.capture(GraphKey(4, part))
            graphs.capture(GraphKey(4, part, 16, 64))
    for key, cached in graphs._graphs.items():
        kernels = Counter(cached.graph.launches)
        attentions = num_attentions or spec.num_layers
        assert kernels["_decode_kernel"] == attentions, key
        assert kernels["_prefill_kernel"] == attentions * key.is_mixed, key
        if num_attentions:
            assert kernels["_conv_kernel"] == spec.num_layers - attentions, key
        assert kernels["_sample_kernel"] == (key.part is GraphPart.WHOLE), key


def test_layers_with_query_heads_of_their_own_number_on_a_gpus_path(tmp_path):
    repair_interpreter()
    entries = dict(
        transformers.LagunaConfig(
            vocab_size=173,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_attention_heads_per_layer=[2, 4],
            num_key_value_heads=1,
            head_dim=16,
            layer_types=["full_attention", "sliding_attention"],
            mlp_layer_types=["dense", "dense"],
            sliding_window=4,
            max_position_embeddings=512,
        ).to_dict(),
        architectures=["LagunaForCausalLM"],
    )
    _check_gpus_path(entries, tmp_path)


def _check_gpus_path(entries, folder):
    """Compare a random model's tokens and logits on a GPU's path with those on the CPU, unfused."""
    save_random_model(entries, folder)
    tokens, logits = generate(interpreted_runner(folder, dtype="float32"))
    expected_tokens, expected = generate(make_runner(folder, fuse="off"))
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


def test_layers_of_unequal_heads_that_share_keys_on_a_gpus_path(tmp_path):
    """Sliding layers, global ones with larger and fewer heads whose values are their keys, and readers of both."""
    repair_interpreter()
    sliding, full = "sliding_attention", "full_attention"
    entries = dict(
        transformers.Gemma4TextConfig(
            vocab_size=173,
            vocab_size_per_layer_input=173,
            hidden_size=64,
            intermediate_size=88,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            global_head_dim=64,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            num_kv_shared_layers=2,
            layer_types=[sliding, full, sliding, full],
            sliding_window=4,
            hidden_size_per_layer_input=16,
            max_position_embeddings=512,
        ).to_dict(),
        architectures=["Gemma4ForCausalLM"],
    )
    _check_gpus_path(entries, tmp_path)


@pytest.mark.parametrize("name", model_zoo.UNLIKE_NAMES)
def test_latents_and_values_unlike_keys_on_a_gpus_path(name, tmp_path):
    """The tiny model of a proof."""
    repair_interpreter()
    model_zoo.build_unlike(name, tmp_path)
    runner = interpreted_runner(tmp_path, dtype="float32")
    assert not any(group.has_equal_sizes for group in runner.pool.groups)
    tokens, logits = generate(runner)
    expected_tokens, expected = generate(make_runner(tmp_path, fuse="off"))
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    check_captured(runner)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    repair_interpreter()
    return build("llama", tmp_path_factory.mktemp("llama"))


def test_a_chain_in_the_models_own_loop_has_the_bits_of_the_fused_decoder(llama):
    runner = interpreted_runner(llama, dtype="bfloat16")
    assert runner.fused.fused["decoders"] == 1 and runner.fused.chains == [2]
    expected_tokens, expected = generate(runner)
    own, *_ = runner.model.model._parts
    runner._forward._decoder = own
    tokens, logits = generate(runner)
    assert tokens == expected_tokens and np.array_equal(logits, expected)


def test_no_addition_is_carried_past_what_the_model_does_between_layers(llama):
    """A layer whose input the model doubles begins a chain: the layer before it adds its own residual."""

    def double(module, args):
        # The same layer before and after the fuse pass: its flag goes with it.
        return (args[0] * 2.0, *args[1:]) if getattr(module, "doubles_input", False) else None

    hook = nn.modules.module.register_module_forward_pre_hook(double)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LlamaDecoderLayer, "doubles_input", property(_is_layer_1), raising=False)
            patch.setattr(FusedLayer, "doubles_input", property(_is_layer_1), raising=False)
            runner = interpreted_runner(llama, dtype="float32")
            assert runner.fused.chains == [1, 1] and "decoders" not in runner.fused.fused
            tokens, logits = generate(runner)
            expected_tokens, expected = generate(make_runner(llama, fuse="off"))
    finally:
        hook.remove()
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


def _is_layer_1(layer: nn.Module) -> bool:
    if isinstance(layer, FusedLayer):
        return layer.attention.facts.layer == 1
    return layer.self_attn.layer_idx == 1


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_recurrent_layers_have_the_logits_of_the_cpu(name, tmp_path):
    """Prompts in chunks, then decoding rows; states, attention and norms are the GPU's kernels.

    The lengths are equal, so that the driver's steps have the rows in one order.
    """
    repair_interpreter()
    sizes = dict(
        hidden_size=64,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        vocab_size=173,
        pad_token_id=0,
        eos_token_id=2,
    )
    if name == "lfm2":
        config = Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
    else:
        config = Qwen3NextConfig(
            **sizes,
            layer_types=["linear_attention", "full_attention"],
            head_dim=32,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            mlp_only_layers=[0, 1],
        )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    runner = interpreted_runner(tmp_path, dtype="float32", has_states=True, q_padding=None)
    assert runner.fused.fused["recurrences"] == 1, runner.fused.dropped
    tokens, logits = generate(runner, (7, 7))
    plain = make_runner(tmp_path, fuse="off", has_states=True, deterministic=False)
    expected_tokens, expected = generate(plain, (7, 7))
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    check_captured(runner, num_attentions=1)
