"""Which full blocks of KV the cache knows, found by their content.

The name of a full block is BLAKE2b-128 over (name of the block before it, its token ids), personalised by the
tenant: equal names mean equal tenants and equal tokens from the start of the sequence on. A name is a
shortcut, never the proof: an index entry keeps its token ids and its parent entry, and a hit compares both, so
even a collision gives right tokens.

An entry has up to one block in each layer group. A hit of n entries needs all n blocks of a group of full
attention, and of a sliding group only those that the token after the hit sees:

```
 entries        e0  e1  e2  e3  e4  e5       a hit of 5: full b0..b4, window of 2 blocks b3 b4
 full           b0  b1  b2  b3  b4  b5       a hit of 6 is none: the window's b5 is gone
 window         -   b1  -   b3  b4  -
```

Each of them may be on the device, or in the host tier, or in both: what is only in the host tier is copied back
when a request takes it. Blocks leave the device leaf first, so of a chain the beginning is on the device and the
end in the host tier.

An entry lives while it has a block, while others continue it, or while a live row's last indexed block is its own
(without a group of full attention nothing else would keep the names and token ids of a long row's beginning).
Its routing hash is held as long: with sliding groups that is the longest chain a request could ever hit. It is
told as `host` once nothing of the entry is on the device, in the groups of full attention if there are any.

```
 tokens    [ t0 .. t31 ][ t32 .. t63 ][ t64 .. t95 ][ t96 .. t127 ]      block_size = 32
 names          n0     ▶     n1      ▶     n2      ▶      n3
 routing                     h0                           h1             told to the routers, 64 tokens each
```
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.protos.routing_hash import (
    ROUTING_BLOCK_TOKENS,
    RoutingHasher,
    routing_block_sums,
    routing_hashes,
)
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup

# Tenants whose chain seeds are kept: the key of a routing hash costs microseconds to make.
_MAX_SEEDS = 1024
_MASK64 = 2**64 - 1
_ROOT = bytes(16)


def block_digest(parent: bytes, token_bytes: bytes, keyed: Any) -> bytes:
    """Name of a full block: BLAKE2b-128 (RFC 7693) of its parent's name and its int32 token ids.

    Parameters
    ----------
    keyed
        The tenant's hash object, not fed yet: to copy it takes half the time of making one.
    """
    hasher = keyed.copy()
    hasher.update(parent + token_bytes)
    return hasher.digest()


class ContentChain:
    """The names of one sequence's full blocks, each computed once, kept while the sequence grows."""

    __slots__ = ("_keyed", "digests", "tenant")

    def __init__(self, tenant: str = ""):
        self.tenant = tenant
        # Not every tenant has been validated when its chain is made: any string has a name.
        name = str(tenant).encode("utf-8", "surrogatepass")
        person = hashlib.blake2b(name, digest_size=16).digest()
        self._keyed = hashlib.blake2b(digest_size=16, person=person)
        self.digests: list[bytes] = []

    def extend(self, token_bytes: bytes) -> bytes:
        """Name the next block."""
        digests = self.digests
        digest = block_digest(digests[-1] if digests else _ROOT, token_bytes, self._keyed)
        digests.append(digest)
        return digest


