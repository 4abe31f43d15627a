"""Which full blocks of KV the cache knows, found by their content.

The name of a full block is BLAKE2b-128 over (name of the block before it, its token ids), personalised by the
tenant: equal names mean equal tenants and equal tokens from the start of the sequence on. A name is a
shortcut, never the proof: an index entry keeps its token ids and its parent entry, and a hit compares both, so
even a collision gives right tokens.

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

import numpy as np

from quire.protos.wire import (
    ROUTING_BLOCK_TOKENS,
    RoutingHasher,
    routing_block_sums,
    routing_hashes,
)
from quire.replica.blocks import IntegrityError
from quire.replica.events import EventLog

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


class _Entry:
    """An indexed block."""

    __slots__ = (
        "block",
        "depth",
        "digest",
        "num_children",
        "parent",
        "routing_hashes",
        "routing_sum",
        "tenant",
        "token_bytes",
    )

    def __init__(
        self,
        block: int,
        digest: bytes,
        token_bytes: bytes,
        tenant: str,
        parent: _Entry | None,
        depth: int,
    ):
        self.block = block
        self.digest = digest
        self.token_bytes = token_bytes  # block_size int32
        self.tenant = tenant
        self.parent = parent
        self.depth = depth  # blocks before it in its sequence
        self.num_children = 0  # indexed blocks that continue this one
        # Of the routing blocks that end in this block, once they are hashed.
        self.routing_hashes: Sequence[int] = ()
        self.routing_sum = 0  # at the block's end, if that ends a routing block

    def is_content(self, token_bytes: bytes, tenant: str, parent: _Entry | None) -> bool:
        return self.parent is parent and self.token_bytes == token_bytes and self.tenant == tenant


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
    model_name, revision
        Identity of the weights, for the routing hash.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        events: EventLog,
        *,
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
        self._events = events
        self._by_digest: dict[bytes, _Entry] = {}
        self._by_block: list[_Entry | None] = [None] * num_blocks
        self._unhashed: list[_Entry] = []  # end a routing block that is not hashed yet, in order
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
    ) -> list[int]:
        """Blocks that hold the longest known prefix; at least one token is left to compute.

        Parameters
        ----------
        token_ids
            [tokens] int32.
        chain
            Names of the sequence's blocks as far as they are known; extended here as far as needed.

        Returns
        -------
        At most (tokens - 1) // block_size block ids, in the order of the sequence.
        """
        chain = ContentChain(tenant) if chain is None else chain
        raw = token_ids.astype(np.int32, copy=False).tobytes()
        width = 4 * self.block_size
        blocks: list[int] = []
        parent: _Entry | None = None
        for i in range((len(token_ids) - 1) // self.block_size):
            token_bytes = raw[i * width : (i + 1) * width]
            if i == len(chain.digests):
                chain.extend(token_bytes)
            entry = self._by_digest.get(chain.digests[i])
            if entry is None or not entry.is_content(token_bytes, chain.tenant, parent):
                break
            blocks.append(entry.block)
            parent = entry
        return blocks

    def register(
        self, block: int, parent: int | None, token_bytes: bytes, chain: ContentChain, i: int
    ) -> int | None:
        """Index the i-th block of a sequence, whose KV the step being planned will complete.

        Its routing hash is told by the next `hash_new`.

        Parameters
        ----------
        block, parent
            The block, and the block before it in the sequence's table; None for the first.
        token_bytes
            The block's own tokens, block_size int32.
        chain
            Names of the sequence's blocks, at least the first i of them.

        Returns
        -------
        The block that is indexed for this content: `block`, or another one that already was. None when the
        content cannot be indexed: its parent is not, or another content has the same name.
        """
        parent_entry = None if parent is None else self._by_block[parent]
        if parent is not None and parent_entry is None:
            return None
        digests = chain.digests
        digest = digests[i] if i < len(digests) else chain.extend(token_bytes)
        entry = self._by_digest.get(digest)
        if entry is not None:
            known = entry.is_content(token_bytes, chain.tenant, parent_entry)
            return entry.block if known else None
        entry = _Entry(block, digest, token_bytes, chain.tenant, parent_entry, i)
        if parent_entry is not None:
            parent_entry.num_children += 1
        self._by_digest[digest] = entry
        self._by_block[block] = entry
        if (i + 1) % self._span == 0:
            self._unhashed.append(entry)
        return block

    @property
    def num_unhashed(self) -> int:
        """Registered blocks that end a routing block whose hash has not been told."""
        return len(self._unhashed)

    def hash_new(self) -> None:
        """Hash the routing blocks that end with the blocks registered since the last call, all in one pass,
        and tell the events.

        A block leaves the index only after all that continue it, so the routing block's last block is the
        first of its blocks to go: the hash lives and dies with that one.
        """
        if not self._unhashed:
            return
        entries, self._unhashed = self._unhashed, []
        parts: list[bytes] = []  # tokens of the routing blocks
        before: list[_Entry | None] = []  # the entry before each routing block
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
        """Drop a block from the index; the blocks that continue it must be gone already."""
        self.hash_new()
        entry = self._by_block[block]
        if entry is None:
            raise IntegrityError(f"block {block} is not in the prefix index")
        if entry.num_children:
            raise IntegrityError(
                f"block {block} leaves the prefix index before {entry.num_children} that continue it"
            )
        if entry.parent is not None:
            entry.parent.num_children -= 1
        del self._by_digest[entry.digest]
        self._by_block[block] = None
        self._events.drop(entry.routing_hashes)

    def clear(self) -> list[int]:
        """Drop every block; returns which were indexed."""
        blocks = [entry.block for entry in self._by_digest.values()]
        for block in blocks:
            self._by_block[block] = None
        self._by_digest.clear()
        self._unhashed.clear()
        self._events.clear()
        return blocks

    def check(self) -> None:
        """Raise `IntegrityError` unless entries, parents and held routing hashes agree."""
        children: dict[int, int] = {}
        holders: set[int] = set()
        for digest, entry in self._by_digest.items():
            if entry.digest != digest or self._by_block[entry.block] is not entry:
                raise IntegrityError(f"block {entry.block} is indexed under a name not its own")
            parent = entry.parent
            if parent is not None:
                if self._by_block[parent.block] is not parent:
                    raise IntegrityError(f"block {entry.block} continues one that is not indexed")
                children[parent.block] = children.get(parent.block, 0) + 1
            holders.update(entry.routing_hashes)
        for block, entry in enumerate(self._by_block):
            if entry is not None and entry.num_children != children.get(block, 0):
                raise IntegrityError(f"block {block} counts {entry.num_children} continuations")
        if holders != self._events.held():
            raise IntegrityError("the routing hashes held are not those of the indexed blocks")
