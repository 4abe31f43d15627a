"""A step's metadata on a GPU, and the rotation as its kernels read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.replica.model.attention import StepContext, Tables


@dataclass(frozen=True, slots=True)
class TokenRotation:
    """cos and sin of a step's tokens as `quire.kernels.rows.kv_write` reads them: one row for each token."""

    rows: torch.Tensor  # [T] int64: 0, 1, 2, ...
    cos: torch.Tensor  # [T, rotary] float32
    sin: torch.Tensor  # [T, rotary] float32

    @classmethod
    def of(cls, tables: Tables, repeats: int, rows: torch.Tensor | None) -> TokenRotation:
        """From the model's tables, of any dtype and strides; `rows` if they are known."""
        cos, sin = (table[0].float() for table in tables)  # [T, part of rotary]
        if repeats > 1:
            cos, sin = (torch.cat([table] * repeats, dim=1) for table in (cos, sin))
        cos, sin = cos.contiguous(), sin.contiguous()
        if rows is None:
            rows = torch.arange(len(cos), device=cos.device)
        return cls(rows, cos, sin)


@dataclass(slots=True)
class GpuStepContext(StepContext):
    """What every layer of one step needs to know; kernels find the rows of keys and values by `slots`."""

    _rotations: list[tuple[Tables, int, TokenRotation]] = field(default_factory=list)

    def rotation(self, tables: Tables, repeats: int) -> TokenRotation:
        """The model's tables, `repeats` times side by side, for `kernels.rows.kv_write`; made for the first layer."""
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
            # transformers' [heads, T, head_dim], in that order where the model rotates by `chunk` and `cat`.
            q = q.contiguous()
        return StepContext.attend(self, layer, q, scaling, softcap, sinks)
