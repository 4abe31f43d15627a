"""What a step's work reads of its plan, on the device: one bulk copy from a ring of pinned staging buffers.

```
 host     plan N+1 ──write──▶ slot 1   (slot 0: N's)          a slot is written again when its copy has run
 h2d                              └──── copy ───▶ inputs      after step N, which reads them, is done
 compute  [ step N ....................... ]      │ [ step N+1 .................. ]
```

There is one set of inputs on the device, so captured graphs read fixed addresses and cost their memory once; only the
staging is doubled. All arrays of a step lie one behind the other; where follows from their lengths alone, so steps of
the same lengths find them at the same addresses. The differences of the request table, of any number, lie behind
them. Block tables and sampling columns are in that table already.

```
 a step of n rows that decode   rows, positions, kv_len, slots, noise keys of n or more rows │ differences
 a mixed step in a graph        tokens, positions, ... of its tokens and rows or more         │ differences
 any other step                 rows, tokens, positions, ...                                 │ differences
```

A device that runs work when it is queued reads the plan's arrays themselves.
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
    """A step's arrays on the device; n rows, T tokens, S rows that sample."""

    # [T] int64; -1 - r: what was last sampled in row r of the request table
    token_ids: torch.Tensor
    positions: torch.Tensor  # [T] int64
    cu_q: torch.Tensor  # [n + 1] int32
    kv_len: torch.Tensor  # [n] int32
    token_index: torch.Tensor  # [S] int64
    sample_rows: torch.Tensor  # [S] int64, in the request table
    slots: torch.Tensor  # [G, T] int64
    rows: torch.Tensor  # [n] int64, in the request table
    noise_keys: torch.Tensor  # [S] int64; not where work runs when it is queued
    # [P] int64, ids of the prompts' tokens whose log-probs are wanted, one prompt behind the other
    target_ids: torch.Tensor


class DecodeInputs(NamedTuple):
    """Arrays of a step in which every row decodes, on the device; n rows, some of them perhaps padding."""

    rows: torch.Tensor  # [n] int64, in the request table
    positions: torch.Tensor  # [n] int64
    kv_len: torch.Tensor  # [n] int32
    slots: torch.Tensor  # [G, n] int64
    noise_keys: torch.Tensor  # [n] int64


class MixedInputs(NamedTuple):
    """Arrays of a mixed step, padded, on the device; n rows, T tokens. Some rows may have no token."""

    # [T] int64; -1 - r: what was last sampled in row r of the request table
    token_ids: torch.Tensor
    positions: torch.Tensor  # [T] int64
    cu_q: torch.Tensor  # [n + 1] int32
    kv_len: torch.Tensor  # [n] int32
    rows: torch.Tensor  # [n] int64, in the request table
    slots: torch.Tensor  # [G, T] int64
    # Of the rows that sample, then of padding:
    token_index: torch.Tensor  # [n] int64
    sample_rows: torch.Tensor  # [n] int64, in the request table
    noise_keys: torch.Tensor  # [n] int64


def _token_ids(plan: StepPlan) -> np.ndarray:
    """[T] int64, as of `StepInputs`."""
    token_ids = plan.token_ids.astype(np.int64)
    token_ids[: len(plan.decode_rows)] = -1 - plan.decode_rows
    return token_ids


def _step_arrays(plan: StepPlan, noise_keys: np.ndarray) -> tuple[Typed, ...]:
    """The plan's arrays in the order of `StepInputs`, and the types they have on the device."""
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
    """Of `DecodeInputs`."""
    return (
        ((n,), np.int64),
        ((n,), np.int64),
        ((n,), np.int32),
        ((num_groups, n), np.int64),
        ((n,), np.int64),
    )


