"""Inputs of a step on the device, uploaded in one copy from a ring of pinned staging buffers.

```
 host     plan N+1 ──write──▶ slot 1   (slot 0: step N)       a slot is reused once its copy has run
 h2d                              └──── copy ───▶ inputs      after step N, which reads the inputs, is done
 compute  [ step N ....................... ]      │ [ step N+1 .................. ]
```

The device has one input buffer, because captured graphs read fixed addresses; only the staging buffer is doubled. The
arrays of a step are packed one after the other. Their offsets depend only on their lengths, so steps of equal lengths
use equal addresses. The changes of the request table (*differences*) follow at the end; that table holds block tables
and sampling limits. An id -1 - r stands for the last token of table row r, which is unknown when the step is planned.

```
 a step of n rows that decode   rows, positions, kv_len, slots, noise keys of n or more rows │ differences
 a mixed step in a graph        tokens, positions, ... of its tokens and rows or more         │ differences
 any other step                 rows, tokens, positions, ...                                 │ differences
```

On the CPU, steps read the plan's arrays directly (`direct_inputs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from quire.replica.core.sampling_record import NUM_LIMITS
from quire.replica.core.step_plan import StepPlan
from quire.replica.device.device import Device, Event, Stream
from quire.replica.device.staging import Layout, Typed
from quire.replica.runner.device_table import Differences
from quire.replica.runner.graphs.graph_key import GraphKey
from quire.replica.sampling.draft_check import newest_rows

_NO_IDS = np.empty(0, np.int64)


# Dimensions and dtype of each input: n rows, T tokens, S rows that sample, P tokens of prompts, G layer groups. A is T
# in a step with adapters, otherwise 0.
_FIELDS: Mapping[str, tuple[tuple[str, ...], type]] = {
    # -1 - r stands for the last token of table row r.
    "token_ids": (("T",), np.int64),
    "positions": (("T",), np.int64),
    "cu_q": (("n + 1",), np.int32),
    "kv_len": (("n",), np.int32),
    # Rows of the request table.
    "rows": (("n",), np.int64),
    "slots": (("G", "T"), np.int64),
    "token_index": (("S",), np.int64),
    # Rows of the request table.
    "sample_rows": (("S",), np.int64),
    # Empty on the CPU.
    "noise_keys": (("S",), np.int64),
    # Tokens to score, of all prompts.
    "target_ids": (("P",), np.int64),
    # `Drafts.offset`: D is S, or 0 if no row has a draft. No graph reads it.
    "draft_offset": (("D",), np.int64),
    # Adapter slots of the tokens.
    "adapters": (("A",), np.int32),
}


class StepInputs(NamedTuple):
    """Inputs of any step, on the device (`_FIELDS`).

    Mixed steps in a graph are padded, with S = n and P = 0. Padding rows may have no token. The rows that sample come
    first in `token_index`, `sample_rows` and `noise_keys`, then padding.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cu_q: torch.Tensor
    kv_len: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    token_index: torch.Tensor
    sample_rows: torch.Tensor
    noise_keys: torch.Tensor
    target_ids: torch.Tensor
    draft_offset: torch.Tensor
    adapters: torch.Tensor

    @property
    def has_drafts(self) -> bool:
        """Whether some row has a draft, and so several samples."""
        return len(self.draft_offset) > 0

    def newest_rows(
        self, tokens: torch.Tensor, rows: torch.Tensor, padding_row: int
    ) -> torch.Tensor:
        """The result of `draft_check.newest_rows` for tokens and rows [S] int64. Part of a step's queued work."""
        count = len(tokens)
        drafted = self.token_ids.index_select(0, self.token_index[:count])
        return newest_rows(tokens, drafted, self.draft_offset[:count], rows, padding_row)


class DecodeInputs(NamedTuple):
    """Inputs of a step in which every row decodes, on the device, with padding; S = T = n."""

    rows: torch.Tensor
    positions: torch.Tensor
    kv_len: torch.Tensor
    slots: torch.Tensor
    noise_keys: torch.Tensor
    adapters: torch.Tensor


FixedInputs = DecodeInputs | StepInputs


