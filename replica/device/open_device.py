"""The one place that chooses by the name of a configuration's device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.replica.device.cpu_device import CpuDevice, zero_pages
from quire.replica.device.cuda_device import CudaDevice
from quire.replica.device.device import Device


def open_device(name: str, *, use_nvtx: bool = False) -> Device:
    """The device of a configuration.

    Parameters
    ----------
    name
        "cpu" or "cuda", the latter with an index if there are several.
    use_nvtx
        On a GPU, mark what is queued as ranges for a profiler.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return CpuDevice()
    return CudaDevice(device, use_nvtx=use_nvtx)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros on a device of torch; on the CPU they take no memory before their first write."""
    if device == "cpu":
        return zero_pages(shape, dtype)
    # As bytes: not every device fills numbers of 8 bits.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(dtype).view(tuple(shape))
