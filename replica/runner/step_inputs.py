"""Inputs of a step on the device, uploaded in one copy from a ring of pinned staging buffers.

```
 host     plan N+1 ──write──▶ slot 1   (slot 0: step N)       a slot is reused once its copy has run
 h2d                              └──── copy ───▶ inputs      after step N, which reads the inputs, is done
 compute  [ step N ....................... ]      │ [ step N+1 .................. ]
```

The device has one input buffer, because captured graphs read fixed addresses; only the staging buffer is doubled. The
arrays of a step are packed one after the other. Their offsets depend only on their lengths, so steps of equal lengths
use equal addresses. The changes of the request table (*differences*) follow at the end; that table holds block tables
and sampling columns. An id -1 - r stands for the last token of table row r, which is unknown when the step is planned.

```
 a step of n rows that decode   rows, positions, kv_len, slots, noise keys of n or more rows │ differences
 a mixed step in a graph        tokens, positions, ... of its tokens and rows or more         │ differences
 any other step                 rows, tokens, positions, ...                                 │ differences
```

On the CPU, steps read the plan's arrays directly (`direct_inputs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.replica.core.step_plan import StepPlan
from quire.replica.device.device import Device, Event, Stream
from quire.replica.device.staging import Layout, Typed
from quire.replica.runner.device_table import Differences
from quire.replica.runner.graphs.graph_key import GraphKey

_NO_IDS = np.empty(0, np.int64)


class StepInputs(NamedTuple):
    """Inputs of any step, on the device: n rows, T tokens, S rows that sample."""

    # [T] int64; -1 - r stands for the last token of table row r
    token_ids: torch.Tensor
    positions: torch.Tensor  # [T] int64
    cu_q: torch.Tensor  # [n + 1] int32
    kv_len: torch.Tensor  # [n] int32
    token_index: torch.Tensor  # [S] int64
    sample_rows: torch.Tensor  # [S] int64 table rows
    slots: torch.Tensor  # [G, T] int64
    rows: torch.Tensor  # [n] int64, in the request table
    noise_keys: torch.Tensor  # [S] int64; empty on the CPU
    # [P] int64, prompt tokens to score, prompts concatenated
    target_ids: torch.Tensor


class DecodeInputs(NamedTuple):
    """Inputs of a step in which every row decodes, on the device: n rows, with padding."""

    rows: torch.Tensor  # [n] int64, in the request table
    positions: torch.Tensor  # [n] int64
    kv_len: torch.Tensor  # [n] int32
    slots: torch.Tensor  # [G, n] int64
    noise_keys: torch.Tensor  # [n] int64


class MixedInputs(NamedTuple):
    """Inputs of a padded mixed step, on the device: n rows, T tokens. Padding rows may have no token."""

    # [T] int64; -1 - r stands for the last token of table row r
    token_ids: torch.Tensor
    positions: torch.Tensor  # [T] int64
    cu_q: torch.Tensor  # [n + 1] int32
    kv_len: torch.Tensor  # [n] int32
    rows: torch.Tensor  # [n] int64, in the request table
    slots: torch.Tensor  # [G, T] int64
    # The rows that sample come first, then padding:
    token_index: torch.Tensor  # [n] int64
    sample_rows: torch.Tensor  # [n] int64, in the request table
    noise_keys: torch.Tensor  # [n] int64


def _token_ids(plan: StepPlan) -> np.ndarray:
    """`StepInputs.token_ids` of a plan."""
    token_ids = plan.token_ids.astype(np.int64)
    token_ids[: len(plan.decode_rows)] = -1 - plan.decode_rows
    return token_ids


def _step_arrays(plan: StepPlan, noise_keys: np.ndarray) -> tuple[Typed, ...]:
    """The plan's arrays in the order of `StepInputs`, with their dtypes on the device."""
    sampling = plan.sampling
    return (
        (_token_ids(plan), np.int64),
        (plan.positions, np.int64),
        (plan.cu_q, np.int32),
        (plan.kv_len, np.int32),
        (sampling.token_index, np.int64),
        (sampling.rows, np.int64),
        (plan.slots, np.int64),
        (plan.rows, np.int64),
        (noise_keys, np.int64),
        (np.concatenate([_NO_IDS, *(targets.token_ids for targets in plan.prompts)]), np.int64),
    )


def _decode_shapes(num_groups: int, n: int) -> tuple[tuple[tuple[int, ...], type], ...]:
    """Shapes and dtypes of `DecodeInputs`."""
    return (
        ((n,), np.int64),
        ((n,), np.int64),
        ((n,), np.int32),
        ((num_groups, n), np.int64),
        ((n,), np.int64),
    )


