"""Argument checks of the kernels that work row by row; `quire.kernels.checks` has those of attention."""

from __future__ import annotations

import torch

from quire.kernels.checks import check_device, check_shape

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless x has one of the dtypes."""
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: must be one of {names}, got {x.dtype}")


def check_matrix(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, int | None],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise unless x is a matrix with contiguous rows; None in `shape` allows any size."""
    wanted = tuple(got if size is None else size for size, got in zip(shape, x.shape, strict=False))
    if x.dim() != 2 or tuple(x.shape) != wanted:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: must have shape [{sizes}], got {list(x.shape)}")
    check_dtype(name, x, dtypes)
    check_device(name, x, device)
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: rows must be contiguous, got strides {x.stride()}")


def check_vector(
    name: str,
    x: torch.Tensor,
    length: int | None,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise unless x is a contiguous vector of that length; None allows any."""
    check_shape(name, x, (x.numel() if length is None else length,))
    check_dtype(name, x, dtypes)
    check_device(name, x, device)
    if not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {x.stride()}")
