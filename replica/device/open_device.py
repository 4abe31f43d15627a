"""The device of a configuration."""

from __future__ import annotations

import torch

from quire.replica.device.cuda_device import CudaDevice
from quire.replica.device.device import CpuDevice, Device


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