def _mixed_shapes(num_groups: int, n: int, t: int) -> tuple[tuple[tuple[int, ...], type], ...]:
    """Of `MixedInputs`."""
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
    """Brings plans to the device.

    Parameters
    ----------
    device
        Whose streams copy.
    max_bytes
        Of one upload, see `input_bytes`.
    num_groups
        Layer groups, G.
    padding_row, padding_slot
        Of the rows that pad a step.
    depth
        Staging buffers: one more than steps in flight while another is staged leaves nothing to wait for.
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
        self._padding = (padding_row, 0, 1, padding_slot, 0)  # of each of `DecodeInputs`
        self._staging = [device.pinned((max_bytes,), torch.uint8) for _ in range(depth)]
        self._copied: list[Event | None] = [None] * depth
        self._read: Event | None = None  # the step that reads the inputs now is done
        self._turn = 0

    def send(
        self, plan: StepPlan, noise_keys: np.ndarray, new: Differences
    ) -> tuple[StepInputs, Differences]:
        """Stage a step and queue its copy; the compute stream waits for it.

        `release` must follow before the next call of this or one of the others, unless the device has been idle since.

        Raises
        ------
        ValueError
            The step is larger than `max_bytes`.
        """
        arrays = _step_arrays(plan, noise_keys)
        views = self._upload(f"inputs of step {plan.step}", (*arrays, *_difference_arrays(new)))
        return StepInputs(*views[: len(arrays)]), Differences(*views[len(arrays) :])

    def send_decode(
        self, plan: StepPlan, num_rows: int, noise_keys: np.ndarray, new: Differences
    ) -> tuple[DecodeInputs, Differences]:
        """As `send`, for a step in which all rows decode, padded to `num_rows`."""
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
        """As `send`, for what no step is small enough to bring along."""
        return Differences(*self._upload("differences", _difference_arrays(new)))

    def send_mixed(
        self, plan: StepPlan, key: GraphKey, noise_keys: np.ndarray, new: Differences
    ) -> tuple[MixedInputs, Differences]:
        """As `send`, padded to the shape of a graph that the step fits (`MixedShapes.fits`)."""
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
        """Arrays of a mixed step in which rows [n] of padding have so many tokens each."""
        row, position, _, slot, noise_key = self._padding
        shapes = _mixed_shapes(self._num_groups, key.num_rows, key.num_tokens)
        cu_q = np.concatenate([[0], np.cumsum(lengths)])
        values: tuple[Any, ...] = (0, position, cu_q, lengths, row, slot, 0, row, noise_key)
        return [
            (np.broadcast_to(value, shape).astype(dtype), dtype)
            for (shape, dtype), value in zip(shapes, values, strict=True)
        ]

    def send_padding(self, key: GraphKey) -> DecodeInputs | MixedInputs:
        """As `send_decode` and `send_mixed`, where all rows are padding."""
        if key.is_mixed:
            # The rows of padding share the trash block, but none is longer than its table.
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
        """What reads the last upload is queued; `read`: it is done."""
        self._read = read


def _padded(array: np.ndarray, shape: tuple[tuple[int, ...], type], value: int) -> np.ndarray:
    padded: np.ndarray = np.full(shape[0], value, shape[1])
    padded[..., : array.shape[-1]] = array
    return padded


def direct_inputs(plan: StepPlan) -> StepInputs:
    """The plan's own arrays, for work that runs when it is queued."""
    return StepInputs(*(_as_tensor(array, dtype) for array, dtype in _step_arrays(plan, _NO_IDS)))


def _as_tensor(array: np.ndarray, dtype: type) -> torch.Tensor:
    array = array.astype(dtype, copy=not array.flags.writeable)  # torch warns of what is read-only
    return torch.from_numpy(array)


def pieces(new: Differences, max_changes: int) -> Iterable[Differences]:
    """Differences of at most so many blocks; the rows' columns come with the first."""
    for begin in range(0, max(len(new.at), 1), max_changes):
        part = slice(begin, begin + max_changes)
        few = new._replace(at=new.at[part], blocks=new.blocks[part])
        yield few if not begin else few._replace(rows=few.rows[:0], columns=few.columns[:, :0])


def input_bytes(num_groups: int, max_rows: int, max_tokens: int, max_changes: int) -> int:
    """Bytes of the largest upload: a step's inputs and the differences that come with them."""
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
