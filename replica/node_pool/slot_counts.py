"""Number of slots in each state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.replica.node_pool.pool_layout import ENGINE, Fact, PoolViews, State


class PoolCounts(NamedTuple):
    """Number of slots in each state; `retained` ones are a part of the `cached` ones."""

    free: int
    cached: int
    retained: int
    in_use: int
    total: int
    # Living and recently died engines.
    members: int
    evicted: int
    damaged: int


def is_used_by(views: PoolViews, members: np.ndarray) -> np.ndarray:
    """[num_slots] bool, whether one of these members has a lease."""
    used: np.ndarray = np.any(views.leases[:, members] > 0, axis=1)
    return used


def count_slots(views: PoolViews) -> PoolCounts:
    """Count the slots. Reads every header; a reading during a change may be off by it."""
    members = np.flatnonzero(views.joined)
    is_free = views.state == State.FREE
    is_cached = (views.state == State.COMPLETE) & ~is_used_by(views, members)
    is_retained = is_cached & (views.retained[:, members] > 0).any(1)
    free, cached, total = int(is_free.sum()), int(is_cached.sum()), len(is_free)
    return PoolCounts(
        free,
        cached,
        int(is_retained.sum()),
        total - free - cached,
        total,
        int(np.count_nonzero(views.joined == ENGINE)),
        views.fact(Fact.NUM_EVICTED),
        views.fact(Fact.NUM_DAMAGED),
    )
