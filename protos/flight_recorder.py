"""Flight recorder: the requests in a dead replica's last step, and whether the replica crashed.

There are two files in one folder. The record is a memory mapping, so the kernel keeps it however the process ends::

    int64:  step number, 0 between two steps │ n │ stream ids of the step's n rows ...

The crash report is text. The interpreter's fatal error handler writes it on SIGSEGV, SIGABRT, SIGBUS, SIGILL and
SIGFPE, and the watchdog writes it before it ends the process. A process that was killed from outside (SIGKILL, or by
the kernel when memory is low) has no report.
"""

from __future__ import annotations

import faulthandler
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_REPORT_BYTES = 4096
_HEADER = 2  # integers before the stream ids


@dataclass(frozen=True, slots=True)
class Flight:
    """The last state of a replica."""

    stream_ids: frozenset[int]  # streams in the running step; empty between two steps
    report: str  # beginning of the crash report; empty: the replica did not crash

    @property
    def crashed(self) -> bool:
        return bool(self.report)


class FlightRecorder:
    """Writes the record of one process. `begin` copies the ids.

    Parameters
    ----------
    path
        Path of the record; its folder is created. The report is `path` with `.crash` appended.
    max_rows
        Maximum number of rows in a step.
    """

    def __init__(self, path: Path, max_rows: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._record = np.memmap(path, np.int64, "w+", shape=(_HEADER + max_rows,))
        self._report = _report_path(path).open("w")

    def catch_fatal_signals(self) -> None:
        """Write a report before this process dies of a fatal signal such as SIGSEGV."""
        faulthandler.enable(self._report, all_threads=False)

    def begin(self, step: int, stream_ids: np.ndarray) -> None:
        """Record the streams of a step that is about to run, [n] int64."""
        count = len(stream_ids)
        self._record[_HEADER : _HEADER + count] = stream_ids
        self._record[1] = count
        self._record[0] = step

    def end(self) -> None:
        """Record that the step has returned or failed."""
        self._record[0] = 0

    def report(self, text: str) -> None:
        """Record why this process is about to end itself."""
        self._report.write(f"{text}\n")
        self._report.flush()
        os.fsync(self._report.fileno())


def read_flight(path: Path) -> Flight | None:
    """Read the record and the report of a dead process; None if there are none."""
    try:
        record = np.fromfile(path, np.int64)
        with _report_path(path).open("rb") as file:
            report = file.read(MAX_REPORT_BYTES).decode(errors="replace")
    except OSError:
        return None
    if len(record) < _HEADER or not record[0]:
        return Flight(frozenset(), report)
    return Flight(frozenset(record[_HEADER : _HEADER + int(record[1])].tolist()), report)


def _report_path(path: Path) -> Path:
    return path.with_name(path.name + ".crash")
