"""Classes that compute attention themselves: each row of a step runs as a sequence of its own.

Some classes do not call transformers' attention interface, so no other attention can take the place of theirs. Some of
them add a bias by position to the scores (ALiBi), others have heads of their own forms. They do keep keys and values in
transformers' cache. Here the cache is filled from the row's blocks, and what the class adds to it is written back.

```
 row   blocks ─▶ keys, values of earlier tokens ─▶ DynamicCache ─▶ decoder ─▶ last keys, values ─▶ blocks
```

So everything but the speed is as for other classes: prefixes are shared, and blocks are copied, saved and restored.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.replica.checkpoint.model_spec import ModelSpec, build_config
from quire.replica.checkpoint.wrapped_text import text_config
from quire.replica.model.attention import StepContext
from quire.replica.model.layers.state_layers import cache_argument
from quire.replica.model.text_part import model_class

# Name of transformers' attention functions in the modules of classes that call them.
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def attends_itself(model_class: Any) -> bool:
    """Whether a class of transformers, causal or a decoder, computes attention without the attention interface."""
    # Fused decoders are no classes of transformers.
    supports = getattr(model_class, "_supports_attention_backend", True)
    return not supports and not hasattr(sys.modules[model_class.__module__], _INTERFACE)


def has_own_attention(spec: ModelSpec) -> bool:
    """Whether a checkpoint's class computes its attention itself."""
    config = build_config(spec.raw_config)
    text = text_config(config)
    if text is config:
        return attends_itself(model_class(config))
    # The class for text and images leaves attention to its decoder.
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return type(text) in MODEL_MAPPING and attends_itself(MODEL_MAPPING[type(text)])


def run_rows(
    decoder: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, context: StepContext
) -> torch.Tensor:
    """Return hidden states [1, T, hidden] of token ids and positions, [1, T] int64 each, and write the step's KV."""
    assert context.num_query is not None
    ends = np.cumsum(context.num_query).tolist()
    lengths, tables = context.kv_len.tolist(), torch.as_tensor(context.block_tables)
    parts = []
    for row, (end, count) in enumerate(zip(ends, context.num_query.tolist(), strict=True)):
        tokens = slice(end - count, end)
        num_earlier = lengths[row] - count
        cache = _filled_cache(context, tables[:, row], num_earlier)
        given = {"position_ids": position_ids[:, tokens], cache_argument(decoder) or "": cache}
        accepted = inspect.signature(decoder.forward).parameters
        given = {name: value for name, value in given.items() if name in accepted}
        result = decoder(input_ids=input_ids[:, tokens], use_cache=True, **given)
        parts.append(result.last_hidden_state)
        _store(context, cache, tokens, num_earlier)
    return torch.cat(parts, dim=1)


def _filled_cache(context: StepContext, tables: torch.Tensor, num_tokens: int) -> Any:
    """Return a cache of transformers with the keys and values of a row's earlier tokens.

    `tables` [G, max blocks] are the row's blocks.
    """
    from transformers import DynamicCache

    cache, pool = DynamicCache(), context.pool
    if num_tokens:
        num_blocks = -(-num_tokens // pool.block_size)
        # Layers of a group are in ascending order, but groups are not.
        for layer in sorted(layer for group in pool.groups for layer in group.layers):
            blocks = tables[pool.group_of(layer), :num_blocks].long()
            # [blocks, heads, block size, elements] to [1, heads, tokens, elements].
            earlier = (
                pages[blocks].transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]
                for pages in (pool.keys(layer), pool.values(layer))
            )
            cache.update(*earlier, layer)
    return cache


def _store(context: StepContext, cache: Any, tokens: slice, num_earlier: int) -> None:
    """Write the keys and values that the class has added to a row's cache."""
    pool = context.pool
    for g, group in enumerate(pool.groups):
        rows = pool.rows_of(g, context.slots[g][tokens])
        for layer in group.layers:
            held = cache.layers[layer]
            k, v = (x[0, :, num_earlier:].transpose(0, 1) for x in (held.keys, held.values))
            pool.write(layer, k.contiguous(), v.contiguous(), rows)
