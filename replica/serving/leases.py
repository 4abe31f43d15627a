"""Leases: who still wants what this replica computes.

A router that dies takes its calls and its attach stream along, as a rule; Serve's cancellation is best effort, and
streams that nobody reads would hold their blocks for ever. So every router says again and again which of its streams
it still wants, and what it has not named for `LEASE_S` ends, as does the attachment of a router that says nothing.

The clock of a lease runs only while some router is heard. A replica that drains hears none, because Serve leads no
more calls to it, and its streams shall end in peace; where all routers died, the first one of the new is heard.
"""

from __future__ import annotations

from collections.abc import Iterable

StreamKey = tuple[str, int]  # (router id, stream id)


class Leases:
    """When each router, and each of its streams, was last wanted. Times are the caller's monotonic clock.

    Parameters
    ----------
    lease_s
        Seconds for which a stream or a router is good without being renewed.
    """

    def __init__(self, lease_s: float):
        self._lease_s = lease_s
        self._heard_s = 0.0  # the last renewal, whoever's
        self._routers: dict[str, float] = {}  # last heard, in seconds
        self._streams: dict[StreamKey, float] = {}  # last wanted, in seconds

    def attach(self, router_id: str, now_s: float) -> None:
        """A router has attached itself, perhaps anew."""
        self._routers[router_id] = now_s

    def begin(self, key: StreamKey, now_s: float) -> None:
        """A stream is wanted from now on."""
        self._streams[key] = now_s

    def end(self, key: StreamKey) -> None:
        """A stream has ended; unknown ones are ignored."""
        self._streams.pop(key, None)

    def renew(self, router_id: str, stream_ids: Iterable[int], now_s: float) -> None:
        """The router lives and wants these streams; those that are not here are ignored."""
        self._heard_s = now_s
        if router_id in self._routers:
            self._routers[router_id] = now_s
        for stream_id in stream_ids:
            key = router_id, stream_id
            if key in self._streams:
                self._streams[key] = now_s

    def expire_routers(self) -> list[str]:
        """Forget the routers that have said nothing for longer than the lease, and name them; also those that
        had left before."""
        silent = [router for router, at_s in self._routers.items() if self._is_over(at_s)]
        for router in silent:
            del self._routers[router]
        return silent

    def expired_streams(self) -> list[StreamKey]:
        """Streams that nobody has wanted for longer than the lease, until they `end`."""
        return [key for key, at_s in self._streams.items() if self._is_over(at_s)]

    def _is_over(self, wanted_s: float) -> bool:
        return self._heard_s - wanted_s > self._lease_s
