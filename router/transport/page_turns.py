"""Spreads the pages of snapshots over turns of the event loop.

A new router gets the snapshots of all its replicas at once. One page takes milliseconds, and a page of each replica
would hold up every request for as many times that. So only one page is read in each turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PageTurns:
    """Grants the turns; one object for all attach streams of a router."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn of the event loop in which no other page is read, and let other tasks run after it."""
        async with self._lock:
            yield
            await asyncio.sleep(0)
