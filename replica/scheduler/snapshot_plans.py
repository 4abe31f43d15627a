"""Which snapshots of recurrent states a step takes, and the entries of the prefix index that get them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.kv_cache.prefix_entries import Entry
from quire.replica.request_table.decode_rows import DecodeRows
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.steps_in_flight import Step, TakenSlot


class _Snapshot(NamedTuple):
    """A snapshot of a row's states after some of its tokens in the step."""

    row: int  # index of the row in the step
    num_tokens: int  # number of these tokens
    slot: int


class SnapshotPlans:
    """Takes slots for the snapshots of steps, and gives them to entries."""

    def __init__(self, config: EngineConfig, memory: EngineMemory):
        self._block_size = config.block_size
        self._rows = memory.rows
        self._snapshots = memory.prefix.snapshots

    def plan(self, step: Step, decodes: DecodeRows) -> np.ndarray:
        """Decide the snapshots of a step that is composed and not written yet.

        Returns
        -------
        [k, 3] int64, for each snapshot the index of its row in the step, the number of the row's tokens in the step
        before it, and its slot.
        """
        if not self._snapshots:
            return np.empty((0, 3), np.int64)
        found: list[_Snapshot] = []
        # Entries get their snapshots at the end: a slot must not be given to two entries in one step.
        given: dict[Entry, int] = {}
        self._plan_decodes(step, decodes, found, given)
        self._plan_chunks(step, found, given)
        for entry, slot in given.items():
            self._snapshots.attach(slot, entry)
            step.snapshots.append((slot, entry))
        return np.array(found, np.int64).reshape(-1, 3)

    def _plan_decodes(
        self, step: Step, decodes: DecodeRows, found: list[_Snapshot], given: dict[Entry, int]
    ) -> None:
        rows, index = decodes.fills()
        for at, row, i in zip(decodes.filling.tolist(), rows.tolist(), index.tolist(), strict=True):
            request = self._rows.request(row)
            are_known = step.fills is None
            entry = _entry_at(request, i) if are_known else None
            if are_known and (entry is None or entry.snapshot is not None or entry in given):
                continue
            self._snapshots.move_from(request.moving_snapshot)
            slot = self._snapshots.take()
            if slot is None:
                return
            found.append(_Snapshot(at, 1, slot))
            if entry is None:
                step.taken.append(TakenSlot(row, int(self._rows.owners[row]), i, slot))
            else:
                given[entry] = slot
                request.moving_snapshot = entry

    def _plan_chunks(self, step: Step, found: list[_Snapshot], given: dict[Entry, int]) -> None:
        for at, (row, count) in enumerate(step.chunks, step.num_decodes):
            request = self._rows.request(row)
            start = int(self._rows.num_computed[row])
            for length in self._snapshots.places(
                start, start + count, request.num_tokens, request.num_known, self._block_size
            ):
                entry = _entry_at(request, length // self._block_size - 1)
                if entry is None or entry.snapshot is not None or entry in given:
                    continue
                slot = self._snapshots.take()
                if slot is None:
                    return
                found.append(_Snapshot(at, length - start, slot))
                given[entry] = slot

    def attach_known(self, step: Step) -> None:
        """Give slots to entries that `StepIndexer.register_known` has found."""
        taken, step.taken = step.taken, []
        for row, owner, i, slot in taken:
            request = self._rows.request(row) if self._rows.owners[row] == owner else None
            entry = None if request is None else _entry_at(request, i)
            self._snapshots.attach(slot, entry)
            if request is not None and entry is not None and entry.snapshot == slot:
                step.snapshots.append((slot, entry))
                request.moving_snapshot = entry

    def forget(self, step: Step) -> None:
        """Drop the snapshots that a failed step should have taken or moved: their content is unknown."""
        self._snapshots.drop_slots(step.moved)
        for slot, entry in step.snapshots:
            if entry.snapshot == slot:
                self._snapshots.drop(entry)
        for taken in step.taken:
            self._snapshots.attach(taken.slot, None)
        step.taken = []


def _entry_at(request: Request, i: int) -> Entry | None:
    """Return the entry of a request's block at index i; None: it is not indexed."""
    entry = request.tip if request.num_indexed > i else None
    while entry is not None and entry.depth > i:
        entry = entry.parent
    return entry if entry is not None and entry.alive else None
