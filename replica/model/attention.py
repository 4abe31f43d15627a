"""The model's attention, registered with transformers as `quire_paged`.

The decoder is called as ``decoder(input_ids[1, T], position_ids[1, T], use_cache=False, quire=StepContext)``.
transformers hands unknown keywords down to the attention function unchanged, so a step's metadata reaches it
without global state and without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.kernels.attention.paged_attention import PagedAttention, Plan
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.cpu_transformers_import import AttentionInterface

ATTENTION_NAME = "quire_paged"

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin [1, T, rotary]
# Hidden states, of which it takes the dtype, and positions [1, T] to tables
Rotation = Callable[[torch.Tensor, torch.Tensor], Tables]

# Layer, q [T, heads, head_dim], scaling, softcap, sinks
OnAttend = Callable[[int, torch.Tensor, float, float | None, torch.Tensor | None], None]


@dataclass(slots=True)
class RanAhead:
    """Layers that one call has run, and its result, which each of them passes on when the model calls it."""

    layers: Sequence[torch.nn.Module]  # not called yet, in order
    result: torch.Tensor
    tables: Tables

    def __bool__(self) -> bool:
        return bool(self.layers)

    def passes(self, layer: torch.nn.Module, hidden_states: torch.Tensor, tables: Tables) -> None:
        """The model calls the next of them.

        Raises
        ------
        RuntimeError
            It calls another one, or with something else: what was run ahead is not what the model wants.
        """
        if (
            layer is not self.layers[0]
            or hidden_states is not self.result
            or tables is not self.tables
        ):
            raise RuntimeError(
                "the model calls its decoder layers otherwise than when it was loaded, when each was given "
                "what the one before it made"
            )
        self.layers = self.layers[1:]


@dataclass(slots=True)
class StepContext:
    """What every layer of one step needs to know."""

    pool: KVPool
    attentions: Sequence[PagedAttention]  # G, one for each layer group
    # Arrays of int64 on the CPU, tensors of int32 on a GPU
    cu_q: np.ndarray | torch.Tensor  # [rows + 1]
    kv_len: np.ndarray | torch.Tensor  # [rows]
    block_tables: np.ndarray | torch.Tensor  # [G, rows, max blocks]
    slots: torch.Tensor  # [G, T] int64, block id * block_size + offset
    num_query: np.ndarray | None = None  # [rows] query tokens of each; needed beside tensors
    on_attend: OnAttend | None = None  # told what each layer's attention is called with
    # Layers that have run with the one before them, and are still to be called for what they have made
    ran_ahead: RanAhead | None = None
    _plans: dict[int, Plan] = field(default_factory=dict)
    _write_rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def plan(self, g: int) -> Plan:
        """The attention plan of all layers of a group; laid out when the first of them asks."""
        if g not in self._plans:
            self._plans[g] = self.attentions[g].plan(
                self.cu_q, self.kv_len, self.block_tables[g], self.num_query
            )
        return self._plans[g]

    def write_rows(self, g: int) -> torch.Tensor:
        """[T * kv_heads] int64, `KVPool.rows_of` the step's slots; computed when the first layer of a group asks."""
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
        """Attention of one layer, whose keys and values of this step are written: q and result [T, heads, head_dim]."""
        if self.on_attend is not None:
            self.on_attend(layer, q, scaling, softcap, sinks)
        g = self.pool.group_of(layer)
        k_scale, v_scale = self.pool.scales(layer)
        return self.attentions[g](
            q,
            self.pool.keys(layer),
            self.pool.values(layer),
            scaling,
            self.plan(g),
            softcap=softcap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        )


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
    pool.write(layer, k, v, quire.write_rows(pool.group_of(layer)))
    out = quire.attend(layer, q, scaling, softcap, s_aux)
    return out[None], None


def register() -> None:
    """Make `quire_paged` known to transformers; harmless when repeated.

    No mask is registered with it: then transformers makes none, and does not look into the positions for packed
    sequences, for which the host would wait for the device in every step.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_forward)
