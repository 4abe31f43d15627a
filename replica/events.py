"""What happened in the prefix cache, told to the routers as routing hashes.

```
 hold / drop / clear ──▶ pending (net effect) ──flush()──▶ CacheEvents{seq} ──▶ ring of the last batches
                              │
                              └▶ held: hash → number of holders
```

A router that replays the batches in order holds exactly the hashes that this replica held at the last flush;
`digest`, the XOR of them, lets it check that without sending them.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable

import numpy as np

from quire.protos.wire import CacheEvents


class EventLog:
    """Numbered batches of cache events, the hashes held, and a ring of batches for replay.

    Parameters
    ----------
    epoch
        Name of this incarnation; a random one by default.
    max_batches
        Batches kept for `since`.
    """

    def __init__(self, epoch: str | None = None, max_batches: int = 1024):
        if max_batches < 1:
            raise ValueError(f"max_batches must be >= 1, got {max_batches}")
        self._ring: deque[CacheEvents] = deque(maxlen=max_batches)
        self._start(epoch)

    def _start(self, epoch: str | None) -> None:
        self.epoch = epoch if epoch is not None else uuid.uuid4().hex
        self.seq = 0  # of the last flushed batch
        self.digest = 0  # XOR of the hashes held at that batch
        self._ring.clear()
        self._held: dict[int, int] = {}
        # Insertion-ordered sets: parents are stored before their children and must be told in that order.
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._before_clear: set[int] | None = None  # held at the last flush, when cleared since

    def reset(self, epoch: str | None = None) -> None:
        """Forget everything and begin a new epoch: the cache behind this log is a new one."""
        self._start(epoch)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def held(self) -> set[int]:
        """The hashes held now, pending events included."""
        return set(self._held)

    def hold(self, hashes: Iterable[int]) -> None:
        """One more holder for each hash; a hash is told when its first holder comes."""
        for routing_hash in hashes:
            holders = self._held.get(routing_hash, 0)
            self._held[routing_hash] = holders + 1
            if holders == 0:
                if routing_hash in self._removed:  # gone and back within a batch: nothing to tell
                    del self._removed[routing_hash]
                else:
                    self._stored[routing_hash] = None

    def drop(self, hashes: Iterable[int]) -> None:
        """One holder fewer for each hash; a hash is told when its last holder goes."""
        for routing_hash in hashes:
            holders = self._held[routing_hash] - 1
            if holders:
                self._held[routing_hash] = holders
                continue
            del self._held[routing_hash]
            if routing_hash in self._stored:
                del self._stored[routing_hash]
            else:
                self._removed[routing_hash] = None

    def clear(self) -> None:
        """Nothing is held any more."""
        self._before_clear = self._held_at_flush()
        self._held.clear()
        self._stored.clear()
        self._removed.clear()

    def flush(self) -> CacheEvents | None:
        """Close the batch: what changed since the last one, or None when nothing did."""
        cleared = self._before_clear is not None
        if not (cleared or self._stored or self._removed):
            return None
        stored = np.fromiter(self._stored, np.uint64, len(self._stored))
        removed = np.fromiter(self._removed, np.uint64, len(self._removed))
        digest = 0 if cleared else self.digest
        self.digest = digest ^ xor(stored) ^ xor(removed)
        self.seq += 1
        self._stored.clear()
        self._removed.clear()
        self._before_clear = None
        batch = CacheEvents(self.seq, stored, removed, cleared)
        self._ring.append(batch)
        return batch

    def since(self, seq: int) -> list[CacheEvents] | None:
        """The batches after `seq`, oldest first; None when they are no longer kept or never were."""
        missing = self.seq - seq
        if not 0 <= missing <= len(self._ring):
            return None
        return [self._ring[i] for i in range(len(self._ring) - missing, len(self._ring))]

    def snapshot(self) -> tuple[int, np.ndarray]:
        """`seq` and [n] uint64, the hashes held at that batch: pending events follow in the next one."""
        held = self._held_at_flush()
        return self.seq, np.fromiter(held, np.uint64, len(held))

    def _held_at_flush(self) -> set[int]:
        if self._before_clear is not None:
            return set(self._before_clear)
        return (self._held.keys() - self._stored.keys()) | self._removed.keys()


def xor(hashes: np.ndarray) -> int:
    """XOR of [n] uint64; 0 of none."""
    return int(np.bitwise_xor.reduce(hashes)) if len(hashes) else 0
