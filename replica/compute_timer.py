"""Tells that a job has computed for too long, in processor time: on a busy machine no job is a slow one for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LEAST_WAIT_S = 0.01


class ComputeTimer:
    """Calls back, in a thread of its own, once a job's thread has computed for so long since the job began.

    Parameters
    ----------
    limit_s
        Seconds of the thread's processor time.
    on_late
        Called at most once, and not after `end` has returned.
    """

    def __init__(self, limit_s: float, on_late: Callable[[], None]):
        self._limit_s = limit_s
        self._on_late = on_late
        self._lock = threading.RLock()  # `on_late` may end the job's timer
        self._is_over = False
        self._clock = 0  # of the job's thread
        self._began_s = 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """The job begins, in the thread that calls this."""
        with self._lock:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._began_s = time.clock_gettime(self._clock)
            self._wait(self._limit_s)

    def end(self) -> None:
        """The job has ended; its thread is still there. Idempotent."""
        with self._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = threading.Timer(max(seconds, _LEAST_WAIT_S), self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            if self._is_over:  # the thread may be gone, and its clock with it
                return
            left_s = self._limit_s - (time.clock_gettime(self._clock) - self._began_s)
            if left_s > 0:
                self._wait(left_s)
                return
            self._is_over = True
            self._on_late()
