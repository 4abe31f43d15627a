"""Shape, strides, dtype and device of a tensor: all that argument checks read.

A wrapper passes `TensorMeta` instead of tensors to a memoised function, `_checked(meta_of(x), meta_of(y), ...)`. So the
checks run once for all layers of a step. A call that fails is not stored: it raises the same error every time.
"""

from __future__ import annotations

from typing import NamedTuple, overload

import torch

# Size of each memoised check's cache, in argument combinations. Shapes change from step to step, so most entries serve
# one step. 256 entries hold all kinds of layers of several steps.
CACHED_CHECKS = 256


class TensorMeta(NamedTuple):
    """Stands for a tensor in argument checks: it has the attributes and methods that they use."""

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

    @overload
    def stride(self) -> tuple[int, ...]: ...

    @overload
    def stride(self, dim: int) -> int: ...

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """All strides, or the stride of one dimension, in elements."""
        return self.strides if dim is None else self.strides[dim]

    def is_contiguous(self) -> bool:
        """Whether the elements lie in memory in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not self.numel()
            expected *= size
        return True


def meta_of(x: torch.Tensor | None) -> TensorMeta | None:
    """Return the `TensorMeta` of a tensor; None for None."""
    return None if x is None else TensorMeta(x.shape, x.stride(), x.dtype, x.device)