class Entry:
    """A full block's content, and where each layer group holds it."""

    __slots__ = (
        "alive",
        "blocks",
        "depth",
        "digest",
        "host_blocks",
        "num_children",
        "num_device_children",
        "num_rows",
        "on_device",
        "parent",
        "routing_hashes",
        "routing_sum",
        "tenant",
        "tier",
        "token_bytes",
    )

    def __init__(
        self,
        blocks: list[int | None],
        digest: bytes,
        token_bytes: bytes,
        tenant: str,
        parent: Entry | None,
    ):
        self.alive = True  # in the index
        self.blocks = blocks  # [G] on the device
        self.host_blocks: list[int | None] = [None] * len(blocks)  # [G] copies in the host tier
        self.digest = digest
        self.token_bytes = token_bytes  # block_size int32
        self.tenant = tenant
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.num_children = 0  # entries that continue this one
        # Has a block on the device: in a group of full attention, or in any if there is no such group.
        self.on_device = False
        self.num_device_children = 0  # of the entries that continue this one, those on the device
        self.num_rows = 0  # live rows, offloaded ones included, whose last indexed block this is
        self.tier: Tier | None = None  # told of its routing hashes
        # Of the routing blocks that end in this block, once they are hashed.
        self.routing_hashes: Sequence[int] = ()
        self.routing_sum = 0  # at the block's end, if that ends a routing block

    def is_content(self, token_bytes: bytes, tenant: str, parent: Entry | None) -> bool:
        return self.parent is parent and self.token_bytes == token_bytes and self.tenant == tenant

    def has(self, g: int, with_host: bool) -> bool:
        """Whether the content is on the device in group g, or in the host tier if that counts."""
        return self.blocks[g] is not None or (with_host and self.host_blocks[g] is not None)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix of a sequence."""

    entries: list[Entry]
    # For each group the blocks from the one of the first key that the next token sees; None where the block is
    # not on the device but in the host tier.
    blocks: list[list[int | None]]

    @property
    def device_blocks(self) -> list[int]:
        """The blocks of all groups that are on the device."""
        return [block for blocks in self.blocks for block in blocks if block is not None]

    @property
    def num_host_entries(self) -> int:
        """Entries of which a block must be copied back from the host tier."""
        return len({entry.depth for _, _, entry in self.to_restore()})

    def to_restore(self) -> list[tuple[int, int, Entry]]:
        """(group, index in its `blocks`, entry) of those that are not, in the order of the sequence."""
        missing = [
            (len(self.entries) - len(blocks) + i, g, i)
            for g, blocks in enumerate(self.blocks)
            for i, block in enumerate(blocks)
            if block is None
        ]
        return [(g, i, self.entries[n]) for n, g, i in sorted(missing)]


class PrefixCache:
    """Index of full blocks by content. It owns no block: the block manager counts the owners.

    Parameters
    ----------
    block_size
        Tokens of a block: a divisor or a multiple of the routing block.
    num_blocks
        Blocks of the device's pool.
    num_host_blocks
        Blocks of the host tier.
    events
        Told the routing hashes that become held and cease to be.
    groups
        G layer groups.
    model_name, revision
        Identity of the weights, for the routing hash.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        events: EventLog,
        *,
        num_host_blocks: int = 0,
        groups: Sequence[LayerGroup] = (FULL_ATTENTION,),
        model_name: str = "",
        revision: str = "",
    ):
        if block_size < 1 or (
            ROUTING_BLOCK_TOKENS % block_size and block_size % ROUTING_BLOCK_TOKENS
        ):
            raise ValueError(
                f"block_size must divide {ROUTING_BLOCK_TOKENS} or be a multiple of it, got {block_size}"
            )
        self.block_size = block_size
        self.groups = tuple(groups)
        self._full = [g for g, group in enumerate(groups) if group.is_full]
        self._sliding = [g for g, group in enumerate(groups) if not group.is_full]
        self._telling = self._full or self._sliding  # the groups that decide an entry's tier
        self._events = events
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: list[Entry | None] = [None] * num_blocks
        self._by_host_block: list[Entry | None] = [None] * num_host_blocks
        self._unhashed: list[Entry] = []  # end a routing block that is not hashed yet, in order
        # Entries whose tokens make up a routing block, and routing blocks in an entry.
        self._span = max(1, ROUTING_BLOCK_TOKENS // block_size)
        self._routing_blocks = max(1, block_size // ROUTING_BLOCK_TOKENS)

        @functools.lru_cache(_MAX_SEEDS)
        def chain_seed(tenant: str) -> int:
            return int(RoutingHasher(model_name, revision, tenant).chain_seed)

        self._chain_seed = chain_seed

    def __len__(self) -> int:
        return len(self._by_digest)

    def __contains__(self, block: int) -> bool:
        return self._by_block[block] is not None

    def has_host_block(self, host_block: int) -> bool:
        return self._by_host_block[host_block] is not None

    def place_of(self, block: int) -> tuple[Entry, int]:
        """The entry and the group of an indexed block of the device."""
        entry = self._by_block[block]
        if entry is None:
            raise IntegrityError(f"block {block} is not in the prefix index")
        return entry, entry.blocks.index(block)

    def match(
        self,
        token_ids: np.ndarray,
        tenant: str = "",
        chain: ContentChain | None = None,
        *,
        with_host: bool = True,
    ) -> Hit:
        """The longest known prefix; at least one token is left to compute.

        Parameters
        ----------
        token_ids
            [tokens] int32.
        chain
            Names of the sequence's blocks as far as they are known; extended here as far as needed.
        with_host
            What is in the host tier alone counts too.

        Returns
        -------
        At most (tokens - 1) // block_size entries, in the order of the sequence.
        """
        chain = ContentChain(tenant) if chain is None else chain
        raw = token_ids.astype(np.int32, copy=False).tobytes()
        width = 4 * self.block_size
        entries: list[Entry] = []
        num_hit = 0
        run_start = [0] * len(self.groups)  # first entry of the unbroken run of blocks up to here
        parent: Entry | None = None
        for i in range((len(token_ids) - 1) // self.block_size):
            token_bytes = raw[i * width : (i + 1) * width]
            if i == len(chain.digests):
                chain.extend(token_bytes)
            entry = self._by_digest.get(chain.digests[i])
            if entry is None or not entry.is_content(token_bytes, chain.tenant, parent):
                break
            if any(not entry.has(g, with_host) for g in self._full):
                break
            entries.append(entry)
            parent = entry
            for g in self._sliding:
                if not entry.has(g, with_host):
                    run_start[g] = i + 1
            if all(run_start[g] <= self._first_needed(g, i + 1) for g in self._sliding):
                num_hit = i + 1
        del entries[num_hit:]
        return Hit(
            entries,
            [
                [e.blocks[g] for e in entries[self._first_needed(g, num_hit) :]]
                for g in range(len(self.groups))
            ],
        )

    def _first_needed(self, g: int, num_blocks: int) -> int:
        """First of `num_blocks` full blocks of which the token after them sees a key."""
        return int(self.groups[g].first_key(num_blocks * self.block_size)) // self.block_size

    def register(
        self,
        blocks: list[int],
        parent: Entry | None,
        token_bytes: bytes,
        chain: ContentChain,
        i: int,
    ) -> Entry | None:
        """Index the i-th blocks of a sequence, whose KV the step being planned will complete.

        Its routing hash is told by the next `hash_new`.

        Parameters
        ----------
        blocks
            [G] the sequence's own block in each group; the list is kept.
        parent
            What this returned for the block before; None for the first.
        token_bytes
            The block's own tokens, block_size int32.
        chain
            Names of the sequence's blocks, at least the first i of them.

        Returns
        -------
        The entry of this content: in each group it has the sequence's own block, or another one that was there
        before. None when the content cannot be indexed: its parent is not, or another content has the same
        name.
        """
        if (i > 0) != (parent is not None) or (parent is not None and not parent.alive):
            return None
        digests = chain.digests
        digest = digests[i] if i < len(digests) else chain.extend(token_bytes)
        entry = self._by_digest.get(digest)
        if entry is None:
            entry = self._by_digest[digest] = Entry(
                blocks, digest, token_bytes, chain.tenant, parent
            )
            for block in blocks:
                self._by_block[block] = entry
            entry.on_device = True
            if parent is not None:
                parent.num_children += 1
                parent.num_device_children += 1
            if (i + 1) % self._span == 0:
                self._unhashed.append(entry)
            return entry
        if not entry.is_content(token_bytes, chain.tenant, parent):
            return None
        for g, block in enumerate(blocks):
            if entry.blocks[g] is None:
                self.place(entry, g, block)
        return entry

    def place(self, entry: Entry, g: int, block: int) -> None:
        """Index a block of the device for content of which the group has none there."""
        entry.blocks[g] = block
        self._by_block[block] = entry
        self._update_tier(entry)

    def place_on_host(self, entry: Entry, g: int, host_block: int) -> None:
        """Index a copy in the host tier of content of which the group has none there."""
        entry.host_blocks[g] = host_block
        self._by_host_block[host_block] = entry
        self._update_tier(entry)

    def _update_tier(self, entry: Entry) -> None:
        """An entry's blocks have changed: count and tell where it is."""
        on_device = any(entry.blocks[g] is not None for g in self._telling)
        if on_device != entry.on_device:
            entry.on_device = on_device
            if entry.parent is not None:
                entry.parent.num_device_children += 1 if on_device else -1
        if entry.tier is not None and entry.tier is not (tier := self._tier_of(entry)):
            self._events.move(entry.routing_hashes, entry.tier, tier)
            entry.tier = tier

    def _tier_of(self, entry: Entry) -> Tier:
        if entry.on_device or all(entry.host_blocks[g] is None for g in self._telling):
            return Tier.GPU
        return Tier.HOST

    @property
    def num_unhashed(self) -> int:
        """Entries that end a routing block whose hash has not been told."""
        return len(self._unhashed)

    def hash_new(self) -> None:
        """Hash the routing blocks that end with the blocks registered since the last call, all in one pass,
        and tell the events.

        An entry leaves the index only after all that continue it, so the routing block's last entry is the
        first of its entries to go: the hash lives and dies with that one.
        """
        if not self._unhashed:
            return
        entries, self._unhashed = self._unhashed, []
        parts: list[bytes] = []  # tokens of the routing blocks
        before: list[Entry | None] = []  # the entry before each routing block
        starts: list[int] = []
        seeds: list[int] = []
        for entry in entries:
            run, first = [entry.token_bytes], entry
            for _ in range(self._span - 1):
                first = first.parent
                run.append(first.token_bytes)
            parts.extend(reversed(run))
            before.append(first.parent)
            starts.append(first.depth * self.block_size)
            seeds.append(self._chain_seed(entry.tenant))
        per_entry = self._routing_blocks
        begin, keys = np.array(starts), np.array(seeds, np.uint64)
        if per_entry > 1:
            begin = (begin[:, None] + np.arange(0, self.block_size, ROUTING_BLOCK_TOKENS)).ravel()
            keys = np.repeat(keys, per_entry)
        ids = np.frombuffer(b"".join(parts), np.int32).reshape(-1, ROUTING_BLOCK_TOKENS)
        added = iter(routing_block_sums(begin, ids).tolist())
        sums: list[int] = []
        for entry, parent in zip(entries, before, strict=True):
            # Parents come before their children, so theirs is complete.
            running = 0 if parent is None else parent.routing_sum
            for _ in range(per_entry):
                running = (running + next(added)) & _MASK64
                sums.append(running)
            entry.routing_sum = running
        hashes = routing_hashes(np.array(sums, np.uint64), keys).tolist()
        held: tuple[list[int], list[int]] = ([], [])  # by tier
        for n, entry in enumerate(entries):
            entry.routing_hashes = hashes[n * per_entry : (n + 1) * per_entry]
            entry.tier = self._tier_of(entry)
            held[entry.tier].extend(entry.routing_hashes)
        for tier in Tier:
            self._events.hold(held[tier], tier)

    def forget(self, block: int) -> None:
        """Drop a block of the device from the index.

        Of the groups of full attention, the blocks there that continue it must be gone already.
        """
        entry, g = self.place_of(block)
        last_full = self.groups[g].is_full and all(
            entry.blocks[other] is None for other in self._full if other != g
        )
        if last_full and entry.num_device_children:
            raise IntegrityError(
                f"block {block} leaves the prefix index before {entry.num_device_children} that continue it"
            )
        entry.blocks[g] = None
        self._by_block[block] = None
        self._update_tier(entry)
        self._drop_unused(entry)

    def forget_host(self, host_block: int) -> None:
        """Drop a copy in the host tier from the index."""
        entry = self._by_host_block[host_block]
        if entry is None:
            raise IntegrityError(f"host block {host_block} is not in the prefix index")
        entry.host_blocks[entry.host_blocks.index(host_block)] = None
        self._by_host_block[host_block] = None
        self._update_tier(entry)
        self._drop_unused(entry)

    def retain_entry(self, entry: Entry | None) -> None:
        """A live row's last indexed block is this entry's."""
        if entry is not None:
            entry.num_rows += 1

    def advance_entry(self, entry: Entry) -> None:
        """A running row's last indexed block is this entry's, and was that of the entry before, if any."""
        entry.num_rows += 1
        if entry.parent is not None:
            entry.parent.num_rows -= 1  # it stays: this entry continues it

    def release_entry(self, entry: Entry | None) -> None:
        """It no longer is."""
        if entry is not None:
            entry.num_rows -= 1
            if entry.alive:
                self._drop_unused(entry)

    def _drop_unused(self, entry: Entry | None) -> None:
        while entry is not None and not (entry.num_children or entry.num_rows or _has_block(entry)):
            self.hash_new()  # or it would be hashed, and held, after it is gone
            entry.alive = False
            del self._by_digest[entry.digest]
            if entry.tier is not None:
                self._events.drop(entry.routing_hashes, entry.tier)
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def clear(self) -> tuple[list[int], list[int]]:
        """Drop every entry; returns the blocks that were indexed, of the device and of the host tier."""
        indexed: list[list[int]] = []
        for by_block in (self._by_block, self._by_host_block):
            indexed.append([block for block, entry in enumerate(by_block) if entry is not None])
            for block in indexed[-1]:
                by_block[block] = None
        for entry in self._by_digest.values():
            entry.alive = False
        self._by_digest.clear()
        self._unhashed.clear()
        self._events.clear()
        return indexed[0], indexed[1]

    def check(self) -> None:
        """Raise `IntegrityError` unless entries, parents and held routing hashes agree."""
        children: Counter[bytes] = Counter()
        on_device: Counter[bytes] = Counter()
        holders: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        num_blocks = num_host_blocks = 0
        for digest, entry in self._by_digest.items():
            blocks = [block for block in entry.blocks if block is not None]
            host_blocks = [block for block in entry.host_blocks if block is not None]
            num_blocks += len(blocks)
            num_host_blocks += len(host_blocks)
            if entry.digest != digest or any(self._by_block[b] is not entry for b in blocks):
                raise IntegrityError(f"blocks {blocks} are indexed under a name not their own")
            if any(self._by_host_block[b] is not entry for b in host_blocks):
                raise IntegrityError(f"host blocks {host_blocks} are not this entry's")
            parent = entry.parent
            if parent is not None:
                if self._by_digest.get(parent.digest) is not parent:
                    raise IntegrityError(f"blocks {blocks} continue ones that are not indexed")
                children[parent.digest] += 1
                on_device[parent.digest] += entry.on_device
            if entry.tier is not None:
                holders[entry.tier].update(entry.routing_hashes)
        for digest, entry in self._by_digest.items():
            self._check_entry(entry, children[digest], on_device[digest])
        if num_blocks != sum(entry is not None for entry in self._by_block):
            raise IntegrityError("a block is indexed that no entry has")
        if num_host_blocks != sum(entry is not None for entry in self._by_host_block):
            raise IntegrityError("a host block is indexed that no entry has")
        for tier in Tier:
            others = holders[Tier.GPU] if tier is Tier.HOST else set()
            if holders[tier] - others != self._events.held(tier):
                raise IntegrityError("the routing hashes held are not those of the indexed blocks")

    def _check_entry(self, entry: Entry, num_children: int, num_device_children: int) -> None:
        if not entry.alive or entry.num_children != num_children:
            raise IntegrityError(f"blocks {entry.blocks} count {entry.num_children} continuations")
        if not (entry.num_children or entry.num_rows or _has_block(entry)):
            raise IntegrityError(f"entry {entry.digest.hex()} is indexed for nothing")
        on_device = any(entry.blocks[g] is not None for g in self._telling)
        if (on_device, num_device_children) != (entry.on_device, entry.num_device_children):
            raise IntegrityError(
                f"blocks {entry.blocks} are on the device: {entry.on_device}, and count "
                f"{entry.num_device_children} continuations there, not {num_device_children}"
            )
        if self._full and num_device_children and not on_device:
            raise IntegrityError(
                f"an entry has left the device before {num_device_children} others"
            )
        if entry.tier not in (None, self._tier_of(entry)):
            raise IntegrityError(f"blocks {entry.blocks} are told to be in {entry.tier}")


def _has_block(entry: Entry) -> bool:
    return any(b is not None for b in entry.blocks) or any(b is not None for b in entry.host_blocks)
