"""A step plan, or the saves of an idle engine, as one message from the leader to the other ranks.

It has what the forward pass and the copies of blocks need. Samples are drawn by the leader alone, so that options of
sampling, grammars and sums for embeddings stay there.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from quire.replica.core.sampling_record import RECORD
from quire.replica.core.step_plan import BlockTables, PromptTargets, SamplingBatch, StepPlan

_ARRAYS = ("positions", "cu_q", "num_sampled", "kv_len", "slots", "saves", "restores")
_NUMBERS = ("step", "uses_restores", "num_decode_rows")


def encode(plan: StepPlan, token_ids: np.ndarray) -> bytes:
    """Encode a plan.

    Parameters
    ----------
    token_ids
        [T] ids of `plan.token_ids`, without placeholders.
    """
    prompts = [
        (t.row, t.begin, t.start, _packed(t.token_ids), int(t.num_top)) for t in plan.prompts
    ]
    return msgpack.packb(
        [
            [int(getattr(plan, name)) for name in _NUMBERS],
            [_packed(getattr(plan, name)) for name in _ARRAYS],
            _packed(token_ids),
            _packed(plan.block_tables.gather()),
            _packed(plan.sampling.token_index),
            [(int(source), int(target)) for source, target in plan.copies],
            [
                (int(row), int(begin), int(start), ids, top)
                for row, begin, start, ids, top in prompts
            ],
        ]
    )


def encode_saves(pairs: np.ndarray) -> bytes:
    """Encode blocks to save between two steps: [k, 2] integers, (device block, host block)."""
    return msgpack.packb([_packed(pairs)])


def decode(message: bytes) -> StepPlan | np.ndarray:
    """Decode a plan that samples nothing but computes the logits of the same tokens, or the pairs of `encode_saves`."""
    fields = msgpack.unpackb(message)
    if len(fields) == 1:
        return _unpacked(fields[0])
    numbers, arrays, token_ids, tables, token_index, copies, prompts = fields
    own: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
    own |= {name: _unpacked(value) for name, value in zip(_ARRAYS, arrays, strict=True)}
    index = _unpacked(token_index)
    no_options = np.zeros(len(index), RECORD)
    return StepPlan(
        **{**own, "uses_restores": bool(own["uses_restores"])},
        token_ids=_unpacked(token_ids),
        block_tables=BlockTables.of(_unpacked(tables)),
        sampling=SamplingBatch(index, no_options, np.zeros(len(index), np.int64)),
        copies=tuple((source, target) for source, target in copies),
        prompts=tuple(
            PromptTargets(row, begin, start, _unpacked(ids), top)
            for row, begin, start, ids, top in prompts
        ),
    )


def _packed(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _unpacked(value: list[Any]) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)
