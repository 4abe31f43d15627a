"""Arrays of the host on their way to the device: how they lie in one buffer, and the pinned memory in between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from quire.replica.device.device import Device, Event, Stream

_ALIGNMENT = 16  # bytes: any type may follow any other
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_LEAST_BYTES = 1 << 16  # of a buffer that grows
Typed = tuple[np.ndarray, type]


class Layout(NamedTuple):
    """Where the arrays of some lengths lie, in bytes."""

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
        """As `of`, of shapes that come again."""
        return cls.of(shapes)

    def on_host(self, raw: np.ndarray) -> list[np.ndarray]:
        """Views of staging memory, [any] uint8."""
        return [
            raw[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for begin, shape, dtype in self.sections
        ]

    def on_device(self, raw: torch.Tensor) -> list[torch.Tensor]:
        """Views of the device's memory, [any] uint8."""
        return [
            raw[begin : begin + math.prod(shape) * dtype.itemsize]
            .view(_TORCH_TYPES[dtype])
            .view(shape)
            for begin, shape, dtype in self.sections
        ]


@dataclass(frozen=True, slots=True)
class Staged:
    """Arrays in pinned memory."""

    layout: Layout
    pinned: torch.Tensor  # [num_bytes] uint8
    torch_device: torch.device

    def copy(self) -> list[torch.Tensor]:
        """Part of a step's work: the arrays on the device. The host waits for nothing."""
        raw = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=self.torch_device)
        raw.copy_(self.pinned, non_blocking=True)
        return self.layout.on_device(raw)


class Staging:
    """Stages arrays of any number and size that one piece of work copies: what it is about is known only
    when the rest of its step is queued.

    Parameters
    ----------
    device
        Whose compute stream copies.
    depth
        Pieces of work that may be in flight before the host waits for one.
    """

    def __init__(self, device: Device, depth: int = 2):
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * depth
        self._copied: list[Event | None] = [None] * depth
        self._turn = 0

    def write(self, arrays: Sequence[Typed]) -> Staged:
        """Stage arrays; `queued` must follow once the work that copies them is queued."""
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
        """The work that copies what was written last is queued on the compute stream."""
        self._copied[self._turn] = self._device.record(Stream.COMPUTE, "inputs copied")
        self._turn = (self._turn + 1) % len(self._buffers)
