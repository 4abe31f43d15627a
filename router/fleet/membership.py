"""The running replicas as Serve lists them, passed from Serve's request router to our bus.

Serve pickles a `RequestRouter` class by value and makes the instance itself, in the process of the deployment that
holds the handle, possibly in another thread. Only a module that is imported by reference is the same object on both
sides, so the registry below is process-wide: the one exception to "no module-level mutable state".
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Listener = Callable[[frozenset[str]], None]


class Membership:
    """The running replicas of one deployment, by Serve's unique id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: frozenset[str] = frozenset()
        self._listener: Listener | None = None

    def update(self, members: frozenset[str]) -> None:
        """Set the members; the listener runs in the caller's thread when they changed."""
        with self._lock:
            self._set(members)

    def discard(self, member: str) -> None:
        """Remove a replica after its actor died."""
        with self._lock:
            self._set(self._members - {member})

    def listen(self, listener: Listener) -> frozenset[str]:
        """Call `listener` with the members at every later change; return the members now.

        There is one listener; a second call replaces it. The lock is held during the call, so that the listener sees
        changes in their order. It must not block or call methods of this object.
        """
        with self._lock:
            self._listener = listener
            return self._members

    def unlisten(self, listener: Listener) -> None:
        """Stop calling `listener`; do nothing if another listener replaced it."""
        with self._lock:
            if self._listener == listener:  # bound methods are equal, not identical
                self._listener = None

    def _set(self, members: frozenset[str]) -> None:
        if members != self._members:
            self._members = members
            if self._listener is not None:
                self._listener(members)


_channels: dict[str, Membership] = {}
_channels_lock = threading.Lock()


def channel(name: str) -> Membership:
    """Return this process's membership of a name, made on first use."""
    with _channels_lock:
        return _channels.setdefault(name, Membership())
