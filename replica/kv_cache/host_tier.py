"""The host tier: blocks of KV in host memory, and the copies between host and device that the next step makes.

```
 device    in use ──release──▶ cached ──evict───▶ free            in use ◀── allocate
                                  │ save                            ▲ restore
                                  ▼                                 │
 host                          cached ───────────taken by───────▶ in use (until the step has run)
                                  │ evict (leaf first, LRU)
                                  ▼
                                free ──▶ in use by an offloaded request
```

The tier's blocks are private to the engine (`BlockManager`) or in the node's pool (`PoolBlocks`), where other engines
find them and may evict them. This module only plans copies. The next step makes them before it
writes any KV: first the saves (device to host), then the restores (host to device). So a device block may be reused as
soon as its save is planned. A host block that is being restored keeps an owner until that step has run, so that no
later save overwrites it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.replica.kv_cache.blocks import BlockManager
from quire.replica.kv_cache.pool_blocks import PoolBlocks
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import Entry


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies of whole blocks between the tiers that one step makes."""

    saves: dict[int, int] = field(default_factory=dict)  # host block → device block
    restores: dict[int, int] = field(default_factory=dict)  # device block → host block

    def __bool__(self) -> bool:
        return bool(self.saves or self.restores)

    def save_pairs(self) -> np.ndarray:
        """[k, 2] int64, (from the device, to the host)."""
        return np.array([(d, h) for h, d in self.saves.items()], np.int64).reshape(-1, 2)

    def restore_pairs(self) -> np.ndarray:
        """[k, 2] int64, (from the host, to the device)."""
        return np.array([(h, d) for d, h in self.restores.items()], np.int64).reshape(-1, 2)


