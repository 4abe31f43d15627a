"""Inspection of the request table: its rows as plain data, and consistency checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.replica.core.request import Phase
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.request_table.rows import RowTable


def snapshot(table: RowTable) -> list[dict[str, Any]]:
    """The rows in use as plain data."""
    return [
        {
            "row": row,
            "key": table.keys[row],
            "phase": table.request(row).phase.value,
            "length": int(table.length[row]),
            "num_computed": int(table.num_computed[row]),
            "blocks": table.blocks(row),
        }
        for row in np.flatnonzero(table.active).tolist()
    ]


def num_owners(table: RowTable, num_blocks: int) -> np.ndarray:
    """[num_blocks] int64, number of rows that have each block in their table."""
    owners = np.zeros(num_blocks, np.int64)
    for row in np.flatnonzero(table.active).tolist():
        blocks = np.array(table.blocks(row), np.int64)
        owners += np.bincount(blocks, minlength=num_blocks)
    return owners


def check(table: RowTable, owners: np.ndarray, num_ahead: int = 0) -> None:
    """Raise `IntegrityError` if a row contradicts its request, or would write to a shared block.

    Parameters
    ----------
    owners
        [num_blocks] the result of `num_owners`.
    num_ahead
        Number of tokens of a row that are planned and not known yet, drafted tokens not counted.
    """
    table.adapters.check()
    computed = table.num_computed
    decode = int(computed[table.decoding].sum())
    prefilling = table.active & ~table.decoding
    missing = int((table.length - computed)[prefilling].sum())
    if (decode, missing) != (table.num_decode_tokens, table.num_missing_tokens):
        raise IntegrityError(
            f"{table.num_decode_tokens} decoding and {table.num_missing_tokens} missing tokens are "
            f"counted, there are {decode} and {missing}"
        )
    decodes = table.current_decodes
    if decodes is not None and decodes.is_located:
        if not np.array_equal(decodes.position, computed[decodes.ids]):
            raise IntegrityError(
                f"the decoding rows {decodes.ids.tolist()} stand at {computed[decodes.ids].tolist()}, "
                f"but `DecodeRows` has {decodes.position.tolist()}"
            )
    for row, request in enumerate(table.requests):
        if bool(table.active[row]) != (request is not None):
            raise IntegrityError(f"row {row} is active: {table.active[row]}, request: {request}")
        if request is None:
            continue
        name = f"row {row} of request {request.key!r}"
        decoding = request.phase is Phase.DECODING
        if bool(table.paused[row]) != request.is_paused:
            raise IntegrityError(f"{name}: its request is paused: {request.is_paused}")
        if request.row != row or bool(table.decoding[row]) != decoding:
            raise IntegrityError(f"{name}: its request says row {request.row}, {request.phase}")
        num_computed, length = int(table.num_computed[row]), int(table.length[row])
        num_blocks = table.num_blocks[:, row]
        num_drafted = int(table.num_drafted[row])
        most = length + num_ahead + num_drafted
        if num_computed > min(most, int(num_blocks.min()) * table.block_size):
            raise IntegrityError(
                f"{name} has {num_computed} computed tokens, more than its {length} tokens or its blocks allow"
            )
        if decoding and (num_blocks != num_blocks[0]).any():
            raise IntegrityError(f"{name} decodes with {num_blocks.tolist()} blocks")
        for g, group in enumerate(table.groups):
            first, end = int(table.first_block[g, row]), int(num_blocks[g])
            num_kept = num_computed - num_drafted
            if first > int(group.first_key(num_kept)) // table.block_size:
                raise IntegrityError(f"{name} gave back block {first - 1}, which it reads")
            own = table.block_tables[g, row, max(first, num_kept // table.block_size) : end]
            if (owners[own] > 1).any():
                raise IntegrityError(f"{name} would write to a block that it shares")
