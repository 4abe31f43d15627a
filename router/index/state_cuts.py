"""Cuts matches to snapshots: a hit of a recurrent model ends where the replica has a copy of the states.

A replica of such a model holds the mark of a prefix (`routing_hash.state_marks`) beside its hash if it has a snapshot
there:

    prompt      h0     h1     h2     h3
    hashes      0b11   0b11   0b11   0b01      blocks matched: replica 0: 4, 1: 3
    marks       0b00   0b11   0b00   0b00      blocks after the cut: 2 and 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.protos.routing_hash import state_marks
from quire.router.index.holder_map import HolderMap
from quire.router.index.holder_slots import HolderSlots


def cut_to_states(
    confirmed: HolderMap,
    booked: Mapping[int, int],
    slots: HolderSlots,
    hashes: np.ndarray,
    depths: np.ndarray,
    rows: Sequence[int],
) -> None:
    """Cut matches to their last block with a snapshot.

    Parameters
    ----------
    confirmed, booked
        Masks of the holders of hashes and marks.
    hashes
        [blocks] uint64 routing hashes of the prompt.
    depths
        [rows] matches in blocks; those in `rows` are cut.
    """
    marks = state_marks(hashes[: int(depths[rows].max(initial=0))])
    found = np.zeros_like(depths)

    def extend(mask: int, first: int, end: int) -> None:
        for holder in slots.holders(mask & slots.live):
            if holder.row >= 0 and first < depths[holder.row]:
                found[holder.row] = max(found[holder.row], min(end, depths[holder.row]))

    for first, end, number in confirmed.runs(marks):
        extend(confirmed.masks[number], first, end)
    if booked:
        for i, mark in enumerate(marks.tolist()):
            extend(booked.get(mark, 0), i, i + 1)
    depths[rows] = found[rows]
