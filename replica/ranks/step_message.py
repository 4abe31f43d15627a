"""What the leader tells the other ranks: a step, an adapter for a slot, saves of an idle engine, captures of graphs.

A step has what the forward pass and the copies of blocks need. The leader alone draws samples, so that grammars,
penalties and sums for embeddings stay there. A step has one of two forms:

| | on a CPU | on a GPU, where each rank has a request table |
|---|---|---|
| tokens | known | a placeholder for a token of the step in flight (launched, not collected) |
| blocks | the rows' tables | changes of the request table |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch

from quire.replica.adapters.adapter_folder import LowRank
from quire.replica.core.sampling_record import RECORD
from quire.replica.core.step_plan import BlockTables, PromptTargets, SamplingBatch, StepPlan
from quire.replica.core.table_changes import TableChanges
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart

_ARRAYS = (
    *("positions", "cu_q", "num_sampled", "kv_len", "rows", "slots", "saves", "restores"),
    *("state_copies", "state_saves", "adapters"),
)
_NUMBERS = ("step", "uses_restores", "num_decode_rows")


class Saves(NamedTuple):
    """Blocks to save between two steps."""

    pairs: np.ndarray  # [k, 2] integers, (device block, host block)


class Capture(NamedTuple):
    """A graph that every rank captures now."""

    key: GraphKey


class Ready(NamedTuple):
    """The end of the warm-up."""


class SlotLoad(NamedTuple):
    """A rank's part of an adapter, and the slot that gets it before the next step."""

    slot: int
    name: str
    weights: dict[str, LowRank]


Task = StepPlan | Saves | Capture | Ready | SlotLoad


def encode(plan: StepPlan, token_ids: np.ndarray | None = None) -> bytes:
    """Encode a plan.

    Parameters
    ----------
    token_ids
        [T] ids of `plan.token_ids`, without placeholders, for ranks without a request table; None: they have one.
    """
    prompts = [
        (t.row, t.begin, t.start, _packed(t.token_ids), int(t.num_top)) for t in plan.prompts
    ]
    has_table = token_ids is None and len(plan.rows) > 0
    return msgpack.packb(
        [
            "step",
            [int(getattr(plan, name)) for name in _NUMBERS],
            [_packed(getattr(plan, name)) for name in _ARRAYS],
            _packed(plan.token_ids if token_ids is None else token_ids),
            _packed_table(plan) if has_table else None,
            None if has_table else _packed(plan.block_tables.gather()),
            _packed(plan.sampling.token_index),
            [(int(source), int(target)) for source, target in plan.copies],
            [
                (int(row), int(begin), int(start), ids, top)
                for row, begin, start, ids, top in prompts
            ],
        ]
    )


def encode_saves(pairs: np.ndarray) -> bytes:
    """Encode `Saves`."""
    return msgpack.packb(["saves", _packed(pairs)])


def encode_capture(key: GraphKey) -> bytes:
    """Encode a `Capture`."""
    return msgpack.packb(
        ["capture", key.part.value, *(value for value in key if value is not key.part)]
    )


def encode_ready() -> bytes:
    """Encode `Ready`."""
    return msgpack.packb(["ready"])


def encode_adapter(weights: Mapping[str, LowRank]) -> bytes:
    """Encode a rank's part of an adapter."""
    return msgpack.packb(
        [
            (name, part.scale, *(_packed_tensor(matrix) for matrix in (part.down, part.up)))
            for name, part in weights.items()
        ]
    )


def encode_slot_load(slot: int, name: str, encoded: bytes) -> bytes:
    """Encode a `SlotLoad` of the result of `encode_adapter`."""
    return msgpack.packb(["adapter", slot, name, encoded])


def decode(message: bytes) -> Task:
    """Decode a message; a plan samples nothing but computes the logits of the same tokens."""
    kind, *fields = msgpack.unpackb(message)
    if kind == "saves":
        return Saves(_unpacked(fields[0]))
    if kind == "capture":
        part, num_rows, *others = fields
        return Capture(GraphKey(num_rows, GraphPart(part), *others))
    if kind == "ready":
        return Ready()
    if kind == "adapter":
        slot, name, encoded = fields
        return SlotLoad(slot, name, _unpacked_adapter(encoded))
    numbers, arrays, token_ids, changes, tables, token_index, copies, prompts = fields
    own: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
    own |= {name: _unpacked(value) for name, value in zip(_ARRAYS, arrays, strict=True)}
    own["uses_restores"] = bool(own["uses_restores"])
    index = _unpacked(token_index)
    sampling = SamplingBatch(index, np.zeros(len(index), RECORD), np.zeros(len(index), np.int64))
    if changes is None:
        own["block_tables"] = BlockTables.of(_unpacked(tables))
    else:
        own |= _unpacked_table(changes, own["rows"], sampling)
        sampling = own.pop("sampling")
    return StepPlan(
        **own,
        token_ids=_unpacked(token_ids),
        sampling=sampling,
        copies=tuple((source, target) for source, target in copies),
        prompts=tuple(
            PromptTargets(row, begin, start, _unpacked(ids), top)
            for row, begin, start, ids, top in prompts
        ),
    )


def _packed_table(plan: StepPlan) -> list[Any]:
    """What a step needs of the request table, and which graph it may use."""
    changes, sampling = plan.changes, plan.sampling
    return [
        int(plan.block_tables.width),
        [(int(group), _packed(at), _packed(blocks)) for group, at, blocks in changes.blocks],
        _packed(changes.claimed),
        changes.sampling.tobytes(),
        _packed(sampling.rows),
        _packed(sampling.position),
        bool(plan.awaits_tokens or not sampling.is_plain),
    ]


def _unpacked_table(fields: list[Any], rows: np.ndarray, sampling: SamplingBatch) -> dict[str, Any]:
    width, blocks, claimed, records, sampling_rows, position, is_split = fields
    changes = TableChanges(
        tuple((group, _unpacked(at), _unpacked(own)) for group, at, own in blocks),
        _unpacked(claimed),
        np.frombuffer(records, RECORD),
    )
    return dict(
        changes=changes,
        # The device has the tables.
        block_tables=BlockTables(np.empty((0, 0, 0), np.int32), rows, width),
        sampling=sampling._replace(rows=_unpacked(sampling_rows), position=_unpacked(position)),
        # The leader samples apart from the forward pass, so that its graph, and the other ranks', has none.
        awaits_tokens=is_split,
    )


def _packed(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _packed_tensor(x: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    dtype = str(x.dtype).removeprefix("torch.")
    return dtype, tuple(x.shape), x.contiguous().view(torch.uint8).numpy().tobytes()


def _unpacked_tensor(value: list[Any]) -> torch.Tensor:
    dtype, shape, data = value
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)


def _unpacked_adapter(encoded: bytes) -> dict[str, LowRank]:
    return {
        name: LowRank(_unpacked_tensor(down), _unpacked_tensor(up), scale)
        for name, scale, down, up in msgpack.unpackb(encoded)
    }


def _unpacked(value: list[Any]) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # writable, for torch
