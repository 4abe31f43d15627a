"""The pool file's layout: a page of facts, the headers of all slots as columns, the leases, and the slots.

```
 page 0     magic, version, sizes, counters, which members have joined
 headers    [slots] state │ epoch │ key │ length │ checksum │ header sum │ payer │ hash │ last use │ last change
 leases     [slots, members] uint16: how often each member uses each slot
 retained   [slots, members] uint8:  whether a member wants the slot evicted after others
 slots      [slots, slot_bytes]: the blocks
```

The headers are the whole truth. Nothing that could be computed from them is stored: no free list, no index, no count.
So a process that dies at any instruction leaves nothing to repair but its own leases. Every member keeps an index of
its own (`slot_index.py`) and follows the column of last changes.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass

import numpy as np

MAGIC = 0x51756972654B5631
# Raised with every change of this layout, of the checksum or of a block's name.
LAYOUT_VERSION = 2
# Members of one node at a time. A member is an engine that uses the pool, or the transport of its blocks.
MAX_MEMBERS = 64
KEY_BYTES = 32
# What has joined as a member: an engine, or threads that only copy blocks (`replica/kv_transport`).
ENGINE, NO_ENGINE = 1, 2

_FACTS_OFFSET = 0
_JOINED_OFFSET = 1024
_PAGE = 4096
_LINE = 64


class State(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    # One or more members use it, and no other can find it: it is being written, is private, or was dropped.
    HELD = 1
    # Its header names its content. Without leases it is cached: it may be evicted.
    COMPLETE = 2


class Fact(enum.IntEnum):
    """Index of each number in page 0."""

    MAGIC = 0
    LAYOUT_VERSION = 1
    NUM_SLOTS = 2
    SLOT_BYTES = 3
    CHANGE = 4  # number of the last change
    CLOCK = 5  # number of the last use
    NUM_EVICTED = 6
    NUM_DAMAGED = 7  # blocks with a wrong checksum or header


# Column of the headers to its dtype.
_COLUMNS: dict[str, np.dtype] = {
    "state": np.dtype(np.uint8),
    "epoch": np.dtype(np.uint64),
    "key": np.dtype(f"V{KEY_BYTES}"),
    "num_bytes": np.dtype(np.uint64),
    "checksum": np.dtype(np.uint32),
    "header_sum": np.dtype(np.uint32),
    "payer": np.dtype(np.uint64),
    "routing_hash": np.dtype(np.uint64),
    "used": np.dtype(np.uint64),
    "changed": np.dtype(np.uint64),
}
_BYTES_PER_SLOT = sum(dtype.itemsize for dtype in _COLUMNS.values()) + 3 * MAX_MEMBERS


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Sizes of a pool."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def that_fits(cls, num_bytes: int, slot_bytes: int) -> PoolLayout:
        """The layout with most slots in a file of at most `num_bytes`."""
        spare = _PAGE * 2 + _LINE * (len(_COLUMNS) + 2)
        num_slots = max(0, (num_bytes - spare) // (slot_bytes + _BYTES_PER_SLOT))
        return cls(num_slots, slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, in whole pages."""
        end = self._offsets()["slots"] + self.num_slots * self.slot_bytes
        return -(-end // _PAGE) * _PAGE

    def _offsets(self) -> dict[str, int]:
        offsets, end = {}, _PAGE
        sizes = {name: dtype.itemsize for name, dtype in _COLUMNS.items()}
        for name, size in (sizes | {"leases": 2 * MAX_MEMBERS, "retained": MAX_MEMBERS}).items():
            offsets[name] = end
            end = -(-(end + size * self.num_slots) // _LINE) * _LINE
        return offsets | {"slots": -(-end // _PAGE) * _PAGE}


class PoolViews:
    """Arrays over a mapped pool file.

    Parameters
    ----------
    memory
        The mapped file of `layout.num_bytes`.
    """

    def __init__(self, memory: mmap.mmap, layout: PoolLayout):
        offsets, n = layout._offsets(), layout.num_slots

        def view(name: str, dtype: np.dtype, *shape: int) -> np.ndarray:
            count = int(np.prod(shape))
            return np.frombuffer(memory, dtype, count, offsets[name]).reshape(shape)

        self.facts = np.frombuffer(memory, np.uint64, len(Fact), _FACTS_OFFSET)
        # [members] uint8: `ENGINE` or `NO_ENGINE` from a member's start until it has left, or was found dead; else 0.
        self.joined = np.frombuffer(memory, np.uint8, MAX_MEMBERS, _JOINED_OFFSET)
        self.state = view("state", _COLUMNS["state"], n)
        # Number of times that the slot was claimed or evicted: tells contents of one slot apart.
        self.epoch = view("epoch", _COLUMNS["epoch"], n)
        self.key = view("key", _COLUMNS["key"], n)
        self.num_bytes = view("num_bytes", _COLUMNS["num_bytes"], n)
        self.checksum = view("checksum", _COLUMNS["checksum"], n)
        self.header_sum = view("header_sum", _COLUMNS["header_sum"], n)
        # Hash of the tenant that pays for the content.
        self.payer = view("payer", _COLUMNS["payer"], n)
        # Routers' name of the block and all before it; 0: none. A hint, which no checksum covers.
        self.routing_hash = view("routing_hash", _COLUMNS["routing_hash"], n)
        self.used = view("used", _COLUMNS["used"], n)
        self.changed = view("changed", _COLUMNS["changed"], n)
        self.leases = view("leases", np.dtype(np.uint16), n, MAX_MEMBERS)
        self.retained = view("retained", np.dtype(np.uint8), n, MAX_MEMBERS)
        self.slots = view("slots", np.dtype(np.uint8), n, layout.slot_bytes)

    def fact(self, fact: Fact) -> int:
        return int(self.facts[fact])
