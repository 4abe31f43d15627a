"""Sizes of recurrent layers in the configuration of a tiny model."""

from __future__ import annotations

from typing import Any

# Chunks in which a recurrent layer computes a prompt: shorter than the proof's prompts.
_CHUNK = 16
_CHUNK_SIZES = ("mamba_chunk_size", "chunk_size", "block_size")
_STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")
_STATE_SIZE = 16
_KEY_HEADS = "linear_num_key_heads"
_VALUE_HEADS = "linear_num_value_heads"
_HEAD_SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_head_dim": 16}
# Names of the heads of Mamba-2, of the size of one, and of the groups of heads.
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads")
_MAMBA_HEAD_SIZES = ("mamba_d_head", "mamba_head_dim")
_MAMBA_GROUPS = ("mamba_n_groups", "n_groups")
_MAMBA_WIDTHS = ("mamba_d_ssm",)
_MAMBA_FACTORS = ("mamba_expand", "expand")


def shorten_periods(tiny: dict[str, Any]) -> None:
    """Let attention come in the second of each three layers, where every n-th layer has attention."""
    period, offset = "attn_layer_period", "attn_layer_offset"
    if isinstance(tiny.get(period), int) and tiny[period] > 3:
        tiny[period], tiny[offset] = 3, 1


def shrink_states(tiny: dict[str, Any]) -> None:
    """Make recurrent layers small. The hidden size must be that of the tiny model."""
    for name in _CHUNK_SIZES:
        if isinstance(tiny.get(name), int):
            tiny[name] = _CHUNK
    for name in _STATE_SIZES:
        if isinstance(tiny.get(name), int):
            tiny[name] = min(tiny[name], _STATE_SIZE)
    for name, size in _HEAD_SIZES.items():
        if isinstance(tiny.get(name), int):
            tiny[name] = size
    _shrink_linear_heads(tiny)
    _shrink_mamba_heads(tiny)


def _shrink_linear_heads(tiny: dict[str, Any]) -> None:
    """Keep the number of value heads per key head of linear attention."""
    keys, values = tiny.get(_KEY_HEADS), tiny.get(_VALUE_HEADS)
    if isinstance(keys, int) and isinstance(values, int):
        tiny[_KEY_HEADS], tiny[_VALUE_HEADS] = 2, 2 * max(1, values // keys)
    if isinstance(tiny.get("linear_num_heads"), int):
        tiny["linear_num_heads"] = 4


def _shrink_mamba_heads(tiny: dict[str, Any]) -> None:
    """Give Mamba-2 four heads in at most two groups, which together have the width that the class computes."""
    heads, size, groups, width, factor = (
        next((name for name in names if isinstance(tiny.get(name), int)), None)
        for names in (
            _MAMBA_HEADS,
            _MAMBA_HEAD_SIZES,
            _MAMBA_GROUPS,
            _MAMBA_WIDTHS,
            _MAMBA_FACTORS,
        )
    )
    if heads is None or size is None:
        return
    num_heads = 4
    if groups is not None:
        tiny[groups] = min(tiny[groups], 2)
    inner = int((tiny[factor] if factor else 1) * tiny["hidden_size"])
    if width is not None:
        inner = tiny[width] = 2 * num_heads * 16
    tiny[heads], tiny[size] = num_heads, inner // num_heads
