"""Routing hashes: the names under which routers know the content of the prefix index.

```
 tokens    [ t0 .. t31 ][ t32 .. t63 ][ t64 .. t95 ][ t96 .. t127 ]      block_size = 32
 names          n0     ▶     n1      ▶     n2      ▶      n3             of full blocks, inside the engine
 routing                     h0                           h1             reported to the routers, 64 tokens each
```

An entry's routing hashes are held as long as the entry is in the index: with sliding groups that is the longest chain
that a request could ever hit. They are reported in tier `host` once no block of the entry is on the device, in the
groups of full attention if there are any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np

from quire.protos.routing_hash import (
    ROUTING_BLOCK_TOKENS,
    RoutingHasher,
    routing_block_sums,
    routing_hashes,
)
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.kv_cache.prefix_entries import Entry

# Tenants with a cached chain seed; computing a seed takes microseconds.
_MAX_SEEDS = 1024
_MASK64 = 2**64 - 1


class RoutingNames:
    """Hash the routing blocks of index entries, and report the hashes and their tiers.

    Parameters
    ----------
    block_size
        Tokens of a block: a divisor or a multiple of the routing block.
    events
        Receives the hashes that become held, move, or are dropped.
    tier_of
        The tier of an entry now.
    model_name, revision
        Identity of the weights.
    """

    def __init__(
        self,
        block_size: int,
        events: EventLog,
        tier_of: Callable[[Entry], Tier],
        model_name: str,
        revision: str,
    ):
        if block_size < 1 or (
            ROUTING_BLOCK_TOKENS % block_size and block_size % ROUTING_BLOCK_TOKENS
        ):
            raise ValueError(
                f"block_size must divide {ROUTING_BLOCK_TOKENS} or be a multiple of it, got {block_size}"
            )
        self._block_size = block_size
        self._events = events
        self._tier_of = tier_of
        # Entries that end a routing block that is not hashed yet, parents before their children.
        self._unhashed: list[Entry] = []
        # Entries that make up one routing block, and routing blocks in one entry.
        self.num_entries = max(1, ROUTING_BLOCK_TOKENS // block_size)
        self._num_routing_blocks = max(1, block_size // ROUTING_BLOCK_TOKENS)

        @functools.lru_cache(_MAX_SEEDS)
        def chain_seed(tenant: str) -> int:
            return int(RoutingHasher(model_name, revision, tenant).chain_seed)

        self._chain_seed = chain_seed

    @property
    def num_unhashed(self) -> int:
        """Entries that end a routing block that is not hashed yet."""
        return len(self._unhashed)

    def add(self, entry: Entry) -> None:
        """Hash the routing blocks that end in this entry in the next `hash_new`."""
        self._unhashed.append(entry)

    def hash_new(self) -> None:
        """Hash the routing blocks of the added entries, all in one pass, and report them.

        An entry leaves the index only after all entries that continue it. The last entry of a routing block therefore
        leaves before the others, so that entry holds the hash.
        """
        if not self._unhashed:
            return
        entries, self._unhashed = self._unhashed, []
        hashes = self._hashes(entries)
        # For each tier.
        held: tuple[list[int], list[int]] = ([], [])
        for n, entry in enumerate(entries):
            begin = n * self._num_routing_blocks
            entry.routing_hashes = hashes[begin : begin + self._num_routing_blocks]
            entry.tier = self._tier_of(entry)
            held[entry.tier].extend(entry.routing_hashes)
        for tier in Tier:
            self._events.hold(held[tier], tier)

    def _hashes(self, entries: list[Entry]) -> list[int]:
        """The routing hashes of these entries, in order; sets their `routing_sum`."""
        # Tokens of each routing block, then for each entry: the entry before the run, its first position, its seed.
        parts: list[bytes] = []
        before: list[Entry | None] = []
        starts: list[int] = []
        seeds: list[int] = []
        for entry in entries:
            run, first = [entry.token_bytes], entry
            for _ in range(self.num_entries - 1):
                if first.parent is None:
                    raise IntegrityError(f"a routing block ends at depth {entry.depth}")
                first = first.parent
                run.append(first.token_bytes)
            parts.extend(reversed(run))
            before.append(first.parent)
            starts.append(first.depth * self._block_size)
            seeds.append(self._chain_seed(entry.tenant))
        per_entry = self._num_routing_blocks
        begin, keys = np.array(starts), np.array(seeds, np.uint64)
        if per_entry > 1:
            begin = (begin[:, None] + np.arange(0, self._block_size, ROUTING_BLOCK_TOKENS)).ravel()
            keys = np.repeat(keys, per_entry)
        ids = np.frombuffer(b"".join(parts), np.int32).reshape(-1, ROUTING_BLOCK_TOKENS)
        added = iter(routing_block_sums(begin, ids).tolist())
        sums: list[int] = []
        for entry, parent in zip(entries, before, strict=True):
            # Parents come before their children, so the parent's sum is complete.
            running = 0 if parent is None else parent.routing_sum
            for _ in range(per_entry):
                running = (running + next(added)) & _MASK64
                sums.append(running)
            entry.routing_sum = running
        hashes: list[int] = routing_hashes(np.array(sums, np.uint64), keys).tolist()
        return hashes

    def update_tier(self, entry: Entry) -> None:
        """Report the entry's hashes in another tier, if its blocks have moved."""
        if entry.tier is not None and entry.tier is not (tier := self._tier_of(entry)):
            self._events.move(entry.routing_hashes, entry.tier, tier)
            entry.tier = tier

    def drop(self, entry: Entry) -> None:
        """Report that an entry leaves the index."""
        # Otherwise the entry would be hashed, and its hashes held, after it has left.
        self.hash_new()
        if entry.tier is not None:
            self._events.drop(entry.routing_hashes, entry.tier)

    def clear(self) -> None:
        """Report that every entry has left the index."""
        self._unhashed.clear()
        self._events.clear()

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise `IntegrityError` unless the hashes of these entries are held, each in its tier.

        Parameters
        ----------
        entries
            The whole index.
        """
        holders: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        for entry in entries:
            if entry.tier is not None:
                holders[entry.tier].update(entry.routing_hashes)
        for tier in Tier:
            others = holders[Tier.GPU] if tier is Tier.HOST else set()
            if holders[tier] - others != self._events.held(tier):
                raise IntegrityError("the routing hashes held are not those of the indexed blocks")
