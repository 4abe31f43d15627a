"""Configurations of a model type in different forms, as changes of the tiny model's entries.

`TESTED` is a sample that the tests prove; `variants_of` yields all (`python -m tests.perf families --variants`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from families import default_entries, write_config

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.proof.model_proof import tiny_entries
from quire.replica.proof.tiny_config import NUM_POSITIONS

Entries = dict[str, Any]

# Types with every variant that their configurations have entries for.
VARIED_TYPES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3_moe"),
    *("gpt_oss", "cohere2"),
)
_FACTORS = dict(rope_theta=10000.0, original_max_position_embeddings=256)
ROPES: dict[str, Entries] = {
    "linear": dict(factor=2.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": dict(factor=4.0),
    "dynamic": dict(factor=2.0),
    # Its factors stand in `rope_of`.
    "longrope": dict(factor=4.0),
    "proportional": dict(factor=1.0, partial_rotary_factor=0.5),
}
# Number of query heads, and of heads of keys and values.
GROUPS = {"1 head a group": (4, 4), "3": (6, 2), "7": (14, 2), "multi-query": (5, 1)}
_HEAD_DIM = 32

_FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "norm_topk_prob"),
    *("qk_layernorm", "use_qk_norm"),
)
# Less than a block of 16 tokens, a block, and one more.
_WINDOWS = (1, 5, 16, 17)
OWN: dict[str, dict[str, Entries]] = {
    "llama": {
        "a window that the class ignores": dict(sliding_window=24),
        "not causal": dict(is_causal=False),
        "a large epsilon": dict(rms_norm_eps=0.1),
    },
    "qwen2": {
        "later layers windowed": dict(
            use_sliding_window=True, sliding_window=9, max_window_layers=1, layer_types=None
        ),
        "a window that is off": dict(use_sliding_window=False, sliding_window=9, layer_types=None),
    },
    "mistral": {"no window": dict(sliding_window=None)},
    "gemma2": {
        "no soft caps": dict(attn_logit_softcapping=None, final_logit_softcapping=None),
        "one soft cap": dict(attn_logit_softcapping=None, final_logit_softcapping=7.0),
    },
    "qwen3_moe": {
        "every second layer dense": dict(decoder_sparse_step=2),
        "first layer dense": dict(mlp_only_layers=[0]),
        "one expert a token": dict(num_experts_per_tok=1),
        "all experts": dict(num_experts_per_tok=8, num_experts=8),
    },
    "gpt_oss": {"no window": dict(layer_types=["full_attention"] * 3)},
    "smollm3": {
        "all layers rotate": dict(no_rope_layers=[1] * 4, num_hidden_layers=4, layer_types=None),
        "no layer rotates": dict(no_rope_layers=[0] * 4, num_hidden_layers=4, layer_types=None),
    },
    "phi": {
        "normed queries": dict(qk_layernorm=True),
        "biased head untied": dict(tie_word_embeddings=False),
    },
    "starcoder2": {"no biases": dict(use_bias=False), "a window": dict(sliding_window=7)},
    "exaone4": {"no window": dict(sliding_window=None, layer_types=["full_attention"] * 3)},
    "olmo": {"clipped queries": dict(clip_qkv=0.2)},
}


def variants_of(model_type: str, tiny: Entries) -> Iterator[tuple[str, Entries]]:
    """Yield name and changed entries of each variant of a tiny configuration."""
    if model_type in VARIED_TYPES:
        for name in _FLAGS:
            if isinstance(tiny.get(name), bool):
                yield f"{name} {not tiny[name]}".lower(), {name: not tiny[name]}
        for name, (heads, kv_heads) in GROUPS.items():
            yield f"groups: {name}", heads_of(heads, kv_heads, tiny)
        if isinstance(tiny.get("head_dim"), int):
            yield "head_dim not hidden / heads", dict(head_dim=_HEAD_DIM, hidden_size=80)
        for name, factors in ROPES.items():
            yield f"rope: {name}", rope_of(name, factors, tiny)
        if tiny.get("sliding_window"):
            for window in _WINDOWS:
                yield f"window {window}", {"sliding_window": window}
        for name in ("hidden_act", "hidden_activation"):
            if name in tiny and model_type != "gpt_oss":
                yield "relu", {name: "relu"}
    yield from OWN.get(model_type, {}).items()


def heads_of(heads: int, kv_heads: int, tiny: Entries) -> Entries:
    """Return the entries of this number of heads."""
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    own = {"head_dim": _HEAD_DIM} if isinstance(tiny.get("head_dim"), int) else {}
    return {**sizes, **own, "hidden_size": heads * _HEAD_DIM}


def rope_of(name: str, factors: Entries, tiny: Entries) -> Entries:
    """Return the entries of a rope type; where layers have rope of their own, for layers with full attention."""
    old = tiny.get("rope_parameters") or {}
    rope = {**_FACTORS, **factors, "rope_type": name}
    if name == "longrope":
        # As many as a rotated head has pairs of elements.
        head_dim = tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]
        count = int(head_dim * old.get("partial_rotary_factor", 1.0)) // 2
        rope |= dict(short_factor=[1.0] * count, long_factor=[4.0] * count)
    if "full_attention" in old:
        return {"rope_parameters": {**old, "full_attention": rope}}
    kept = {key: old[key] for key in ("partial_rotary_factor",) if key in old}
    return {"rope_parameters": {**kept, **rope}}


def tiny_of(model_type: str, folder: Path, num_positions: int = NUM_POSITIONS) -> Entries:
    """Return the entries of a type's tiny model; `folder` must not exist."""
    spec = ModelSpec.from_checkpoint(write_config(folder, default_entries(model_type)))
    return tiny_entries(spec, num_positions)


