"""The configuration of a tiny model of a checkpoint's own class: small sizes, every kind of layer and every flag kept.

A tiny model shows how a class computes: which layers have a window, what rotates, what is scaled, where experts are
chosen. It does not show whether large sizes work.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from quire.replica.proof.tiny_states import shorten_periods, shrink_states

# Sizes by the names that transformers' configurations have for them. A name that a configuration lacks is skipped.
_WIDTHS = {
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 48,
    "moe_hidden_size": 64,
    "shared_expert_intermediate_size": 56,
    "moe_shared_expert_intermediate_size": 56,
    "shared_intermediate_size": 56,
    "hidden_size_per_layer_input": 24,
    "laurel_rank": 24,
    "expert_ffn_hidden_size": 48,
    "share_expert_dim": 56,
    # Latent attention.
    "kv_lora_rank": 40,
    "q_lora_rank": 36,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEADS = ("num_attention_heads", "head_dim", *_KV_HEADS)
_MAX_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
    "seq_length",
)
# The scale is a number of positions too: attention is scaled by how often it fits before a position.
_WINDOWS = (
    "sliding_window",
    "window_size",
    "sliding_window_size",
    "attention_chunk_size",
    "floor_scale",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "moe_k",
    "moe_topk",
    "num_experts_per_token",
    "top_k_experts",
)
# Every n-th layer is of another kind.
_STEPS = (
    "decoder_sparse_step",
    "moe_layer_interval",
    "moe_layer_freq",
    "interleave_moe_layer_step",
    "attn_layer_period",
    "expert_layer_period",
)
# Indices of the layers of another kind.
_LAYER_LISTS = ("mlp_only_layers", "attn_layer_indices")
_FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

NUM_POSITIONS = 512
WINDOW = 24
VOCAB_SIZE = 173  # odd, so that the last vector of a row is not full
_MIN_LAYERS = 3
_MAX_LAYERS = 16
_MAX_EXPERTS = 8
_MAX_HEADS_PER_GROUP = 8
# Of `longrope`: shorter than a prompt and its output.
_SHORT_CONTEXT = 16


def tiny_config(
    config: dict[str, Any],
    num_positions: int = NUM_POSITIONS,
    own_names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the entries of a tiny model's configuration.

    Parameters
    ----------
    config
        All entries of the checkpoint's configuration, `PretrainedConfig.to_dict()`; unchanged.
    num_positions
        Longest context of the tiny model.
    own_names
        The class's own names of entries by their usual names, `PretrainedConfig.attribute_map`.
    """
    own_names = {u: own for u, own in (own_names or {}).items() if own not in _HEADS}
    usual_names = {own: usual for usual, own in own_names.items()}
    tiny = {usual_names.get(name, name): copy.deepcopy(value) for name, value in config.items()}
    shorten_periods(tiny)
    _set_layers(tiny)
    _set_heads(tiny)
    _set_sections(tiny)
    _set_experts(tiny)
    shrink_states(tiny)
    for name, width in _WIDTHS.items():
        # Of 0, the model has no such part.
        if isinstance(tiny.get(name), int) and tiny[name]:
            tiny[name] = width
        elif isinstance(tiny.get(name), list):
            tiny[name] = [width] * len(tiny[name])
    for name in _WINDOWS:
        if tiny.get(name):
            tiny[name] = WINDOW
    _set_positions(tiny, num_positions)
    _set_overrides(tiny, config)
    tiny["vocab_size"] = VOCAB_SIZE
    if "vocab_size_per_layer_input" in tiny:
        tiny["vocab_size_per_layer_input"] = VOCAB_SIZE
    for name, token in _TOKENS.items():
        if tiny.get(name) is not None:
            tiny[name] = token
    tiny["dtype"] = "float32"
    tiny.pop("torch_dtype", None)
    return {own_names.get(name, name): value for name, value in tiny.items()}


