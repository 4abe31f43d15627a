"""Retention: the blocks of an ended request are kept longer than others, because its conversation will soon go on.

An agent's turn ends with a tool call. The next turn, with the call's result, arrives after the tool has run. Until
then the blocks of the turn have no owner, and other requests could evict them:

```
 turn ends ─ retain ─▶ device, evicted after all other cached blocks
                         │ evict (no other cached block is left)         retain_s is over
                         ▼                                               in either tier: an ordinary
                       host tier, evicted there after all others         cached block
                         │ next turn arrives: a prefix hit
                         ▼
                       restored, in use
```

A retained block is a cached block in every other respect: it counts as available. So retention changes the order of
evictions only. It never makes a request wait, and never causes a preemption.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator

from quire.replica.kv_cache.blocks import BlockManager, IntegrityError
from quire.replica.kv_cache.pool_blocks import PoolBlocks
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import Entry


class Retention:
    """The retained sequences, and when the retention of each ends.

    Parameters
    ----------
    prefix
        The prefix index of both tiers.
    blocks, host_blocks
        The block managers of the device and of the host tier; each bounds the number of its retained blocks.
    """

    def __init__(
        self, prefix: PrefixCache, blocks: BlockManager, host_blocks: BlockManager | PoolBlocks
    ):
        self._prefix = prefix
        self._blocks = blocks
        self._host_blocks = host_blocks
        # Key of the ended request to the entry of its last block.
        self._tips: dict[Hashable, Entry] = {}
        # Sequences added since the last `expire`: key to seconds.
        self._new: dict[Hashable, float] = {}
        # Key to the time at which its retention ends.
        self._ends_s: dict[Hashable, float] = {}
        # (end, number, key); out of date if `_ends_s` has no such end for the key.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._tips)

    def add(self, key: Hashable, tip: Entry, retain_s: float) -> None:
        """Retain a sequence for `retain_s` seconds after the next `expire`.

        Parameters
        ----------
        key
            Name of the ended request, for `drop`.
        tip
            The entry of the sequence's last block.
        """
        self.drop(key)
        if not (self._blocks.max_retained or self._host_blocks.max_retained):
            return
        self._tips[key] = tip
        self._new[key] = retain_s
        blocks, host_blocks = [], []
        for entry, g in self._places(tip):
            entry.num_retained[g] += 1
            if (block := entry.blocks[g]) is not None:
                blocks.append(block)
            elif (host_block := entry.host_blocks[g]) is not None:
                host_blocks.append(host_block)
        self._blocks.retain(blocks)
        self._host_blocks.retain(host_blocks)

    def drop(self, key: Hashable) -> None:
        """End the retention of a sequence; unknown keys are ignored."""
        tip = self._tips.pop(key, None)
        if tip is None:
            return
        self._new.pop(key, None)
        self._ends_s.pop(key, None)
        blocks, host_blocks = [], []
        for entry, g in self._places(tip):
            entry.num_retained[g] -= 1
            if entry.num_retained[g]:
                continue
            if (block := entry.blocks[g]) is not None:
                blocks.append(block)
            if (host_block := entry.host_blocks[g]) is not None:
                host_blocks.append(host_block)
        self._blocks.end_retention(blocks)
        self._host_blocks.end_retention(host_blocks)

    def clear(self) -> None:
        """End the retention of every sequence."""
        for key in list(self._tips):
            self.drop(key)

    def expire(self, now_s: float) -> None:
        """End the retention of sequences whose time is over. The time of new ones begins now."""
        for key, retain_s in self._new.items():
            self._ends_s[key] = now_s + retain_s
            heapq.heappush(self._heap, (now_s + retain_s, self._num_added, key))
            self._num_added += 1
        self._new.clear()
        while (end_s := self.next_end_s()) is not None and end_s <= now_s:
            self.drop(self._heap[0][2])

    def next_end_s(self) -> float | None:
        """The time at which the next retention ends; None: there is none."""
        while self._heap and self._ends_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _places(self, tip: Entry) -> Iterator[tuple[Entry, int]]:
        """(entry, group) of each block that the token after a sequence needs, the last one first."""
        num_blocks = tip.depth + 1
        num_groups = len(self._prefix.groups)
        first = [self._prefix.first_needed(g, num_blocks) for g in range(num_groups)]
        entry: Entry | None = tip
        while entry is not None:
            for g in range(num_groups):
                if entry.depth >= first[g]:
                    yield entry, g
            entry = entry.parent

    def check(self) -> None:
        """Raise `IntegrityError` unless entries and block managers agree with the retained sequences."""
        counts = Counter((id(e), g) for tip in self._tips.values() for e, g in self._places(tip))
        for entry in self._prefix.entries():
            for g, count in enumerate(entry.num_retained):
                if count != counts[id(entry), g]:
                    raise IntegrityError(
                        f"blocks {entry.blocks} count {count} retained sequences in group {g}, "
                        f"not {counts[id(entry), g]}"
                    )
                block, host_block = entry.blocks[g], entry.host_blocks[g]
                kept = block is not None and self._blocks.is_retained(block)
                kept_on_host = host_block is not None and self._host_blocks.is_retained(host_block)
                if not count and (kept or kept_on_host):
                    raise IntegrityError(f"blocks {entry.blocks} are retained for no sequence")
        if self._tips.keys() != self._new.keys() | self._ends_s.keys():
            raise IntegrityError("a retained sequence has no end, or an end has no sequence")
