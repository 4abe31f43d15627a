"""Metadata of a step on a GPU, and RoPE cos/sin tables in the layout that the GPU kernels read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.replica.model.attention import StepContext, Tables


@dataclass(frozen=True, slots=True)
class TokenRotation:
    """cos and sin of a step's tokens for `quire.kernels.rows.kv_write`: one row per token."""

    rows: torch.Tensor  # [T] int64, row of cos and sin for each token: 0, 1, 2, ...
    cos: torch.Tensor  # [T, rotary] float32
    sin: torch.Tensor  # [T, rotary] float32

    @classmethod
    def of(cls, tables: Tables, repeats: int, rows: torch.Tensor | None) -> TokenRotation:
        """Convert the model's RoPE tables, of any dtype and strides.

        `repeats` copies of a table are put side by side (`AttentionFacts.table_repeats`). `rows` is reused if given.
        """
        cos, sin = (table[0].float() for table in tables)  # [T, part of rotary]
        if repeats > 1:
            cos, sin = (torch.cat([table] * repeats, dim=1) for table in (cos, sin))
        cos, sin = cos.contiguous(), sin.contiguous()
        if rows is None:
            rows = torch.arange(len(cos), device=cos.device)
        return cls(rows, cos, sin)


@dataclass(slots=True)
class GpuStepContext(StepContext):
    """`StepContext` on a GPU. Its kernels compute where keys and values are written from `slots`."""

    _rotations: list[tuple[Tables, int, TokenRotation]] = field(default_factory=list)

    def rotation(self, tables: Tables, repeats: int) -> TokenRotation:
        """Return the model's RoPE tables for `kernels.rows.kv_write`, repeated `repeats` times; cached for the step."""
        for known, known_repeats, made in self._rotations:
            if known is tables and known_repeats == repeats:
                return made
        rows = self._rotations[0][2].rows if self._rotations else None
        made = TokenRotation.of(tables, repeats, rows)
        self._rotations.append((tables, repeats, made))
        return made

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `StepContext.attend`."""
        if q.stride()[1:] != (q.shape[2], 1):
            # Attention needs contiguous heads. Models that apply RoPE by `chunk` and `cat` return q in memory order
            # [heads, T, head_dim].
            q = q.contiguous()
        return StepContext.attend(self, layer, q, scaling, softcap, sinks)
