"""Fixes RoPE frequencies that transformers would choose in every step, by the longest sequence of the batch."""

from __future__ import annotations

import torch
from torch import nn

# Variants that transformers changes with the positions of a batch.
_CHANGING = ("longrope", "dynamic")


def fix_rope(model: nn.Module, max_model_len: int) -> None:
    """Give `longrope` the factors for sequences of `max_model_len` tokens, and keep those of `dynamic`.

    transformers' RoPE module keeps its frequencies as `inv_freq`, and changes them if its `rope_type` says so. Where
    each type of layer has RoPE parameters, the type of layer is a prefix of one name and the key of the other.

    Parameters
    ----------
    max_model_len
        Most tokens of a sequence, at most the checkpoint's `max_position_embeddings`.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        if rope_type is None or config is None:
            continue
        is_nested = isinstance(rope_type, dict)
        fixed = dict(rope_type) if is_nested else {None: rope_type}
        for layer_type in fixed:
            parameters = config.rope_parameters
            name = "inv_freq"
            if layer_type is not None:
                parameters, name = parameters[layer_type], f"{layer_type}_inv_freq"
            # Of a model that was fixed before, the module has another type than its configuration.
            stated = parameters["rope_type"]
            if stated not in _CHANGING:
                continue
            buffer: torch.Tensor = getattr(module, name)
            options = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, _ = ROPE_INIT_FUNCTIONS[stated](
                config, buffer.device, seq_len=max_model_len, **options
            )
            buffer.copy_(frequencies)
            fixed[layer_type] = "default"
        module.rope_type = fixed if is_nested else fixed[None]
