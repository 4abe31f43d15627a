"""Locks on bytes of the pool file, which the kernel releases when their process dies.

```
 byte 0        the mutex: held for microseconds by the member that changes headers
 byte 1 + i    held by member i while it lives
```

They are locks of the open file description (`F_OFD_SETLK`): they exclude other openings of the file, also by threads
of one process, and end with the process, however it dies. A child that only forks would keep them, so a process that
joins a pool starts its children with exec, which closes the file. The ranks of a replica get the leader's opening. So
its member lives until the last of them has ended: no other member uses a slot to which a rank may still write.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import time

_FLOCK = struct.Struct("hhqqi4x")
_UNLOCKED = struct.Struct("h")
_MUTEX = 0
_SEEK_SET = 0
# Pauses between two attempts to get the mutex.
_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 2e-3


class PoolLocks:
    """The locks of one opening of the pool file.

    Parameters
    ----------
    fd
        The open file.
    """

    def __init__(self, fd: int):
        self._fd = fd

    def lock(self, timeout_s: float) -> bool:
        """Take the mutex. Returns False if another member holds it for `timeout_s`, because it is stopped."""
        pause_s, end_s = _SHORTEST_PAUSE_S, 0.0
        while not self._set(fcntl.F_WRLCK, _MUTEX):
            now_s = time.monotonic()
            end_s = end_s or now_s + timeout_s
            if now_s >= end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def unlock(self) -> None:
        self._set(fcntl.F_UNLCK, _MUTEX)

    def join(self, member: int) -> bool:
        """Take the place of a member. Returns False if a living process has it."""
        return self._set(fcntl.F_WRLCK, 1 + member)

    def leave(self, member: int) -> None:
        self._set(fcntl.F_UNLCK, 1 + member)

    def is_alive(self, member: int) -> bool:
        """Whether another opening of the file has this place."""
        return self._is_locked(1 + member, 1)

    def has_others(self) -> bool:
        """Whether another opening of the file has a member's place."""
        return self._is_locked(1, 0)

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, _SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _is_locked(self, byte: int, count: int) -> bool:
        """Whether another opening of the file has locked a byte from `byte` on; `count` 0: to the end."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, _SEEK_SET, byte, count, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        (kind,) = _UNLOCKED.unpack_from(found)
        return bool(kind != fcntl.F_UNLCK)
