"""Tiny models with random weights for every architecture that Quire serves.

All have a head dimension of 64, so engines of different architectures share compiled kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 512
_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, dict(sliding_window=64)),
    "gemma3": (
        transformers.Gemma3TextConfig,
        dict(sliding_window=64, query_pre_attn_scalar=64),
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        dict(
            sliding_window=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=128,
            ),
        ),
    ),
    "phi3": (transformers.Phi3Config, {}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        dict(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2),
    ),
    "gemma2": (
        transformers.Gemma2Config,
        dict(sliding_window=64, query_pre_attn_scalar=64),
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "olmo2": (transformers.Olmo2Config, {}),
    "smollm3": (transformers.SmolLM3Config, {}),
    "granite": (transformers.GraniteConfig, {}),
}
NAMES = tuple(_CONFIGS)


def config_of(name: str, **changes: Any) -> transformers.PretrainedConfig:
    """The configuration of one of `NAMES`."""
    kind, options = _CONFIGS[name]
    return kind(**(_COMMON | options | changes))


def write(name: str, folder: Path, dtype: torch.dtype, **changes: Any) -> None:
    """Write the checkpoint to a folder, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(name, **changes), dtype=torch.float32
        )
    model.to(dtype).save_pretrained(folder)
