"""The host tier: blocks of KV in the host's memory, and the copies between it and the device that wait for a step.

```
 device    in use ──release──▶ cached ──evict───▶ free            in use ◀── allocate
                                  │ save                            ▲ restore
                                  ▼                                 │
 host                          cached ───────────taken by───────▶ in use (until the step has run)
                                  │ evict (leaf first, LRU)
                                  ▼
                                free ──▶ in use by an offloaded request
```

A second `BlockManager` owns the blocks. Copies are only planned here: the next step makes them before it writes
anything, saves first, then restores. So a block may be given away as soon as its save is planned. A block that is
restored stays retained until its step has run: nothing else may be saved there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.replica.kv_cache.blocks import BlockManager
from quire.replica.kv_cache.prefix import PrefixCache


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
    """What is in the host tier, and what is about to be copied.

    Parameters
    ----------
    num_blocks
        Blocks of the tier; 0 = there is none.
    prefix
        The index of both tiers.
    """

    def __init__(self, num_blocks: int, prefix: PrefixCache):
        self.blocks = BlockManager(num_blocks, on_evict=prefix.forget_host)
        self._prefix = prefix
        self._planned = Transfers()
        self._in_flight: list[Transfers] = []  # by step

    def take_evicted(self, block: int) -> None:
        """A cached block leaves the device: its content stays here if there is room."""
        entry, g = self._prefix.place_of(block)
        copy = entry.host_blocks[g]
        if copy is not None:
            self.blocks.touch(copy)
        elif block not in self._planned.restores:  # else its content is not there yet
            allocated = self.blocks.allocate(1)
            if allocated is not None:
                self.save(block, allocated[0])
                self._prefix.place_on_host(entry, g, allocated[0])
                self.blocks.mark_contents([allocated[0]])
                self.blocks.release(allocated)
        self._prefix.forget(block)

    def save(self, block: int, host_block: int) -> None:
        """Copy a block of the device to one of the tier before the next step."""
        self._planned.saves[host_block] = block

    def restore(self, host_block: int, block: int) -> None:
        """Copy a block of the tier to one of the device before the next step. An owner of the host block, who
        has counted already, hands it over until then."""
        unneeded = self._planned.restores.pop(block, None)  # of a row that has gone again since
        if unneeded is not None:
            self.blocks.release([unneeded])
        self._planned.restores[block] = host_block

    @property
    def planned_restores(self) -> Collection[int]:
        """Blocks of the device that the next step restores."""
        return self._planned.restores.keys()

    def launch(self) -> Transfers:
        """The copies of the step being planned; they are in flight until `land`."""
        if not self._planned:
            return Transfers()
        launched, self._planned = self._planned, Transfers()
        self._in_flight.append(launched)
        return launched

    def land(self, landed: Transfers) -> None:
        """The step with these copies has run, or failed: its restored blocks are given back."""
        if landed:
            self._in_flight = [t for t in self._in_flight if t is not landed]
            # Restored in the order of the sequence, so released leaf first.
            self.blocks.release(reversed(landed.restores.values()))

    def forget_saves(self, landed: Transfers) -> None:
        """The step failed: what it would have saved is unknown."""
        for host_block in landed.saves:
            if self._prefix.has_host_block(host_block):
                self._prefix.forget_host(host_block)
                self.blocks.forget_content(host_block)

    def check(self, parked: Iterable[int]) -> None:
        """Raise `IntegrityError` unless pools, counts and index agree.

        Parameters
        ----------
        parked
            Host blocks of the offloaded requests, each as often as it has owners.
        """
        owners = [0] * self.blocks.num_blocks
        for transfers in (self._planned, *self._in_flight):
            for host_block in transfers.restores.values():
                owners[host_block] += 1
        for host_block in parked:
            owners[host_block] += 1
        self.blocks.check(owners, self._prefix.has_host_block)
