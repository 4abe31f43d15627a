"""Which replica holds which prefix: an exact replay of the replicas' cache events, plus bookings.

A prompt is a chain of routing hashes (`quire.protos.wire.RoutingHasher`), one for each 64-token
prefix. The index maps a hash to the replicas that hold it, as the bits of an int:

    confirmed   hash -> mask    what the replicas' own events say, in whichever tier
    host        hash -> mask    those of them that are in the replica's `host` tier
    booked      hash -> mask    requests on their way or in prefill, counted by (replica, hash)

    prompt      h0     h1     h2     h3
    mask        0b111  0b111  0b101  0b001      blocks matched: replica 0: 4, 1: 2, 2: 3

Equal masks are one object (hash-consing), so a million blocks of the same holders cost a million
dict entries and one int: about 110 bytes a block. The confirmed map is cut in shards: growing a
dict of ten million entries would stop the event loop for a second, growing one of its 256 shards
stops it for milliseconds.

Dropping a replica, or all it held, is O(1): its slot (bit number) leaves the live mask and a fresh
one is given. The dead bits are swept a little after each later update; only then is the slot used
again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.protos.wire import CacheEvents, tier_digest

_NUM_SHARDS = 256
_SHARD_MASK = _NUM_SHARDS - 1
_SWEEP_ENTRIES = 4096  # scanned after one update, to whole shards: under a millisecond
_FEW_BITS = 8  # more replicas than these are cheaper to write as an array
_NO_HASHES = np.empty(0, np.uint64)
_MAX_INTERNED_MASKS = 1 << 16  # beyond it sharing starts over; only memory is lost


@dataclass(slots=True, eq=False)
class _Holder:
    """One incarnation (epoch) of a replica."""

    replica: str
    epoch: str
    seq: int
    slot: int
    bit: int  # 1 << slot
    gpu_xor: int = 0  # XOR of the confirmed hashes in its `gpu` tier
    host_xor: int = 0  # of those in its `host` tier
    num_blocks: int = 0
    num_removed: int = 0  # evictions from its `gpu` tier that were replayed
    complete: bool = True  # False: a store was dropped at the memory bound
    booked: dict[int, int] = field(default_factory=dict)  # hash -> number of bookings
    alive: bool = True
    row: int = -1  # where `match_into` writes


@dataclass(slots=True, eq=False)
class Booking:
    """Optimistic entries of one request on one replica; given back with `PrefixIndex.unbook`."""

    holder: _Holder
    hashes: list[int]
    active: bool = True


class PrefixIndex:
    """Routing hash -> holders, for every replica that this router is attached to.

    Parameters
    ----------
    max_blocks
        Bound on distinct confirmed hashes. At the bound a hash that no replica holds yet is not
        stored: predictions are then too small, never too large, and `is_complete` is False for the
        replica until its next snapshot.
    max_booked_blocks
        Bound on booked (replica, hash) pairs. At the bound only the first blocks of a request are
        booked.
    leaf_first
        The replicas promise to evict no block while they hold a longer prefix through it. `match`
        then gallops and bisects: O(log blocks) look-ups for each distinct depth. Without the
        promise it walks the chain, which is right for any order of eviction.
    """

    def __init__(
        self,
        *,
        max_blocks: int = 8_000_000,
        max_booked_blocks: int = 1_000_000,
        leaf_first: bool = False,
    ):
        for name, bound in (("max_blocks", max_blocks), ("max_booked_blocks", max_booked_blocks)):
            if bound < 1:
                raise ValueError(f"{name} must be >= 1, got {bound}")
        self.max_blocks = max_blocks
        self.max_booked_blocks = max_booked_blocks
        self._leaf_first = leaf_first
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._host_shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._num_host = 0  # hashes in them
        self._interned: dict[int, int] = {}
        self._size = 0
        self._booked: dict[int, int] = {}  # hash -> mask
        self._num_booked = 0  # (replica, hash) pairs
        self._holders: dict[str, _Holder] = {}
        self._staged: dict[str, _Holder] = {}  # snapshots under way, not yet live
        self._by_slot: dict[int, _Holder] = {}
        self._row_by_slot = np.full(64, -1, np.int64)
        self._live = 0  # bits that `match` may see
        self._num_incomplete = 0
        self._free_slots: list[int] = []  # heap
        self._num_slots = 0
        self._retired = 0  # dead bits that wait for the next sweep
        self._sweeping = 0  # dead bits of the sweep under way
        self._sweep_shard = 0

    def __len__(self) -> int:
        """Distinct confirmed hashes stored, dead ones that are not swept yet included."""
        return self._size

    # ---------------------------------------------------------------------------------- membership

    def add_replica(self, replica: str) -> None:
        """Start to index a replica, empty and of no epoch.

        Raises
        ------
        ValueError
            The replica is already there.
        """
        if replica in self._holders:
            raise ValueError(f"replica {replica!r} is already indexed")
        self._make_live(self._new_holder(replica, "", 0))

    def remove_replica(self, replica: str) -> None:
        """Forget a replica, its blocks and its bookings; unknown ones are ignored."""
        self._drop_staged(replica)
        holder = self._holders.pop(replica, None)
        if holder is None:
            return
        holder.alive = False
        for routing_hash in holder.booked:
            self._clear_booked_bit(routing_hash, holder.bit)
        self._num_booked -= len(holder.booked)
        self._make_dead(holder)

    def epoch(self, replica: str) -> str:
        return self._holders[replica].epoch

    def seq(self, replica: str) -> int:
        """Sequence number of the last event batch that is in the index."""
        return self._holders[replica].seq

    def digest(self, replica: str) -> int:
        """`tier_digest` of the replica's confirmed hashes: equals `Frame.digest` if `is_complete`."""
        holder = self._holders[replica]
        return tier_digest(holder.gpu_xor, holder.host_xor)

    def num_blocks(self, replica: str) -> int:
        """Confirmed routing blocks of the replica."""
        return self._holders[replica].num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Distinct hashes that some replica holds in its `host` tier."""
        return self._num_host

    def num_removed(self, replica: str) -> int:
        """Routing blocks that left the replica's `gpu` tier, by the events replayed in this epoch."""
        return self._holders[replica].num_removed

    def is_complete(self, replica: str) -> bool:
        """Whether everything that the replica reported was stored (see `max_blocks`)."""
        return self._holders[replica].complete

    # -------------------------------------------------------------------------------------- events

    def apply(self, replica: str, epoch: str, events: CacheEvents) -> bool:
        """Replay one batch of a replica's cache events.

        Returns
        -------
        False when the batch cannot follow what is there (unknown replica, another epoch, a gap in
        seq): the caller must resynchronise. A batch that was applied before is True and changes
        nothing.
        """
        holder = self._holders.get(replica)
        if holder is None or holder.epoch != epoch or events.seq > holder.seq + 1:
            return False
        if events.seq <= holder.seq:
            return True
        if events.cleared:
            self._clear(holder)
        holder.num_removed += len(events.removed)
        holder.gpu_xor ^= self._remove(holder, events.removed.tolist())
        self._remove_host(holder, events.host_removed.tolist())
        holder.gpu_xor ^= self._store(holder, events.stored.tolist())
        self._store_host(holder, events.host_stored.tolist())
        holder.seq = events.seq
        self._sweep_step()
        return True

    def reset(
        self,
        replica: str,
        epoch: str,
        seq: int,
        hashes: np.ndarray,
        host_hashes: np.ndarray = _NO_HASHES,
    ) -> None:
        """Replace all that is known of a replica by a snapshot.

        Bookings survive when the epoch is the same and are dropped when it is another.

        Parameters
        ----------
        hashes
            [n] uint64, all routing hashes in the replica's `gpu` tier after event batch `seq`.
        host_hashes
            [m] uint64, those in its `host` tier.
        """
        self.begin_reset(replica, epoch, seq)
        self.extend_reset(replica, hashes, host_hashes)
        self.commit_reset(replica)

    def begin_reset(self, replica: str, epoch: str, seq: int) -> None:
        """Start a snapshot that comes in pages; until `commit_reset` the old state answers."""
        self._drop_staged(replica)
        self._staged[replica] = self._new_holder(replica, epoch, seq)

    def extend_reset(
        self, replica: str, hashes: np.ndarray, host_hashes: np.ndarray = _NO_HASHES
    ) -> None:
        """Add one page of the snapshot under way."""
        staged = self._staged[replica]
        staged.gpu_xor ^= self._store(staged, hashes.tolist())
        self._store_host(staged, host_hashes.tolist())

    def commit_reset(self, replica: str) -> None:
        """Put the snapshot in the place of what was known."""
        staged = self._staged.pop(replica)
        old = self._holders.get(replica)
        if old is not None and old.epoch == staged.epoch:
            # The holder object stays, since bookings point to it; it takes over the slot and the
            # counts.
            self._move_bookings(old, staged.bit)
            self._make_dead(old)
            for name in ("seq", "slot", "bit", "gpu_xor", "host_xor", "num_blocks", "complete"):
                setattr(old, name, getattr(staged, name))
            staged = old
        else:
            if old is not None:
                staged.row = old.row
            self.remove_replica(replica)
        self._make_live(staged)
        self._sweep_step()

    # ------------------------------------------------------------------------------------ bookings

    def book(self, replica: str, hashes: Sequence[int] | np.ndarray) -> Booking:
        """Count a request's prefix as present on the replica, until `unbook`.

        Raises
        ------
        KeyError
            The replica is not indexed.
        """
        holder = self._holders[replica]
        taken: list[int] = []
        for routing_hash in _as_list(hashes):
            count = holder.booked.get(routing_hash, 0)
            if not count:
                if self._num_booked >= self.max_booked_blocks:
                    break
                self._num_booked += 1
                self._booked[routing_hash] = self._booked.get(routing_hash, 0) | holder.bit
            holder.booked[routing_hash] = count + 1
            taken.append(routing_hash)
        return Booking(holder, taken)

    def unbook(self, booking: Booking) -> None:
        """Give a booking back; a second time, or after the replica went, does nothing."""
        holder = booking.holder
        if not booking.active or not holder.alive:
            return
        booking.active = False
        for routing_hash in booking.hashes:
            count = holder.booked[routing_hash] - 1
            if count:
                holder.booked[routing_hash] = count
            else:
                del holder.booked[routing_hash]
                self._num_booked -= 1
                self._clear_booked_bit(routing_hash, holder.bit)

    # ------------------------------------------------------------------------------------ matching

    def match(self, hashes: Sequence[int] | np.ndarray) -> dict[str, int]:
        """Longest prefix of a prompt that each replica holds or will hold, in routing blocks.

        Parameters
        ----------
        hashes
            [blocks] chained routing hashes of the prompt, from its first block.

        Returns
        -------
        replica -> blocks > 0; replicas without the first block are left out.
        """
        depths: dict[str, int] = {}
        for depth, mask in self.match_masks(hashes):
            while mask:
                bit = mask & -mask
                depths[self._by_slot[bit.bit_length() - 1].replica] = depth
                mask ^= bit
        return depths

    def set_row(self, replica: str, row: int) -> None:
        """Let `match_into` write the replica's matches to this place."""
        holder = self._holders[replica]
        holder.row = row
        self._row_by_slot[holder.slot] = row

    def match_into(self, hashes: Sequence[int] | np.ndarray, depths: np.ndarray) -> int:
        """As `match`, to the rows of `set_row`.

        Parameters
        ----------
        depths
            [rows] zeros of any dtype; replicas that match get their blocks.

        Returns
        -------
        The longest match, in blocks.
        """
        depth = 0
        for depth, mask in self.match_masks(hashes):
            if mask.bit_count() <= _FEW_BITS:
                while mask:
                    bit = mask & -mask
                    depths[self._by_slot[bit.bit_length() - 1].row] = depth
                    mask ^= bit
                continue
            packed = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
            depths[self._row_by_slot[bits.nonzero()[0]]] = depth
        return depth

    def host_blocks_into(
        self, hashes: Sequence[int] | np.ndarray, depths: np.ndarray, blocks: np.ndarray
    ) -> None:
        """Of what `match_into` found, count the blocks that are in the `host` tier.

        Parameters
        ----------
        depths
            [rows] as `match_into` left them.
        blocks
            [rows] zeros; gets the counts.
        """
        live = self._live
        for depth, routing_hash in enumerate(_as_list(hashes)[: int(depths.max(initial=0))]):
            mask = self._host_shards[routing_hash & _SHARD_MASK].get(routing_hash, 0) & live
            while mask:
                bit = mask & -mask
                row = self._by_slot[bit.bit_length() - 1].row
                if row >= 0 and depth < depths[row]:
                    blocks[row] += 1
                mask ^= bit

    def match_masks(self, hashes: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """As `match`, by slots: (blocks, mask of the replicas that match so many), ascending."""
        chain = _as_list(hashes)
        if self._leaf_first and not self._num_incomplete:
            return self._match_bisect(chain)
        return self._match_walk(chain)

    def _mask_at(self, routing_hash: int) -> int:
        confirmed = self._shards[routing_hash & _SHARD_MASK].get(routing_hash, 0)
        return (confirmed | self._booked.get(routing_hash, 0)) & self._live

    def _match_walk(self, chain: list[int]) -> list[tuple[int, int]]:
        shards, booked = self._shards, self._booked
        groups: list[tuple[int, int]] = []
        alive = self._live
        for depth, routing_hash in enumerate(chain):
            mask = shards[routing_hash & _SHARD_MASK].get(routing_hash, 0)
            if booked:
                mask |= booked.get(routing_hash, 0)
            mask &= alive
            if mask != alive:
                if depth:
                    groups.append((depth, alive ^ mask))
                alive = mask
                if not alive:
                    return groups
        if chain and alive:
            groups.append((len(chain), alive))
        return groups

    def _match_bisect(self, chain: list[int]) -> list[tuple[int, int]]:
        """With leaf-first eviction masks only shrink, so between equal masks nothing changes."""
        if not chain or not (mask := self._mask_at(chain[0])):
            return []
        # Gallop: intervals (low, high] with the masks at their ends, until nobody is left.
        intervals: list[tuple[int, int, int, int]] = []
        low, step = 0, 1
        while mask:
            high = min(low + step, len(chain))
            high_mask = self._mask_at(chain[high]) if high < len(chain) else 0
            intervals.append((low, mask, high, high_mask))
            low, mask, step = high, high_mask, step * 2
        groups: list[tuple[int, int]] = []
        intervals.reverse()
        while intervals:
            low, low_mask, high, high_mask = intervals.pop()
            if low_mask == high_mask:
                continue
            if high - low == 1:
                groups.append((high, low_mask & ~high_mask))
                continue
            middle = (low + high) // 2
            middle_mask = self._mask_at(chain[middle])
            intervals.append((middle, middle_mask, high, high_mask))
            intervals.append((low, low_mask, middle, middle_mask))
        return groups

    # --------------------------------------------------------------------------------------- state

    def _store(self, holder: _Holder, hashes: Iterable[int]) -> int:
        """Set the holder's bit for these hashes; returns the XOR of those for which it was not set."""
        shards, interned, bit = self._shards, self._interned, holder.bit
        if len(interned) > _MAX_INTERNED_MASKS:
            interned.clear()
        added_xor, added = 0, 0
        for routing_hash in hashes:
            shard = shards[routing_hash & _SHARD_MASK]
            mask = shard.get(routing_hash, 0)
            if mask & bit:
                continue
            if not mask:
                if self._size >= self.max_blocks:
                    self._mark_incomplete(holder)
                    continue
                self._size += 1
            mask |= bit
            shard[routing_hash] = interned.setdefault(mask, mask)
            added_xor ^= routing_hash
            added += 1
        holder.num_blocks += added
        return added_xor

    def _remove(self, holder: _Holder, hashes: Iterable[int]) -> int:
        """Clear the holder's bit for these hashes; returns the XOR of those for which it was set."""
        removed_xor = 0
        for routing_hash in hashes:
            shard = self._shards[routing_hash & _SHARD_MASK]
            mask = shard.get(routing_hash, 0)
            if not mask & holder.bit:
                continue
            self._put(shard, routing_hash, mask ^ holder.bit)
            removed_xor ^= routing_hash
            holder.num_blocks -= 1
        return removed_xor

    def _store_host(self, holder: _Holder, hashes: list[int]) -> None:
        """As `_store`, of the `host` tier."""
        holder.host_xor ^= self._store(holder, hashes)
        for routing_hash in hashes:
            index = routing_hash & _SHARD_MASK
            if self._shards[index].get(routing_hash, 0) & holder.bit:  # not dropped at the bound
                shard = self._host_shards[index]
                mask = shard.get(routing_hash, 0)
                self._num_host += not mask
                mask |= holder.bit
                shard[routing_hash] = self._interned.setdefault(mask, mask)

    def _remove_host(self, holder: _Holder, hashes: list[int]) -> None:
        """As `_remove`, of the `host` tier."""
        holder.host_xor ^= self._remove(holder, hashes)
        for routing_hash in hashes:
            self._put_host(self._host_shards[routing_hash & _SHARD_MASK], routing_hash, holder.bit)

    def _put_host(self, shard: dict[int, int], routing_hash: int, without: int) -> None:
        """Take holders out of an entry of the `host` tier."""
        mask = shard.get(routing_hash, 0)
        if not mask & without:
            return
        mask &= ~without
        if mask:
            shard[routing_hash] = self._interned.setdefault(mask, mask)
        else:
            del shard[routing_hash]
            self._num_host -= 1

    def _put(self, shard: dict[int, int], routing_hash: int, mask: int) -> None:
        if mask:
            shard[routing_hash] = self._interned.setdefault(mask, mask)
        else:
            del shard[routing_hash]
            self._size -= 1

    def _clear(self, holder: _Holder) -> None:
        """The replica holds nothing any more; bookings stay, their blocks are still to come."""
        self._make_dead(holder)
        slot = self._take_slot()
        self._move_bookings(holder, 1 << slot)
        holder.slot, holder.bit = slot, 1 << slot
        holder.gpu_xor = holder.host_xor = holder.num_blocks = 0
        holder.complete = True
        self._make_live(holder)

    def _move_bookings(self, holder: _Holder, bit: int) -> None:
        for routing_hash in holder.booked:
            self._booked[routing_hash] = self._booked[routing_hash] & ~holder.bit | bit

    def _clear_booked_bit(self, routing_hash: int, bit: int) -> None:
        mask = self._booked[routing_hash] & ~bit
        if mask:
            self._booked[routing_hash] = mask
        else:
            del self._booked[routing_hash]

    # --------------------------------------------------------------------------------------- slots

    def _new_holder(self, replica: str, epoch: str, seq: int) -> _Holder:
        slot = self._take_slot()
        return _Holder(replica, epoch, seq, slot, 1 << slot)

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def _make_live(self, holder: _Holder) -> None:
        self._holders[holder.replica] = holder
        self._by_slot[holder.slot] = holder
        if holder.slot >= len(self._row_by_slot):
            more = np.full(len(self._row_by_slot), -1, np.int64)
            self._row_by_slot = np.concatenate([self._row_by_slot, more])
        self._row_by_slot[holder.slot] = holder.row
        self._live |= holder.bit
        self._num_incomplete += not holder.complete

    def _make_dead(self, holder: _Holder) -> None:
        """Retire the holder's slot; the holder may go on with another."""
        del self._by_slot[holder.slot]
        self._live &= ~holder.bit
        self._num_incomplete -= not holder.complete
        self._retired |= holder.bit

    def _drop_staged(self, replica: str) -> None:
        staged = self._staged.pop(replica, None)
        if staged is not None:
            self._retired |= staged.bit

    def _mark_incomplete(self, holder: _Holder) -> None:
        if holder.complete:
            holder.complete = False
            self._num_incomplete += self._by_slot.get(holder.slot) is holder

    def _sweep_step(self) -> None:
        """Clear the dead bits of the next shards; after the last one their slots are free again."""
        scanned = 0
        while scanned < _SWEEP_ENTRIES and (self._sweeping or self._retired):
            if not self._sweeping:
                self._sweeping, self._retired, self._sweep_shard = self._retired, 0, 0
            dead = self._sweeping
            shard = self._shards[self._sweep_shard]
            scanned += len(shard)
            for routing_hash, mask in [item for item in shard.items() if item[1] & dead]:
                self._put(shard, routing_hash, mask & ~dead)
            host = self._host_shards[self._sweep_shard]
            scanned += len(host)
            for routing_hash in [item[0] for item in host.items() if item[1] & dead]:
                self._put_host(host, routing_hash, dead)
            self._sweep_shard += 1
            if self._sweep_shard == _NUM_SHARDS:
                self._sweeping = 0
                while dead:
                    bit = dead & -dead
                    heapq.heappush(self._free_slots, bit.bit_length() - 1)
                    dead ^= bit


def _as_list(hashes: Sequence[int] | np.ndarray) -> list[int]:
    return hashes.tolist() if isinstance(hashes, np.ndarray) else list(hashes)
