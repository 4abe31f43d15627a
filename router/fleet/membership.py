"""Passes the list of running replicas from Serve's request router to our bus.

Serve pickles our `RequestRouter` class by value and makes the instance itself, in the process of the deployment that
holds the handle, possibly in another thread. So the bus and the instance can share only a module that both import by
reference. Therefore the registry below is process-wide: the one exception to "no module-level mutable state".
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Listener = Callable[[frozenset[str]], None]


class Membership:
    """The running replicas of one deployment, by the unique ids that Serve gives them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: frozenset[str] = frozenset()
        self._listener: Listener | None = None

    @property
    def members(self) -> frozenset[str]:
        return self._members

    def update(self, members: frozenset[str]) -> None:
        """Set the members. If they changed, call the listener in the caller's thread."""
        with self._lock:
            self._set(members)

    def discard(self, member: str) -> None:
        """Remove a replica after its actor died."""
        with self._lock:
            self._set(self._members - {member})

    def listen(self, listener: Listener) -> frozenset[str]:
        """Call `listener` with the members at every later change, and return the present members.

        There is one listener; a second call replaces it. The lock is held during the call, so that the listener sees
        changes in their order. It must not block or call methods of this object.
        """
        with self._lock:
            self._listener = listener
            return self._members

    def unlisten(self, listener: Listener) -> None:
        """Stop calling `listener`; do nothing if another listener replaced it."""
        with self._lock:
            # Two bound methods of one object are equal, but not identical.
            if self._listener == listener:
                self._listener = None

    def _set(self, members: frozenset[str]) -> None:
        if members != self._members:
            self._members = members
            if self._listener is not None:
                self._listener(members)


_channels: dict[str, Membership] = {}
_channels_lock = threading.Lock()


def channel(name: str) -> Membership:
    """Return the membership with this name in this process; make it on first use."""
    with _channels_lock:
        return _channels.setdefault(name, Membership())