class HostTier:
    """The host tier's blocks, and the planned copies.

    Parameters
    ----------
    num_blocks
        Blocks of the tier; 0: the tier is off.
    prefix
        The prefix index of both tiers.
    max_retained
        Maximum number of cached blocks of the tier that are retained (`retention.py`).
    pool_blocks
        The blocks of the node's pool; None: the tier's blocks are private.
    """

    def __init__(
        self,
        num_blocks: int,
        prefix: PrefixCache,
        *,
        max_retained: int = 0,
        pool_blocks: PoolBlocks | None = None,
    ):
        self.blocks: BlockManager | PoolBlocks = pool_blocks or BlockManager(
            num_blocks,
            on_evict=prefix.forget_host,
            payer_of=prefix.payer_of_host_block,
            max_retained=max_retained,
        )
        self.pool_blocks = pool_blocks
        self._prefix = prefix
        self._planned = Transfers()
        # Host blocks that failed steps may still write to.
        self._failed_saves: list[int] = []
        # The copies of the steps in flight, oldest first.
        self._in_flight: list[Transfers] = []

    def take_evicted(self, block: int) -> None:
        """Plan to save a cached block that the device evicts, if the host tier has room for it.

        A block that a retained sequence needs is retained in the host tier too. Other blocks do not displace such ones.
        """
        entry, g = self._prefix.place_of(block)
        copy = entry.host_blocks[g]
        is_retained = entry.num_retained[g] > 0
        if copy is not None:
            self.blocks.touch(copy)
        elif block not in self._planned.restores:
            # A block with a restore that is only planned has no content yet, so it is not saved.
            copy = self._copy(entry, g, block, may_evict_retained=is_retained)
        if is_retained and copy is not None:
            self.blocks.retain([copy])
        self._prefix.forget(block)

    def _copy(self, entry: Entry, g: int, block: int, *, may_evict_retained: bool) -> int | None:
        """Give an entry's device block a copy in the tier, unless another engine has published one. None: no room."""
        found = self._find_published(entry, g)
        if found is not None:
            return found
        allocated = self.blocks.allocate(1, may_evict_retained=may_evict_retained)
        if allocated is None:
            return None
        self._save_content(entry, g, block, allocated[0])
        self.blocks.release(allocated)
        return allocated[0]

    def _find_published(self, entry: Entry, g: int) -> int | None:
        """Give an entry the host block that another engine has published, if there is one."""
        if self.pool_blocks is None:
            return None
        found = self.pool_blocks.find(entry.digest, g)
        if found is None or not self.pool_blocks.adopt(found, entry.digest, g):
            return None
        self._prefix.place_on_host(entry, g, found)
        return found

    def _save_content(self, entry: Entry, g: int, block: int, copy: int) -> None:
        self.save(block, copy)
        self._prefix.place_on_host(entry, g, copy)
        self.blocks.mark_contents([copy])

    def publish(self, filled: Sequence[tuple[Entry, int, int]]) -> None:
        """Plan to copy blocks that stay on the device, for the node's other engines, as far as there is room.

        Parameters
        ----------
        filled
            (entry, group, device block) of each, in the order of their sequences.
        """
        arriving: set[int] = set()
        arriving = arriving.union(*(t.restores for t in (self._planned, *self._in_flight)))
        missing = [
            place
            for place in filled
            if place[2] not in arriving and self._find_published(place[0], place[1]) is None
        ]
        copies = self.blocks.allocate(len(missing), may_evict_retained=False)
        if copies is None:
            return
        for (entry, g, block), copy in zip(missing, copies, strict=True):
            self._save_content(entry, g, block, copy)
        self.blocks.release(copies[::-1])

    def begin_plan(self) -> None:
        """Follow what the node's other engines have changed since the last plan."""
        if self.pool_blocks is not None:
            self.pool_blocks.refresh()

    def pin(self, host_blocks: Sequence[int]) -> bool:
        """Make sure that these indexed blocks stay until the next plan, and that their bytes are right.

        Returns
        -------
        False if some are lost. The prefix index does not have them any longer, so the caller looks again.
        """
        return self.pool_blocks is None or self.pool_blocks.pin(host_blocks)

    def end_saves(self, host_blocks: Iterable[int], *, are_all: bool) -> None:
        """Let the node's other engines find these blocks, whose copies have ended.

        Parameters
        ----------
        are_all
            Whether no other copy is queued, so that those of failed steps have ended too.
        """
        if self.pool_blocks is None:
            return
        if are_all and self._failed_saves:
            host_blocks = [*host_blocks, *self._failed_saves]
            self._failed_saves = []
        self.pool_blocks.end_saves(host_blocks)

    def save(self, block: int, host_block: int) -> None:
        """Plan to copy a device block to a host block."""
        self._planned.saves[host_block] = block
        if self.pool_blocks is not None:
            self.pool_blocks.begin_save(host_block)

    def restore(self, host_block: int, block: int) -> None:
        """Plan to copy a host block to a device block.

        The caller hands over one reference to the host block, which `land` releases.
        """
        # Another row may have planned a restore into this block, and given the block back.
        unneeded = self._planned.restores.pop(block, None)
        if unneeded is not None:
            self.blocks.release([unneeded])
        self._planned.restores[block] = host_block

    @property
    def planned_restores(self) -> Collection[int]:
        """Device blocks that the next step restores."""
        return self._planned.restores.keys()

    def launch(self) -> Transfers:
        """Take the planned copies for the step being planned; its restores are in flight until `land`."""
        if not self._planned:
            return Transfers()
        launched, self._planned = self._planned, Transfers()
        self._in_flight.append(launched)
        return launched

    def land(self, landed: Transfers) -> None:
        """Release the host blocks that a step restored, after these copies have ended."""
        if landed:
            self._in_flight = [t for t in self._in_flight if t is not landed]
            # Restores are in the order of the sequence; `release` needs the sequence's last block first.
            self.blocks.release(reversed(landed.restores.values()))

    def forget_saves(self, landed: Transfers) -> None:
        """Drop the host blocks that a failed step should have written: their content is unknown.

        Its copies may be in flight, so the node's other engines do not get these blocks yet.
        """
        if self.pool_blocks is not None:
            self._failed_saves += landed.saves
        for host_block in landed.saves:
            if self._prefix.has_host_block(host_block):
                self._prefix.forget_host(host_block)
                self.blocks.forget_content(host_block)

    def check(self, offloaded: Iterable[int]) -> None:
        """Raise `IntegrityError` unless block states, owners and the prefix index agree.

        Parameters
        ----------
        offloaded
            Host blocks of the offloaded requests, one entry per owner.
        """
        owners = [0] * self.blocks.num_blocks
        for transfers in (self._planned, *self._in_flight):
            for host_block in transfers.restores.values():
                owners[host_block] += 1
        for host_block in offloaded:
            owners[host_block] += 1
        self.blocks.check(owners, self._prefix.has_host_block)
