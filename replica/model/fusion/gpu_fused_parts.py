"""Fused parts on a GPU, with the kernels of `quire.kernels.rows`."""

from __future__ import annotations

import torch

from quire.kernels.rows import activation
from quire.kernels.rows.kv_write import write_kv
from quire.kernels.rows.norm import rms_norm
from quire.replica.model.attention import Tables
from quire.replica.model.fusion.fused_parts import FusedAttention, FusedMLP, FusedNorm
from quire.replica.model.gpu_step_context import GpuStepContext


class GpuNorm(FusedNorm):
    """`FusedNorm` on a GPU; can also add a residual before the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., columns] to the same."""
        w = self.weight
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, w.weight, w.eps, gemma=w.plus_one).view(x.shape)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and x + residual."""
        w, columns = self.weight, x.shape[-1]
        out, total = rms_norm(
            x.reshape(-1, columns),
            w.weight,
            w.eps,
            residual=residual.reshape(-1, columns),
            gemma=w.plus_one,
        )
        return out.view(x.shape), total.view(x.shape)


class GpuMLP(FusedMLP):
    """`FusedMLP` on a GPU."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `FusedMLP.gate`."""
        gated = activation.silu_mul if self.activation == "silu" else activation.gelu_tanh_mul
        return gated(gate_up)


class GpuAttention(FusedAttention):
    """`FusedAttention` on a GPU."""

    def write(self, qkv: torch.Tensor, tables: Tables, step: GpuStepContext) -> torch.Tensor:
        """See `FusedAttention.write`."""
        facts, pool = self.facts, step.pool
        rotation = step.rotation(tables, facts.table_repeats) if facts.table_repeats else None
        heads = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
        q, k, v = qkv.view(len(qkv), -1, facts.head_dim).split(heads, dim=1)
        given = {}
        if rotation is not None:
            given = dict(positions=rotation.rows, cos=rotation.cos, sin=rotation.sin)
        if self.norms is not None:
            q_norm, k_norm = self.norms
            given |= dict(
                q_norm=q_norm.weight,
                k_norm=k_norm.weight,
                eps=q_norm.eps,
                gemma=q_norm.plus_one,
            )
        k_scale, v_scale = pool.scales(facts.layer)
        return write_kv(
            q,
            k,
            v,
            pool.keys(facts.layer),
            pool.values(facts.layer),
            step.slots[pool.group_of(facts.layer)],
            k_scale=k_scale,
            v_scale=v_scale,
            q_out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            **given,
        )