def sampling_rows(inputs: FixedInputs) -> torch.Tensor:
    """Table rows [S] int64 whose tokens the step samples, with padding rows."""
    return inputs.rows if isinstance(inputs, DecodeInputs) else inputs.sample_rows


_Inputs = TypeVar("_Inputs", StepInputs, DecodeInputs)
_Shapes = tuple[tuple[tuple[int, ...], type], ...]


@lru_cache(maxsize=256)
def _shapes(
    fields: tuple[str, ...],
    num_groups: int,
    num_rows: int,
    num_tokens: int,
    num_targets: int = 0,
    num_offsets: int = 0,
    is_adapted: bool = False,
) -> _Shapes:
    """Shapes and dtypes of padded inputs; every row may sample."""
    sizes = {"G": num_groups, "n": num_rows, "n + 1": num_rows + 1, "S": num_rows}
    sizes |= {"T": num_tokens, "P": num_targets, "D": num_offsets}
    sizes["A"] = num_tokens if is_adapted else 0
    return tuple((tuple(sizes[i] for i in _FIELDS[name][0]), _FIELDS[name][1]) for name in fields)


def _step_arrays(plan: StepPlan, noise_keys: np.ndarray) -> tuple[np.ndarray, ...]:
    """The plan's arrays in the order of `StepInputs`."""
    return (
        *(plan.token_ids, plan.positions, plan.cu_q, plan.kv_len, plan.rows, plan.slots),
        *(plan.sampling.token_index, plan.sampling.rows, noise_keys),
        np.concatenate([_NO_IDS, *(targets.token_ids for targets in plan.prompts)]),
        _NO_IDS if plan.sampling.drafts is None else plan.sampling.drafts.offset,
        plan.token_adapters,
    )


