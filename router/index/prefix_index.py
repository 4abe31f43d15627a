"""Answers which replica holds which prefix: a replay of the replicas' cache events, plus bookings.

A booking counts the blocks of a request on their way to a replica as held there, until its first token.

A prompt is a chain of routing hashes (`quire.protos.routing_hash.RoutingHasher`), one for each 64-token prefix. The
index maps a hash to the replicas that hold it, as the bits of an int:

    confirmed   hash -> mask    blocks on the device or in host memory (tiers `gpu`, `host`), by the replicas' events
    host        hash -> mask    the confirmed blocks in the replica's `host` tier
    booked      hash -> mask    blocks of requests on their way or in prefill

    prompt      h0     h1     h2     h3
    mask        0b111  0b111  0b101  0b001      blocks matched: replica 0: 4, 1: 2, 2: 3

`confirmed` and `host` are a `HolderMap` each. A match looks up all blocks of a prompt in one pass, and then handles
only the few places where the holders change. It tests every block, so a replica may evict in any order.

Dropping a replica, or all its blocks, is O(1): `router/index/holder_slots.py` retires its bit, and clears dead bits
from the sets in small steps, one after each later update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from quire.protos.routing_hash import state_marks, tier_digest
from quire.protos.wire import CacheEvents
from quire.router import compiled_router
from quire.router.index.booked_blocks import BookedBlocks, num_common
from quire.router.index.holder_map import HolderMap
from quire.router.index.holder_slots import Booking, Holder, HolderSlots
from quire.router.index.native_match import FoundMatch, NativeMatch
from quire.router.index.state_cuts import cut_to_states

# Depths of more replicas than this are faster to write with one array operation than one by one.
_FEW_BITS = 8
# A match compares the prompt with at most this many bookings before it walks over the blocks with masks instead. One
# comparison takes a tenth of the walk's time.
_MAX_COMPARISONS = 8
# Blocks of a prompt to look up at a time: enough for most prompts, and a bound for the others.
_WINDOW = 512
_NO_HASHES = np.empty(0, np.uint64)


class PrefixIndex:
    """Routing hash -> holders, for every replica that this router is attached to.

    Parameters
    ----------
    max_blocks
        Bound on distinct confirmed hashes, and so on the memory: 43 bytes for each, and more for each distinct set of
        holders. At the bound, a hash that no replica holds yet is not stored. Then predicted prefix hits are too small,
        never too large, and `is_complete` is False for the replica until its next snapshot.
    max_booked_blocks
        Bound on booked (replica, hash) pairs. At the bound only the first blocks of a request are
        booked.
    """

    def __init__(self, *, max_blocks: int = 8_000_000, max_booked_blocks: int = 1_000_000):
        for name, bound in (("max_blocks", max_blocks), ("max_booked_blocks", max_booked_blocks)):
            if bound < 1:
                raise ValueError(f"{name} must be >= 1, got {bound}")
        self.max_blocks = max_blocks
        self.max_booked_blocks = max_booked_blocks
        self._confirmed = HolderMap(max_blocks, with_sets=True)
        self._host = HolderMap(max_blocks)
        self._booked = BookedBlocks(max_booked_blocks)
        self._holders: dict[str, Holder] = {}
        self.has_states = False  # whether some replica's model is recurrent
        # Holders of unfinished snapshots, not yet live.
        self._staged: dict[str, Holder] = {}
        self._slots = HolderSlots([self._host, self._confirmed])
        self._native_match = NativeMatch(self._confirmed, self._slots)

    def __len__(self) -> int:
        """Return the number of distinct confirmed hashes, including those of dead holders that are not swept yet."""
        return len(self._confirmed)

    # ---------------------------------------------------------------------------------- membership

    def add_replica(self, replica: str) -> None:
        """Add a replica without blocks and without an epoch.

        Raises
        ------
        ValueError
            The index already has the replica.
        """
        if replica in self._holders:
            raise ValueError(f"replica {replica!r} is already indexed")
        self._make_live(self._slots.new_holder(replica, "", 0))

    def remove_replica(self, replica: str) -> None:
        """Remove a replica with its blocks and bookings; an unknown one is ignored."""
        self._drop_staged(replica)
        holder = self._holders.pop(replica, None)
        if holder is None:
            return
        holder.alive = False
        self._booked.drop(holder.booked, holder.bit)
        # Bookings refer to the holder, and the holder to its bookings: break the reference cycle.
        holder.begun.clear()
        self._slots.retire(holder)

    def epoch(self, replica: str) -> str:
        return self._holders[replica].epoch

    def seq(self, replica: str) -> int:
        """Sequence number of the last event batch that was applied."""
        return self._holders[replica].seq

    def digest(self, replica: str) -> int:
        """Digest of the replica's confirmed hashes. If `is_complete`, it must equal the replica's `Frame.digest`."""
        holder = self._holders[replica]
        return tier_digest(holder.gpu_xor, holder.host_xor)

    def num_blocks(self, replica: str) -> int:
        """Confirmed routing blocks of the replica."""
        return self._holders[replica].num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Number of distinct hashes in the `host` tiers of all replicas."""
        return len(self._host)

    def num_removed(self, replica: str) -> int:
        """Number of routing blocks evicted from the replica's `gpu` tier in this epoch."""
        return self._holders[replica].num_removed

    def is_complete(self, replica: str) -> bool:
        """Whether all blocks that the replica reported are stored (see `max_blocks`)."""
        return self._holders[replica].complete

    # -------------------------------------------------------------------------------------- events

    def apply(self, replica: str, epoch: str, events: CacheEvents) -> bool:
        """Replay one batch of a replica's cache events.

        Returns
        -------
        False if the batch does not follow the last one (unknown replica, another epoch, a gap in seq): the caller must
        request a resync. True if it was applied, now or before.
        """
        holder = self._holders.get(replica)
        if holder is None or holder.epoch != epoch or events.seq > holder.seq + 1:
            return False
        if events.seq <= holder.seq:
            return True
        if events.cleared:
            self._clear(holder)
        holder.num_removed += len(events.removed)
        holder.gpu_xor ^= self._remove(holder, events.removed)
        self._remove_host(holder, events.host_removed)
        holder.gpu_xor ^= self._store(holder, events.stored)
        self._store_host(holder, events.host_stored)
        holder.seq = events.seq
        self._slots.sweep_step()
        return True

    def reset(
        self,
        replica: str,
        epoch: str,
        seq: int,
        hashes: np.ndarray,
        host_hashes: np.ndarray = _NO_HASHES,
    ) -> None:
        """Replace a replica's blocks by a snapshot.

        Its bookings stay if the epoch is the same, and are dropped otherwise.

        Parameters
        ----------
        hashes
            [n] uint64, all routing hashes in the replica's `gpu` tier after event batch `seq`.
        host_hashes
            [m] uint64, the routing hashes in its `host` tier.
        """
        self.begin_reset(replica, epoch, seq)
        self.extend_reset(replica, hashes, host_hashes)
        self.commit_reset(replica)

    def begin_reset(self, replica: str, epoch: str, seq: int) -> None:
        """Start a snapshot in pages. Until `commit_reset`, matches use the old blocks, or, without any, each page."""
        self._drop_staged(replica)
        self._staged[replica] = self._slots.new_holder(replica, epoch, seq)
        old = self._holders.get(replica)
        if old is not None and not old.num_blocks:
            self.commit_reset(replica)

    def extend_reset(
        self, replica: str, hashes: np.ndarray, host_hashes: np.ndarray = _NO_HASHES
    ) -> None:
        """Add a page of the snapshot."""
        holder = self._staged.get(replica) or self._holders[replica]
        holder.gpu_xor ^= self._store(holder, hashes)
        self._store_host(holder, host_hashes)

    def commit_reset(self, replica: str) -> None:
        """Replace the replica's blocks by the snapshot."""
        staged = self._staged.pop(replica, None)
        if staged is None:
            return
        old = self._holders.get(replica)
        if old is not None and old.epoch == staged.epoch:
            # Bookings refer to the old holder, so keep it and give it the new slot and counts.
            self._booked.move(old.booked, old.bit, staged.bit)
            self._slots.retire(old)
            for name in ("seq", "slot", "bit", "gpu_xor", "host_xor", "num_blocks", "complete"):
                setattr(old, name, getattr(staged, name))
            staged = old
        else:
            if old is not None:
                staged.row, staged.has_states = old.row, old.has_states
            self.remove_replica(replica)
        self._make_live(staged)
        self._slots.sweep_step()

    # ------------------------------------------------------------------------------------ bookings

    def book(self, replica: str, hashes: Sequence[int] | np.ndarray) -> Booking:
        """Count a request's blocks as held by the replica, until `unbook`.

        Raises
        ------
        KeyError
            The index does not have the replica.
        """
        holder = self._holders[replica]
        chain = np.array(hashes, np.uint64)
        if holder.has_states:
            # The prefill ends with a snapshot.
            chain = np.append(chain, state_marks(chain[-1:]))
        taken = self._booked.add(holder.booked, holder.bit, chain.tolist())
        booking = Booking(holder, taken, chain[: len(taken)])
        if taken:
            holder.begun[taken[0]] = booking
        return booking

    def unbook(self, booking: Booking) -> None:
        """End a booking; do nothing if it has ended or the replica was removed."""
        holder = booking.holder
        if not booking.active or not holder.alive:
            return
        booking.active = False
        if booking.hashes and holder.begun.get(booking.hashes[0]) is booking:
            del holder.begun[booking.hashes[0]]
        self._booked.give_back(holder.booked, holder.bit, booking.hashes)

    # ------------------------------------------------------------------------------------ matching

    def match(self, hashes: Sequence[int] | np.ndarray) -> dict[str, int]:
        """Return the longest prefix of a prompt that each replica holds or will hold, in routing blocks.

        Parameters
        ----------
        hashes
            [blocks] chained routing hashes of the prompt, from its first block.

        Returns
        -------
        replica -> blocks, > 0; replicas without the first block are left out.
        """
        depths: dict[str, int] = {}
        for depth, mask in self.match_masks(hashes):
            depths.update((holder.replica, depth) for holder in self._slots.holders(mask))
        return depths

    def set_states(self, replica: str, has_states: bool) -> None:
        """Set whether the replica's model is recurrent, so that its bookings include a snapshot."""
        self._holders[replica].has_states = has_states
        self.has_states = any(holder.has_states for holder in self._holders.values())

    def cut_to_states(self, hashes: Sequence[int] | np.ndarray, depths: np.ndarray) -> None:
        """Cut the matches of recurrent models, [rows] in blocks, to the last block with a snapshot."""
        rows = [h.row for h in self._holders.values() if h.has_states and h.row >= 0]
        known = (self._confirmed, self._booked.masks, self._slots)
        cut_to_states(*known, np.asarray(hashes, np.uint64), depths, rows)

    def set_row(self, replica: str, row: int) -> None:
        """Set the row (index in the output) to which `match_into` writes the replica's match."""
        self._slots.set_row(self._holders[replica], row)

    def match_into(
        self,
        hashes: Sequence[int] | np.ndarray,
        depths: np.ndarray,
        block: float = 1.0,
        most: float = math.inf,
    ) -> int:
        """Write the result of `match` to an array, at the rows set by `set_row`; replicas without a row are left out.

        Parameters
        ----------
        depths
            [rows] float64 zeros. Each replica's row is set to `block` times its matched blocks, at most `most`.

        Returns
        -------
        The longest match, in blocks.
        """
        library = compiled_router.load()
        if library is not None:
            chain = np.ascontiguousarray(hashes, np.uint64)
            found = self._native_match.into(library, chain, block, most, depths)
            blocks = found.num_blocks
            # The library matches confirmed blocks only, and a booking may continue a match where it ended.
            if self._booked.masks.keys().isdisjoint(found.end_hashes):
                return blocks
            followed = self._booked_beyond(chain, found)
            if followed is not None:
                for holder, num_blocks in followed:
                    if holder.row >= 0:
                        depths[holder.row] = min(num_blocks * block, most)
                    blocks = max(blocks, num_blocks)
                return blocks
        # The walk includes bookings, so it overwrites each row that the library wrote with an equal or longer match.
        blocks = 0
        for blocks, mask in self.match_masks(hashes):
            depth = min(blocks * block, most)
            if mask.bit_count() > _FEW_BITS:
                depths[self._slots.rows(mask)] = depth
                continue
            for holder in self._slots.holders(mask):
                if holder.row >= 0:
                    depths[holder.row] = depth
        return blocks

    def host_blocks_into(
        self, hashes: Sequence[int] | np.ndarray, depths: np.ndarray, blocks: np.ndarray
    ) -> None:
        """Count the matched blocks that a replica holds in its `host` tier (host memory).

        Parameters
        ----------
        depths
            [rows] matches in blocks, as `match_into` wrote them.
        blocks
            [rows] zeros; the counts are written here.
        """
        chain = np.asarray(hashes, np.uint64)[: int(depths.max(initial=0))]
        for first, end, number in self._host.runs(chain):
            for holder in self._slots.holders(self._host.masks[number] & self._slots.live):
                if holder.row >= 0:
                    blocks[holder.row] += max(0, min(end, depths[holder.row]) - first)

    def _booked_beyond(
        self, chain: np.ndarray, found: FoundMatch
    ) -> list[tuple[Holder, int]] | None:
        """Return (holder, blocks) for each holder that matches more of a chain with its bookings than without.

        Return None if only a walk with masks can find the result, or finds it faster. `found` is the match of the same
        chain without bookings.
        """
        masks, booked, alive = self._confirmed.masks, self._booked.masks, self._slots.live
        followed: list[tuple[Holder, int]] = []
        left = _MAX_COMPARISONS
        ends = zip(found.end_hashes, found.end_blocks, found.end_sets, strict=True)
        for end, first, number in ends:
            lost = alive & ~masks[number]
            alive ^= lost
            rest = chain[first:]
            for holder in self._slots.holders(lost & booked.get(end, 0)):
                # A request books the blocks after the match of its prompt, and its replica confirms them in order.
                begins_here = holder.begun.get(end)
                bookings = holder.begun.values() if begins_here is None else (begins_here,)
                left -= len(bookings)
                if left < 0:
                    return None
                depth = first
                for booking in bookings:
                    depth = max(depth, first + num_common(booking.chain, rest))
                # `begun` has no booking with this block: a later one with the same first hash has replaced it.
                if depth == first:
                    return None
                if depth < len(chain):
                    following = chain.item(depth)
                    _, held_by = self._confirmed.table.locate(following)
                    # Another booking, or a confirmed block, continues the match: only the walk finds its end.
                    if following in holder.booked or masks[held_by] & holder.bit:
                        return None
                followed.append((holder, depth))
        return followed

    def match_masks(self, hashes: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """Return the result of `match` as (blocks, mask of the holders that match so many blocks), ascending."""
        chain = np.asarray(hashes, np.uint64)
        groups: list[tuple[int, int]] = []
        alive = self._slots.live
        for start in range(0, len(chain), _WINDOW):
            alive = self._walk(chain[start : start + _WINDOW], start, alive, groups)
            if not alive:
                return groups
        if len(chain) and alive:
            groups.append((len(chain), alive))
        return groups

    def _walk(
        self, window: np.ndarray, start: int, alive: int, groups: list[tuple[int, int]]
    ) -> int:
        """Match the blocks from `start` on with the holders of all blocks before (mask `alive`).

        Add the holders that stop at a block to `groups`, and return the mask of the others.
        """
        masks, booked = self._confirmed.masks, self._booked.masks
        for first, end, number in self._confirmed.runs(window):
            lost = alive & ~masks[number]
            if not lost:
                continue
            kept = lost & booked.get(int(window[first]), 0) if booked else 0
            if kept != lost and start + first:
                groups.append((start + first, lost ^ kept))
            alive ^= lost ^ kept
            # The holders in `kept` have this run only by bookings, which may end within it.
            if kept:
                later = window[first + 1 : end].tolist()
                alive = self._walk_booked(later, start + first + 1, alive, kept, groups)
            if not alive:
                return 0
        return alive

    def _walk_booked(
        self,
        chain: list[int],
        start: int,
        alive: int,
        only_booked: int,
        groups: list[tuple[int, int]],
    ) -> int:
        """Match the blocks of a run with the holders in `only_booked`, which hold the run by bookings alone.
        Return `alive` without the holders that stop, and add those to `groups`."""
        for depth, mask in enumerate(map(self._booked.masks.get, chain, repeat(0)), start):
            kept = only_booked & mask
            if kept != only_booked:
                groups.append((depth, only_booked ^ kept))
                alive ^= only_booked ^ kept
                if not kept:
                    break
                only_booked = kept
        return alive

    # --------------------------------------------------------------------------------------- state

    def _store(self, holder: Holder, hashes: np.ndarray) -> int:
        """Set the holder's bit for hashes; return the XOR of the hashes that did not have it."""
        if not len(hashes):
            return 0
        change = self._confirmed.store(holder.bit, hashes)
        holder.num_blocks += change.num_blocks
        holder.complete &= change.has_room
        return change.xor

    def _remove(self, holder: Holder, hashes: np.ndarray) -> int:
        """Clear the holder's bit for hashes; return the XOR of the hashes that had it."""
        if not len(hashes):
            return 0
        change = self._confirmed.remove(holder.bit, hashes)
        holder.num_blocks -= change.num_blocks
        return change.xor

    def _store_host(self, holder: Holder, hashes: np.ndarray) -> None:
        """Store hashes of the `host` tier."""
        if not len(hashes):
            return
        holder.host_xor ^= self._store(holder, hashes)
        # At the bound `_store` drops hashes. `_host` must not contain them either.
        if not holder.complete:
            masks = self._confirmed.masks
            kept = [masks[i] & holder.bit != 0 for i in self._confirmed.numbers(hashes).tolist()]
            hashes = hashes[np.array(kept)]
        self._host.store(holder.bit, hashes)

    def _remove_host(self, holder: Holder, hashes: np.ndarray) -> None:
        """Remove hashes of the `host` tier."""
        if len(hashes):
            holder.host_xor ^= self._remove(holder, hashes)
            self._host.remove(holder.bit, hashes)

    def _clear(self, holder: Holder) -> None:
        """Drop all blocks of a replica. Its bookings stay, since their blocks are not computed yet."""
        self._slots.retire(holder)
        slot = self._slots.take()
        self._booked.move(holder.booked, holder.bit, 1 << slot)
        holder.slot, holder.bit = slot, 1 << slot
        holder.gpu_xor = holder.host_xor = holder.num_blocks = 0
        holder.complete = True
        self._make_live(holder)

    def _make_live(self, holder: Holder) -> None:
        self._holders[holder.replica] = holder
        self._slots.make_live(holder)

    def _drop_staged(self, replica: str) -> None:
        staged = self._staged.pop(replica, None)
        if staged is not None:
            self._slots.retire_staged(staged)
