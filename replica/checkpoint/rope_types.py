"""Supported RoPE variants.

transformers computes the cos and sin tables. Of most variants they depend only on the position. Two variants change
their frequencies with the longest sequence of a batch, so a token would get other values in another batch. The engine
fixes them when it starts (`model/layers/fixed_rope.py`):

- `longrope` has short factors for sequences of up to `original_max_position_embeddings` tokens and long factors for
  longer ones. Here `max_model_len` decides, for all sequences. Its default is the longest with short factors.
- `dynamic` changes with sequences beyond `max_position_embeddings`. Here no sequence is longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic")


def check_rope_types(config: Any) -> None:
    """Check every rope type that a model's config names.

    Parameters
    ----------
    config
        A `transformers` config. `rope_parameters` is one set for all layers, or one set for each kind of layer.

    Raises
    ------
    ValueError
        A rope type is not in `ROPE_TYPES`.
    """
    for entry in _entries(config):
        rope_type = entry.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {rope_type!r} is not covered by tests; served are {', '.join(ROPE_TYPES)}"
            )


def short_context(config: Any) -> int | None:
    """Return the most tokens of a sequence that `longrope` gives its short factors; None: no layer has `longrope`."""
    lengths = [
        entry["original_max_position_embeddings"]
        for entry in _entries(config)
        if entry.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def _entries(config: Any) -> Iterator[dict[str, Any]]:
    """Yield each set of rope parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