def _mixed_shapes(num_groups: int, n: int, t: int) -> tuple[tuple[tuple[int, ...], type], ...]:
    """Shapes and dtypes of `MixedInputs`."""
    return (
        ((t,), np.int64),
        ((t,), np.int64),
        ((n + 1,), np.int32),
        ((n,), np.int32),
        ((n,), np.int64),
        ((num_groups, t), np.int64),
        ((n,), np.int64),
        ((n,), np.int64),
        ((n,), np.int64),
    )


def _difference_arrays(new: Differences) -> tuple[Typed, ...]:
    return (
        (new.at, np.int64),
        (new.blocks, np.int32),
        (new.rows, np.int64),
        (new.columns, np.int32),
    )


class InputRing:
    """Uploads inputs of steps.

    Parameters
    ----------
    device
        Its H2D stream runs the copies.
    max_bytes
        Size of the largest upload, computed by `input_bytes`.
    num_groups
        Layer groups, G.
    padding_row, padding_slot
        Table row and KV slot of padding rows.
    depth
        Number of staging buffers. If it exceeds the number of steps in flight, the host never waits for a buffer.
    """

    def __init__(
        self,
        device: Device,
        max_bytes: int,
        num_groups: int,
        padding_row: int,
        padding_slot: int,
        depth: int = 2,
    ):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.inputs = device.empty((max_bytes,), torch.uint8)
        self.num_copies = 0
        self.num_bytes = 0  # of all copies
        self._device = device
        self._num_groups = num_groups
        self._padding = (
            padding_row,
            0,
            1,
            padding_slot,
            0,
        )  # fill value of each field of `DecodeInputs`
        self._staging = [device.pinned((max_bytes,), torch.uint8) for _ in range(depth)]
        self._copied: list[Event | None] = [None] * depth
        self._read: Event | None = None  # end of the step that reads the inputs
        self._turn = 0

    def send(
        self, plan: StepPlan, noise_keys: np.ndarray, new: Differences
    ) -> tuple[StepInputs, Differences]:
        """Stage a step's inputs and queue their copy; the compute stream waits for it.

        Before the next upload of any kind, call `release` with an event after the work that reads these inputs, unless
        the device is idle.

        Raises
        ------
        ValueError
            The inputs are larger than `max_bytes`.
        """
        arrays = _step_arrays(plan, noise_keys)
        views = self._upload(f"inputs of step {plan.step}", (*arrays, *_difference_arrays(new)))
        return StepInputs(*views[: len(arrays)]), Differences(*views[len(arrays) :])

    def send_decode(
        self, plan: StepPlan, num_rows: int, noise_keys: np.ndarray, new: Differences
    ) -> tuple[DecodeInputs, Differences]:
        """Like `send`, for a step in which every row decodes, padded to `num_rows`."""
        shapes = _decode_shapes(self._num_groups, num_rows)
        own: tuple[np.ndarray, ...] = (
            *(plan.rows, plan.positions, plan.kv_len, plan.slots, noise_keys),
        )
        if num_rows > plan.num_rows:
            own = tuple(map(_padded, own, shapes, self._padding))
        arrays = tuple((array, dtype) for array, (_, dtype) in zip(own, shapes, strict=True))
        views = self._upload(f"inputs of step {plan.step}", (*arrays, *_difference_arrays(new)))
        return DecodeInputs(*views[: len(arrays)]), Differences(*views[len(arrays) :])

    def send_differences(self, new: Differences) -> Differences:
        """Like `send`, for table changes that do not fit into a step's upload."""
        return Differences(*self._upload("differences", _difference_arrays(new)))

    def send_mixed(
        self, plan: StepPlan, key: GraphKey, noise_keys: np.ndarray, new: Differences
    ) -> tuple[MixedInputs, Differences]:
        """Like `send`, padded to the shape of a graph; `MixedShapes.fits` must hold for graph and step."""
        sampling = plan.sampling
        lengths = np.zeros(key.num_rows, np.int64)
        lengths[plan.num_rows] = key.num_tokens - plan.num_tokens
        arrays = self._mixed_padding(key, lengths)
        own = (
            *(_token_ids(plan), plan.positions, None, plan.kv_len, plan.rows, plan.slots),
            *(sampling.token_index, sampling.rows, noise_keys),
        )
        for (array, _), real in zip(arrays, own, strict=True):
            if real is not None:
                array[..., : real.shape[-1]] = real
        cu_q = arrays[2][0]
        cu_q += plan.num_tokens
        cu_q[: len(plan.cu_q)] = plan.cu_q
        views = self._upload(f"inputs of step {plan.step}", (*arrays, *_difference_arrays(new)))
        return MixedInputs(*views[: len(arrays)]), Differences(*views[len(arrays) :])

    def _mixed_padding(self, key: GraphKey, lengths: np.ndarray) -> list[Typed]:
        """Return inputs of a mixed step in which every row is padding; row i has `lengths[i]` tokens."""
        row, position, _, slot, noise_key = self._padding
        shapes = _mixed_shapes(self._num_groups, key.num_rows, key.num_tokens)
        cu_q = np.concatenate([[0], np.cumsum(lengths)])
        values: tuple[Any, ...] = (0, position, cu_q, lengths, row, slot, 0, row, noise_key)
        return [
            (np.broadcast_to(value, shape).astype(dtype), dtype)
            for (shape, dtype), value in zip(shapes, values, strict=True)
        ]

    def send_padding(self, key: GraphKey) -> DecodeInputs | MixedInputs:
        """Upload inputs of a graph's shape in which every row is padding."""
        if key.is_mixed:
            # Padding rows share the trash block, but no row may be longer than its block table.
            before = np.arange(key.num_rows) * key.kv_tokens
            lengths = np.clip(key.num_tokens - before, 0, key.kv_tokens)
            return MixedInputs(*self._upload(f"{key}, padding", self._mixed_padding(key, lengths)))
        shapes = _decode_shapes(self._num_groups, key.num_rows)
        arrays: list[Typed] = [
            (np.full(shape, value, dtype), dtype)
            for (shape, dtype), value in zip(shapes, self._padding, strict=True)
        ]
        return DecodeInputs(*self._upload(f"{key}, padding", arrays))

    def _upload(self, name: str, arrays: Sequence[Typed]) -> list[torch.Tensor]:
        device = self._device
        layout = Layout.known(tuple((array.shape, dtype) for array, dtype in arrays))
        num_bytes = layout.num_bytes
        if num_bytes > len(self.inputs):
            raise ValueError(f"{name}: {num_bytes} bytes, the bound is {len(self.inputs)}")
        slot = self._turn
        self._turn = (slot + 1) % len(self._staging)
        if (copied := self._copied[slot]) is not None:
            copied.wait()
        staging = self._staging[slot]
        for target, (array, _) in zip(layout.on_host(staging.numpy()), arrays, strict=True):
            target[...] = array
        if self._read is not None:
            device.wait(Stream.H2D, self._read)
        target = self.inputs[:num_bytes]
        device.copy(Stream.H2D, target, staging[:num_bytes], name)
        self.num_copies += 1
        self.num_bytes += num_bytes
        self._copied[slot] = copied = device.record(Stream.H2D, "inputs copied")
        device.wait(Stream.COMPUTE, copied)
        return layout.on_device(self.inputs)

    def release(self, read: Event) -> None:
        """Allow uploads to overwrite the input buffer after the event `read`, the end of the step that reads it."""
        self._read = read


