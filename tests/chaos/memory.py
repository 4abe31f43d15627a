"""What processes keep of memory, and whether it grows: for tests that look for leaks."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path


def private_bytes(pid: int) -> int:
    """Memory that would come free if the process ended (its unique set size).

    Not its resident set, which counts pages of Ray's object store and of libraries that others share.

    Raises
    ------
    OSError
        There is no such process.
    """
    kib = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")):
            kib += int(line.split()[1])
    return kib * 1024


def slope_mb_per_min(samples: Sequence[tuple[float, int]]) -> float:
    """Growth by the estimator of Theil and Sen: the median of the slopes between all pairs of samples.

    A cache that is filled in one go, or a peak, moves fewer than half of the pairs; a leak moves all.

    Parameters
    ----------
    samples
        Seconds and bytes, at least two.
    """
    slopes = [(b1 - b0) / (t1 - t0) for (t0, b0), (t1, b1) in combinations(samples, 2)]
    return statistics.median(slopes) * 60 / 1e6


class Sampler:
    """Reads the memory of processes once a period, in a thread of its own, while it is entered.

    Attributes
    ----------
    samples
        Of each process: seconds since the start, and bytes.
    """

    def __init__(self, pids: Iterable[int], period_s: float):
        self.samples: dict[int, list[tuple[float, int]]] = {pid: [] for pid in pids}
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: OSError | None = None

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and exc_info[0] is None:
            raise self._error

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._stop.wait(self._period_s):
            for pid, samples in self.samples.items():
                try:
                    samples.append((time.monotonic() - began_s, private_bytes(pid)))
                except OSError as error:  # it has ended, which no soak survives
                    self._error = error
                    return
