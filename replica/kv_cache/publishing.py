"""Publishing: blocks that running requests have filled are copied to the node's pool while the requests go on.

So when this process is killed, another engine of the node finds all of a stream but its last block. The copies have a
budget in bytes per second, because each takes time from the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from quire.replica.kv_cache.host_tier import HostTier
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import Entry

# A block also costs time that does not depend on its size: its name, header and locks. On a busy machine a block of 64
# KiB took 280 us of the engine's thread in all.
_BLOCK_OVERHEAD_BYTES = 128 << 10
# Unused budget is kept for so long, for the blocks of the next prompt.
_MAX_SAVED_S = 0.25
_MAX_FILLED = 1 << 14


class Publishing:
    """The filled blocks that are not published yet.

    Parameters
    ----------
    prefix
        The prefix index of both tiers.
    host
        The host tier, in the node's pool.
    block_bytes
        Bytes of a block.
    bytes_per_s
        The budget.
    """

    def __init__(self, prefix: PrefixCache, host: HostTier, block_bytes: int, bytes_per_s: float):
        self._prefix = prefix
        self._host = host
        self._cost = block_bytes + _BLOCK_OVERHEAD_BYTES
        self._rate = bytes_per_s
        self._budget = 0.0
        self._last_s: float | None = None
        # (entry, group, device block), in the order in which they were filled.
        self._filled: deque[tuple[Entry, int, int]] = deque()
        self.num_published = 0

    def __len__(self) -> int:
        return len(self._filled)

    def add(self, blocks: Iterable[int]) -> None:
        """Queue indexed device blocks that a committed step has filled.

        Beyond `_MAX_FILLED` they are not queued: a block is of no use without the blocks before it.
        """
        for block in blocks:
            if block in self._prefix and len(self._filled) < _MAX_FILLED:
                entry, g = self._prefix.place_of(block)
                if entry.host_blocks[g] is None:
                    self._filled.append((entry, g, block))

    def plan(self, now_s: float, being_filled: Collection[int], *, is_idle: bool = False) -> None:
        """Plan copies within the budget; if the engine is idle, of as many blocks as the budget of `_MAX_SAVED_S` has.

        Parameters
        ----------
        being_filled
            Device blocks that steps in flight, or the step being planned, fill. A block of an old sequence may be one.
        """
        if not self._filled:
            self._last_s = now_s
            return
        passed_s = _MAX_SAVED_S if is_idle or self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._budget = min(self._budget + passed_s * self._rate, _MAX_SAVED_S * self._rate)
        # At least one block fits, however large blocks are.
        self._budget = max(self._budget, self._cost if is_idle else self._budget)
        filling = set(being_filled)
        chosen = []
        while self._filled and self._budget >= self._cost:
            entry, g, block = self._filled.popleft()
            is_there = entry.alive and entry.blocks[g] == block and entry.host_blocks[g] is None
            if is_there and block not in filling:
                chosen.append((entry, g, block))
                self._budget -= self._cost
        if chosen:
            self._host.publish(chosen)
            self.num_published += len(chosen)
