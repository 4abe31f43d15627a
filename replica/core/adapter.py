"""An adapter that is in host memory, and the slots of device memory for those of running requests.

```
 row     0   1   2   3            slot    0      1       2       3
 slot  [ 2 ][ 0 ][ 2 ][ 1 ]            [ none ][ de ][ legal ][ chess ]      chess has no row: the next
         └── legal ──┘                                                     adapter may take its slot
```
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.protos.adapter_ref import AdapterRef


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in host memory. Two objects are different adapters, even of the same folder."""

    ref: AdapterRef
    # Linear layer of the model to its matrices; of the runner's device (`replica/adapters`).
    weights: Any


class AdapterLoad(NamedTuple):
    """A slot that gets an adapter before a step."""

    slot: int
    adapter: Adapter


NO_SLOTS = np.empty(0, np.int32)
NO_SLOTS.setflags(write=False)


class AdapterSlots:
    """Which adapter each slot of device memory has, and which rows use it.

    An adapter stays in its slot after its last row has ended, until another one needs the slot: the one that has been
    unused longest goes first.

    Parameters
    ----------
    num_slots
        Number of adapters that running requests may have at once.
    num_rows
        Number of rows of the request table.
    """

    def __init__(self, num_slots: int, num_rows: int):
        self._free = list(range(num_slots, 0, -1))
        self._of_row = np.zeros(num_rows + 1, np.int32)  # the last row never has a request
        self._num_users = np.zeros(num_slots + 1, np.int64)
        self._slots: dict[Adapter, int] = {}
        self._adapters: dict[int, Adapter] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # slots without rows, longest first
        self._loads: dict[int, Adapter] = {}
        self._num_adapted_rows = 0
        self.num_loads = 0
        # Changes of `digests` and `num_used` so far.
        self.num_changes = 0

    def __len__(self) -> int:
        """Number of slots that have an adapter."""
        return len(self._slots)

    @property
    def num_slots(self) -> int:
        """Number of slots, with an adapter or without."""
        return len(self._num_users) - 1

    @property
    def num_used(self) -> int:
        """Number of slots with rows."""
        return len(self._slots) - len(self._unused)

    def digests(self) -> set[str]:
        """Return the digests of the adapters in slots."""
        return {adapter.ref.digest for adapter in self._slots}

    def fits(self, adapter: Adapter | None) -> bool:
        """Whether a request with this adapter can get a row now."""
        return bool(adapter is None or adapter in self._slots or self._free or self._unused)

    def take(self, adapter: Adapter | None, row: int) -> None:
        """Give a row the slot of its adapter; `fits` must hold."""
        if adapter is None:
            return
        slot = self._slots.get(adapter)
        if slot is None:
            slot = self._place(adapter)
        self._unused.pop(slot, None)
        if not self._num_users[slot]:
            self.num_changes += 1
        self._num_users[slot] += 1
        self._of_row[row] = slot
        self._num_adapted_rows += 1

    def _place(self, adapter: Adapter) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot, _ = self._unused.popitem(last=False)
            del self._slots[self._adapters[slot]]
        self._slots[adapter], self._adapters[slot] = slot, adapter
        self._loads[slot] = adapter
        self.num_loads += 1
        return slot

    def release(self, row: int) -> None:
        """Take a row's slot back; rows without an adapter are ignored."""
        slot = int(self._of_row[row])
        if not slot:
            return
        self._of_row[row] = 0
        self._num_adapted_rows -= 1
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._unused[slot] = None
            self.num_changes += 1

    def forget(self, digest: str) -> None:
        """Free the slots of unused adapters with this digest."""
        for slot in [s for s in self._unused if self._adapters[s].ref.digest == digest]:
            del self._unused[slot]
            del self._slots[self._adapters.pop(slot)]
            self._loads.pop(slot, None)
            self._free.append(slot)
            self.num_changes += 1

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The slots of rows [n] of the request table, [n] int32; empty if no row has an adapter."""
        if not self._num_adapted_rows:
            return NO_SLOTS
        slots: np.ndarray = self._of_row[rows]
        return slots if slots.any() else NO_SLOTS

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Remove and return the loads that no plan has had."""
        if not self._loads:
            return ()
        loads = tuple(AdapterLoad(*load) for load in self._loads.items())
        self._loads.clear()
        return loads

    def report_again(self) -> None:
        """Load every slot again in the next plan, because an earlier plan may not have reached the device."""
        self._loads.update(self._adapters)

    def check(self) -> None:
        """Raise AssertionError if rows, slots and adapters disagree."""
        users = np.bincount(self._of_row[self._of_row > 0], minlength=len(self._num_users))
        assert (users == self._num_users).all(), f"{users} rows of slots, counted {self._num_users}"
        assert self._num_adapted_rows == users.sum()
        assert self._slots == {adapter: slot for slot, adapter in self._adapters.items()}
        assert set(self._unused) == {s for s in self._adapters if not users[s]}
        assert sorted([*self._free, *self._adapters]) == list(range(1, len(self._num_users)))
