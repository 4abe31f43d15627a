"""Recurrent layers in an engine's steps on the CPU: the same bits alone and in a batch, however a prompt is divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_driver import Driver, make_runner
from transformers import AutoModelForCausalLM, Lfm2Config
from transformers.models.jamba.configuration_jamba import JambaConfig

from quire.kernels.cpu import native_library
from quire.replica.proof.model_proof import save_random_model
from quire.replica.runner.runner import Runner

pytestmark = pytest.mark.skipif(native_library.load() is None, reason="no compiled library")

SIZES = dict(
    hidden_size=64, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
    num_hidden_layers=3, vocab_size=173, pad_token_id=0, eos_token_id=2,
)  # fmt: skip
# A gated delta rule, Mamba-2 in two groups, a short convolution.
ENTRIES = {
    "Qwen3NextForCausalLM": dict(
        model_type="qwen3_next", head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=24, mlp_only_layers=[0, 1, 2],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "BambaForCausalLM": dict(
        model_type="bamba", mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=16,
        attn_layer_indices=[1],
    ),
    "Lfm2ForCausalLM": dict(
        model_type="lfm2", layer_types=["conv", "full_attention", "conv"]
    ),
}  # fmt: skip


def generate(runner: Runner, prompts: list[list[int]], chunk: int) -> list[np.ndarray]:
    """Logits [steps, vocab] of each prompt's greedy tokens."""
    driver = Driver(runner)
    sequences = [driver.add(prompt, 4) for prompt in prompts]
    driver.generate(sequences, 4, chunk)
    return [np.stack(sequence.logits) for sequence in sequences]


@pytest.mark.parametrize("architecture", ENTRIES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(architecture, tmp_path):
    save_random_model(SIZES | ENTRIES[architecture] | {"architectures": [architecture]}, tmp_path)
    runner = make_runner(tmp_path, has_states=True, deterministic=True)
    assert runner.fused.fused["recurrences"] == 2, runner.fused.dropped
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 173, 23).tolist() for _ in range(4)]
    batch = generate(runner, prompts, 23)
    for prompt, expected in zip(prompts, batch, strict=True):
        for chunk in (23, 5, 1):
            (alone,) = generate(runner, [prompt], chunk)
            assert np.array_equal(alone, expected), chunk


def test_recurrences_of_transformers_are_not_deterministic(tmp_path):
    """Mamba-1 has no kernel here."""
    config = JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="deterministic is true, and modules of transformers"):
        make_runner(tmp_path, has_states=True, deterministic=True)


def test_without_fused_modules_a_recurrence_keeps_its_own_code(tmp_path):
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    runner = make_runner(tmp_path, has_states=True, deterministic=False, fuse="off")
    assert not runner.fused.fused
