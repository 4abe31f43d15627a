"""Writes one JSON line for each request that was answered, for billing.

The lines go to a rotating file in a thread of its own. On the event loop a line costs one append to a queue.
"""

from __future__ import annotations

import logging
import queue
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger("ray.serve")
_MAX_QUEUED = 16_384  # lines that wait for the disk; further ones are dropped and counted


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
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_QUEUED)
        self._file = _UsageFile(
            folder / f"{router_id}.jsonl",
            maxBytes=max_bytes,
            backupCount=num_files - 1,
            encoding="utf-8",
        )
        self._thread = threading.Thread(target=self._write, name="usage-log", daemon=True)
        self._thread.start()

    def put(self, line: dict[str, Any]) -> None:
        """Queue a line."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write the queued lines and end the thread. Call no other method afterwards."""
        self._lines.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            text = orjson.dumps(line).decode()
            self._file.emit(logging.makeLogRecord({"msg": text, "args": None}))


class _UsageFile(RotatingFileHandler):
    """Logs the first failure of a row of failures, instead of writing each to the standard error."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Log that lines are lost; called by `emit` while it handles the exception."""
        if not self._has_failed:
            self._has_failed = True
            logger.exception("usage log: writing failed, lines are lost")
