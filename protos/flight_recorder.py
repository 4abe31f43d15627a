"""What a replica leaves behind when it dies: which requests its running step held, and whether it crashed.

Two files beside each other. The record is a mapping of memory, so the kernel keeps it whatever ends the process::

    int64:  step number, 0 between two steps │ n │ stream ids of the step's n rows ...

The crash report is text: the interpreter's fatal error handler writes it on SIGSEGV, SIGABRT, SIGBUS, SIGILL and
SIGFPE, and the watch over the steps before it ends the process. A process that was killed from outside (SIGKILL, or
the kernel when memory is short) has written none.
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
class FlightRecord:
    """The last moments of a replica."""

    stream_ids: frozenset[int]  # of the step that ran; empty between two steps
    report: str  # how the crash report begins; empty: it did not crash by itself

    @property
    def crashed(self) -> bool:
        return bool(self.report)


class FlightRecorder:
    """Writes the record of one process. `begin` and `end` cost a copy of the ids each.

    Parameters
    ----------
    path
        Of the record; its folder is made. The report is `path` with `.crash` appended.
    max_rows
        Most rows of a step.
    """

    def __init__(self, path: Path, max_rows: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._record = np.memmap(path, np.int64, "w+", shape=(_HEADER + max_rows,))
        self._report = _report_path(path).open("w")

    def catch_fatal_signals(self) -> None:
        """From now on this process writes a report before it dies of a signal of its own making."""
        faulthandler.enable(self._report, all_threads=False)

    def begin(self, step: int, stream_ids: np.ndarray) -> None:
        """A step with these rows, [n] int64, is about to run."""
        count = len(stream_ids)
        self._record[_HEADER : _HEADER + count] = stream_ids
        self._record[1] = count
        self._record[0] = step

    def end(self) -> None:
        """It has returned, or failed in a way that this process lives to tell."""
        self._record[0] = 0

    def report(self, text: str) -> None:
        """Write down why this process is about to end itself."""
        self._report.write(f"{text}\n")
        self._report.flush()
        os.fsync(self._report.fileno())


def read_flight_record(path: Path) -> FlightRecord | None:
    """What a dead process has left; None when there is nothing to be read."""
    try:
        record = np.fromfile(path, np.int64)
        with _report_path(path).open("rb") as file:
            report = file.read(MAX_REPORT_BYTES).decode(errors="replace")
    except OSError:
        return None
    if len(record) < _HEADER or not record[0]:
        return FlightRecord(frozenset(), report)
    return FlightRecord(frozenset(record[_HEADER : _HEADER + int(record[1])].tolist()), report)


def _report_path(path: Path) -> Path:
    return path.with_name(path.name + ".crash")
