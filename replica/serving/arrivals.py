"""The order of calls that belong together: Serve does not promise to deliver them as they were sent."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable

# A request that has come this long before its fork needs no waiting for: it is among the live ones or has ended.
MAX_REMEMBERED = 4096
# Two calls that one router sends at once arrive within a few milliseconds of each other, or by different ways.
WAIT_S = 0.05


class Arrivals:
    """Which requests have arrived lately, so that a fork is not submitted before its parent.

    Lives in one event loop; not thread-safe.

    Parameters
    ----------
    wait_s
        How long a fork waits for a parent that has not come; then it goes on alone.
    """

    def __init__(self, wait_s: float = WAIT_S):
        self._wait_s = wait_s
        self._arrived: OrderedDict[Hashable, None] = OrderedDict()
        self._awaited: dict[Hashable, asyncio.Event] = {}

    def tell(self, key: Hashable) -> None:
        """A request has arrived and is submitted before anything else runs in this loop."""
        self._arrived[key] = None
        if len(self._arrived) > MAX_REMEMBERED:
            self._arrived.popitem(last=False)
        event = self._awaited.pop(key, None)
        if event is not None:
            event.set()

    async def wait(self, key: Hashable) -> bool:
        """Return when the request has arrived; False when it did not come in time."""
        if key in self._arrived:
            return True
        event = self._awaited.setdefault(key, asyncio.Event())
        try:
            async with asyncio.timeout(self._wait_s):
                await event.wait()
        except TimeoutError:
            self._awaited.pop(key, None)
            return False
        return True
