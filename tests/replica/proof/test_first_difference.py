"""A failed proof names the first module that differs, as far within the model as its inputs are equal."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from quire.replica.proof.first_difference import find_module

TOKENS = list(range(2, 14))


@pytest.fixture(scope="module")
def model():
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=8,
        use_sliding_window=True,
    )
    torch.manual_seed(3)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def located(model, changed):
    def run():
        with torch.inference_mode():
            changed(torch.tensor([TOKENS]), use_cache=False)
        return TOKENS

    return find_module(changed, model, run, 1e-3)


def add(tensor, token):
    tensor = tensor.clone()
    tensor[..., token, :] += 1
    return tensor


def change(module, args, output):
    """Change two tokens of the first result."""
    first = output[0] if isinstance(output, tuple) else output
    first = add(add(first, 9), 6)
    return (first, *output[1:]) if isinstance(output, tuple) else first


@pytest.mark.parametrize(
    "path, named",
    [
        ("model.embed_tokens", "model.embed_tokens (Embedding)"),
        ("model.layers.0", "model.layers.0 (Qwen3MoeDecoderLayer, full_attention)"),
        ("model.layers.1.self_attn", "model.layers.1.self_attn (Qwen3MoeAttention, sliding_attention)"),
        ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.k_proj (Linear, sliding_attention)"),
        ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts (Qwen3MoeExperts, full_attention)"),
        ("model.norm", "model.norm (Qwen3MoeRMSNorm)"),
    ],
)  # fmt: skip
def test_a_changed_module_is_named(model, path, named):
    changed = copy.deepcopy(model)
    changed.get_submodule(path).register_forward_hook(change)
    text = located(model, changed)
    assert text == f"the output of {named} differs from transformers' by 1 (token 7)"


def test_a_change_between_modules_is_named_by_its_caller_or_as_the_input_of_a_layer(model):
    changed = copy.deepcopy(model)
    changed.model.layers[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert "the input of model.layers.0 (Qwen3MoeDecoderLayer" in located(model, changed)
    changed = copy.deepcopy(model)
    changed.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert "the output of model.layers.1 (Qwen3MoeDecoderLayer" in located(model, changed)


def test_a_number_that_is_none_differs_and_equal_models_do_not(model):
    changed = copy.deepcopy(model)
    assert located(model, changed) is None
    changed.model.norm.register_forward_hook(lambda module, args, output: output * float("nan"))
    assert "the output of model.norm" in located(model, changed)
