"""Offloading: copying a preempted request's blocks to the host tier, and copying them back.

```
 positions      0    1    2    3    4                preempted after 4.5 blocks were computed
 indexed        e0   e1   e2   -    -
 device         d0   d1   d2   d3   d4               all released: d0..d2 stay cached, d3 and d4 are free
 host           h0   (h1)  (h2)  (h3)  (h4)          h0 was there; (h) is saved now
 return         d0   d1   d7   d8   d9               d0, d1 were still cached; the others are copied back
```

A request of a recurrent model is not offloaded: it returns from its newest snapshot, which is at most a block old, and
from its cached blocks in either tier (`state_snapshots.py`).

An offloaded request keeps its reference to its last indexed entry of the prefix index. So its blocks that are still
cached can be found, and later blocks can be indexed as their continuation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.request import OffloadedBlock, OffloadedBlocks, Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.host_tier import Transfers
from quire.replica.kv_cache.prefix_entries import Entry
from quire.replica.scheduler.admission import Admission
from quire.replica.scheduler.engine_memory import EngineMemory
from quire.replica.scheduler.speed import CopySpeed


@dataclass(frozen=True, slots=True)
class Return:
    """The blocks that an offloaded request gets if it returns now."""

    # For each of `OffloadedBlocks.blocks` the device block that still has its content; None: it must be copied back.
    known: list[int | None]
    # Number of further blocks to allocate in each full-attention group.
    num_lacking: int


class Offload:
    """Move requests between the device and the host tier."""

    def __init__(
        self,
        config: EngineConfig,
        memory: EngineMemory,
        admission: Admission,
        copies: CopySpeed,
    ):
        self._block_size = config.block_size
        self._num_groups = len(config.groups)
        self._has_states = config.has_states
        self._prefix = memory.prefix
        self._blocks = memory.blocks
        self._host = memory.host
        self._rows = memory.rows
        self._admission = admission
        self._copies = copies

    def save(self, request: Request) -> OffloadedBlocks | None:
        """Plan to copy a running request's computed blocks to the host tier. The request keeps its row and blocks.

        Returns
        -------
        The host blocks, which the caller owns. None, without a copy, if the tier has no room for all blocks, if nothing
        is computed, or if the model is recurrent.
        """
        if self._has_states:
            return None
        rows, row = self._rows, request.row
        num_computed = int(rows.num_computed[row])
        end = -(-num_computed // self._block_size)
        entries = self._entries(request, end)
        places = [
            (i, g)
            for i in range(end)
            for g in range(self._num_groups)
            if i >= rows.first_block[g, row]
        ]
        while True:
            copies = [None if (e := entries[i]) is None else e.host_blocks[g] for i, g in places]
            known = [copy for copy in copies if copy is not None]
            if self._host.pin(known):
                break
        # Own the known blocks before the allocation, which could evict them from the host tier.
        self._host.blocks.add_owner(known)
        fresh = self._host.blocks.allocate(len(places) - len(known)) if places else None
        if fresh is None:
            self._host.blocks.release(reversed(known))
            return None
        unused = iter(fresh)
        offloaded = []
        for (i, g), copy in zip(places, copies, strict=True):
            if copy is None:
                copy = next(unused)
                self._save_block(int(rows.block_tables[g, row, i]), copy, entries[i], g)
            offloaded.append(OffloadedBlock(i, g, copy))
        return OffloadedBlocks(num_computed, offloaded)

    def _save_block(self, block: int, copy: int, entry: Entry | None, g: int) -> None:
        self._host.save(block, copy)
        if entry is not None:
            self._prefix.place_on_host(entry, g, copy)
            self._host.blocks.mark_contents([copy])

    def _entries(self, request: Request, end: int) -> list[Entry | None]:
        """[end] the prefix entries of the request's first blocks; None: the block is not indexed."""
        entries: list[Entry | None] = [None] * end
        entry = request.tip if request.tip is not None and request.tip.alive else None
        while entry is not None:
            if entry.depth < end:
                entries[entry.depth] = entry
            entry = entry.parent
        return entries

    def prefers_copy(self, request: Request) -> bool:
        """Whether copying an offloaded request's blocks back is faster than computing them again."""
        offloaded = _offloaded(request)
        known = self._known(request)
        missing = [b.index for b, k in zip(offloaded.blocks, known, strict=True) if k is None]
        if not missing:
            return True
        start = min(missing) * self._block_size
        return self._copies.prefers_copy(len(missing), start, offloaded.num_computed - start)

    def _known(self, request: Request) -> list[int | None]:
        """For each of the request's offloaded blocks the device block that still has its content, or None."""
        offloaded = _offloaded(request)
        entries = self._entries(request, -(-offloaded.num_computed // self._block_size))
        return [
            None if (e := entries[block.index]) is None else e.blocks[block.group]
            for block in offloaded.blocks
        ]

    def offer(self, request: Request, prefilling: Iterable[Request]) -> Return | None:
        """The blocks that an offloaded request gets if it returns now, or None if it must wait. Changes nothing.

        Parameters
        ----------
        prefilling
            The running prefills; sliding-window blocks for their later chunks are reserved, as in `Admission.offer`.
        """
        offloaded = _offloaded(request)
        end = -(-offloaded.num_computed // self._block_size)
        known = self._known(request)
        lacking = -(-request.num_tokens // self._block_size) - end
        num_full = self._num_groups - len(self._rows.sliding)
        on_device = [block for block in known if block is not None]
        fits = self._admission.has_room(
            request.num_tokens,
            on_device,
            lacking * num_full + len(known) - len(on_device),
            [sum(block.group == g for block in offloaded.blocks) for g in self._rows.sliding],
            prefilling,
        )
        return Return(known, lacking) if fits else None

    def take(self, request: Request, offer: Return) -> None:
        """Give the request a row and its blocks; the next step copies the blocks that are only in the host tier."""
        offloaded = _offloaded(request)
        end = -(-offloaded.num_computed // self._block_size)
        entries = self._entries(request, end)
        self._blocks.add_owner(block for block in offer.known if block is not None)
        fresh = iter(self._admission.allocate(offer.known.count(None)))
        tables: list[list[int]] = [[] for _ in range(self._num_groups)]
        unneeded = []
        for offloaded_block, known in zip(offloaded.blocks, offer.known, strict=True):
            g, copy = offloaded_block.group, offloaded_block.host_block
            if known is not None:
                block = known
                unneeded.append(copy)
            else:
                block = next(fresh)
                entry = entries[offloaded_block.index]
                if entry is not None:
                    self._admission.restore(entry, g, copy, block)
                else:
                    self._host.restore(copy, block)
            tables[g].append(block)
        num_full = self._num_groups - len(self._rows.sliding)
        lacking = offer.num_lacking
        more = self._admission.allocate(lacking * num_full)
        for g in range(num_full):
            tables[g] += more[g * lacking : (g + 1) * lacking]
        self._host.blocks.release(reversed(unneeded))
        request.offloaded = None
        self._rows.claim(request, tables, offloaded.num_computed)

    def drop(self, request: Request) -> None:
        """Release the host blocks of an offloaded request, which ends or computes its tokens again."""
        self._host.blocks.release(
            block.host_block for block in reversed(_offloaded(request).blocks)
        )
        request.offloaded = None


def _offloaded(request: Request) -> OffloadedBlocks:
    if request.offloaded is None:
        raise IntegrityError(f"request {request.key!r} is not offloaded")
    return request.offloaded


class PendingRestores:
    """Copies from the host tier that may not have arrived yet, and the prefills that wait for them.

    A prefill waits while other requests have something to compute; otherwise the step itself waits for the copies. On a
    CPU a step makes its copies before it computes, so waiting would only delay the prefill by a step.
    """

    def __init__(self, memory: EngineMemory):
        self._may_wait = memory.copies_beside_steps
        self._rows = memory.rows
        self._host = memory.host
        # (step, its copies), the oldest step first.
        self._copying: deque[tuple[int, Transfers]] = deque()
        # Key of a waiting prefill to the number of the step that makes its copies.
        self._waiting: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        """Whether this request waits for its blocks."""
        return key in self._waiting

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def keys(self) -> Collection[Hashable]:
        """The keys of the requests that wait."""
        return self._waiting.keys()

    def step_of(self, row: int, number: int) -> int | None:
        """The newest step that copies blocks of this row back; None if all have arrived or will at its begin.

        Parameters
        ----------
        number
            Number of the step that is being planned; it makes the copies that are planned now.
        """
        if not self._may_wait or not (self._copying or self._host.planned_restores):
            return None
        blocks = set(self._rows.blocks(row))
        if not blocks.isdisjoint(self._host.planned_restores):
            return number
        steps = (step for step, made in self._copying if not blocks.isdisjoint(made.restores))
        return max(steps, default=None)

    def wait(self, request: Request, step: int) -> None:
        """Leave a prefill out of the steps until the copies of this step have arrived."""
        self._waiting[request.key] = step

    def drop(self, key: Hashable) -> None:
        """Remove a request that has ended or lost its row."""
        self._waiting.pop(key, None)

    def clear(self) -> None:
        """Let every prefill take part in the next step, which then waits for the copies itself."""
        self._waiting.clear()

    def launch(self, step: int, transfers: Transfers) -> None:
        """Record that a step is launched with these copies."""
        if transfers.restores:
            self._copying.append((step, transfers))

    @property
    def are_copying(self) -> bool:
        """Whether some copies may not have arrived."""
        return len(self._copying) > 0

    def are_used_by(self, plan: StepPlan) -> bool:
        """Whether the plan reads or writes restored blocks that may not have arrived."""
        restored: set[int] = set()
        restored = restored.union(*(transfers.restores for _, transfers in self._copying))
        copied = any(not restored.isdisjoint(pair) for pair in plan.copies)
        return copied or bool(np.isin(plan.block_tables.gather(), list(restored)).any())

    def land(self, through: int) -> None:
        """Record that the copies of step `through` and of earlier steps have arrived.

        Until then the host blocks that they read have an owner: another engine of the node could write to them.
        """
        while self._copying and self._copying[0][0] <= through:
            self._host.land(self._copying.popleft()[1])
        if self._waiting:
            self._waiting = {key: step for key, step in self._waiting.items() if step > through}
