"""The prefix index: full blocks of KV, found by their content.

An entry has at most one block in each layer group (layers with queries that see the same positions). A hit of n entries
needs all n blocks of each full-attention group. In a sliding-window group it needs only the blocks that the token after
the hit sees:

```
 entries        e0  e1  e2  e3  e4  e5       a hit of 5 is possible: full b0..b4, window of 2 blocks b3 b4
 full           b0  b1  b2  b3  b4  b5       a hit of 6 is not: the window's b5 is gone
 window         -   b1  -   b3  b4  -
```

Each block is on the device, in the host tier (host memory), or in both. A block that is only in the host tier is copied
back when a request takes it. Blocks of a sequence leave the device last block first, so the start of a sequence is on
the device and its end in the host tier.

An entry stays in the index while it has a block, while other entries continue it, or while it is the last indexed entry
of a live request. (The last condition matters without full-attention groups: then a long request no longer owns blocks
of its first tokens, and only its reference keeps their names and token ids.) The routers see an entry's routing hashes
until the entry leaves the index (`routing_names.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.cache_events import EventLog, Tier
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup
from quire.replica.kv_cache.pool_blocks import BlockName
from quire.replica.kv_cache.prefix_entries import ContentChain, Entry, Hit
from quire.replica.kv_cache.routing_names import RoutingNames
from quire.replica.kv_cache.state_snapshots import StateSnapshots


class PrefixCache:
    """Index of full blocks by content. It owns no block; the block manager counts the owners.

    Parameters
    ----------
    block_size
        Tokens of a block: a divisor or a multiple of the routing block.
    num_blocks
        Blocks of the device.
    num_host_blocks
        Blocks of the host tier.
    events
        Receives the routing hashes of entries that are added, moved and dropped.
    groups
        G layer groups.
    model_name, revision
        Identity of the weights, for the routing hashes.
    snapshots
        First slot, number of slots, number of slots in host memory, and spacing of a recurrent model's snapshots.
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
        snapshots: tuple[int, int, int, int] = (0, 0, 0, 1),
    ):
        self.block_size = block_size
        self.groups = tuple(groups)
        self._full = [g for g, group in enumerate(groups) if group.is_full]
        self._sliding = [g for g, group in enumerate(groups) if not group.is_full]
        # The groups that decide an entry's tier.
        self._tier_groups = self._full or self._sliding
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: list[Entry | None] = [None] * num_blocks
        self._by_host_block: list[Entry | None] = [None] * num_host_blocks
        self._routing = RoutingNames(block_size, events, self._tier_of, model_name, revision)
        self.snapshots = StateSnapshots(*snapshots, self._routing.update_snapshot)

    def __len__(self) -> int:
        return len(self._by_digest)

    def __contains__(self, block: int) -> bool:
        return self._by_block[block] is not None

    def get(self, digest: bytes) -> Entry | None:
        """The entry with this name."""
        return self._by_digest.get(digest)

    def entries(self) -> Iterable[Entry]:
        """Every entry of the index, in any order."""
        return self._by_digest.values()

    def has_host_block(self, host_block: int) -> bool:
        return self._by_host_block[host_block] is not None

    def place_of(self, block: int) -> tuple[Entry, int]:
        """The entry and the group of an indexed device block."""
        entry = self._by_block[block]
        if entry is None:
            raise IntegrityError(f"block {block} is not in the prefix index")
        return entry, entry.blocks.index(block)

    def payer_of_block(self, block: int) -> str:
        """Who pays for an indexed device block."""
        entry = self._by_block[block]
        return "" if entry is None else entry.payer

    def name_of_host_block(self, host_block: int) -> BlockName:
        """What an indexed host block holds."""
        entry = self._by_host_block[host_block]
        if entry is None:
            raise IntegrityError(f"host block {host_block} is not in the prefix index")
        g, routing_hash = entry.host_blocks.index(host_block), 0
        if g == self._tier_groups[0] and (entry.depth + 1) % self._routing.num_entries == 0:
            routing_hash = self._routing.hash_of(entry)
        return BlockName(entry.digest, g, entry.payer, routing_hash)

    def payer_of_host_block(self, host_block: int) -> str:
        """Who pays for an indexed host block."""
        entry = self._by_host_block[host_block]
        return "" if entry is None else entry.payer

    def match(
        self,
        token_ids: np.ndarray,
        tenant: str = "",
        chain: ContentChain | None = None,
        *,
        with_host: bool = True,
    ) -> Hit:
        """Find the longest known prefix that leaves at least one token to compute.

        Parameters
        ----------
        token_ids
            [tokens] int32.
        chain
            Names of the sequence's blocks; extended here as far as needed.
        with_host
            Whether blocks that are only in the host tier count.

        Returns
        -------
        At most (tokens - 1) // block_size entries, in the order of the sequence.
        """
        chain = ContentChain(tenant) if chain is None else chain
        raw = token_ids.astype(np.int32, copy=False).tobytes()
        width = 4 * self.block_size
        entries: list[Entry] = []
        num_hit = num_known = 0
        # For each group: index of the first entry of the unbroken run of blocks that ends at the current entry.
        run_start = [0] * len(self.groups)
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
            if all(run_start[g] <= self.first_needed(g, i + 1) for g in self._sliding):
                num_known = i + 1
                if entry.snapshot is not None or not self.snapshots:
                    num_hit = i + 1
        del entries[num_hit:]
        return Hit(
            entries,
            [
                [e.blocks[g] for e in entries[self.first_needed(g, num_hit) :]]
                for g in range(len(self.groups))
            ],
            num_known,
        )

    def first_needed(self, g: int, num_blocks: int) -> int:
        """Index of the first block in group g that the token after `num_blocks` full blocks sees."""
        return int(self.groups[g].first_key(num_blocks * self.block_size)) // self.block_size

    def register(
        self,
        blocks: list[int],
        parent: Entry | None,
        token_bytes: bytes,
        chain: ContentChain,
        i: int,
    ) -> Entry | None:
        """Index the blocks of a sequence at index i, one per group. The step being planned completes them.

        If a routing block ends here, the next `hash_new` reports its routing hash.

        Parameters
        ----------
        blocks
            [G] the sequence's own block in each group; a new entry keeps the list object.
        parent
            The entry that this method returned for index i - 1; None for the first block.
        token_bytes
            The block's tokens, block_size int32.
        chain
            Names of at least the sequence's first i blocks.

        Returns
        -------
        The entry with this content. In each group it has the sequence's own block, or an older one with the same
        content. None if the content cannot be indexed: its parent is not in the index, or the name belongs to other
        content.
        """
        if (i > 0) != (parent is not None) or (parent is not None and not parent.alive):
            return None
        digests = chain.digests
        digest = digests[i] if i < len(digests) else chain.extend(token_bytes)
        entry = self._by_digest.get(digest)
        if entry is None:
            entry = Entry(blocks, digest, token_bytes, chain.tenant, parent, chain.payer)
            self._by_digest[digest] = entry
            for block in blocks:
                self._by_block[block] = entry
            entry.on_device = True
            if parent is not None:
                parent.num_children += 1
                parent.num_device_children += 1
            if (i + 1) % self._routing.num_entries == 0:
                self._routing.add(entry)
            return entry
        if not entry.is_content(token_bytes, chain.tenant, parent):
            return None
        for g, block in enumerate(blocks):
            if entry.blocks[g] is None:
                self.place(entry, g, block)
        return entry

    def find_or_add(
        self, chain: ContentChain, i: int, token_bytes: bytes, parent: Entry | None
    ) -> Entry | None:
        """The entry with this content, or a new one, to which the caller then adds a host block.

        Parameters are those of `register`; the chain has a name for block i. None if the name belongs to other content.
        """
        entry = self._by_digest.get(chain.digests[i])
        if entry is not None:
            return entry if entry.is_content(token_bytes, chain.tenant, parent) else None
        no_blocks = [None] * len(self.groups)
        entry = Entry(no_blocks, chain.digests[i], token_bytes, chain.tenant, parent, chain.payer)
        self._by_digest[entry.digest] = entry
        if parent is not None:
            parent.num_children += 1
        if (i + 1) % self._routing.num_entries == 0:
            self._routing.add(entry)
        return entry

    def place(self, entry: Entry, g: int, block: int) -> None:
        """Add a device block to an entry that has none in this group."""
        entry.blocks[g] = block
        self._by_block[block] = entry
        self._update_tier(entry)

    def place_on_host(self, entry: Entry, g: int, host_block: int) -> None:
        """Add a host block to an entry that has none in this group."""
        entry.host_blocks[g] = host_block
        self._by_host_block[host_block] = entry
        self._update_tier(entry)

    def _update_tier(self, entry: Entry) -> None:
        """Update counts and reports after an entry's blocks have changed."""
        on_device = any(entry.blocks[g] is not None for g in self._tier_groups)
        if on_device != entry.on_device:
            entry.on_device = on_device
            if entry.parent is not None:
                entry.parent.num_device_children += 1 if on_device else -1
        self._routing.update_tier(entry)

    def _tier_of(self, entry: Entry) -> Tier:
        if entry.on_device or all(entry.host_blocks[g] is None for g in self._tier_groups):
            return Tier.GPU
        return Tier.HOST

    @property
    def num_unhashed(self) -> int:
        """Number of entries at the end of a routing block that is not hashed yet."""
        return self._routing.num_unhashed

    def hash_new(self) -> None:
        """Hash the routing blocks of the entries registered since the last call, and report them."""
        self._routing.hash_new()

    def forget(self, block: int) -> None:
        """Drop a device block from the index.

        Raises
        ------
        IntegrityError
            The block is the entry's last full-attention block on the device, and entries that continue this entry
            still have blocks there.
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
        self.drop_unused(entry)

    def forget_host(self, host_block: int) -> None:
        """Drop a host block from the index."""
        entry = self._by_host_block[host_block]
        if entry is None:
            raise IntegrityError(f"host block {host_block} is not in the prefix index")
        entry.host_blocks[entry.host_blocks.index(host_block)] = None
        self._by_host_block[host_block] = None
        self._update_tier(entry)
        self.drop_unused(entry)

    def add_row(self, entry: Entry | None) -> None:
        """Count a live row that has this entry as its last indexed one."""
        if entry is not None:
            entry.num_rows += 1

    def advance_entry(self, entry: Entry) -> None:
        """Move a running row's reference from the entry's parent, if there is one, to the entry."""
        entry.num_rows += 1
        if entry.parent is not None:
            # The parent stays in the index, because this entry continues it.
            entry.parent.num_rows -= 1

    def release_entry(self, entry: Entry | None) -> None:
        """Drop a row's reference to its last indexed entry."""
        if entry is not None:
            entry.num_rows -= 1
            if entry.alive:
                self.drop_unused(entry)

    def drop_unused(self, entry: Entry | None) -> None:
        """Remove an entry that nothing needs, and those before it that only it needed."""
        while entry is not None and not (entry.num_children or entry.num_rows or entry.has_block):
            self.snapshots.drop(entry)
            self._routing.drop(entry)
            entry.alive = False
            del self._by_digest[entry.digest]
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1

    def clear(self) -> tuple[list[int], list[int]]:
        """Drop every entry. Returns the device blocks and the host blocks that were indexed."""
        indexed: list[list[int]] = []
        for by_block in (self._by_block, self._by_host_block):
            indexed.append([block for block, entry in enumerate(by_block) if entry is not None])
            for block in indexed[-1]:
                by_block[block] = None
        self.snapshots.clear()
        for entry in self._by_digest.values():
            entry.alive = False
        self._by_digest.clear()
        self._routing.clear()
        return indexed[0], indexed[1]

    def check(self, pool_hashes: Collection[int] = ()) -> None:
        """Raise `IntegrityError` unless entries, parents and held routing hashes agree.

        Parameters
        ----------
        pool_hashes
            Routing hashes that are held in the host tier because other engines have published them.
        """
        children: Counter[bytes] = Counter()
        on_device: Counter[bytes] = Counter()
        num_blocks = num_host_blocks = 0
        for digest, entry in self._by_digest.items():
            blocks = [block for block in entry.blocks if block is not None]
            host_blocks = [block for block in entry.host_blocks if block is not None]
            num_blocks += len(blocks)
            num_host_blocks += len(host_blocks)
            if entry.digest != digest or any(self._by_block[b] is not entry for b in blocks):
                raise IntegrityError(f"blocks {blocks} are indexed under a wrong name")
            if any(self._by_host_block[b] is not entry for b in host_blocks):
                raise IntegrityError(f"host blocks {host_blocks} are indexed for another entry")
            parent = entry.parent
            if parent is not None:
                if self._by_digest.get(parent.digest) is not parent:
                    raise IntegrityError(f"blocks {blocks} continue blocks that are not indexed")
                children[parent.digest] += 1
                on_device[parent.digest] += entry.on_device
        for digest, entry in self._by_digest.items():
            self._check_entry(entry, children[digest], on_device[digest])
        if num_blocks != sum(entry is not None for entry in self._by_block):
            raise IntegrityError("a block is indexed that no entry has")
        if num_host_blocks != sum(entry is not None for entry in self._by_host_block):
            raise IntegrityError("a host block is indexed that no entry has")
        self._routing.check(self._by_digest.values(), pool_hashes)

    def _check_entry(self, entry: Entry, num_children: int, num_device_children: int) -> None:
        if not entry.alive or entry.num_children != num_children:
            raise IntegrityError(f"blocks {entry.blocks} count {entry.num_children} continuations")
        if not (entry.num_children or entry.num_rows or entry.has_block):
            raise IntegrityError(f"entry {entry.digest.hex()} is unused and still indexed")
        on_device = any(entry.blocks[g] is not None for g in self._tier_groups)
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
            raise IntegrityError(f"blocks {entry.blocks} are reported in {entry.tier}")
