"""The order of related calls: a fork (a request that shares its parent's prompt) waits for its parent's call.

Ray Serve may deliver calls in another order than they were sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable

# Number of recent requests to remember. A fork of a request that is no longer remembered waits `WAIT_S` in vain.
MAX_REMEMBERED = 4096
# Two calls that a router sends together arrive within a few milliseconds, unless they take different paths.
WAIT_S = 0.05


class Arrivals:
    """Recently arrived requests, so that a fork is not submitted before its parent.

    Lives in one event loop; not thread-safe.

    Parameters
    ----------
    wait_s
        Maximum seconds for which a fork waits for its parent; then it runs without one.
    """

    def __init__(self, wait_s: float = WAIT_S):
        self._wait_s = wait_s
        self._arrived: OrderedDict[Hashable, None] = OrderedDict()
        self._awaited: dict[Hashable, asyncio.Event] = {}

    def tell(self, key: Hashable) -> None:
        """Record that a request has arrived. The caller must submit it before its next `await`."""
        self._arrived[key] = None
        if len(self._arrived) > MAX_REMEMBERED:
            self._arrived.popitem(last=False)
        event = self._awaited.pop(key, None)
        if event is not None:
            event.set()

    async def wait(self, key: Hashable) -> bool:
        """Wait for a request to arrive. Returns whether it arrived in time."""
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
