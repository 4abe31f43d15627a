"""The form of a tensor: all that argument checks look at. A call with the forms of an earlier one is not checked again.

A wrapper hands forms, not tensors, to a memoised function, `_checked(form_of(x), form_of(y), ...)`. The same checks
thus run once for all layers of a step, and raise the same errors. The latest `KEPT_FORMS` calls that passed are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Steps differ in their tokens, so most entries serve one step: enough for all kinds of layers of several.
KEPT_FORMS = 256


class Form(NamedTuple):
    """Reads like the tensor, as far as `checks` and `row_checks` ask."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """All strides, or that of a dimension, in elements."""
        return self.strides if dim is None else self.strides[dim]

    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in memory."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not self.numel()
            expected *= size
        return True


def form_of(x: torch.Tensor | None) -> Form | None:
    """The form of a tensor; None of None."""
    return None if x is None else Form(x.shape, x.stride(), x.dtype, x.device)
