"""A cache of RoPE tables: cos and sin of positions, computed by the model's own module."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from quire.replica.model.attention import Tables
from quire.replica.model.fusion.fuse_report import same_tensor
from quire.replica.model.fusion.trial_pass import CALLED_OTHERWISE, TrialPass

# A position beyond the context length of any model.
_FAR = 1 << 22


class CosSinCache:
    """Caches cos and sin by position, if the values of a position depend on that position only.

    transformers' module takes 0.2 ms for one token, because its code is no longer in the CPU caches after a step that
    has read all weights. This cache takes two rows of `head_dim` elements per position, 1/200 of the memory of its keys
    and values.

    Parameters
    ----------
    rotation
        The model's module that computes RoPE tables: from hidden states (only the dtype is used) and positions [1, T]
        to cos and sin [1, T, rotary].
    """

    _PIECE = 256  # positions computed at once, which bounds the float32 temporaries

    def __init__(self, rotation: nn.Module):
        self._rotation = rotation
        self._cos = self._sin = torch.empty(0, 0)  # [positions, rotary] each

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> Tables:
        """Return cos and sin [1, T, rotary] of positions [1, T] int64."""
        needed = int(positions.numpy().max()) + 1  # faster than torch's for a few
        if self._cos.dtype != x.dtype:
            self._cos = self._sin = x.new_empty(0, 0)
        if len(self._cos) < needed:
            self._grow(x, max(self._PIECE, 1 << (needed - 1).bit_length()))
        rows = positions[0]
        return self._cos.index_select(0, rows)[None], self._sin.index_select(0, rows)[None]

    def _grow(self, x: torch.Tensor, count: int) -> None:
        known = len(self._cos)
        tables: list[torch.Tensor] = []
        for begin in range(known, count, self._PIECE):
            made = self._rotation(x, torch.arange(begin, begin + self._PIECE)[None])
            if not tables:
                tables = [part.new_empty(count, part.shape[-1]) for part in made]
            for table, part in zip(tables, made, strict=True):
                table[begin : begin + self._PIECE] = part[0]
        for table, own in zip(tables, (self._cos, self._sin), strict=True):
            if known:
                table[:known] = own
        self._cos, self._sin = tables


def tabled_rotation(
    rotation: nn.Module, like: torch.Tensor, trial: TrialPass
) -> CosSinCache | None:
    """Return a cache for `rotation` if a position's cos and sin depend on that position only, else None.

    This is not so if the RoPE scaling depends on the longest sequence, of the batch or since the start.
    """
    table = CosSinCache(rotation)
    try:
        for near, far in (([3], []), ([3, 700, 41], []), ([3, 700, 41], [_FAR]), ([41], [])):
            made = rotation(trial.normal(like), torch.tensor([near + far]))
            tabled = table(trial.normal(like), torch.tensor([near]))
            for own, found in zip(made, tabled, strict=True):
                if not same_tensor(found, own[:, : len(near)]):
                    return None
    except CALLED_OTHERWISE:
        return None
    finally:
        with suppress(*CALLED_OTHERWISE):
            rotation(
                like, torch.tensor([[0]])
            )  # resets rotations that adapt to the longest position
    return table
