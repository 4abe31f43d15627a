"""What a step's work reads of its plan, on the device: one bulk copy from a ring of pinned staging buffers.

```
 host     plan N+1 ──write──▶ slot 1   (slot 0: N's)          a slot is written again when its copy has run
 h2d                              └──── copy ───▶ inputs      after step N, which reads them, is done
 compute  [ step N ....................... ]      │ [ step N+1 .................. ]
```

There is one set of inputs on the device, so captured graphs read fixed addresses and cost their memory once; only the
staging is doubled. All arrays of a step lie one behind the other; where follows from their lengths alone, so steps of
the same lengths find them at the same addresses.

A device that runs work when it is queued reads the plan's arrays themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from quire.replica.device import Device, Event, Stream
from quire.replica.plan import StepPlan

_ALIGNMENT = 16  # bytes: any type may follow any other
_TORCH_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's arrays on the device; n rows, T tokens, S rows that sample, D whose token the device has."""

    token_ids: torch.Tensor  # [T] int64; those of the first D tokens are not read
    positions: torch.Tensor  # [T] int64
    cu_q: torch.Tensor  # [n + 1] int32
    kv_len: torch.Tensor  # [n] int32
    token_index: torch.Tensor  # [S] int64
    decode_rows: torch.Tensor  # [D] int64, in the request table
    sample_rows: torch.Tensor  # [S] int64, in the request table
    slots: torch.Tensor  # [G, T] int64
    block_tables: torch.Tensor  # [G, n, max blocks] int32

    def all(self) -> tuple[torch.Tensor, ...]:
        return (
            self.token_ids,
            self.positions,
            self.cu_q,
            self.kv_len,
            self.token_index,
            self.decode_rows,
            self.sample_rows,
            self.slots,
            self.block_tables,
        )


def _arrays(plan: StepPlan) -> tuple[tuple[np.ndarray, type], ...]:
    """The plan's arrays in the order of `StepInputs`, and the types they have on the device."""
    sampling = plan.sampling
    return (
        (plan.token_ids, np.int64),
        (plan.positions, np.int64),
        (plan.cu_q, np.int32),
        (plan.kv_len, np.int32),
        (sampling.token_index, np.int64),
        (plan.decode_rows, np.int64),
        (sampling.rows, np.int64),
        (plan.slots, np.int64),
        (plan.block_tables, np.int32),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the arrays of some lengths lie, in bytes."""

    sections: tuple[tuple[int, tuple[int, ...], np.dtype], ...]  # (begin, shape, type)
    num_bytes: int

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, shapes: tuple[tuple[tuple[int, ...], type], ...]) -> _Layout:
        sections, end = [], 0
        for shape, dtype in shapes:
            dtype = np.dtype(dtype)
            sections.append((end, shape, dtype))
            num_bytes = math.prod(shape) * dtype.itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(sections), end)

    def on_host(self, raw: np.ndarray) -> list[np.ndarray]:
        """Views of staging memory, [any] uint8."""
        return [
            raw[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for begin, shape, dtype in self.sections
        ]

    def on_device(self, raw: torch.Tensor) -> StepInputs:
        """Views of the device's inputs, [any] uint8."""
        return StepInputs(
            *(
                raw[begin : begin + math.prod(shape) * dtype.itemsize]
                .view(_TORCH_TYPES[dtype])
                .view(shape)
                for begin, shape, dtype in self.sections
            )
        )


class InputRing:
    """Brings plans to the device.

    Parameters
    ----------
    device
        Whose streams copy.
    max_bytes
        Of one step's arrays, see `input_bytes`.
    depth
        Staging buffers: one more than steps in flight while another is staged leaves nothing to wait for.
    """

    def __init__(self, device: Device, max_bytes: int, depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._device = device
        self._inputs = device.empty((max_bytes,), torch.uint8)
        self._staging = [device.pinned((max_bytes,), torch.uint8) for _ in range(depth)]
        self._copied: list[Event | None] = [None] * depth
        self._read: Event | None = None  # the step that reads the inputs now is done
        self._turn = 0

    def send(self, plan: StepPlan) -> StepInputs:
        """Stage a plan and queue its copy; the compute stream waits for it.

        `release` must follow before the next call.

        Raises
        ------
        ValueError
            The plan is larger than `max_bytes`.
        """
        device, arrays = self._device, _arrays(plan)
        layout = _Layout.of(tuple((array.shape, dtype) for array, dtype in arrays))
        num_bytes = layout.num_bytes
        if num_bytes > len(self._inputs):
            raise ValueError(
                f"step {plan.step} has inputs of {num_bytes} bytes, the bound is {len(self._inputs)}"
            )
        slot = self._turn
        self._turn = (slot + 1) % len(self._staging)
        if (copied := self._copied[slot]) is not None:
            copied.wait()
        staging = self._staging[slot]
        for target, (array, _) in zip(layout.on_host(staging.numpy()), arrays, strict=True):
            target[...] = array
        if self._read is not None:
            device.wait(Stream.H2D, self._read)
        target = self._inputs[:num_bytes]
        device.copy(Stream.H2D, target, staging[:num_bytes], f"inputs of step {plan.step}")
        self._copied[slot] = copied = device.record(Stream.H2D, "inputs copied")
        device.wait(Stream.COMPUTE, copied)
        return layout.on_device(self._inputs)

    def release(self, read: Event) -> None:
        """The step that reads what was sent last is queued; `read`: it is done."""
        self._read = read


def direct_inputs(plan: StepPlan) -> StepInputs:
    """The plan's own arrays, for work that runs when it is queued."""
    token_ids, *others = _arrays(plan)
    return StepInputs(
        torch.from_numpy(token_ids[0].astype(np.int64)),  # a copy: the step fills in some
        *(_as_tensor(array, dtype) for array, dtype in others),
    )


def _as_tensor(array: np.ndarray, dtype: type) -> torch.Tensor:
    array = array.astype(dtype, copy=not array.flags.writeable)  # torch warns of what is read-only
    return torch.from_numpy(array)


def input_bytes(num_groups: int, max_rows: int, max_tokens: int, max_blocks: int) -> int:
    """Bytes of the largest step's inputs.

    Parameters
    ----------
    max_blocks
        Of one row in one group.
    """
    shapes = (
        ((max_tokens,), np.int64),
        ((max_tokens,), np.int64),
        ((max_rows + 1,), np.int32),
        ((max_rows,), np.int32),
        ((max_rows,), np.int64),
        ((max_rows,), np.int64),
        ((max_rows,), np.int64),
        ((num_groups, max_tokens), np.int64),
        ((num_groups, max_rows, max_blocks), np.int32),
    )
    return _Layout.of(shapes).num_bytes
