"""Prefaults the CPU's KV pool (backs it with memory) while the engine is idle, in a thread of its own.

The first write to a page makes the operating system find and clear a page of memory, at 0.5 to 3 GB/s. This takes
longer than everything else that a step does with a token's keys and values. Prefaulting at start would delay the start;
without prefaulting, the first requests would be slower.

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

from quire.kernels.huge_pages import back_with_memory
from quire.replica.host_machine import available_bytes

if TYPE_CHECKING:
    from quire.replica.device.kv_pool import KVPool

# While the operating system backs a chunk, for some milliseconds, no other thread of the process can map or unmap
# memory.
CHUNK_BYTES = 4 << 20
# Pause after each chunk, in which other threads can map memory.
_REST_S = 0.002
_NICENESS = 19
# How long the thread may outlive its pool.
_POLL_S = 1.0


class PoolPrefault:
    """Backs a pool block by block, in the order of allocation, between calls of `allow` and `forbid`.

    The thread ends when the whole pool is backed, when less than twice the missing bytes is available on the machine,
    when the pool is freed, or when the engine is closed.
    """

    def __init__(self, pool: KVPool):
        self._pool = weakref.ref(pool)
        self._num_blocks = len(pool.data)
        self._block_bytes = pool.data[0].nbytes
        self._num_backed = 0  # blocks, from the first on
        self._is_allowed = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def allow(self) -> None:
        """Called when the engine becomes idle: let the thread back memory; start the thread if it has not run yet."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="quire-backing", daemon=True)
            self._thread.start()
        self._is_allowed.set()

    def forbid(self) -> None:
        """Called before a step: back no further chunk. A chunk that is being backed is still finished."""
        self._is_allowed.clear()

    def close(self) -> None:
        """Back no further chunk, wait for the current one and end the thread.

        Call it before the interpreter exits. If the interpreter stops a thread while torch reacquires the GIL, the
        process ends with SIGABRT.
        """
        self._is_closed = True
        self._is_allowed.set()
        if self._thread is not None:
            self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return True if it has ended or was never started."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def unbacked_bytes(self) -> int:
        """Bytes of the pool that are still to be backed; 0 if the operating system cannot back memory in advance."""
        return (self._num_blocks - self._num_backed) * self._block_bytes

    def back_next(self, num_bytes: int) -> None:
        """Back about `num_bytes` more of the pool, at least one block."""
        pool = self._pool()
        if pool is None:
            return
        end = min(self._num_backed + max(num_bytes // self._block_bytes, 1), self._num_blocks)
        done = back_with_memory(pool.data[self._num_backed : end])
        self._num_backed = end if done else self._num_blocks

    def _run(self) -> None:
        if sys.platform == "linux":  # where each thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            is_allowed = self._is_allowed.wait(_POLL_S)
            if self._is_closed or not self.unbacked_bytes or self._pool() is None:
                return
            if not is_allowed:
                continue
            if available_bytes("cpu") < 2 * self.unbacked_bytes:
                return
            self.back_next(CHUNK_BYTES)
            time.sleep(_REST_S)
