"""The host tier's blocks in the node's pool, where other engines find them and may evict them.

```
            allocate                   mark_contents               end_saves
   (pool) ───────────▶ in use ──────────────────────▶ unsealed ─────────────────────────▶ published
                        ▲  │ release                     │ release: kept until sealed       │ release
                        │  ▼                             ▼                                  ▼
                        │ free                        unsealed                  cached in the pool: may be lost
                        └──────────────── pin: leased again, and verified ─────────────────┘
```

`PoolBlocks` has the interface of `BlockManager`. A block's number is its slot. This engine holds one lease of a slot
while the slot has owners here, is being written by a copy from the device, or waits to be sealed. Another engine may
evict every other slot; `refresh` finds that out and drops the block from the prefix index. So does `pin`, which an
admission calls before it counts on a block.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.replica.kv_cache.blocks import IntegrityError, Occupancy
from quire.replica.kv_cache.cache_events import EventLog
from quire.replica.kv_cache.pool_hashes import PoolHashes
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.node_pool.slot_content import Content
from quire.replica.node_pool.slot_counts import PoolCounts

_PART_BYTES = 16
_COUNT_S = 0.5


class BlockName(NamedTuple):
    """What an indexed block holds."""

    digest: bytes  # name of its tokens and of all before them, within its tenant's namespace (`ContentChain`)
    group: int
    payer: str
    # Routers' name of the block and all before it; 0: no routing block ends here, or another group reports it.
    routing_hash: int


class PoolBlocks:
    """This engine's view of the node's pool.

    Parameters
    ----------
    pool
        Owned by this object from now on.
    layout_name
        Everything besides the tokens that a block's bytes depend on: model, revision, dtype, block size, layers.
    num_groups
        Number of layer groups.
    name_of
        Returns the name of a block that the prefix index has.
    on_lost
        Called with each indexed block that another engine has evicted or dropped.
    events
        Told what other engines have published; None: routers learn of blocks that this engine has used.
    max_retained
        Maximum number of blocks that this engine retains.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        pool: NodePool,
        layout_name: str,
        num_groups: int,
        name_of: Callable[[int], BlockName],
        on_lost: Callable[[int], None],
        events: EventLog | None = None,
        *,
        max_retained: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.pool = pool
        self.num_blocks = pool.num_slots
        self.max_retained = max_retained
        self._group_names = [
            hashlib.blake2b(f"{layout_name}/{g}".encode(), digest_size=_PART_BYTES).digest()
            for g in range(num_groups)
        ]
        self._group_of = {name: g for g, name in enumerate(self._group_names)}
        self._name_of = name_of
        self._on_lost = on_lost
        self._owners: dict[int, int] = {}
        # Key of each block that the prefix index knows.
        self._keys: dict[int, bytes] = {}
        # Blocks with a planned content: the slot is published when its copy has ended.
        self._unsealed: dict[int, BlockName] = {}
        # Slots with a copy from the device that is planned or in flight. Another engine must not get such a slot.
        self._saving: set[int] = set()
        self.hashes = None if events is None else PoolHashes(pool, events)
        # Epoch of each block that is published; another one means that the content is another.
        self._epochs: dict[int, int] = {}
        # Published blocks that this engine has written or verified.
        self._verified: set[int] = set()
        # Contents that the pool could not take yet, because its mutex was not free.
        self._unpublished: list[Content] = []
        self._pinned: list[int] = []
        self._retained: dict[int, None] = {}
        # Time that sealing has taken, and the number of sealed blocks.
        self.seal_s, self.num_sealed = 0.0, 0
        self._clock = clock
        self._counted_s = clock()
        self._counts, self._is_reporter = pool.counts(), pool.is_reporter()

    # -- what the node has -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Begin a plan: unpin, and follow what other engines have changed."""
        if self._pinned:
            pinned, self._pinned = self._pinned, []
            self.release(reversed(pinned))
        if self._unpublished:
            self._publish([])
        changed = self.pool.refresh()
        for slot in changed:
            epoch = self._epochs.get(slot)
            if epoch is not None and not (
                self.pool.is_complete(slot) and self.pool.epoch(slot) == epoch
            ):
                self._lose(slot)
        if changed and self.hashes is not None:
            self.hashes.follow(changed, self._keys, self._group_names)

    def key(self, digest: bytes, g: int) -> bytes:
        """The name in the pool of a block of group g."""
        return digest + self._group_names[g]

    def place_of(self, key: bytes) -> tuple[bytes, int | None]:
        """The digest and the layer group of a name in the pool; None: it is another layout's."""
        return key[:_PART_BYTES], self._group_of.get(key[_PART_BYTES:])

    def find(self, digest: bytes, g: int) -> int | None:
        """The slot of a published block that the prefix index does not know yet, for `adopt`."""
        slot = self.pool.find(self.key(digest, g))
        return None if slot is None or slot in self._keys else slot

    def adopt(self, slot: int, digest: bytes, g: int) -> bool:
        """Let this engine know a published block. Returns False if it has been evicted meanwhile."""
        key = self.key(digest, g)
        epoch = self.pool.epoch_of(slot, key)
        if epoch is None:
            return False
        self._keys[slot], self._epochs[slot] = key, epoch
        return True

    def pin(self, slots: Sequence[int]) -> bool:
        """Keep indexed blocks until the next `refresh`, and verify those that this engine has not written.

        Returns
        -------
        False if some are lost or damaged; the prefix index does not have these any longer.
        """
        unowned = [s for s in slots if s not in self._owners and s not in self._unsealed]
        leased = self.pool.lease(unowned, [self._keys[s] for s in unowned]) if unowned else []
        lost = [s for s, is_leased in zip(unowned, leased, strict=True) if not is_leased]
        for slot in slots:
            if slot not in lost:
                self._owners[slot] = self._owners.get(slot, 0) + 1
                self._pinned.append(slot)
        for slot in slots:
            if slot in self._epochs and slot not in self._verified and slot not in lost:
                if self.pool.verify(slot):
                    self._verified.add(slot)
                else:
                    lost.append(slot)
        for slot in lost:
            self._lose(slot)
        return not lost

    def begin_save(self, slot: int) -> None:
        """Note that a copy to this slot is planned; `end_saves` ends it."""
        self._saving.add(slot)

    def end_saves(self, slots: Iterable[int]) -> None:
        """Publish those of these blocks that have a name, and give back those without an owner: their copies have
        ended."""
        began_s = self._clock()
        ended = [slot for slot in dict.fromkeys(slots) if slot in self._saving]
        self._saving.difference_update(ended)
        unused = [s for s in ended if s not in self._owners and s not in self._unsealed]
        if unused:
            self.pool.release(unused)
        contents = [
            Content(
                s, self._keys[s], _payer_hash(name.payer), self.pool.checksum(s), name.routing_hash
            )
            for s in ended
            if (name := self._unsealed.get(s)) is not None
        ]
        if contents:
            self._publish(contents)
            self.seal_s += self._clock() - began_s
            self.num_sealed += len(contents)

    def _publish(self, contents: list[Content]) -> None:
        contents = [c for c in self._unpublished + contents if c.slot in self._unsealed]
        self._unpublished = []
        released = [c.slot for c in contents if c.slot not in self._owners]
        if not self.pool.publish(contents, released):
            self._unpublished = contents
            return
        for content in contents:
            slot = content.slot
            del self._unsealed[slot]
            self._epochs[slot] = self.pool.epoch(slot)
            self._verified.add(slot)

    def _lose(self, slot: int) -> None:
        """Forget a block that is not, or not only, this engine's any longer."""
        self._on_lost(slot)
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        for records in (self._keys, self._epochs, self._retained):
            records.pop(slot, None)
        self._verified.discard(slot)

    # -- the interface of BlockManager -----------------------------------------------------------------------

    def allocate(self, count: int, *, may_evict_retained: bool = True) -> list[int] | None:
        """Take `count` blocks, each with one owner and unknown content. If too few are available, return None."""
        if not count:
            return []
        slots = self.pool.claim(count, may_evict_retained=may_evict_retained)
        for slot in slots or ():
            if slot in self._keys:
                # This engine knew its content, which was evicted just now.
                self._lose(slot)
            self._owners[slot] = 1
        return slots

    def add_owner(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these blocks, which must be pinned or in use."""
        for block in blocks:
            if block not in self._owners:
                raise IntegrityError(f"host block {block} has got an owner without being pinned")
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each of these blocks of one chain, leaf first."""
        done = []
        for block in blocks:
            left = self._owners.get(block, 0) - 1
            if left < 0:
                raise IntegrityError(f"block {block} is released more often than it was taken")
            if left:
                self._owners[block] = left
                continue
            del self._owners[block]
            if block not in self._unsealed and block not in self._saving:
                done.append(block)
        if done:
            self.pool.release(done)

    def touch(self, block: int) -> None:
        """Treat a cached block as just used. No effect if it is not cached."""
        if block in self._epochs:
            self.pool.touch([block])

    def mark_contents(self, blocks: Iterable[int]) -> None:
        """Record that the prefix index knows the content of these blocks, which a planned copy will bring."""
        for block in blocks:
            name = self._name_of(block)
            self._keys[block] = self.key(name.digest, name.group)
            self._unsealed[block] = name

    def forget_content(self, block: int) -> None:
        """Record that the prefix index has dropped this block: no lookup finds it any longer."""
        if block in self._unsealed:
            del self._unsealed[block]
            if block not in self._owners and block not in self._saving:
                self.pool.release([block])
        elif block in self._epochs:
            self.pool.drop([block])
        self._forget(block)

    def retain(self, blocks: Iterable[int]) -> None:
        """Evict these blocks after all that are not retained, until `end_retention`."""
        if not self.max_retained:
            return
        for block in blocks:
            self._retained.pop(block, None)
            self._retained[block] = None
            self.pool.retain([block])
        excess = list(self._retained)[: max(0, len(self._retained) - self.max_retained)]
        self.end_retention(excess)

    def end_retention(self, blocks: Iterable[int]) -> None:
        """Make retained blocks ordinary ones."""
        for block in blocks:
            if block in self._retained:
                del self._retained[block]
                self.pool.retain([block], False)

    def is_retained(self, block: int) -> bool:
        return block in self._retained

    def has_content(self, block: int) -> bool:
        return block in self._keys

    def ref_count(self, block: int) -> int:
        return self._owners.get(block, 0)

    @property
    def num_in_use(self) -> int:
        """Blocks that live requests of this engine own."""
        return len(self._owners)

    @property
    def num_evictions(self) -> int:
        """Evictions of the whole node."""
        return self._recent().evicted if self._is_reporter else 0

    def occupancy(self) -> Occupancy:
        """The blocks of the whole node, which one of its engines reports; zeros from the others. For any thread."""
        counts = self._recent()
        if not self._is_reporter:
            return Occupancy(0, 0, 0, 0)
        return Occupancy(counts.free, counts.cached, counts.retained, counts.total)

    def _recent(self) -> PoolCounts:
        """Counts that are at most `_COUNT_S` old, because counting reads every header."""
        now_s = self._clock()
        if now_s - self._counted_s >= _COUNT_S:
            self._counted_s = now_s
            self._counts, self._is_reporter = self.pool.counts(), self.pool.is_reporter()
        return self._counts

    def snapshot(self) -> dict[str, int]:
        """The number of blocks in each state, in the whole node."""
        counts = self.pool.counts()
        return {
            "free": counts.free,
            "cached": counts.cached,
            "retained": counts.retained,
            "in_use": counts.in_use,
            "total": counts.total,
            "engines": counts.members,
            "damaged": counts.damaged,
        }

    def check(self, owners: Sequence[int], is_indexed: Callable[[int], bool] | None = None) -> None:
        """Raise `IntegrityError` unless owners, leases and the prefix index agree.

        Parameters
        ----------
        owners
            [num_blocks] number of owners of each block, counted by the caller independently of this class.
        is_indexed
            Returns whether the prefix index knows a block.
        """
        expected = {block: count for block, count in enumerate(owners) if count}
        for block in self._pinned:
            expected[block] = expected.get(block, 0) + 1
        if expected != self._owners:
            raise IntegrityError(f"host blocks have the owners {self._owners}, not {expected}")
        leased = self._owners.keys() | self._unsealed.keys() | self._saving
        if not all(self.pool.is_leased(block) for block in leased):
            raise IntegrityError("a host block is used without a lease")
        if self.pool.num_leased() != len(leased):
            raise IntegrityError(
                f"this engine leases {self.pool.num_leased()} slots and uses {len(leased)}"
            )
        known = self._epochs.keys() | self._unsealed.keys()
        if self._keys.keys() != known or self._epochs.keys() & self._unsealed.keys():
            raise IntegrityError("a host block is both published and not, or neither")
        if is_indexed is not None:
            for block in range(self.num_blocks):
                if is_indexed(block) != (block in self._keys):
                    raise IntegrityError(f"host block {block}: pool and prefix index disagree")
        if not self._retained.keys() <= known:
            raise IntegrityError("a host block is retained without known content")


@functools.lru_cache(1024)
def _payer_hash(payer: str) -> int:
    digest = hashlib.blake2b(payer.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
