"""Snapshots: copies of a request's recurrent states at the ends of cached blocks.

A recurrent layer replaces its state with every token. So a cached prefix can be used only where a copy of the states
has been kept: an entry of the prefix index may have a snapshot, and a hit ends at an entry that has one.

```
 blocks of a prompt    b0   b1   b2   b3   b4   b5        another prompt has the first four
 snapshots                       s               s        its hit is b0 to b2; it takes a snapshot after b3
```

A snapshot is taken where it will probably be needed:

| place | for |
|---|---|
| last block that leaves one token of the prompt to compute | the same prompt again, forks |
| end of the known blocks of a prompt | other prompts with the same beginning |
| each `spacing` blocks | prompts that leave a long one anywhere |
| newest full block of a decoding row | the next turn, a return after preemption |

The last one moves: the snapshot before it is given back, unless it was used meanwhile. If no slot of the device is
free, the snapshot that was used longest ago moves to a slot in host memory. If none is free there, the one that was
used longest ago is dropped.

A step first loads snapshots into the slots of the rows that start, then moves others to host memory, and then takes its
own. So a slot can be given to another entry in the same step. A snapshot is attached to its entry after its step is
composed, because rows of the same step cannot load it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.prefix_entries import Entry


class _Slots:
    """The slots of one tier that snapshots may have."""

    def __init__(self, slots: range):
        self.count = len(slots)
        self.free = list(reversed(slots))
        # Slot to the entry that has it; the one used longest ago first.
        self.entries: OrderedDict[int, Entry] = OrderedDict()

    def oldest(self) -> Entry:
        """Return the entry to evict: the one used longest ago, of those that are not retained if there are such."""
        ordinary = (entry for entry in self.entries.values() if not any(entry.num_retained))
        return next(ordinary, next(iter(self.entries.values())))


class StateSnapshots:
    """The slots of snapshots, and the entries of the prefix index that have one.

    Parameters
    ----------
    first_slot, num_slots
        Slots `first_slot` to `first_slot + num_slots - 1` of the state pool are for snapshots; those before it belong
        to rows. Without slots the model has no snapshots.
    num_host_slots
        Number of slots in host memory, with the numbers after these.
    spacing
        Number of blocks after which a prompt gets a snapshot in any case.
    on_change
        Called with an entry and whether it has a snapshot now.
    """

    def __init__(
        self,
        first_slot: int,
        num_slots: int,
        num_host_slots: int,
        spacing: int,
        on_change: Callable[[Entry, bool], None],
    ):
        self.spacing = spacing
        first_host = first_slot + num_slots
        self._device = _Slots(range(first_slot, first_host))
        self._host = _Slots(range(first_host, first_host + num_host_slots))
        self._first_host = first_host
        # Entries whose snapshots were loaded since they were taken.
        self._used: set[Entry] = set()
        # Row to the slot that the next step loads into the row's slot.
        self._loads: dict[int, int] = {}
        # Slot of the host to the device's slot that the next step copies there.
        self._moves: dict[int, int] = {}
        self._on_change = on_change

    def __bool__(self) -> bool:
        return self._device.count > 0

    def __len__(self) -> int:
        """Return the number of entries that have a snapshot."""
        return len(self._device.entries) + len(self._host.entries)

    def _tier(self, slot: int) -> _Slots:
        return self._device if slot < self._first_host else self._host

    # -- rows that start ---------------------------------------------------------------------------------

    def load(self, entry: Entry, row: int) -> None:
        """Plan to load an entry's snapshot into a row's slot."""
        slot = entry.snapshot
        if slot is None:
            raise IntegrityError(f"the entry at depth {entry.depth} has no snapshot to load")
        self._loads[row] = slot
        self._used.add(entry)
        self._tier(slot).entries.move_to_end(slot)

    def cancel_load(self, row: int) -> None:
        """Forget a planned load, because the row's request has left it."""
        self._loads.pop(row, None)

    def launch(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Take the copies for the step being planned.

        Returns
        -------
        (slot, row) of each load, and then (slot of the device, slot of the host) of each move.
        """
        loads = [(slot, row) for row, slot in self._loads.items()]
        moves = [(slot, host_slot) for host_slot, slot in self._moves.items()]
        self._loads.clear()
        self._moves.clear()
        return loads, moves

    # -- steps that take snapshots -----------------------------------------------------------------------

    def places(
        self, start: int, end: int, num_tokens: int, num_known: int, block_size: int
    ) -> list[int]:
        """Return the lengths in tokens at which a prompt gets a snapshot, of those in (start, end].

        Parameters
        ----------
        num_tokens
            Length of the prompt.
        num_known
            Number of its tokens whose blocks were cached when it started.
        """
        width = self.spacing * block_size
        wanted = {(num_tokens - 1) // block_size * block_size, num_known}
        wanted.update(range(-(-(start + 1) // width) * width, end + 1, width))
        return sorted(length for length in wanted if start < length <= end)

    def take(self) -> int | None:
        """Take a slot of the device for a snapshot; None: there are no slots."""
        device, host = self._device, self._host
        if not device.free and device.entries:
            evicted = device.oldest()
            if host.count and not host.free:
                self.drop(host.oldest())
            if host.free:
                self._move_to_host(evicted)
            else:
                self.drop(evicted)
        return device.free.pop() if device.free else None

    def _move_to_host(self, entry: Entry) -> None:
        slot = entry.snapshot
        assert slot is not None
        del self._device.entries[slot]
        self._device.free.append(slot)
        entry.snapshot = self._host.free.pop()
        self._host.entries[entry.snapshot] = entry
        self._moves[entry.snapshot] = slot

    def attach(self, slot: int, entry: Entry | None) -> None:
        """Give a taken slot to the entry at whose end the snapshot is.

        The slot becomes free if there is no such entry in the index, or if the entry has a snapshot.
        """
        if entry is None or not entry.alive or entry.snapshot is not None:
            self._device.free.append(slot)
            return
        entry.snapshot = slot
        self._device.entries[slot] = entry
        self._on_change(entry, True)

    def move_from(self, entry: Entry | None) -> None:
        """Drop the snapshot of a row's earlier block, because the row takes a newer one.

        No effect if another request has used it, or if it is one of those at each `spacing` blocks.
        """
        if entry is None or entry.snapshot is None or entry in self._used:
            return
        if (entry.depth + 1) % self.spacing:
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Drop an entry's snapshot, if it has one."""
        slot = entry.snapshot
        if slot is None:
            return
        entry.snapshot = None
        self._used.discard(entry)
        tier = self._tier(slot)
        del tier.entries[slot]
        tier.free.append(slot)
        self._moves.pop(slot, None)
        self._on_change(entry, False)

    def drop_slots(self, host_slots: Iterable[int]) -> None:
        """Drop the snapshots in these slots of the host."""
        for slot in host_slots:
            if slot in self._host.entries:
                self.drop(self._host.entries[slot])

    def clear(self) -> None:
        """Drop every snapshot."""
        for tier in (self._device, self._host):
            for entry in list(tier.entries.values()):
                self.drop(entry)

    def check(self, entries: Iterable[Entry], num_taken: int) -> None:
        """Raise `IntegrityError` unless slots and entries agree.

        Parameters
        ----------
        entries
            All entries of the index.
        num_taken
            Number of slots that steps in flight have taken and not attached.
        """
        found = {entry.snapshot: entry for entry in entries if entry.snapshot is not None}
        if found != {**self._device.entries, **self._host.entries}:
            raise IntegrityError("the entries that have snapshots differ from the slots' records")
        if not self._used <= set(found.values()):
            raise IntegrityError("an entry without snapshot counts as used")
        for tier, taken in ((self._device, num_taken), (self._host, 0)):
            slots = {*tier.free, *tier.entries}
            if len(slots) != len(tier.free) + len(tier.entries):
                raise IntegrityError("a slot is free twice, or free and in use")
            if len(slots) + taken != tier.count:
                raise IntegrityError(
                    f"{tier.count} slots for snapshots, but {len(tier.free)} are free, {len(tier.entries)} in use and "
                    f"{taken} taken by steps in flight"
                )
