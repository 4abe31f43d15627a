"""Watchdog for hung steps. It is needed because a device that hangs reports no error.

A thread watches the duration of the running step. A step that takes longer than `step_timeout_s` and longer than
`SLACK` times its predicted duration counts as hung. Serve's health check then fails and the actor ends the process, so
that Serve starts another replica and routers migrate the streams immediately. Saves of an idle engine are watched like
a step: with several ranks they wait for all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLACK = 5.0
_LOOKS = 10  # checks per timeout


class StepWatch:
    """Holds the running step, its start and its time limit. One thread writes, any thread reads.

    Parameters
    ----------
    timeout_s
        Minimum time limit of a step in seconds.
    clock
        Monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self.timeout_s = timeout_s
        self._clock = clock
        self._running: tuple[str, float, float] | None = None  # name, begin and limit in seconds
        self._closed = threading.Event()

    def begin(self, name: str, predicted_s: float) -> None:
        """Start to watch a step before it is launched; `predicted_s` is 0 if no step was ever measured."""
        self._running = name, self._clock(), max(self.timeout_s, SLACK * predicted_s)

    def end(self) -> None:
        """Stop watching the running step, after it has returned or failed."""
        self._running = None

    def complaint(self) -> str | None:
        """Return why the running step counts as hung, or None."""
        running = self._running
        if running is None:
            return None
        name, began_s, limit_s = running
        taken_s = self._clock() - began_s
        if taken_s <= limit_s:
            return None
        return f"{name} has run for {taken_s:.1f} s; the limit is {limit_s:.1f} s"

    def watch(self, on_hang: Callable[[str], None]) -> threading.Thread:
        """Start a daemon thread that calls `on_hang` once, with the reason, when a step hangs."""

        def run() -> None:
            while not self._closed.wait(self.timeout_s / _LOOKS):
                complaint = self.complaint()
                if complaint is not None:
                    on_hang(complaint)
                    return

        thread = threading.Thread(target=run, name="quire-watchdog", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End the thread of `watch`."""
        self._closed.set()