def _padded(array: np.ndarray, shape: tuple[tuple[int, ...], type], value: int) -> np.ndarray:
    padded: np.ndarray = np.full(shape[0], value, shape[1])
    padded[..., : array.shape[-1]] = array
    return padded


def direct_inputs(plan: StepPlan) -> StepInputs:
    """Return the plan's arrays without copying, for steps on the CPU."""
    return StepInputs(*(_as_tensor(array, dtype) for array, dtype in _step_arrays(plan, _NO_IDS)))


def _as_tensor(array: np.ndarray, dtype: type) -> torch.Tensor:
    array = array.astype(
        dtype, copy=not array.flags.writeable
    )  # torch warns about read-only arrays
    return torch.from_numpy(array)


def pieces(new: Differences, max_changes: int) -> Iterable[Differences]:
    """Split table changes into parts of at most `max_changes` block entries; the first part has all changed columns."""
    for begin in range(0, max(len(new.at), 1), max_changes):
        part = slice(begin, begin + max_changes)
        few = new._replace(at=new.at[part], blocks=new.blocks[part])
        yield few if not begin else few._replace(rows=few.rows[:0], columns=few.columns[:, :0])


def input_bytes(num_groups: int, max_rows: int, max_tokens: int, max_changes: int) -> int:
    """Bytes of the largest upload: inputs of the largest step, and `max_changes` table changes."""
    shapes = (
        ((max_tokens,), np.int64),
        ((max_tokens,), np.int64),
        ((max_rows + 1,), np.int32),
        ((max_rows,), np.int32),
        ((max_rows,), np.int64),
        ((max_rows,), np.int64),
        ((num_groups, max_tokens), np.int64),
        ((max_rows,), np.int64),
        ((max_rows,), np.int64),
        ((max_tokens,), np.int64),
        ((max_changes,), np.int64),
        ((max_changes,), np.int32),
        ((max_rows,), np.int64),
        ((4, max_rows), np.int32),
    )
    return Layout.of(shapes).num_bytes
