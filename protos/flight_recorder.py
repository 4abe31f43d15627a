"""The flight recorder: files that show, after a replica has ended, whether it crashed and with which requests.

There are two files in one folder. The record is a memory mapping, so the kernel keeps it after any end of the process::

    int64:  step number, 0 between two steps │ n │ stream ids of the step's n rows ...

The crash report is text. The interpreter's fatal error handler writes it on SIGSEGV, SIGABRT, SIGBUS, SIGILL and
SIGFPE, and the step watchdog writes it before it ends the process. A process that was killed from outside (SIGKILL, or
the kernel when memory is short) writes no report.
"""

from __future__ import annotations

import faulthandler
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_REPORT_BYTES = 4096
# Integers before the stream ids.
_HEADER = 2


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The contents of both files.

    Attributes
    ----------
    stream_ids
        The streams of the running step; empty between two steps.
    report
        The beginning of the crash report; empty if the process did not crash.
    """

    stream_ids: frozenset[int]
    report: str

    @property
    def crashed(self) -> bool:
        return bool(self.report)


class FlightRecorder:
    """Writes the record of one process. Cheap enough for each step: `begin` copies ids, `end` writes one integer.

    Parameters
    ----------
    path
        Path of the record; its folder is created. The report's path is `path` with `.crash` appended.
    max_rows
        Most rows (running requests) of a step.
    """

    def __init__(self, path: Path, max_rows: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._record = np.memmap(path, np.int64, "w+", shape=(_HEADER + max_rows,))
        self._report = _report_path(path).open("w")

    def catch_fatal_signals(self) -> None:
        """Let the interpreter write a report before a fatal signal ends this process."""
        faulthandler.enable(self._report, all_threads=False)

    def begin(self, step: int, stream_ids: np.ndarray) -> None:
        """Record that a step with these streams, [n] int64, begins."""
        count = len(stream_ids)
        self._record[_HEADER : _HEADER + count] = stream_ids
        self._record[1] = count
        self._record[0] = step

    def end(self) -> None:
        """Record that the step has returned, or has failed without ending the process."""
        self._record[0] = 0

    def report(self, text: str) -> None:
        """Write why this process is about to end itself."""
        self._report.write(f"{text}\n")
        self._report.flush()
        os.fsync(self._report.fileno())


def read_flight_record(path: Path) -> FlightRecord | None:
    """Read the files of a process that has ended; return None if they do not exist."""
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
