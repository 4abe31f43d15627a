"""Gives the CPU's cache its memory while the engine is idle, in a thread of its own.

A page's first write takes as long as the kernel needs to find and clear it, 0.5 to 3 GB/s: more than all else that is
done with a token's keys and values. Whoever starts an engine has not waited for that, and whoever sends the first
requests need not.

```
 engine's thread   warm up │ idle            │ steps ........ │ idle
 this thread               │ ▮ ▮ ▮ ▮ ▮ ▮ ▮ ▮ │                │ ▮ ▮ ▮ ▮ ends
```
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from quire.replica.machine import available_bytes

if TYPE_CHECKING:
    from quire.replica.device.kv_pool import KVPool

# While the kernel does that, nobody else in the process can map or unmap memory: some milliseconds.
CHUNK_BYTES = 4 << 20
_REST_S = 0.002  # after each, for whoever waits to do so
_NICENESS = 19
_POLL_S = 1.0  # how long the thread may outlive its pool


class PoolBacking:
    """Backs a pool, from its first block on, whenever it is allowed to.

    The thread ends when all of it is backed, when the machine has not twice the rest, so that others may need it
    first, or when the pool has gone or the engine is closed.
    """

    def __init__(self, pool: KVPool):
        self._pool = weakref.ref(pool)
        self._is_allowed = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def allow(self) -> None:
        """The engine is idle. Starts the thread when there is something to do for one."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="quire-backing", daemon=True)
            self._thread.start()
        self._is_allowed.set()

    def forbid(self) -> None:
        """A step begins; a chunk that has begun is still finished."""
        self._is_allowed.clear()

    def close(self) -> None:
        """Back no more, and wait for the chunk that has begun.

        Whoever lets the interpreter end must have called this: a thread that it stops while torch takes the
        interpreter's lock back ends the process with SIGABRT.
        """
        self._is_closed = True
        self._is_allowed.set()
        if self._thread is not None:
            self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; returns whether it has, or never was there."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            is_allowed = self._is_allowed.wait(_POLL_S)
            pool = self._pool()
            if self._is_closed or pool is None or not pool.unbacked_bytes:
                return
            if not is_allowed:
                continue
            if available_bytes("cpu") < 2 * pool.unbacked_bytes:
                return
            pool.back_next(CHUNK_BYTES)
            del pool
            time.sleep(_REST_S)
