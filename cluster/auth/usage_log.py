"""Writes one JSON line for each request that was answered, for billing.

A thread makes the lines and writes them to a rotating file, several times a second. On the event loop a line costs one
append.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger("ray.serve")
WRITE_S = 0.2
_MAX_QUEUED = 65_536  # lines that wait for the disk; further ones are dropped and counted

MakeLine = Callable[[], dict[str, Any]]


class UsageLog:
    """Writes `FOLDER/ROUTER.jsonl`; full files become `ROUTER.jsonl.1`, `ROUTER.jsonl.2` and so on, the oldest last.

    Parameters
    ----------
    max_bytes
        A file is full before a line would make it longer.
    num_files
        Most files that are kept, the current one included; at least 2.
    """

    def __init__(self, folder: Path, router_id: str, *, max_bytes: int, num_files: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._lines: deque[MakeLine] = deque()
        # Only its renaming of full files is used.
        self._file = RotatingFileHandler(
            folder / f"{router_id}.jsonl", backupCount=num_files - 1, encoding="utf-8"
        )
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def put(self, make_line: MakeLine) -> None:
        """Queue a line. `make_line` is called in the thread."""
        if len(self._lines) < _MAX_QUEUED:
            self._lines.append(make_line)
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Write the queued lines and end the thread. Call no other method afterwards."""
        self._stop.set()
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_S):
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.error("usage log: writing failed, lines are lost: %s", error)

    def _write(self) -> None:
        """Write the queued lines; lines that were taken from the queue are lost if that fails."""
        file = self._bytes()
        num_bytes = file.tell()
        while self._lines:
            line = orjson.dumps(self._lines.popleft()(), option=orjson.OPT_APPEND_NEWLINE)
            if num_bytes and num_bytes + len(line) > self._max_bytes:
                self._file.doRollover()
                file, num_bytes = self._bytes(), 0
            file.write(line)
            num_bytes += len(line)
        file.flush()

    def _bytes(self) -> Any:
        """Return the open file, which is another one after each rollover. The lines need no encoding."""
        stream = self._file.stream
        if stream is None:
            # A rollover has failed after it closed the old file.
            stream = self._file.stream = self._file._open()
        return stream.buffer
