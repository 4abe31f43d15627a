"""Changes of the prefix cache, reported to the routers as routing hashes.

A routing hash names 64 tokens and all tokens before them (`routing_names.py`). It is held in a tier (device or host
memory) while at least one index entry, its holder, has it there.

```
 hold / move / drop / clear ──▶ changed (net effect) ──flush()──▶ CacheEvents{seq} ──▶ ring of the last batches
                                   │
                                   └▶ holders of each tier: hash → number
```

A hash is in one tier at a time: in `gpu` while any entry holds it there, else in `host`. A router that replays the
batches in order knows exactly which hashes this replica had in each tier at the last flush. It can check this with
`digest` (`routing_hash.tier_digest`), without receiving the hashes again.
"""

from __future__ import annotations

import enum
import uuid
from collections import deque
from collections.abc import Collection, Iterable

import numpy as np

from quire.protos.routing_hash import tier_digest, xor_hashes
from quire.protos.wire import CacheEvents

_NO_HASHES = np.empty(0, np.uint64)


class Tier(enum.IntEnum):
    """The memory that holds a block of KV."""

    # On the device that computes, which may be a CPU.
    GPU = 0
    HOST = 1


class EventLog:
    """Numbered batches of cache events, the hashes held in each tier, and a ring of batches for replay.

    Parameters
    ----------
    epoch
        Name of this cache's lifetime; a random one by default. A router that sees a new epoch drops what it knew.
    max_batches
        Number of the newest batches that `since` can return.
    """

    def __init__(self, epoch: str | None = None, max_batches: int = 1024):
        if max_batches < 1:
            raise ValueError(f"max_batches must be >= 1, got {max_batches}")
        self._ring: deque[CacheEvents] = deque(maxlen=max_batches)
        self._start(epoch)

    def _start(self, epoch: str | None) -> None:
        self.epoch = epoch if epoch is not None else uuid.uuid4().hex
        # Number of the last flushed batch.
        self.seq = 0
        # XOR of the hashes that each tier held at the last flushed batch.
        self._xors = [0, 0]
        self._ring.clear()
        # For each tier: hash to the number of entries that hold it there.
        self._holders: tuple[dict[int, int], dict[int, int]] = ({}, {})
        # Each hash with a tier that has changed since the last flush, and the tier at that flush (None: not held). In
        # the order of the changes, because parents must be reported before their children.
        self._changed: dict[int, Tier | None] = {}
        # The hashes of each tier at the last flush, if the cache was cleared since; None: it was not.
        self._before_clear: tuple[set[int], set[int]] | None = None

    def reset(self, epoch: str | None = None) -> None:
        """Forget everything and start a new epoch, for a new cache."""
        self._start(epoch)

    @property
    def digest(self) -> int:
        """Digest of the hashes that were held at the last flushed batch."""
        return tier_digest(*self._xors)

    @property
    def num_held(self) -> int:
        gpu, host = self._holders
        return len(gpu.keys() | host.keys()) if host else len(gpu)

    def held(self, tier: Tier | None = None) -> set[int]:
        """The hashes in a tier now, or in any tier if `tier` is None. Changes that are not flushed count."""
        gpu, host = self._holders
        if tier is None:
            return set(gpu.keys() | host.keys())
        return set(gpu) if tier is Tier.GPU else set(host.keys() - gpu.keys())

    def hold(self, hashes: Iterable[int], tier: Tier = Tier.GPU) -> None:
        """Add a holder in this tier to each hash."""
        holders, changed = self._holders[tier], self._changed
        others = self._holders[1 - tier]
        for routing_hash in hashes:
            count = holders.get(routing_hash, 0)
            holders[routing_hash] = count + 1
            if count or (tier and routing_hash in others):
                continue
            if routing_hash in others or routing_hash in changed:
                self._note(routing_hash, Tier.HOST if routing_hash in others else None)
            else:
                # The usual case: the hash is new and changes for the first time in this batch. Not calling `_note`
                # saves time.
                changed[routing_hash] = None

    def drop(self, hashes: Iterable[int], tier: Tier = Tier.GPU) -> None:
        """Remove a holder in this tier from each hash."""
        for routing_hash in hashes:
            before = self._tier(routing_hash)
            self._subtract(routing_hash, tier)
            self._note(routing_hash, before)

    def move(self, hashes: Iterable[int], source: Tier, target: Tier) -> None:
        """Move a holder of each hash from one tier to the other."""
        for routing_hash in hashes:
            before = self._tier(routing_hash)
            self._subtract(routing_hash, source)
            holders = self._holders[target]
            holders[routing_hash] = holders.get(routing_hash, 0) + 1
            self._note(routing_hash, before)

    def clear(self) -> None:
        """Remove every hash from both tiers."""
        self._before_clear = self._held_at_flush()
        for holders in self._holders:
            holders.clear()
        self._changed.clear()

    def _tier(self, routing_hash: int) -> Tier | None:
        gpu, host = self._holders
        if routing_hash in gpu:
            return Tier.GPU
        return Tier.HOST if routing_hash in host else None

    def _subtract(self, routing_hash: int, tier: Tier) -> None:
        holders = self._holders[tier]
        left = holders[routing_hash] - 1
        if left:
            holders[routing_hash] = left
        else:
            del holders[routing_hash]

    def _note(self, routing_hash: int, before: Tier | None) -> None:
        now = self._tier(routing_hash)
        if now is not before:
            at_flush = self._changed.pop(routing_hash, before)
            # A hash that is back in its tier at the last flush has not changed.
            if now is not at_flush:
                self._changed[routing_hash] = at_flush

    def flush(self) -> CacheEvents | None:
        """Close the batch: the changes since the last one, or None when there are none."""
        cleared = self._before_clear is not None
        if not (cleared or self._changed):
            return None
        stored: tuple[list[int], list[int]] = ([], [])
        removed: tuple[list[int], list[int]] = ([], [])
        for routing_hash, at_flush in self._changed.items():
            now = self._tier(routing_hash)
            if at_flush is not None:
                removed[at_flush].append(routing_hash)
            if now is not None:
                stored[now].append(routing_hash)
        stored_arrays = [np.array(h, np.uint64) if h else _NO_HASHES for h in stored]
        removed_arrays = [np.array(h, np.uint64) if h else _NO_HASHES for h in removed]
        for tier in Tier:
            old = 0 if cleared else self._xors[tier]
            self._xors[tier] = (
                old ^ xor_hashes(stored_arrays[tier]) ^ xor_hashes(removed_arrays[tier])
            )
        self.seq += 1
        self._changed.clear()
        self._before_clear = None
        batch = CacheEvents(
            self.seq,
            stored_arrays[Tier.GPU],
            removed_arrays[Tier.GPU],
            cleared,
            stored_arrays[Tier.HOST],
            removed_arrays[Tier.HOST],
        )
        self._ring.append(batch)
        return batch

    def since(self, seq: int) -> list[CacheEvents] | None:
        """The batches after `seq`, oldest first; None if not all of these are kept."""
        missing = self.seq - seq
        if not 0 <= missing <= len(self._ring):
            return None
        return [self._ring[i] for i in range(len(self._ring) - missing, len(self._ring))]

    def snapshot(self) -> tuple[int, np.ndarray, np.ndarray]:
        """`seq`, and the hashes in `gpu` ([n] uint64) and in `host` ([m] uint64) at that batch.

        Events that are not flushed follow in the next batch. Without any, parents come before their children: they were
        held first, and are dropped last.
        """
        gpu: Collection[int]
        host: Collection[int]
        gpu, host = self._holders
        if self._changed or self._before_clear is not None:
            gpu, host = self._held_at_flush()
        elif host:
            host = self.held(Tier.HOST)
        return (
            self.seq,
            np.fromiter(gpu, np.uint64, len(gpu)),
            np.fromiter(host, np.uint64, len(host)),
        )

    def _held_at_flush(self) -> tuple[set[int], set[int]]:
        if self._before_clear is not None:
            gpu, host = self._before_clear
            return set(gpu), set(host)
        held = (self.held(Tier.GPU), self.held(Tier.HOST))
        for routing_hash, at_flush in self._changed.items():
            for tier in Tier:
                (held[tier].add if tier is at_flush else held[tier].discard)(routing_hash)
        return held