def _difference_arrays(new: Differences) -> tuple[Typed, ...]:
    return (
        (new.at, np.int64),
        (new.blocks, np.int32),
        (new.rows, np.int64),
        (new.limits, np.int32),
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
        # Values of a padding row with one token; 0 in the other fields.
        self._padding = {
            "rows": padding_row,
            "sample_rows": padding_row,
            "kv_len": 1,
            "slots": padding_slot,
        }
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
        return self._send(StepInputs, plan, _step_arrays(plan, noise_keys), new)

    def send_decode(
        self, plan: StepPlan, num_rows: int, noise_keys: np.ndarray, new: Differences
    ) -> tuple[DecodeInputs, Differences]:
        """Like `send`, for a step in which every row decodes, padded to `num_rows`."""
        own: Sequence[np.ndarray] = (
            *(plan.rows, plan.positions, plan.kv_len, plan.slots, noise_keys, plan.adapters),
        )
        if num_rows > plan.num_rows:
            own = _written(self._decode_padding(num_rows, len(plan.adapters) > 0), own)
        return self._send(DecodeInputs, plan, own, new)

    def send_differences(self, new: Differences) -> Differences:
        """Like `send`, for table changes that do not fit into a step's upload."""
        return Differences(*self._upload("differences", _difference_arrays(new)))

    def send_mixed(
        self, plan: StepPlan, key: GraphKey, noise_keys: np.ndarray, new: Differences
    ) -> tuple[StepInputs, Differences]:
        """Like `send`, padded to the shape of a graph; `MixedShapes.fits` must hold for graph and step."""
        lengths = np.zeros(key.num_rows, np.int64)
        lengths[plan.num_rows] = key.num_tokens - plan.num_tokens
        padding = self._mixed_padding(key, lengths, has_drafts=plan.sampling.drafts is not None)
        padding[StepInputs._fields.index("cu_q")] += np.int32(plan.num_tokens)
        arrays = _written(padding, _step_arrays(plan, noise_keys))
        return self._send(StepInputs, plan, arrays, new)

    def _send(
        self, kind: type[_Inputs], plan: StepPlan, arrays: Sequence[np.ndarray], new: Differences
    ) -> tuple[_Inputs, Differences]:
        """Upload the inputs and the table changes of a step."""
        typed: list[Typed] = _typed(kind, arrays)
        views = self._upload(f"inputs of step {plan.step}", (*typed, *_difference_arrays(new)))
        return kind(*views[: len(typed)]), Differences(*views[len(typed) :])

    def _decode_padding(self, num_rows: int, is_adapted: bool) -> list[np.ndarray]:
        """Return inputs of a step in which every row decodes and is padding."""
        fields = DecodeInputs._fields
        shapes = _shapes(fields, self._num_groups, num_rows, num_rows, is_adapted=is_adapted)
        return [
            np.full(shape, self._padding.get(name, 0), dtype)
            for name, (shape, dtype) in zip(fields, shapes, strict=True)
        ]

    def _mixed_padding(
        self, key: GraphKey, lengths: np.ndarray, has_drafts: bool = False
    ) -> list[np.ndarray]:
        """Return inputs of a mixed step in which every row is padding; row i has `lengths[i]` tokens."""
        fields = StepInputs._fields
        num_offsets = key.num_rows if has_drafts else 0
        shapes = _shapes(
            fields,
            self._num_groups,
            key.num_rows,
            key.num_tokens,
            0,
            num_offsets,
            key.is_adapted,
        )
        own = {"kv_len": lengths, "cu_q": np.concatenate([[0], np.cumsum(lengths)])}
        values: dict[str, Any] = {**self._padding, **own}
        return [
            np.broadcast_to(values.get(name, 0), shape).astype(dtype)
            for name, (shape, dtype) in zip(fields, shapes, strict=True)
        ]

    def send_padding(self, key: GraphKey) -> DecodeInputs | StepInputs:
        """Upload inputs of a graph's shape in which every row is padding."""
        if key.is_mixed:
            # Padding rows share the trash block, but no row may be longer than its block table.
            before = np.arange(key.num_rows) * key.kv_tokens
            lengths = np.clip(key.num_tokens - before, 0, key.kv_tokens)
            mixed = _typed(StepInputs, self._mixed_padding(key, lengths))
            return StepInputs(*self._upload(f"{key}, padding", mixed))
        arrays = _typed(DecodeInputs, self._decode_padding(key.num_rows, key.is_adapted))
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


def _typed(kind: type[_Inputs], arrays: Sequence[np.ndarray]) -> list[Typed]:
    """Add the dtypes on the device."""
    return [(array, _FIELDS[name][1]) for name, array in zip(kind._fields, arrays, strict=True)]


def _written(padding: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Write the inputs of a step to the begin of those of padding."""
    for target, array in zip(padding, arrays, strict=True):
        target[..., : array.shape[-1]] = array
    return padding


def direct_inputs(plan: StepPlan) -> StepInputs:
    """Return the plan's arrays without copying, for steps on the CPU."""
    typed = _typed(StepInputs, _step_arrays(plan, _NO_IDS))
    return StepInputs(*(_as_tensor(array, dtype) for array, dtype in typed))


def _as_tensor(array: np.ndarray, dtype: type) -> torch.Tensor:
    array = array.astype(
        dtype, copy=not array.flags.writeable
    )  # torch warns about read-only arrays
    return torch.from_numpy(array)


def pieces(new: Differences, max_changes: int) -> Iterable[Differences]:
    """Split table changes into parts of at most `max_changes` block entries; the first part has all changed limits."""
    for begin in range(0, max(len(new.at), 1), max_changes):
        part = slice(begin, begin + max_changes)
        few = new._replace(at=new.at[part], blocks=new.blocks[part])
        yield few if not begin else few._replace(rows=few.rows[:0], limits=few.limits[:0])


def input_bytes(num_groups: int, max_rows: int, max_tokens: int, max_changes: int) -> int:
    """Bytes of the largest upload: inputs of the largest step, and `max_changes` table changes.

    A step has at most `max_rows` rows and as many samples.
    """
    differences = (
        ((max_changes,), np.int64),
        ((max_changes,), np.int32),
        ((max_rows,), np.int64),
        ((max_rows, NUM_LIMITS), np.int32),
    )
    shapes = _shapes(
        StepInputs._fields, num_groups, max_rows, max_tokens, max_tokens, max_rows, True
    )
    return Layout.of((*shapes, *differences)).num_bytes
