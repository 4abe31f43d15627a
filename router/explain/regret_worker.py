"""Computes the regret of a router's decisions in a thread, from what the router keeps to explain them.

Nothing is added to the path of a request. The thread takes at most `MAX_SHARE` of a core. It sleeps after every few
decisions, so it holds Python's lock for less than a millisecond at a time. It has the priority of its process: a thread
of a lower one could lose its core to another process while it holds the lock, and the router would wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from quire.router.explain.decisions import DecisionRing
from quire.router.explain.regret import RegretMeter, windows_of
from quire.router.status_types import RoutingRegret

logger = logging.getLogger("ray.serve")

PERIOD_S = 5.0
MAX_SHARE = 0.005
# Decisions between two sleeps, and their length: less than a quarter of a core even while it computes.
_FEW = 4
_REST_S = 0.001


class RegretWorker:
    """Replays the newest decisions of a ring from time to time.

    Parameters
    ----------
    clock
        The clock of the ring.

    Attributes
    ----------
    regrets
        The present estimates; the thread replaces the list.
    cpu_s
        Processor seconds that the thread has taken.
    """

    def __init__(self, ring: DecisionRing, clock: Callable[[], float] = time.monotonic):
        self.regrets: Sequence[RoutingRegret] = ()
        self.cpu_s = 0.0
        self._ring = ring
        self._clock = clock
        self._meter = RegretMeter()
        self._num_seen = 0
        self._num_replayed = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="regret", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def step(self) -> None:
        """Replay the decisions since the last step, or as many of them as the ring has kept."""
        began_s = time.thread_time()
        num_added = self._ring.num_added
        new = self._ring.snapshot()[-(num_added - self._num_seen) :]
        if num_added > self._num_seen:
            self._num_seen = num_added
            for window in windows_of(new, self._rest):
                self._meter.add(window, self._clock())
        self.regrets = self._meter.estimates(self._clock())
        self.cpu_s += time.thread_time() - began_s

    def _run(self) -> None:
        pause_s = PERIOD_S
        try:
            while not self._stopped.wait(pause_s):
                before_s = self.cpu_s
                self.step()
                pause_s = max(PERIOD_S, (self.cpu_s - before_s) / MAX_SHARE)
        except Exception:
            logger.exception("the regret of decisions is no longer computed")

    def _rest(self) -> None:
        self._num_replayed += 1
        if self._num_replayed % _FEW == 0:
            self._stopped.wait(_REST_S)
