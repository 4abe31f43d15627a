"""Rotary embedding's tables: what a model's own module makes for a step's positions, remembered."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from quire.replica.model.attention import Tables
from quire.replica.model.fusion.fuse_report import same_tensor
from quire.replica.model.fusion.trial_pass import CALLED_OTHERWISE, TrialPass

# A position beyond what any model was trained on.
_FAR = 1 << 22


class CosSinCache:
    """cos and sin of all positions so far, for a rotation that makes a position's from that position alone.

    transformers' own takes 0.2 ms for one token whose step has just read all weights: by then neither its code nor
    Python's is in a cache. Two rows of `head_dim` elements for each position: 1/200 of what its keys and values take.

    Parameters
    ----------
    rotation
        Called with hidden states, of which it takes the dtype, and positions [1, T]; gives cos and sin [1, T, rotary].
    """

    _PIECE = 256  # positions that are asked for at once: in between they are float32, several times

    def __init__(self, rotation: nn.Module):
        self._rotation = rotation
        self._cos = self._sin = torch.empty(0, 0)  # [positions, rotary] each

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> Tables:
        """As the rotation: cos and sin [1, T, rotary] of positions [1, T] int64."""
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
    """A table of what `rotation` makes, where a position's cos and sin are a function of that position alone.

    With scaling that goes by the longest of a batch, or of all so far, they are not.
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
            rotation(like, torch.tensor([[0]]))  # one that has seen the far position forgets it
    return table
