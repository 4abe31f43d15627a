"""Functions that choose an implementation by the device's name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.replica.device.cpu_device import CpuDevice, zero_pages
from quire.replica.device.cuda_device import CudaDevice
from quire.replica.device.device import Device


def open_device(name: str, *, use_nvtx: bool = False) -> Device:
    """Open the device of a configuration.

    Parameters
    ----------
    name
        "cpu", "cuda", or "cuda:" with an index.
    use_nvtx
        On a GPU, mark queued work as NVTX ranges.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return CpuDevice()
    return CudaDevice(device, use_nvtx=use_nvtx)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Allocate zeros on a torch device. On the CPU, pages take no memory until they are written."""
    if device == "cpu":
        return zero_pages(shape, dtype)
    # Zero-fill as bytes, because some devices cannot fill float8 tensors.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(dtype).view(tuple(shape))
