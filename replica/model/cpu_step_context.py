"""Metadata of a step on the CPU, where a layer may be one call into the compiled library and skip tokens.

A token may be skipped in the last layer if nothing reads its result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from quire.kernels.cpu.cpu_attention_native import NativePlan
from quire.kernels.cpu.cpu_call_sequence import Workspace
from quire.kernels.cpu.cpu_decoder_layer import LayerStep, Selection
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import StepContext, Tables


@dataclass(slots=True)
class CpuStepContext(StepContext):
    """`StepContext` on the CPU."""

    # Memory for layers that run as one call; None: each part of a layer is a call.
    workspace: Workspace | None = None
    # [S] int64 indices of the tokens that are read after the last layer; None: all
    selected: np.ndarray | None = None
    _layer_steps: dict[int, tuple[Tables, LayerStep]] = field(default_factory=dict)

    def write_rows(self, g: int) -> torch.Tensor:
        """As `StepContext.write_rows`, with numpy."""
        if g not in self._write_rows:
            self._write_rows[g] = _rows_of(self.pool, g, self.slots[g])
        return self._write_rows[g]

    def layer_step(self, g: int, tables: Tables) -> LayerStep:
        """Return the step's arguments for layers of a group that run as one call; cached for the step."""
        made = self._layer_steps.get(g)
        if made is None or made[0] is not tables:
            cos, sin = (table.reshape(-1, table.shape[-1]) for table in tables)
            made = tables, LayerStep.of(self._native_plan(g), self.write_rows(g), cos, sin)
            self._layer_steps[g] = made
        return made[1]

    def selection(self, g: int) -> Selection:
        """Return the `selected` tokens as argument of a layer that runs as one call."""
        tokens = self.selected
        assert tokens is not None
        row = np.searchsorted(self.cu_q, tokens, side="right") - 1
        # A plan in which each selected token is a row that ends with this token.
        plan = self.attentions[g].plan(
            np.arange(len(tokens) + 1),
            self.kv_len[row] - (self.cu_q[row + 1] - 1 - tokens),
            self.block_tables[g][row],
        )
        return Selection(torch.from_numpy(tokens), cast(NativePlan, plan))

    def _native_plan(self, g: int) -> NativePlan:
        """Return a group's attention plan; the compiled library must support the group."""
        return cast(NativePlan, self.plan(g))


def _rows_of(pool: KVPool, g: int, slots: torch.Tensor) -> torch.Tensor:
    """`KVPool.rows_of` with numpy, which takes a third of torch's time for a few tokens."""
    group, block_size = pool.groups[g], pool.block_size
    blocks, offsets = np.divmod(slots.numpy(), block_size)
    first = blocks * (pool.data.shape[1] // group.head_dim) + offsets
    heads = np.arange(group.num_kv_heads) * block_size
    return torch.from_numpy(np.add.outer(first, heads).ravel())
