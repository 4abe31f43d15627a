"""Content of full blocks: names, index entries, and hits.

The name of a full block is BLAKE2b-128 over the name of the block before it and its token ids, personalised by the
tenant. So equal names mean, collisions aside, equal tenants and equal tokens from the start of the sequence. A lookup
does not rely on names alone: an entry keeps its token ids and its parent entry, and the lookup compares both. So even a
collision of names never causes a false hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.replica.kv_cache.cache_events import Tier

_ROOT = bytes(16)


def block_digest(parent: bytes, token_bytes: bytes, keyed: Any) -> bytes:
    """The name of a full block: BLAKE2b-128 (RFC 7693) of its parent's name and its int32 token ids.

    Parameters
    ----------
    keyed
        The tenant's hash object without any input. Copying it takes half the time of creating one.
    """
    hasher = keyed.copy()
    hasher.update(parent + token_bytes)
    digest: bytes = hasher.digest()
    return digest


class ContentChain:
    """The names of one sequence's full blocks; each is computed once."""

    __slots__ = ("_keyed", "digests", "payer", "tenant")

    def __init__(self, tenant: str = "", payer: str = ""):
        self.tenant = tenant
        # Who pays for the blocks: one for all scopes of a key's tenant.
        self.payer = payer
        # The tenant may not be validated yet, so any string must work.
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
    """The content of a full block, and the block of each layer group that holds it."""

    __slots__ = (
        "alive",
        "blocks",
        "depth",
        "digest",
        "host_blocks",
        "num_children",
        "num_device_children",
        "num_retained",
        "num_rows",
        "on_device",
        "parent",
        "payer",
        "routing_hashes",
        "routing_sum",
        "snapshot",
        "tenant",
        "tier",
        "token_bytes",
    )

    def __init__(
        self,
        blocks: list[Any],
        digest: bytes,
        token_bytes: bytes,
        tenant: str,
        parent: Entry | None,
        payer: str = "",
    ):
        # Whether the entry is in the index.
        self.alive = True
        # [G layer groups] device blocks; None: the group has no device block with this content
        self.blocks: list[int | None] = blocks
        # [G] host blocks; None: the group has no host block with this content
        self.host_blocks: list[int | None] = [None] * len(blocks)
        self.digest = digest
        # The block's token ids, block_size int32
        self.token_bytes = token_bytes
        self.tenant = tenant
        self.payer = payer
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        # Entries that continue this one.
        self.num_children = 0
        # Whether the entry has a device block in a full-attention layer group, or in any group if there is none such.
        self.on_device = False
        # Entries that continue this one and are on the device.
        self.num_device_children = 0
        # [G] number of retained sequences that need the group's block (`retention.py`)
        self.num_retained = [0] * len(blocks)
        # Live requests, offloaded ones included, that have this entry as their last indexed one.
        self.num_rows = 0
        # The tier in which its routing hashes are reported; None: they are not reported yet.
        self.tier: Tier | None = None
        # Hashes of the routing blocks that end in this block, once they are computed.
        self.routing_hashes: Sequence[int] = ()
        # Slot of the copy of the recurrent states after this block; None: there is no copy (`state_snapshots.py`).
        self.snapshot: int | None = None
        # Running sum of the routing blocks' hash terms from the start of the sequence, if a routing block ends here.
        self.routing_sum = 0

    def is_content(self, token_bytes: bytes, tenant: str, parent: Entry | None) -> bool:
        return self.parent is parent and self.token_bytes == token_bytes and self.tenant == tenant

    @property
    def has_block(self) -> bool:
        """Whether any group holds the content, on the device or in the host tier."""
        return any(b is not None for b in self.blocks) or any(
            b is not None for b in self.host_blocks
        )

    def has(self, g: int, with_host: bool) -> bool:
        """Whether group g has a device block, or a host block if `with_host`."""
        return self.blocks[g] is not None or (with_host and self.host_blocks[g] is not None)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix of a sequence that the index can serve."""

    entries: list[Entry]
    # For each group the device blocks of the last entries, starting at the first block that the next token sees. None:
    # the block is only in the host tier (host memory).
    blocks: list[list[int | None]]
    # Number of leading blocks of the sequence that are cached. It is larger than the number of entries if the model is
    # recurrent and later blocks have no snapshot.
    num_known: int = 0

    @property
    def device_blocks(self) -> list[int]:
        """The device blocks of all groups."""
        return [block for blocks in self.blocks for block in blocks if block is not None]

    @property
    def num_host_entries(self) -> int:
        """Entries with a block that must be copied back from the host tier."""
        return len({entry.depth for _, _, entry in self.to_restore()})

    def to_restore(self) -> list[tuple[int, int, Entry]]:
        """(group, index in its `blocks`, entry) of each block to copy back, in the order of the sequence."""
        missing = [
            (len(self.entries) - len(blocks) + i, g, i)
            for g, blocks in enumerate(self.blocks)
            for i, block in enumerate(blocks)
            if block is None
        ]
        return [(g, i, self.entries[n]) for n, g, i in sorted(missing)]
