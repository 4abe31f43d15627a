"""Publishing: blocks that running requests have filled are copied to the node's pool while the requests go on.

So when this process is killed, another engine of the node finds all of a stream but its last block.

```
 filled   b0 b1 ... b15 │ b16 ...          a batch: 16 blocks, or those that have waited for 50 ms
 step n      plan the copies, make them beside the step
 step n + 1  checksum and publish (`PoolBlocks.seal`)
```

The budget is a share of the engine's time, larger for steps with prefill, and is charged with the measured time of each
batch. Batches are cheap: on a CPU a block of 64 KiB costs 170 us alone and 60 us in a batch of 16, because the locks
and the headers cost as much for 16. What a peer asks for is published at once, because its stream has left this engine
or is about to.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from quire.replica.kv_cache.host_tier import HostTier
from quire.replica.kv_cache.pool_blocks import PoolBlocks
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import Entry

_BATCH = 16
_MAX_WAIT_S = 0.05
# A step is delayed by at most this, or by one block if blocks are large. A step without prefill has a smaller budget.
_MAX_BATCH_S = 0.005
# If a peer waits, a step is delayed by at least a batch, and by this share of its time, which counts up to the second
# number in seconds. The streams whose blocks a peer waits for leave, mostly all at once.
_ASKED_SHARE, _MAX_ASKED_STEP_S = 0.25, 0.4
# Budget of a step with prefill, as a share of its time: computing a block takes 20 times as long as publishing it.
_PREFILL_SHARE = 0.05
# Unused budget is kept for so long, for the blocks of the next prompt.
_MAX_SAVED_S = 0.25
_MAX_FILLED = 1 << 14
# Cost of a block before the first is measured: locks and headers, and a slow checksum.
_FIRST_S, _FIRST_S_PER_BYTE = 100e-6, 0.5e-9
_LEAST_S = 1e-6
# Weight of a new measurement in the mean cost of a block.
_WEIGHT = 0.2


class Publishing:
    """The filled blocks that are not published yet.

    Parameters
    ----------
    prefix
        The prefix index of both tiers.
    host
        The host tier.
    blocks
        Its blocks in the node's pool.
    block_bytes
        Bytes of a block.
    max_share
        The budget without prefill: seconds of planning and sealing for a second of the engine. The copies are not among
        them. On a CPU they take a quarter of that time for small blocks, and as long for large ones.
    clock
        Seconds, for measuring the cost.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        host: HostTier,
        blocks: PoolBlocks,
        block_bytes: int,
        max_share: float,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._prefix = prefix
        self._host = host
        self._blocks = blocks
        self.max_share = max_share
        self._clock = clock
        self._cost_s = _FIRST_S + _FIRST_S_PER_BYTE * block_bytes
        # Seconds, negative after a batch that took longer than expected.
        self._budget_s = 0.0
        self._last_s: float | None = None
        self._waiting_since_s: float | None = None
        self._seal_s = blocks.seal_s
        # Planning the blocks that are not sealed yet.
        self._plan_s = 0.0
        # Time between the last two steps.
        self._step_s, self._stepped_s = 0.0, math.inf
        self._num_sealed = blocks.num_sealed
        # (entry, group, device block), in the order in which they were filled.
        self._filled: deque[tuple[Entry, int, int]] = deque()
        # The same, of blocks that a peer waits for.
        self._asked: deque[tuple[Entry, int, int]] = deque()
        self.num_published = 0

    def __len__(self) -> int:
        return len(self._filled) + len(self._asked)

    def add(self, blocks: Iterable[int], prefill_s: float = 0.0) -> None:
        """Queue indexed device blocks that a committed step has filled.

        Beyond `_MAX_FILLED` they are not queued: a block is of no use without the blocks before it.

        Parameters
        ----------
        prefill_s
            Duration of a step with prefill.
        """
        if prefill_s:
            most_s = _MAX_SAVED_S * _PREFILL_SHARE
            self._budget_s = min(self._budget_s + prefill_s * _PREFILL_SHARE, most_s)
        for block in blocks:
            if block in self._prefix and len(self._filled) < _MAX_FILLED:
                entry, g = self._prefix.place_of(block)
                if entry.host_blocks[g] is None:
                    self._filled.append((entry, g, block))

    def ask(self, keys: Iterable[bytes]) -> set[bytes]:
        """Publish those of these blocks that the device has before all others, and without regard to the budget.

        Parameters
        ----------
        keys
            Names in the pool (`PoolBlocks.key`), in the order of a sequence.

        Returns
        -------
        The blocks that will be in the pool soon.
        """
        coming = set()
        for key in keys:
            digest, g = self._blocks.place_of(key)
            entry = None if g is None else self._prefix.get(digest)
            if entry is None or g is None:
                continue
            block = entry.blocks[g]
            if entry.host_blocks[g] is not None:
                # Its copy may not have ended yet.
                coming.add(key)
            elif block is not None and len(self._asked) < _MAX_FILLED:
                self._asked.append((entry, g, block))
                coming.add(key)
        return coming

    def is_due(self, now_s: float) -> bool:
        """Whether a batch waits and the budget allows it, or a peer waits. Called at each step."""
        self._step_s, self._stepped_s = max(0.0, now_s - self._stepped_s), now_s
        if self._asked:
            return True
        if not self._filled:
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if len(self._filled) < _BATCH and now_s - self._waiting_since_s < _MAX_WAIT_S:
            return False
        self._charge()
        passed_s = _MAX_SAVED_S if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        most = _MAX_SAVED_S * self.max_share
        if self._budget_s < most:
            self._budget_s = min(self._budget_s + passed_s * self.max_share, most)
        return self._budget_s >= min(min(len(self._filled), _BATCH) * self._cost_s, most)

    def plan(self, being_filled: Collection[int], *, is_idle: bool = False) -> None:
        """Plan the copies of a batch, within the budget unless the engine is idle or a peer waits.

        Parameters
        ----------
        being_filled
            Device blocks that steps in flight, or the step being planned, fill. A block of an old sequence may be one.
        """
        began_s = self._clock()
        queue, least = (self._asked, _BATCH) if self._asked else (self._filled, 1)
        budget_s = _MAX_BATCH_S if self._asked or is_idle else min(self._budget_s, _MAX_BATCH_S)
        if self._asked:
            budget_s = max(budget_s, _ASKED_SHARE * min(self._step_s, _MAX_ASKED_STEP_S))
        # At least one block fits, however large blocks are.
        most = max(least, int(budget_s / self._cost_s))
        filling = set(being_filled)
        # Two peers may have asked for the same block.
        seen: set[int] = set()
        chosen: list[tuple[Entry, int, int]] = []
        early: list[tuple[Entry, int, int]] = []
        while queue and len(chosen) < most:
            entry, g, block = place = queue.popleft()
            if block in seen:
                continue
            seen.add(block)
            if entry.alive and entry.blocks[g] == block and entry.host_blocks[g] is None:
                (early if block in filling else chosen).append(place)
        if queue is self._asked:
            # The others are queued again when their step is committed.
            queue.extendleft(reversed(early))
        if not self._filled:
            self._waiting_since_s = None
        if chosen:
            self._host.publish(chosen)
            self.num_published += len(chosen)
        self._plan_s += self._clock() - began_s

    def _charge(self) -> None:
        """Take the time of what was sealed since the last call from the budget; evicted blocks count too."""
        blocks = self._blocks
        num_sealed = blocks.num_sealed - self._num_sealed
        if not num_sealed:
            return
        spent_s = self._plan_s + blocks.seal_s - self._seal_s
        self._plan_s, self._seal_s, self._num_sealed = 0.0, blocks.seal_s, blocks.num_sealed
        self._budget_s = max(self._budget_s - spent_s, -_MAX_SAVED_S * self.max_share)
        self._cost_s += _WEIGHT * (max(spent_s / num_sealed, _LEAST_S) - self._cost_s)
