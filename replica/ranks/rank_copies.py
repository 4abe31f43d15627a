"""Which copies between device and host memory have ended on every rank of a GPU replica.

```
 leader   copies 1 ─▶ copies 2 ─▶ copies 3          ended here and there: 1
 rank 1   copies 1 ─▶ copies 2 ─▶ ...               "1 has ended" ──▶ leader
```

All ranks queue the same groups of copies in the same order. Each has a stream for them that may be ahead of the
leader's or behind it. So a rank tells the leader how many groups have ended. The leader reuses a block, publishes it,
or lets a request compute with it when all ranks have copied their parts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.replica.device.device import Event


class OwnCopies:
    """Counts the groups of copies of this rank that have ended."""

    def __init__(self) -> None:
        self._queued: deque[Event] = deque()
        self.num_ended = 0  # at the last `count`

    def add(self, event: Event) -> Event:
        """See `HostPool.on_all_ranks`. A rank other than the leader knows of no other."""
        self._queued.append(event)
        return event

    @property
    def are_queued(self) -> bool:
        """Whether some had not ended at the last `count`."""
        return len(self._queued) > 0

    def count(self) -> int:
        """Return the number of groups that have ended since the start."""
        while self._queued and self._queued[0].is_done():
            self._queued.popleft()
            self.num_ended += 1
        return self.num_ended


class CopiesOfRanks:
    """What the leader knows of the other ranks' copies.

    Parameters
    ----------
    num_others
        Number of other ranks.
    check
        Raises an error if a rank has ended.
    """

    def __init__(self, num_others: int, check: Callable[[], None]):
        self._num_ended = [0] * num_others
        self._changed = threading.Condition()
        self._num_queued = 0
        self._check = check

    def add(self, event: Event) -> Event:
        """Return the event that the next group of copies has ended on all ranks; `event` is that of the leader."""
        self._num_queued += 1
        return _OnAllRanks(event, self._num_queued, self)

    def note(self, other: int, num_ended: int) -> None:
        """Record how many groups of another rank, counted from 0, have ended. For any thread."""
        with self._changed:
            self._num_ended[other] = num_ended
            self._changed.notify_all()

    def wake(self) -> None:
        """Let `wait` find out that a rank has ended. For any thread."""
        with self._changed:
            self._changed.notify_all()

    def have_ended(self, number: int) -> bool:
        """Whether the first `number` groups of copies have ended on all other ranks."""
        return min(self._num_ended) >= number

    def wait(self, number: int) -> None:
        """Wait until `have_ended`.

        Raises
        ------
        EngineError
            A rank has ended.
        """
        with self._changed:
            while not self.have_ended(number):
                self._check()
                self._changed.wait()


class _OnAllRanks:
    """See `CopiesOfRanks.add`."""

    def __init__(self, own: Event, number: int, copies: CopiesOfRanks):
        self._own = own
        self._number = number
        self._copies = copies

    def is_done(self) -> bool:
        return self._copies.have_ended(self._number) and self._own.is_done()

    def wait(self) -> None:
        self._own.wait()
        self._copies.wait(self._number)
