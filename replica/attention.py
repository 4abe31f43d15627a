"""The model's attention, registered with transformers as `quire_paged`.

The model is called as ``model(input_ids[1, T], position_ids[1, T], use_cache=False, logits_to_keep=index,
quire=StepContext)``. transformers hands unknown keywords down to the attention function unchanged, so a step's
metadata reaches it without global state and without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from quire.kernels.cpu_attention import AttentionPlan, paged_attention, plan_attention
from quire.replica.kv_pool import KVPool

ATTENTION_NAME = "quire_paged"


@dataclass(slots=True)
class StepContext:
    """What every layer of one step needs to know."""

    pool: KVPool
    cu_q: np.ndarray  # [rows + 1] int64
    kv_len: np.ndarray  # [rows] int64
    block_tables: np.ndarray  # [rows, max blocks] int64
    write_rows: torch.Tensor  # [T * kv_heads] int64, `KVPool.rows_of` the step's slots
    query_tokens: int | None = None  # `plan_attention`
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    def plan(self, num_heads: int, window: int | None) -> AttentionPlan:
        """The attention plan of all layers with this window; laid out when the first of them asks."""
        if window not in self._plans:
            self._plans[window] = plan_attention(
                self.cu_q,
                self.kv_len,
                self.block_tables,
                self.pool.keys(0),
                num_heads,
                window=window,
                query_tokens=self.query_tokens,
            )
        return self._plans[window]


def paged_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    quire: StepContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, then attend: transformers' attention signature.

    Parameters
    ----------
    query
        [1, heads, T, head_dim].
    key, value
        [1, kv_heads, T, head_dim].

    Returns
    -------
    [1, T, heads, head_dim] and None for the weights.
    """
    layer, pool = module.layer_idx, quire.pool
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
    pool.write(layer, k, v, quire.write_rows)
    out = paged_attention(
        q,
        pool.keys(layer),
        pool.values(layer),
        quire.block_tables,
        quire.cu_q,
        quire.kv_len,
        scaling,
        softcap=softcap,
        sinks=s_aux,
        out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        plan=quire.plan(q.shape[1], sliding_window),
    )
    return out[None], None


def register() -> None:
    """Make `quire_paged` known to transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, paged_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
