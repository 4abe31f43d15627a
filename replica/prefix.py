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

An entry lives while it has a block, while others continue it, or while a running row's last indexed block is its own
(without a group of full attention nothing else would keep the names and token ids of a long row's beginning).
Its routing hash is held as long: with sliding groups that is the longest chain a request could ever hit.

```
 tokens    [ t0 .. t31 ][ t32 .. t63 ][ t64 .. t95 ][ t96 .. t127 ]      block_size = 32
 names          n0     ▶     n1      ▶     n2      ▶      n3
 routing                     h0                           h1             told to the routers, 64 tokens each
```
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.protos.wire import (
    ROUTING_BLOCK_TOKENS,
    RoutingHasher,
    routing_block_sums,
    routing_hashes,
)
from quire.replica.blocks import IntegrityError
from quire.replica.events import EventLog
from quire.replica.groups import FULL_ATTENTION, LayerGroup

# Tenants whose chain seeds are kept: the key of a routing hash costs microseconds to make.
_MAX_SEEDS = 1024
_MASK64 = 2**64 - 1
_ROOT = bytes(16)


def block_digest(parent: bytes, token_bytes: bytes, person: bytes) -> bytes:
    """Name of a full block: BLAKE2b-128 (RFC 7693) of its parent's name and its int32 token ids."""
    return hashlib.blake2b(parent + token_bytes, digest_size=16, person=person).digest()


class ContentChain:
    """The names of one sequence's full blocks, each computed once, kept while the sequence grows."""

    __slots__ = ("_person", "digests", "tenant")

    def __init__(self, tenant: str = ""):
        self.tenant = tenant
        # Not every tenant has been validated when its chain is made: any string has a name.
        name = str(tenant).encode("utf-8", "surrogatepass")
        self._person = hashlib.blake2b(name, digest_size=16).digest()
        self.digests: list[bytes] = []

    def extend(self, token_bytes: bytes) -> bytes:
        """Name the next block."""
        parent = self.digests[-1] if self.digests else _ROOT
        digest = block_digest(parent, token_bytes, self._person)
        self.digests.append(digest)
        return digest


class Entry:
    """A full block's content, and where each layer group holds it."""

    __slots__ = (
        "alive",
        "blocks",
        "depth",
        "digest",
        "num_children",
        "num_rows",
        "parent",
        "routing_hashes",
        "routing_sum",
        "tenant",
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
        self.blocks = blocks  # [G]
        self.digest = digest
        self.token_bytes = token_bytes  # block_size int32
        self.tenant = tenant
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.num_children = 0  # entries that continue this one
        self.num_rows = 0  # running rows whose last indexed block this is
        # Of the routing blocks that end in this block, once they are hashed.
        self.routing_hashes: Sequence[int] = ()
        self.routing_sum = 0  # at the block's end, if that ends a routing block

    def is_content(self, token_bytes: bytes, tenant: str, parent: Entry | None) -> bool:
        return self.parent is parent and self.token_bytes == token_bytes and self.tenant == tenant


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix of a sequence."""

    entries: list[Entry]
    # For each group the blocks from the one of the first key that the next token sees.
    blocks: list[list[int]]

    @property
    def all_blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block for blocks in self.blocks for block in blocks]


class PrefixCache:
    """Index of full blocks by content. It owns no block: the block manager counts the owners.

    Parameters
    ----------
    block_size
        Tokens of a block: a divisor or a multiple of the routing block.
    num_blocks
        Blocks of the pool.
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
        self._events = events
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: list[Entry | None] = [None] * num_blocks
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

    def match(
        self, token_ids: np.ndarray, tenant: str = "", chain: ContentChain | None = None
    ) -> Hit:
        """The longest known prefix; at least one token is left to compute.

        Parameters
        ----------
        token_ids
            [tokens] int32.
        chain
            Names of the sequence's blocks as far as they are known; extended here as far as needed.

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
            if any(entry.blocks[g] is None for g in self._full):
                break
            entries.append(entry)
            parent = entry
            for g in self._sliding:
                if entry.blocks[g] is None:
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
        blocks: Sequence[int],
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
            [G] the sequence's own block in each group.
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
            entry = Entry(list(blocks), digest, token_bytes, chain.tenant, parent)
            if parent is not None:
                parent.num_children += 1
            self._by_digest[digest] = entry
            if (i + 1) % self._span == 0:
                self._unhashed.append(entry)
            for block in blocks:
                self._by_block[block] = entry
            return entry
        if not entry.is_content(token_bytes, chain.tenant, parent):
            return None
        for g, block in enumerate(blocks):
            if entry.blocks[g] is None:
                entry.blocks[g] = block
                self._by_block[block] = entry
        return entry

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
        for n, entry in enumerate(entries):
            entry.routing_hashes = hashes[n * per_entry : (n + 1) * per_entry]
        self._events.hold(hashes)

    def forget(self, block: int) -> None:
        """Drop a block from the index.

        Of the groups of full attention, the blocks that continue it must be gone already.
        """
        entry = self._by_block[block]
        if entry is None:
            raise IntegrityError(f"block {block} is not in the prefix index")
        g = entry.blocks.index(block)
        last_full = self.groups[g].is_full and all(
            entry.blocks[other] is None for other in self._full if other != g
        )
        if last_full and entry.num_children:
            raise IntegrityError(
                f"block {block} leaves the prefix index before {entry.num_children} that continue it"
            )
        entry.blocks[g] = None
        self._by_block[block] = None
        self._drop_unused(entry)

    def retain_entry(self, entry: Entry | None) -> None:
        """A running row's last indexed block is this entry's."""
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
        while entry is not None and not (
            entry.num_children or entry.num_rows or any(b is not None for b in entry.blocks)
        ):
            self.hash_new()  # or it would be hashed, and held, after it is gone
            entry.alive = False
            del self._by_digest[entry.digest]
            self._events.drop(entry.routing_hashes)
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def clear(self) -> list[int]:
        """Drop every entry; returns the blocks that were indexed."""
        blocks = [block for block, entry in enumerate(self._by_block) if entry is not None]
        for block in blocks:
            self._by_block[block] = None
        for entry in self._by_digest.values():
            entry.alive = False
        self._by_digest.clear()
        self._unhashed.clear()
        self._events.clear()
        return blocks

    def check(self) -> None:
        """Raise `IntegrityError` unless entries, parents and held routing hashes agree."""
        children: dict[bytes, int] = {}
        holders: set[int] = set()
        num_blocks = 0
        for digest, entry in self._by_digest.items():
            blocks = [block for block in entry.blocks if block is not None]
            num_blocks += len(blocks)
            if entry.digest != digest or any(self._by_block[b] is not entry for b in blocks):
                raise IntegrityError(f"blocks {blocks} are indexed under a name not their own")
            parent = entry.parent
            if parent is not None:
                if self._by_digest.get(parent.digest) is not parent:
                    raise IntegrityError(f"blocks {blocks} continue ones that are not indexed")
                children[parent.digest] = children.get(parent.digest, 0) + 1
            holders.update(entry.routing_hashes)
        for digest, entry in self._by_digest.items():
            if not entry.alive or entry.num_children != children.get(digest, 0):
                raise IntegrityError(
                    f"blocks {entry.blocks} count {entry.num_children} continuations"
                )
            if not (entry.num_children or entry.num_rows or set(entry.blocks) != {None}):
                raise IntegrityError(f"entry {digest.hex()} is indexed for nothing")
        if num_blocks != sum(entry is not None for entry in self._by_block):
            raise IntegrityError("a block is indexed that no entry has")
        if holders != self._events.held():
            raise IntegrityError("the routing hashes held are not those of the indexed blocks")
