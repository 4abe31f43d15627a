"""What each layer of a model caches, read from transformers' configuration.

transformers names the kind of each layer in `layer_types`. Recurrent layers have a state of each running request;
layers of attention have keys and values of each token; a hybrid layer has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.replica.kv_cache.groups import LayerKind

_HYBRID = frozenset({"hybrid", "hybrid_sliding"})
_SLIDING = frozenset({"sliding_attention", "hybrid_sliding"})
_CHUNKED = "chunked_attention"
_ATTENTION = frozenset({"full_attention", _CHUNKED}) | _SLIDING | _HYBRID
_RECURRENT = frozenset({"linear_attention", "conv"}) | _HYBRID
_WITHOUT_CACHE = frozenset({"mlp", "moe"})


def layer_kinds(config: Any) -> tuple[LayerKind | None, ...]:
    """Return each layer's kind; None: it has no keys and values.

    transformers has a configuration of each layer, for entries that differ.

    Raises
    ------
    ValueError
        The kind of a layer is not served, or entries contradict each other.
    """
    layers = _configs(config)
    types = _layer_types(config)
    heads = query_heads(config)
    if len(types) != len(layers):
        raise ValueError(f"layer_types has {len(types)} entries for {len(layers)} layers")
    sources = _kv_sources(config, types)
    return tuple(
        LayerKind(
            window=getattr(layer, "sliding_window", None) if kind in _SLIDING else None,
            chunk=layer.attention_chunk_size if kind == _CHUNKED else None,
            source=source,
            num_heads=num_heads if len(set(heads)) > 1 else None,
            **_kv_shape(layer, is_sliding=kind in _SLIDING),
        )
        if kind in _ATTENTION
        else None
        for layer, kind, source, num_heads in zip(layers, types, sources, heads, strict=True)
    )


def query_heads(config: Any) -> list[int]:
    """Return the number of query heads of each layer."""
    listed = getattr(config, "num_attention_heads_per_layer", None)
    return list(listed or (layer.num_attention_heads for layer in _configs(config)))


def has_recurrent_layers(config: Any) -> bool:
    """Whether some layers have a state of each running request."""
    return not _RECURRENT.isdisjoint(_layer_types(config))


def _configs(config: Any) -> list[Any]:
    """Return the configuration of each layer."""
    return (
        list(config.per_layer_config)
        if config.is_heterogeneous
        else [config] * config.num_hidden_layers
    )


def _layer_types(config: Any) -> list[str]:
    types = getattr(config, "layer_types", None)
    if types is None:
        windows = (getattr(layer, "sliding_window", None) for layer in _configs(config))
        return ["full_attention" if window is None else "sliding_attention" for window in windows]
    if unknown := set(types) - _ATTENTION - _RECURRENT - _WITHOUT_CACHE:
        raise ValueError(f"layer_types has {sorted(unknown)}, which are not served")
    return list(types)


def _kv_shape(layer: Any, is_sliding: bool) -> dict[str, Any]:
    """Return the entries of a layer's `LayerKind` that are the shape of its keys and values."""
    rank, rotated = (getattr(layer, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if isinstance(rank, int) and isinstance(rotated, int):
        # Latent attention: one latent and one rotated part for all heads.
        return dict(num_kv_heads=1, head_dim=rank + rotated, value_dim=rank, values_in_keys=True)
    heads = getattr(layer, "num_key_value_heads", None) or _kv_heads(layer)
    if is_sliding:
        heads = getattr(layer, "swa_num_key_value_heads", None) or heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    value_dim = getattr(layer, "v_head_dim", None)
    return dict(
        num_kv_heads=heads,
        head_dim=head_dim,
        value_dim=None if value_dim == head_dim else value_dim,
    )


def _kv_heads(layer: Any) -> int:
    """Return the number of key heads of a class without an entry for it."""
    is_one = getattr(layer, "multi_query", False)
    # Falcon's newer form repeats the heads of keys before it caches them.
    repeats = getattr(layer, "new_decoder_architecture", False)
    return 1 if is_one and not repeats else layer.num_attention_heads


def _kv_sources(config: Any, types: Sequence[str]) -> list[int | None]:
    """Return for each layer the earlier layer whose keys and values it reads; None: its own.

    The last `num_kv_shared_layers` read those of the last layer of their type before them.
    """
    first = len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    missing = set(types[max(first, 0) :]) - last.keys()
    if missing:
        raise ValueError(
            f"num_kv_shared_layers is {len(types) - first} of {len(types)} layers, so no layer of type {min(missing)} "
            "stores keys and values"
        )
    return [None if layer < first else last[kind] for layer, kind in enumerate(types)]
