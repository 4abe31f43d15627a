"""Routing hashes: the names under which routers know the content of the prefix index.

The engine names each full KV block. Routers use coarser names: a routing block is 64 tokens, regardless of the
engine's block size, and its routing hash depends on all tokens from the start of the sequence.

```
 tokens    [ t0 .. t31 ][ t32 .. t63 ][ t64 .. t95 ][ t96 .. t127 ]      block_size = 32
 names          n0     ▶     n1      ▶     n2      ▶      n3             one per full block, inside the engine
 routing                     h0                           h1             one per routing block, sent to the routers
```

A routing hash is reported as held until its entry leaves the index. With sliding-window layer groups an entry may stay
after its sliding-window blocks are gone, so the reported chain can be longer than the hit of a request.

An entry is reported in tier `host` if none of its blocks is on the device and at least one is in host memory. Only
blocks of full-attention layer groups count here, unless the model has no such group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import numpy as np

from quire.protos.routing_hash import (
    ROUTING_BLOCK_TOKENS,
    RoutingHasher,
    routing_block_sums,
    routing_hashes,
    state_marks,
)
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.kv_cache.prefix_entries import Entry

# Number of chain seeds (a tenant's start value of its hashes) that are cached; computing a seed takes microseconds.
_MAX_SEEDS = 1024
_MASK64 = 2**64 - 1


class RoutingNames:
    """Hash the routing blocks of index entries, and report the hashes and their tiers.

    Parameters
    ----------
    block_size
        Tokens of a block: a divisor or a multiple of the routing block.
    events
        Receives the hashes that are added, that change their tier, and that are dropped.
    tier_of
        Returns the present tier of an entry.
    model_name, revision
        Identity of the weights; a part of each hash.
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
        # Entries at the end of a routing block that is not hashed yet, parents before their children.
        self._unhashed: list[Entry] = []
        # Number of entries in a routing block; 1 if a routing block is not longer than an entry.
        self.num_entries = max(1, ROUTING_BLOCK_TOKENS // block_size)
        # Number of routing blocks in an entry; 1 if an entry is not longer than a routing block.
        self._num_routing_blocks = max(1, block_size // ROUTING_BLOCK_TOKENS)

        @functools.lru_cache(_MAX_SEEDS)
        def chain_seed(tenant: str) -> int:
            return int(RoutingHasher(model_name, revision, tenant).chain_seed)

        self._chain_seed = chain_seed

    @property
    def num_unhashed(self) -> int:
        """Number of entries at the end of a routing block that is not hashed yet."""
        return len(self._unhashed)

    def add(self, entry: Entry) -> None:
        """Queue an entry that ends a routing block; `hash_new` hashes it."""
        self._unhashed.append(entry)

    def hash_new(self) -> None:
        """Hash the routing blocks of the added entries, all in one pass, and report them.

        A hash is stored in the last entry of its routing block. This entry leaves the index before the block's other
        entries, because an entry never leaves before its children.
        """
        if not self._unhashed:
            return
        entries, self._unhashed = self._unhashed, []
        hashes = self._hashes(entries)
        # The new hashes of each tier, indexed by `Tier`.
        held: tuple[list[int], list[int]] = ([], [])
        for n, entry in enumerate(entries):
            begin = n * self._num_routing_blocks
            entry.routing_hashes = hashes[begin : begin + self._num_routing_blocks]
            entry.tier = self._tier_of(entry)
            held[entry.tier].extend(entry.routing_hashes)
        for tier in Tier:
            self._events.hold(held[tier], tier)

    def _hashes(self, entries: list[Entry]) -> list[int]:
        """Compute the routing hashes of these entries, in order, and set each entry's `routing_sum`."""
        # Token bytes of the routing blocks, in order.
        parts: list[bytes] = []
        # For each entry: the entry before the first one of its routing block.
        before: list[Entry | None] = []
        # For each entry: position of the first token of its routing block.
        starts: list[int] = []
        # For each entry: the chain seed of its tenant.
        seeds: list[int] = []
        for entry in entries:
            run, first = [entry.token_bytes], entry
            for _ in range(self.num_entries - 1):
                if first.parent is None:
                    raise IntegrityError(
                        f"the entry at depth {entry.depth} has too few ancestors to end a routing block"
                    )
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
            # `entries` has parents before their children, so the parent's sum is already set.
            running = 0 if parent is None else parent.routing_sum
            for _ in range(per_entry):
                running = (running + next(added)) & _MASK64
                sums.append(running)
            entry.routing_sum = running
        hashes: list[int] = routing_hashes(np.array(sums, np.uint64), keys).tolist()
        return hashes

    def update_tier(self, entry: Entry) -> None:
        """Report the entry's new tier if the tier has changed since the last report."""
        if entry.tier is not None and entry.tier is not (tier := self._tier_of(entry)):
            self._events.move(entry.routing_hashes, entry.tier, tier)
            entry.tier = tier

    def update_snapshot(self, entry: Entry, has_snapshot: bool) -> None:
        """Report that an entry of a recurrent model has got or lost the snapshot at which a hit may end.

        It is reported for the last routing block that ends at the snapshot or before it.
        """
        marks = self._marks(entry)
        if has_snapshot:
            self._events.hold(marks)
        else:
            self._events.drop(marks)

    def _marks(self, entry: Entry) -> list[int]:
        """Return the mark of the last routing block that ends with an entry or before it; [] if there is none."""
        last: Entry | None = entry
        while last is not None and (last.depth + 1) % self.num_entries:
            last = last.parent
        if last is None:
            return []
        if last.tier is None:
            self.hash_new()
        marks: list[int] = state_marks(np.array(last.routing_hashes[-1:], np.uint64)).tolist()
        return marks

    def drop(self, entry: Entry) -> None:
        """Report that an entry leaves the index."""
        # The entry may still be queued; a later `hash_new` would then report it after it has left.
        self.hash_new()
        if entry.tier is not None:
            self._events.drop(entry.routing_hashes, entry.tier)

    def clear(self) -> None:
        """Report that every entry has left the index."""
        self._unhashed.clear()
        self._events.clear()

    def hash_of(self, entry: Entry) -> int:
        """The routing hash of an entry that ends a routing block; 0 if it has several."""
        if entry.tier is None:
            self.hash_new()
        return entry.routing_hashes[0] if len(entry.routing_hashes) == 1 else 0

    def check(self, entries: Iterable[Entry], pool_hashes: Collection[int]) -> None:
        """Raise `IntegrityError` unless the event log holds exactly the hashes of these entries, each in its tier.

        Parameters
        ----------
        entries
            All entries of the index.
        pool_hashes
            Further hashes in the host tier.
        """
        holders: dict[Tier, set[int]] = {Tier.GPU: set(), Tier.HOST: set(pool_hashes)}
        for entry in entries:
            if entry.tier is not None:
                holders[entry.tier].update(entry.routing_hashes)
            if entry.snapshot is not None:
                holders[Tier.GPU].update(self._marks(entry))
        for tier in Tier:
            others = holders[Tier.GPU] if tier is Tier.HOST else set()
            if holders[tier] - others != self._events.held(tier):
                raise IntegrityError(
                    "the routing hashes in the event log differ from those of the index"
                )
