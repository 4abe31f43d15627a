"""Routing hashes of blocks that other engines have published: routers learn that this engine can restore them.

```
 engine A   computes b0 b1, publishes them ──▶ slots with key, bytes, routing hash
 engine B   refresh: b1's slot has changed ──▶ its hash is held in tier `host` ──▶ B's next cache events
```

So a request goes to any replica of the node that is free, and a replica that has just started is known to have what
the node has. Each replica reports the pool in its own events, so the routers' index, digests and replays need no notion
of a node. A hash is in the header of the slot with its last block; its earlier blocks may have been evicted. Like every
other hint it is checked when a request is admitted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.node_pool.node_pool import NodePool


class PoolHashes:
    """The routing hashes of slots that this engine has not published or adopted itself.

    Parameters
    ----------
    pool
        The node's pool.
    events
        Holds the hashes in tier `host`.
    """

    def __init__(self, pool: NodePool, events: EventLog):
        self._pool = pool
        self._events = events
        self._held: dict[int, int] = {}  # slot to its hash

    def hashes(self) -> set[int]:
        """What is held."""
        return set(self._held.values())

    def follow(
        self, slots: Iterable[int], own: Container[int], group_names: Container[bytes]
    ) -> None:
        """Hold the hashes of changed slots, and drop those that they had.

        Parameters
        ----------
        own
            Slots that the prefix index has, and reports.
        group_names
            Second parts of the keys of this engine's blocks; other slots belong to another model or format.
        """
        dropped, held = [], []
        for slot in slots:
            old = self._held.pop(slot, None)
            if old is not None:
                dropped.append(old)
            new = 0 if slot in own else self._pool.routing_hash(slot, group_names)
            if new:
                self._held[slot] = new
                held.append(new)
        # Held first, so that a hash that moves to another slot does not change.
        self._events.hold(held, Tier.HOST)
        self._events.drop(dropped, Tier.HOST)

    def hold_again(self) -> None:
        """Report what is held once more, after the event log was cleared."""
        self._events.hold(self._held.values(), Tier.HOST)