def _set_layers(tiny: dict[str, Any]) -> None:
    """Keep the first layer of each kind, and as many further ones as it takes for `_MIN_LAYERS` and every step."""
    num_layers = tiny.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        # Each layer has several attentions, from which the class derives `num_hidden_layers`.
        if isinstance(tiny.get("num_layers"), int):
            tiny["num_layers"] = min(tiny["num_layers"], 2)
        return
    lists = [
        name for name, value in tiny.items() if isinstance(value, list) and len(value) == num_layers
    ]
    num_shared = tiny.get("num_kv_shared_layers") or 0
    is_shared = [layer >= num_layers - num_shared for layer in range(num_layers)]
    own = _by_layer(tiny, num_layers)
    indexed = [name for name in _LAYER_LISTS if isinstance(tiny.get(name), list)]
    columns = [[str(i in tiny[name]) for i in range(num_layers)] for name in indexed]
    columns += [list(map(str, tiny[name])) for name in lists]
    kinds = list(zip(is_shared, map(str, own), *columns, strict=True))
    steps = [tiny[name] for name in _STEPS if isinstance(tiny.get(name), int)]
    for name in _FIRST_LAYERS:
        if isinstance(tiny.get(name), int):
            tiny[name] = min(tiny[name], 1)
    least = min(num_layers, max([_MIN_LAYERS, *(step + 1 for step in steps)]))
    chosen = {kinds.index(kind) for kind in kinds}
    for layer in range(num_layers):
        if len(chosen) >= least:
            break
        chosen.add(layer)
    kept = sorted(chosen)[:_MAX_LAYERS]
    for name in lists:
        tiny[name] = [tiny[name][layer] for layer in kept]
    for name in indexed:
        tiny[name] = [i for i, layer in enumerate(kept) if layer in tiny[name]]
    if "per_layer_config" in tiny:
        tiny["per_layer_config"] = {i: own[layer] for i, layer in enumerate(kept)}
    if num_shared:
        tiny["num_kv_shared_layers"] = sum(is_shared[layer] for layer in kept)
    tiny["num_hidden_layers"] = len(kept)
    if isinstance(tiny.get("max_window_layers"), int):
        tiny["max_window_layers"] = min(tiny["max_window_layers"], 1)
    if isinstance(tiny.get("num_nextn_predict_layers"), int):
        tiny["num_nextn_predict_layers"] = 0


def _by_layer(tiny: dict[str, Any], num_layers: int) -> list[dict[str, Any]]:
    """Return the entries of each layer that differ between layers: `per_layer_config`, whose keys may be strings."""
    stated = {int(layer): own for layer, own in (tiny.get("per_layer_config") or {}).items()}
    return [stated.get(layer, {}) for layer in range(num_layers)]


