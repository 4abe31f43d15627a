"""Leases of streams and routers.

A stream is one request of a router; its attachment is the connection over which the replica sends tokens. Both usually
end when the router dies, but Serve's cancellation is best effort, and streams without a reader would hold their blocks
indefinitely. So each router renews the leases of its streams periodically. A stream that has not been renewed for
`LEASE_S` seconds ends, and so does the attachment of a router without renewals.

Leases expire only while some router sends renewals. If all routers die, the first renewal of a new router expires the
old leases.
"""

from __future__ import annotations

from collections.abc import Iterable

StreamKey = tuple[str, int]  # (router id, stream id)


class Leases:
    """Time of the last renewal of each router and stream, in seconds of the caller's monotonic clock.

    Parameters
    ----------
    lease_s
        Seconds for which a stream or a router is valid without a renewal.
    """

    def __init__(self, lease_s: float):
        self._lease_s = lease_s
        self._heard_s = 0.0  # time of the last renewal by any router
        self._routers: dict[str, float] = {}  # time of the last renewal
        self._streams: dict[StreamKey, float] = {}  # time of the last renewal

    def attach(self, router_id: str, now_s: float) -> None:
        """Add a router that has attached, or attached again."""
        self._routers[router_id] = now_s

    def begin(self, key: StreamKey, now_s: float) -> None:
        """Add a stream that has started."""
        self._streams[key] = now_s

    def end(self, key: StreamKey) -> None:
        """Remove a stream that has ended; ignores unknown ones."""
        self._streams.pop(key, None)

    def renew(self, router_id: str, stream_ids: Iterable[int], now_s: float) -> None:
        """Renew the leases of a router and of some of its streams; ignores unknown ones."""
        self._heard_s = now_s
        if router_id in self._routers:
            self._routers[router_id] = now_s
        for stream_id in stream_ids:
            key = router_id, stream_id
            if key in self._streams:
                self._streams[key] = now_s

    def expire_routers(self) -> list[str]:
        """Remove and return the routers with an expired lease, including those that have already detached."""
        silent = [router for router, at_s in self._routers.items() if self._is_over(at_s)]
        for router in silent:
            del self._routers[router]
        return silent

    def expired_streams(self) -> list[StreamKey]:
        """Streams with an expired lease that have not ended."""
        return [key for key, at_s in self._streams.items() if self._is_over(at_s)]

    def _is_over(self, wanted_s: float) -> bool:
        return self._heard_s - wanted_s > self._lease_s
