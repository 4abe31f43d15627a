"""Paged attention, registered with transformers as `quire_paged`.

The decoder is called by `run_decoder`. transformers passes unknown keywords on to the attention function, so the step's
metadata reaches it without global state and without a mask. Some classes lose keywords on the way. Therefore each
attention module also has the model's `CurrentStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.attention.paged_attention import PagedAttention, Plan
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.transformers_import import AttentionInterface

ATTENTION_NAME = "quire_paged"

Tables = tuple[torch.Tensor, torch.Tensor]  # RoPE tables: cos and sin [1, T, rotary]
# Computes RoPE tables from hidden states (only their dtype is used) and positions [1, T].
Rotation = Callable[[torch.Tensor, torch.Tensor], Tables]

# Called before each layer's attention with layer, q [T, heads, head_dim], scaling, softcap, sinks.
OnAttend = Callable[[int, torch.Tensor, float, float | None, torch.Tensor | None], None]


@dataclass(slots=True)
class RanAhead:
    """Layers that an earlier fused call has already computed.

    The model still calls them one by one. Each call returns its input, which is the stored result of all these layers.
    """

    layers: Sequence[torch.nn.Module]  # not called yet, in order
    result: torch.Tensor
    tables: Tables

    def __bool__(self) -> bool:
        return bool(self.layers)

    def passes(self, layer: torch.nn.Module, hidden_states: torch.Tensor, tables: Tables) -> None:
        """Check that the model now calls the next of these layers, with the stored result.

        Raises
        ------
        RuntimeError
            The model calls another layer, or passes other arguments; then the stored result would be wrong.
        """
        if (
            layer is not self.layers[0]
            or hidden_states is not self.result
            or tables is not self.tables
        ):
            raise RuntimeError(
                "the model calls its decoder layers otherwise than when it was loaded: then each layer got the result "
                "of the previous layer"
            )
        self.layers = self.layers[1:]


@dataclass(slots=True)
class StepContext:
    """Metadata of one step, shared by all layers."""

    pool: KVPool
    attentions: Sequence[PagedAttention]  # G, one for each layer group
    # int64 arrays on the CPU, int32 tensors on a GPU:
    cu_q: np.ndarray | torch.Tensor  # [rows + 1]
    kv_len: np.ndarray | torch.Tensor  # [rows]
    block_tables: np.ndarray | torch.Tensor  # [G, rows, max blocks]
    slots: torch.Tensor  # [G, T] int64, block id * block_size + offset
    num_query: np.ndarray | None = (
        None  # [rows] number of query tokens; needed if `cu_q` is a tensor
    )
    on_attend: OnAttend | None = None  # called with the arguments of each layer's attention
    # Layers computed by an earlier call, which the model has not called yet.
    ran_ahead: RanAhead | None = None
    # The adapters of the step's tokens, for the products of `replica/adapters`; None: no row has one.
    adapters: Any = None
    _plans: dict[int, Plan] = field(default_factory=dict)
    _write_rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def plan(self, g: int) -> Plan:
        """Return the attention plan of a layer group; layers of the group share it."""
        if g not in self._plans:
            self._plans[g] = self.attentions[g].plan(
                self.cu_q, self.kv_len, self.block_tables[g], self.num_query
            )
        return self._plans[g]

    def write_rows(self, g: int) -> torch.Tensor:
        """Return `KVPool.rows_of` for the step's slots in a layer group, [T * kv_heads] int64; computed once."""
        if g not in self._write_rows:
            self._write_rows[g] = self.pool.rows_of(g, self.slots[g])
        return self._write_rows[g]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend in one layer, after its keys and values were written.

        q [T, heads, head_dim] to [T, heads, elements of a value].
        """
        if self.on_attend is not None:
            self.on_attend(layer, q, scaling, softcap, sinks)
        g = self.pool.group_of(layer)
        k_scale, v_scale = self.pool.scales(layer)
        values = self.pool.values(layer)
        return self.attentions[g](
            q,
            self.pool.keys(layer),
            values,
            scaling,
            self.plan(g),
            softcap=softcap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=torch.empty(*q.shape[:2], values.shape[-1], dtype=q.dtype, device=q.device),
        )


@dataclass(slots=True)
class CurrentStep:
    """The step that a model computes; shared by its modules."""

    context: StepContext | None = None


def share_step(model: nn.Module) -> None:
    """Give a model's modules one `CurrentStep`, as their attribute `quire_step`."""
    step = CurrentStep()
    for module in model.modules():
        module.quire_step = step


def run_decoder(
    decoder: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    context: StepContext,
    **options: object,
) -> torch.Tensor:
    """Return hidden states [1, T, hidden] of token ids and positions, [1, T] int64 each.

    `options` are further keywords for the decoder.
    """
    decoder.quire_step.context = context
    return decoder(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, quire=context, **options
    ).last_hidden_state


def paged_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    quire: StepContext | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, then attend. Has the signature of transformers' attention functions.

    The layer's group determines window and chunk; they come from the model's configuration.

    Parameters
    ----------
    query
        [1, heads, T, head_dim].
    key, value
        [1, kv_heads, T, head_dim]; values may have another size.

    Returns
    -------
    [1, T, heads, elements of a value], and None for the attention weights.
    """
    step = module.quire_step.context if quire is None else quire
    layer, pool = module.layer_idx, step.pool
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
    # Of latent attention, `quire.replica.model.layers.latent_attention`.
    products = getattr(module, "head_products", None)
    if products is not None:
        q = products.absorb_query(q)
    if pool.stores(layer):
        pool.write(layer, k, v, step.write_rows(pool.group_of(layer)))
    out = step.attend(layer, q, scaling, softcap, s_aux)
    if products is not None:
        out = products.expand_output(out)
    return out[None], None


def register() -> None:
    """Register `quire_paged` with transformers. Further calls change nothing.

    No mask function is registered, so transformers makes no mask and does not search the positions for packed
    sequences. That search would make the host wait for the device in every step.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_forward)