# Types of one structure each: windows, soft caps, sinks, experts (grouped, shared, dense first layers), partial
# rotation, parallel residual, biased LayerNorm, scaled logits, layers without rotation, other activations.
_PLAIN = (
    *("gpt_oss", "mixtral", "glm4_moe", "cohere2", "phi", "granitemoeshared", "exaone4"),
    *("ernie4_5_moe", "olmo3", "starcoder2", "gemma", "qwen2_moe", "apertus", "arcee"),
    *("vaultgemma", "minimax_m2"),
    # Learned positions and sizes of other names; a decoder within the base model; keywords that do not reach attention;
    # interleaved rotation; a router that reads its weight itself.
    *("gpt2", "opt", "stablelm", "gptj", "hunyuan_v1_moe"),
    # Layers that read an earlier layer's keys and values, inputs of each layer's own.
    "gemma3n_text",
    # Latent attention; keys and values of unequal sizes and numbers of heads; a class that would set the padding
    # token's row to zero after loading.
    *("deepseek_v3", "minicpm3", "mimo_v2_flash", "youtu"),
    # Recurrent layers: gated delta rule, linear attention, attention and Mamba-2 in one layer.
    *("qwen3_next", "minimax", "falcon_h1"),
)


def sample_changes(model_type: str, tiny: Entries) -> Entries:
    """Return the changes with which the tests prove a type: several variants together in few models."""
    flip = {name: not tiny[name] for name in _FLAGS if isinstance(tiny.get(name), bool)}
    narrow = {"sliding_window": 5}
    rope = {name: rope_of(name, ROPES[name], tiny) for name in ("linear", "llama3", "yarn")}
    heads = {name: heads_of(*counts, tiny) for name, counts in GROUPS.items()}
    return {
        "llama": {**flip, **rope["linear"], **heads["3"], "hidden_size": 96},
        "qwen2": {**flip, **rope["yarn"], **heads["7"], **OWN["qwen2"]["later layers windowed"]},
        "qwen3": {**flip, **rope["llama3"], **heads["multi-query"]},
        "mistral": {**flip, **narrow, **heads["1 head a group"]},
        "gemma2": {**flip, **narrow, **OWN["gemma2"]["one soft cap"]},
        "qwen3_moe": {**flip, **OWN["qwen3_moe"]["first layer dense"], **heads["7"]},
        "smollm3": OWN["smollm3"]["no layer rotates"],
    }.get(model_type, {})


TESTED_TYPES = (*_PLAIN, "llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe", "smollm3")
