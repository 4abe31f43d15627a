"""What a slot holds, and how many slots hold what; plain data."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """The content of a slot that is ready to be published."""

    slot: int
    key: bytes
    payer: int
    checksum: int


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
