"""Uploads of several arrays in one copy: their layout in a buffer, and pinned staging buffers on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from quire.replica.device.device import Device, Event, Stream

_ALIGNMENT = 16  # bytes; enough for every dtype
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_LEAST_BYTES = 1 << 16  # initial size of a staging buffer
Typed = tuple[np.ndarray, type]


class Layout(NamedTuple):
    """Byte offsets of arrays in one buffer."""

    sections: tuple[tuple[int, tuple[int, ...], np.dtype], ...]  # (begin, shape, type)
    num_bytes: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[tuple[int, ...], type]]) -> Layout:
        sections: list[tuple[int, tuple[int, ...], np.dtype]] = []
        end = 0
        for shape, scalar in shapes:
            dtype = np.dtype(scalar)
            sections.append((end, shape, dtype))
            num_bytes = math.prod(shape) * dtype.itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(sections), end)

    @classmethod
    @lru_cache(maxsize=256)
    def known(cls, shapes: tuple[tuple[tuple[int, ...], type], ...]) -> Layout:
        """As `of`, with a cache: steps often have the same shapes."""
        return cls.of(shapes)

    def on_host(self, raw: np.ndarray) -> list[np.ndarray]:
        """Views of the arrays in host memory `raw`, [any] uint8."""
        return [
            raw[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for begin, shape, dtype in self.sections
        ]

    def on_device(self, raw: torch.Tensor) -> list[torch.Tensor]:
        """Views of the arrays in device memory `raw`, [any] uint8."""
        return [
            raw[begin : begin + math.prod(shape) * dtype.itemsize]
            .view(_TORCH_TYPES[dtype])
            .view(shape)
            for begin, shape, dtype in self.sections
        ]


@dataclass(frozen=True, slots=True)
class Staged:
    """Arrays in pinned memory, ready to be copied to the device."""

    layout: Layout
    pinned: torch.Tensor  # [num_bytes] uint8
    torch_device: torch.device

    def copy(self) -> list[torch.Tensor]:
        """Copy the arrays to the device without blocking the host.

        Part of a step's queued work: device operations queued on the step's stream.
        """
        raw = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=self.torch_device)
        raw.copy_(self.pinned, non_blocking=True)
        return self.layout.on_device(raw)


class Staging:
    """Stages inputs that are known only after the rest of their step is queued: those of the sampler.

    Parameters
    ----------
    device
        Its compute stream runs the copy.
    depth
        Number of buffers: uploads that may be in flight before the host waits for the oldest.
    """

    def __init__(self, device: Device, depth: int = 2):
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * depth
        self._copied: list[Event | None] = [None] * depth
        self._turn = 0

    def write(self, arrays: Sequence[Typed]) -> Staged:
        """Copy arrays to pinned memory. Call `queued` after the work that copies them to the device is queued."""
        layout = Layout.of((array.shape, dtype) for array, dtype in arrays)
        if (copied := self._copied[self._turn]) is not None:
            copied.wait()
        buffer = self._buffers[self._turn]
        if buffer is None or len(buffer) < layout.num_bytes:
            size = max(_LEAST_BYTES, 1 << (layout.num_bytes - 1).bit_length())
            buffer = self._buffers[self._turn] = self._device.pinned((size,), torch.uint8)
        for target, (array, _) in zip(layout.on_host(buffer.numpy()), arrays, strict=True):
            target[...] = array
        return Staged(layout, buffer[: layout.num_bytes], self._device.torch_device)

    def queued(self) -> None:
        """Record that the work which copies the last `write` is queued on the compute stream."""
        self._copied[self._turn] = self._device.record(Stream.COMPUTE, "inputs copied")
        self._turn = (self._turn + 1) % len(self._buffers)