def _set_heads(tiny: dict[str, Any]) -> None:
    """Keep the number of query heads per key head, and whether the heads together are as wide as the hidden state."""
    heads = tiny.get("num_attention_heads")
    hidden = tiny.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    stated = [name for name in _KV_HEADS if tiny.get(name) is not None]
    kv_heads = tiny[stated[0]] if stated else heads
    group = _group(heads, kv_heads)
    few = min(kv_heads, 2)
    tiny |= dict.fromkeys(stated, few)
    tiny["num_attention_heads"] = few * group
    listed = tiny.get("num_attention_heads_per_layer")
    if isinstance(listed, list):
        # Of layers that differ, each keeps its ratio.
        tiny["num_attention_heads_per_layer"] = [few * _group(own, kv_heads) for own in listed]
    head_dim = tiny.get("head_dim")
    # A quarter of it is still even, for those that rotate a part of each head.
    small = 32 if few * group <= 8 else 16
    value_dim = tiny.get("v_head_dim")
    if isinstance(value_dim, int):
        small = 32
    is_other = isinstance(head_dim, int) and head_dim * heads != hidden
    if isinstance(head_dim, int):
        tiny["head_dim"] = small
    if isinstance(tiny.get("rotary_dim"), int):
        tiny["rotary_dim"] = min(small, tiny["rotary_dim"] * small * heads // hidden // 2 * 2)
    if isinstance(value_dim, int):
        tiny["v_head_dim"] = small if value_dim == head_dim else 20
    if isinstance(tiny.get("swa_num_key_value_heads"), int):
        tiny["swa_num_key_value_heads"] = few * max(1, tiny["swa_num_key_value_heads"] // kv_heads)
    rotated = tiny.get("qk_rope_head_dim")
    if isinstance(rotated, int):
        wide = _WIDTHS["qk_nope_head_dim"] + _WIDTHS["qk_rope_head_dim"]
        if isinstance(head_dim, int):
            tiny["head_dim"] = _WIDTHS["qk_rope_head_dim"] if head_dim == rotated else wide
        if isinstance(tiny.get("qk_head_dim"), int):
            tiny["qk_head_dim"] = wide
        for rope in _ropes(tiny):
            # The rotated part of a head, where rope is of the whole head.
            if head_dim and rope.get("partial_rotary_factor") == rotated / head_dim:
                rope["partial_rotary_factor"] = _WIDTHS["qk_rope_head_dim"] / wide
    tiny["hidden_size"] = few * group * small * (2 if is_other else 1)
    if tiny.get("word_embed_proj_dim") is not None:
        is_projected = tiny["word_embed_proj_dim"] != hidden
        tiny["word_embed_proj_dim"] = tiny["hidden_size"] // (2 if is_projected else 1)
    if isinstance(tiny.get("query_pre_attn_scalar"), int | float):
        tiny["query_pre_attn_scalar"] = small + 4


def _group(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads per key head in the tiny model."""
    return min(max(1, num_heads // num_kv_heads), _MAX_HEADS_PER_GROUP)


def _set_overrides(tiny: dict[str, Any], config: dict[str, Any]) -> None:
    """Keep the ratio of a layer's own head size and number of KV heads to that of the other layers."""
    for own in (tiny.get("per_layer_config") or {}).values():
        if "head_dim" in own:
            own["head_dim"] = max(16, tiny["head_dim"] * own["head_dim"] // config["head_dim"])
        kv_heads = own.get("num_key_value_heads")
        if "num_key_value_heads" in own:
            ratio = own["num_key_value_heads"] / config["num_key_value_heads"]
            few = max(1, int(tiny["num_key_value_heads"] * ratio))
            own["num_key_value_heads"] = min(few, tiny["num_attention_heads"])
        if "num_attention_heads" in own:
            few = own.get("num_key_value_heads", tiny["num_key_value_heads"])
            stated = kv_heads or config["num_key_value_heads"]
            own["num_attention_heads"] = few * _group(own["num_attention_heads"], stated)
        own |= {name: width for name, width in _WIDTHS.items() if own.get(name)}
        own |= {name: WINDOW for name in _WINDOWS if own.get(name)}


def _set_sections(tiny: dict[str, Any]) -> None:
    """Share half of a rotated head among the axes of multi-dimensional rope as before."""
    for rope in _ropes(tiny):
        sections = rope.get("mrope_section")
        if not sections:
            continue
        head_dim = tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]
        half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        small = [max(1, half * size // sum(sections)) for size in sections[1:]]
        rope["mrope_section"] = [half - sum(small), *small]


def _ropes(tiny: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rope of each kind of layer, or that of all layers."""
    rope = tiny.get("rope_parameters") or tiny.get("rope_scaling")
    if not isinstance(rope, dict):
        return []
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def _set_experts(tiny: dict[str, Any]) -> None:
    for name in _EXPERTS:
        if isinstance(tiny.get(name), int) and tiny[name] > _MAX_EXPERTS:
            tiny[name] = _MAX_EXPERTS
    experts = next((tiny[name] for name in _EXPERTS if isinstance(tiny.get(name), int)), 0)
    for name in _CHOSEN_EXPERTS:
        if isinstance(tiny.get(name), int) and experts:
            tiny[name] = max(1, min(tiny[name], experts // 2))
    if isinstance(tiny.get("zero_expert_num"), int):
        # Experts that return their input.
        tiny["zero_expert_num"] = min(tiny["zero_expert_num"], 4)
    if isinstance(tiny.get("n_group"), int) and tiny["n_group"] > 1:
        tiny["n_group"], tiny["topk_group"] = 2, 1


def _shorten_factors(entry: dict[str, Any], tiny: dict[str, Any]) -> None:
    """Keep as many factors of `longrope` as there are frequencies, from the first to the last."""
    head_dim = tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]
    count = int(head_dim * entry.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        factors = entry[name]
        entry[name] = [factors[i * len(factors) // count] for i in range(count)]


def _set_positions(tiny: dict[str, Any], num_positions: int) -> None:
    """Shorten the context, and the trained context within it by the same factor."""
    stated: int = next(
        (tiny[name] for name in _MAX_POSITIONS if isinstance(tiny.get(name), int)), num_positions
    )
    for name in _MAX_POSITIONS:
        if isinstance(tiny.get(name), int):
            tiny[name] = num_positions
    for entry in _ropes(tiny):
        trained = entry.get("original_max_position_embeddings")
        if entry.get("rope_type") == "longrope":
            # The proof's prompts have the long factors, unless no context of the checkpoint has them.
            is_short = trained is None or trained >= stated
            short = num_positions if is_short else _SHORT_CONTEXT
            entry["original_max_position_embeddings"] = short
            if "original_max_position_embeddings" in tiny:
                tiny["original_max_position_embeddings"] = short
            _shorten_factors(entry, tiny)
        elif isinstance(trained, int):
            entry["original_max_position_embeddings"] = max(
                8, num_positions * trained // max(stated, 1)
            )
