"""Writes a router's decisions to disk, each with its inputs and its outcome; `quire router replay` reads them.

The file has one JSON object per line. The first line is the header. Each decision has a line, and a second one with its
outcome if the request got a first token:

    {"quire_decision_log": 2, "router": ..., "started": seconds since 1970}
    {"decision": 17, "policy": ..., "time": ..., "now_s": ..., "attempt": 1, "prompt_tokens": ..., "priority": 0,
     "chosen": replica, "fleet": {column: [of each replica], ..., "demand": {...}}}
    {"outcome": 17, "replica": ..., "cached_tokens": ..., "queue_s": ..., "ttft_s": ...}

The file contains sizes, seconds, replicas and one routing hash. It contains no prompt, no token, and no id or session
that a client chose. JSON has no infinity: null stands for it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from quire.router.policy.fleet_view import (
    COLUMN_NAMES,
    Demand,
    FleetView,
    PeerPrefixes,
    PrefillRows,
)
from quire.router.policy.policy import Ranking, RouteRequest
from quire.router.types import Explain

logger = logging.getLogger("ray.serve")
VERSION = 2
_MAX_QUEUED = 1024  # lines that wait for the disk; further ones are dropped and counted
_FACTS = (
    "replicas",
    "prior_s_per_work",
    "demand",
    "attention_context_tokens",
    "longest_prefix",
    "followers",
    "session_row",
)


class DecisionLogError(ValueError):
    """The file is not a decision log, or this version cannot read it."""


class DecisionLog:
    """Writes decisions to `FOLDER/ROUTER.jsonl` in a thread of its own.

    On the event loop, logging a decision costs a copy of the fleet's columns. If the disk is too slow, lines are
    dropped and counted in `num_dropped`.

    Parameters
    ----------
    folder
        Folder of the files; created if missing.
    router_id
        ROUTER in the file's name; also written in the header.
    max_bytes
        Bound on the size of the two files that are kept together. When the current file reaches half of it, the file is
        renamed to `ROUTER.1.jsonl`, replacing the older file of that name, and a new file is started.
    """

    def __init__(self, folder: Path, router_id: str, max_bytes: int):
        self.num_dropped = 0
        self._path = folder / f"{router_id}.jsonl"
        self._older_path = folder / f"{router_id}.1.jsonl"
        self.resize(max_bytes)
        self._header = {"quire_decision_log": VERSION, "router": router_id}
        self._num_decisions = 0
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_MAX_QUEUED)
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write, name="decision-log", daemon=True)
        self._thread.start()

    def decided(self, request: RouteRequest, ranking: Ranking, attempt: int, now_s: float) -> int:
        """Record a decision.

        Returns
        -------
        The decision's number, to be passed to `answered`.
        """
        self._num_decisions += 1
        self._put(
            {
                "decision": self._num_decisions,
                "policy": ranking.policy,
                "time": time.time(),
                "now_s": now_s,
                "attempt": attempt,
                "prompt_tokens": request.num_prompt_tokens,
                "priority": request.priority,
                "chosen": ranking.names()[0],
                "fleet": _copy(ranking.fleet),
            }
        )
        return self._num_decisions

    def answered(self, decision: int, explain: Explain) -> None:
        """Record the outcome of a decision, at the request's first token."""
        self._put(
            {
                "outcome": decision,
                "replica": explain.replica,
                "cached_tokens": explain.cached_tokens,
                "queue_s": explain.queue_s,
                "ttft_s": explain.ttft_s,
            }
        )

    def resize(self, max_bytes: int) -> None:
        """Change `max_bytes`. An older file larger than half of it stays until the next one replaces it."""
        self._max_file_bytes = max_bytes // 2

    def close(self) -> None:
        """Write the queued lines and end the thread. Call no other method afterwards."""
        self._lines.put(None)
        self._thread.join()

    def _put(self, line: dict[str, Any]) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def _write(self) -> None:
        try:
            more = True
            while more:
                with self._path.open("wb") as file:
                    more = self._fill(file)
                if more:
                    self._path.replace(self._older_path)
        except OSError as error:
            logger.error("decision log: writing failed, no further decisions are logged: %s", error)
            while self._lines.get() is not None:
                self.num_dropped += 1

    def _fill(self, file: Any) -> bool:
        """Write lines until the file is full; return False after the last line of the log."""
        num_bytes = file.write(_encode(self._header | {"started": time.time()}))
        while num_bytes < self._max_file_bytes:
            line = self._lines.get()
            if line is None:
                return False
            num_bytes += file.write(_encode(line))
            if self._lines.empty():
                file.flush()
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One decision read from a log.

    Attributes
    ----------
    time_s
        Seconds since 1970.
    now_s
        Time of the decision on the router's monotonic clock.
    chosen
        The replica that the policy ranked first.
    outcome
        The parsed outcome line; None if the request got no first token, or if the log does not contain the line.
    """

    router: str
    policy: str
    time_s: float
    now_s: float
    attempt: int
    request: RouteRequest
    fleet: FleetView
    chosen: str
    outcome: dict[str, Any] | None


def read(path: Path) -> Iterator[LoggedDecision]:
    """Read the decisions of one file, in the order in which they were made. An incomplete last line is ignored.

    Raises
    ------
    DecisionLogError
        A line is not valid; the message names the line.
    """
    waiting: dict[int, LoggedDecision] = {}
    outcomes: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    header = _decode(lines[0], path, 1)
    if header.get("quire_decision_log") != VERSION:
        raise DecisionLogError(
            f"{path}: line 1 must be the header of a decision log of version {VERSION}, got "
            f"{lines[0][:80]!r}"
        )
    for number, line in enumerate(lines[1:-1], 2):
        entry = _decode(line, path, number)
        try:
            if "outcome" in entry:
                outcomes[entry["outcome"]] = entry
            else:
                waiting[entry["decision"]] = _decision(entry, header)
        except (KeyError, TypeError, ValueError) as error:
            raise DecisionLogError(f"{path}: line {number}: {error!r}") from error
    for key, decision in waiting.items():
        yield dataclasses.replace(decision, outcome=outcomes.get(key))


def _decision(entry: dict[str, Any], header: dict[str, Any]) -> LoggedDecision:
    return LoggedDecision(
        router=header["router"],
        policy=entry["policy"],
        time_s=entry["time"],
        now_s=entry["now_s"],
        attempt=entry["attempt"],
        request=RouteRequest(
            entry["prompt_tokens"],
            priority=entry["priority"],
            is_continued=entry["attempt"] > 1,
        ),
        fleet=_fleet(entry["fleet"]),
        chosen=entry["chosen"],
        outcome=None,
    )


def _copy(fleet: FleetView) -> dict[str, Any]:
    """Copy the values of a view: the replica table keeps writing to the arrays while the line is queued."""
    facts = {name: getattr(fleet, name) for name in _FACTS}
    if fleet.peers is not None:
        facts["peers"] = dataclasses.asdict(fleet.peers)
    if fleet.prefill is not None:
        facts["prefill"] = dataclasses.asdict(fleet.prefill)
    if fleet.adapter_s is not None:
        facts["adapter_s"] = fleet.adapter_s.copy()
    return facts | {"demand": fleet.demand._asdict()} | fleet.named()


def _fleet(values: dict[str, Any]) -> FleetView:
    peers, prefill = values.pop("peers", None), values.pop("prefill", None)
    adapter_s = values.pop("adapter_s", None)
    known = {*_FACTS, *COLUMN_NAMES}
    if values.keys() != known:
        raise ValueError(f"fleet must have {sorted(known)}, got {sorted(values)}")
    facts = {name: values[name] for name in _FACTS}
    facts["demand"] = Demand(**values["demand"])
    named = {
        name: np.array([math.inf if v is None else v for v in values[name]], np.float64)
        for name in COLUMN_NAMES
    }
    if peers is not None:
        tokens, rows = np.array(peers["tokens"], np.float64), np.array(peers["rows"], np.int64)
        facts["peers"] = PeerPrefixes(tokens, rows, peers["s_per_token"])
    if prefill is not None:
        is_prefill = np.array(prefill["is_prefill"], bool)
        facts["prefill"] = PrefillRows(is_prefill, np.array(prefill["s_per_token"], np.float64))
    if adapter_s is not None:
        facts["adapter_s"] = np.array(adapter_s, np.float64)
    return FleetView.of(facts.pop("replicas"), named, **facts)


def _encode(line: dict[str, Any]) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _decode(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        return dict(orjson.loads(line))
    except (ValueError, TypeError):
        raise DecisionLogError(
            f"{path}: line {number} is not a JSON object: {line[:80]!r}"
        ) from None
