"""Supported RoPE variants.

transformers computes the cos and sin tables. A variant is supported if they depend only on the position. The variants
`dynamic` and `longrope` change their frequencies with the longest sequence of a batch, so a token would get other
values in another batch.
"""

from __future__ import annotations

from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


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
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        rope_type = entry.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {rope_type!r} depends on the longest sequence of a batch or is not covered by tests; "
                f"served are {', '.join(ROPE_TYPES)}"
            )
