"""Tiny checkpoints with random weights, one a served architecture, saved as any other checkpoint is.

Use the fixture `zoo` (tests/replica/conftest.py): ``zoo("llama")`` is the checkpoint's folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.replica.proof.model_proof import save_random_model
from quire.replica.proof.tiny_config import tiny_config

_TINY = dict(
    vocab_size=173,  # odd on purpose: tails of vectors
    hidden_size=64,
    intermediate_size=88,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    # Random weights make flat logits; a wide initialisation makes argmax a real test.
    initializer_range=0.25,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN_ROPE = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128
)
_GEMMA = dict(
    head_dim=24,
    query_pre_attn_scalar=20,
    sliding_window=24,
    final_logit_softcapping=20.0,
    initializer_range=0.08,  # wider, and the embedding's scale saturates the soft caps
)
_MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "llama_tied": (transformers.LlamaConfig, dict(tie_word_embeddings=True)),
    "llama3_rope": (transformers.LlamaConfig, dict(rope_parameters=_LLAMA3_ROPE, head_dim=24)),
    "llama_yarn": (transformers.LlamaConfig, dict(rope_parameters=_YARN_ROPE)),
    "llama_linear": (
        transformers.LlamaConfig,
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    ),
    "llama_mha": (transformers.LlamaConfig, dict(num_key_value_heads=4, attention_bias=True)),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_mixed": (
        transformers.Qwen2Config,
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
    ),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=32)),
    "mistral": (transformers.MistralConfig, dict(sliding_window=40, head_dim=16)),
    "olmo2": (transformers.Olmo2Config, {}),
    "smollm3": (transformers.SmolLM3Config, dict(num_hidden_layers=4)),
    "granite": (
        transformers.GraniteConfig,
        dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.5,
            logits_scaling=2.0,
        ),
    ),
    "gemma2": (transformers.Gemma2Config, dict(_GEMMA, attn_logit_softcapping=5.0)),
    "gemma3": (
        transformers.Gemma3TextConfig,
        dict(
            _GEMMA,
            num_hidden_layers=5,
            layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e5, factor=2.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        dict(
            head_dim=16,
            sliding_window=20,
            num_local_experts=5,
            num_experts_per_tok=2,
            rope_parameters=_YARN_ROPE,
        ),
    ),
    "phi3": (transformers.Phi3Config, dict(sliding_window=40)),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        dict(
            head_dim=24,
            moe_intermediate_size=40,
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
}
NAMES = tuple(_MODELS)


def build(name: str, folder: Path, max_shard_size: str = "1GB", **changes: object) -> Path:
    """Save the model `name` under `folder`; the same weights each time. `changes` are of its configuration."""
    config_class, options = _MODELS[name]
    config = config_class(**{**_TINY, **options, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:  # ones by default: a forgotten weight would not show
                    parameter.uniform_(0.5, 1.5)
                elif key.endswith(("bias", "sinks")):
                    parameter.uniform_(-0.5, 0.5)
    path = folder / name
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


# Types with keys unlike their values, and what their classes leave open.
_UNLIKE: dict[str, dict[str, object]] = {
    "deepseek_v3": {},
    "mimo_v2_flash": dict(swa_num_key_value_heads=8),
}
UNLIKE_NAMES = tuple(_UNLIKE)


def build_unlike(name: str, folder: Path) -> None:
    """Save the tiny model of a proof of latent attention, or of keys and values of unequal sizes."""
    build_proven(name, folder, **_UNLIKE[name])


def build_proven(name: str, folder: Path, **changes: object) -> None:
    """Save the tiny model of a type's proof; `changes` are of the type's own configuration."""
    config = transformers.CONFIG_MAPPING[name](**changes)
    entries = tiny_config(config.to_dict(), own_names=config.attribute_map)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    save_random_model({**entries, "architectures": [architecture]}, folder)
