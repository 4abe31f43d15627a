"""Content of full blocks: names, index entries, and hits.

The name of a full block is BLAKE2b-128 over (name of the block before it, its token ids), personalised by the
tenant: equal names mean equal tenants and equal tokens from the start of the sequence on. A name is a
shortcut, never the proof: an index entry keeps its token ids and its parent entry, and a hit compares both, so
even a collision gives right tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.replica.kv_cache.cache_events import Tier

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
    digest: bytes = hasher.digest()
    return digest


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
        self.depth: int = 0 if parent is None else parent.depth + 1
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

    @property
    def has_block(self) -> bool:
        """Whether any group holds the content, on the device or in the host tier."""
        return any(b is not None for b in self.blocks) or any(
            b is not None for b in self.host_blocks
        )

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
