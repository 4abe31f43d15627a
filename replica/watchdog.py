"""The watch over the step: a device that hangs does not say so.

A thread of its own looks at how long the running step has taken. Beyond the larger of `step_timeout_s` and
`SLACK` times what the measured speed foretold, the step will not return: Serve's health check fails, and the
serving shell ends the process, so that Serve starts another replica and routers move the streams at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLACK = 5.0
_LOOKS = 10  # in the time of the timeout


class StepWatch:
    """Which step runs, since when, and how long it may. One thread writes, any thread reads.

    Parameters
    ----------
    timeout_s
        What every step may take, whatever was foretold.
    clock
        Monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self.timeout_s = timeout_s
        self._clock = clock
        self._running: tuple[int, float, float] | None = None  # number, begin and limit in seconds
        self._closed = threading.Event()

    def begin(self, step: int, predicted_s: float) -> None:
        """A step is about to be launched; 0 seconds are predicted while the speed is not known."""
        self._running = step, self._clock(), max(self.timeout_s, SLACK * predicted_s)

    def end(self) -> None:
        """The step has returned, or has failed."""
        self._running = None

    def complaint(self) -> str | None:
        """What is wrong with the running step; None while all is well."""
        running = self._running
        if running is None:
            return None
        step, began_s, limit_s = running
        taken_s = self._clock() - began_s
        if taken_s <= limit_s:
            return None
        return f"step {step} has run for {taken_s:.1f} s; the limit is {limit_s:.1f} s"

    def watch(self, on_hang: Callable[[str], None]) -> threading.Thread:
        """Start a daemon thread that calls `on_hang` once, with the complaint, when a step hangs."""

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
        """No more steps: the thread ends."""
        self._closed.set()
