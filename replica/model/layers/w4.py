"""Linear layers with weights of 4 bits (`quire.kernels.rows.w4_linear`).

Only checkpoints that are stored in 4 bits have them; nothing is quantised here. `w4_formats.py` brings the tensors of
each format to this layout, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.kernels.rows import w4_linear


class W4Linear(nn.Module):
    """y = x W^T + bias, where W has 4-bit numbers with a scale and a zero point for each group of inputs.

    Parameters
    ----------
    words, scales, zeros
        [n, k / 8] int32, [n, groups] and [n, groups] uint8: the layout of `w4_linear`.
    dtype
        Dtype of the activations.
    order
        [k] int32: input feature `order[i]` is multiplied by column i of the weight. None: in order.
    bias
        [n] in the model's dtype.
    """

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
        bias: nn.Parameter | None = None,
    ):
        super().__init__()
        self.in_features = words.shape[1] * w4_linear.PER_WORD
        self.out_features = len(words)
        self.dtype = dtype
        self.words = _constant(words)
        self.scales = _constant(scales)
        self.zeros = _constant(zeros)
        self.order = None if order is None else _constant(order)
        self.bias = bias

    @classmethod
    def joined(cls, parts: Sequence[W4Linear], bias: torch.Tensor | None) -> W4Linear:
        """Merge layers with the same input. Results do not change, because each output has its own scales.

        Raises
        ------
        ValueError
            The layers have groups of different sizes, or different orders of their inputs.
        """
        groups = {part.scales.shape[1] for part in parts}
        if len(groups) > 1:
            raise ValueError(f"4-bit layers have different numbers of groups: {sorted(groups)}")
        first = parts[0].order
        for part in parts[1:]:
            if (part.order is None) != (first is None):
                raise ValueError("4-bit layers have their inputs in different orders")
            if first is not None and not torch.equal(first, part.order):
                raise ValueError("4-bit layers have their inputs in different orders")
        if len(parts) == 1:
            words, scales, zeros = parts[0].words, parts[0].scales, parts[0].zeros
        else:
            words = torch.cat([part.words for part in parts])
            scales = torch.cat([part.scales for part in parts])
            zeros = torch.cat([part.zeros for part in parts])
        held = None if bias is None else _constant(bias)
        return cls(words, scales, zeros, parts[0].dtype, first, held)

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        """Bring the features of x [..., in_features] to the order of the weight's columns."""
        return x if self.order is None else x.index_select(-1, self.order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = self.arranged(x.reshape(-1, self.in_features))
        out = w4_linear.product(rows, self.words, self.scales, self.zeros, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


def _constant(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x.detach(), requires_grad=False)
