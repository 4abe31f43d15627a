"""Argument checks that the kernels' wrappers share. Every message names the argument, the bound and the value.

`x` is a tensor or its `quire.kernels.tensor_meta.TensorMeta`. All checks raise ValueError.
"""

from __future__ import annotations

import torch

# The proof of a class (`replica/proof/`) has heads of 16 or 32.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256, 512)
MAX_GROUP = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_bounds(name: str, value: int, low: int, high: int) -> None:
    """Raise unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name}: must be between {low} and {high}, got {value}")


def check_power_of_two(name: str, value: int, low: int) -> None:
    """Raise unless value is a power of two and at least low."""
    if value < low or value & (value - 1):
        raise ValueError(f"{name}: must be a power of two of at least {low}, got {value}")


def check_shape(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless x has that shape."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: must have shape {list(shape)}, got {list(x.shape)}")


def check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    """Raise unless x lies on the device."""
    if x.device != device:
        raise ValueError(f"{name}: must be on {device}, got {x.device}")


def check_dtype(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless x has one of the dtypes."""
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: must be one of {names}, got {x.dtype}")


def check_ids(name: str, x: torch.Tensor, length: int, device: torch.device) -> None:
    """Raise unless x is a contiguous int32 vector of that length."""
    check_shape(name, x, (length,))
    check_device(name, x, device)
    if x.dtype != torch.int32 or not x.is_contiguous():
        raise ValueError(
            f"{name}: must be contiguous int32, got {x.dtype} with strides {x.stride()}"
        )


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


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise unless the kernels can serve these heads."""
    check_group(num_heads, num_kv_heads)
    check_head_dim(head_dim)


def check_group(num_heads: int, num_kv_heads: int) -> None:
    """Raise unless the kernels can serve so many query heads for each KV head."""
    check_bounds("num_kv_heads", num_kv_heads, 1, 1024)
    if num_heads % num_kv_heads or not num_kv_heads <= num_heads <= MAX_GROUP * num_kv_heads:
        raise ValueError(
            f"num_heads: must be 1 to {MAX_GROUP} times num_kv_heads={num_kv_heads}, got {num_heads}"
        )


def check_head_dim(head_dim: int) -> None:
    """Raise unless the kernels can serve keys and values of that many elements each."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: must be one of {HEAD_DIMS}, got {head_dim}")


def check_block_size(block_size: int) -> None:
    """Raise unless blocks of that many tokens can be addressed by shifts."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size: must be one of {BLOCK_SIZES}, got {block_size}")
