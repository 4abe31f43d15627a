"""The model's attention, registered with transformers as `quire_paged`.

The decoder is called as ``decoder(input_ids[1, T], position_ids[1, T], use_cache=False, quire=StepContext)``.
transformers hands unknown keywords down to the attention function unchanged, so a step's metadata reaches it
without global state and without a mask.
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
    block_tables: np.ndarray  # [G, rows, max blocks] int64
    write_rows: list[torch.Tensor]  # G of [T * kv_heads] int64, `KVPool.rows_of` the step's slots
    query_tokens: tuple[int | None, ...]  # G, `plan_attention`; for the torch path
    _plans: dict[int, AttentionPlan] = field(default_factory=dict)

    def plan(self, layer: int, num_heads: int) -> AttentionPlan:
        """The attention plan of all layers of this one's group; laid out when the first of them asks."""
        g = self.pool.group_of(layer)
        if g not in self._plans:
            group = self.pool.groups[g]
            self._plans[g] = plan_attention(
                self.cu_q,
                self.kv_len,
                self.block_tables[g],
                self.pool.keys(layer),
                num_heads,
                window=group.window,
                chunk=group.chunk,
                query_tokens=self.query_tokens[g],
            )
        return self._plans[g]


def paged_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    quire: StepContext,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, then attend: transformers' attention signature.

    What a layer's queries see comes from its group, which was read from the same configuration.

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
    pool.write(layer, k, v, quire.write_rows[pool.group_of(layer)])
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
        plan=quire.plan(layer, q.shape[1]),
    )
    return out[None], None


def register() -> None:
    """Make `quire_paged` known to transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, paged_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
