"""A router's decisions on disk, for `quire router replay`: what each was made from, and what came of it.

One JSON object a line, of three kinds; a file begins with the first.

    {"quire_decision_log": 2, "router": ..., "started": seconds since 1970}
    {"decision": 17, "policy": ..., "time": ..., "now_s": ..., "attempt": 1, "prompt_tokens": ..., "priority": 0,
     "chosen": replica, "fleet": {column: [of each replica], ..., "demand": {...}}}
    {"outcome": 17, "replica": ..., "cached_tokens": ..., "queue_s": ..., "ttft_s": ...}

There are sizes, seconds, replicas and one routing hash; no prompt, no token, no id or session that a client
chose. JSON has no infinity: null stands for it.
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

from quire.router.policy.fleet_view import COLUMN_NAMES, Demand, FleetView
from quire.router.policy.policy import Ranking, RouteRequest
from quire.router.types import Explain

logger = logging.getLogger("ray.serve")
VERSION = 2
_MAX_QUEUED = 1024  # lines on their way to the disk; more are dropped and counted
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
    """A file that is no decision log, or not one that this version can read."""


class DecisionLog:
    """Writes decisions to `FOLDER/ROUTER.jsonl` in a thread of its own.

    The event loop pays for a copy of the fleet's columns and no more. Where the disk is too slow, lines are
    dropped rather than kept: `num_dropped` counts them.

    Parameters
    ----------
    folder
        Made if it is not there.
    router_id
        For the file's name and its first line.
    max_bytes
        Of all that is kept: at half of it the file becomes `ROUTER.1.jsonl`, in place of an older one, and
        another begins.
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
        Its number, for `answered`.
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
        """Record what came of a decision, at its first token."""
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
        """Keep so many bytes from now on; an older file that is larger stays until the next takes its place."""
        self._max_file_bytes = max_bytes // 2

    def close(self) -> None:
        """Write what is queued; nothing may be recorded afterwards."""
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
            logger.error("the decision log ends here: %s", error)
            while self._lines.get() is not None:
                self.num_dropped += 1

    def _fill(self, file: Any) -> bool:
        """Write lines until the file is full; False when that was the last one."""
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
    """One decision as it is read back."""

    router: str
    policy: str
    time_s: float  # since 1970
    now_s: float  # the router's clock
    attempt: int
    request: RouteRequest
    fleet: FleetView
    chosen: str  # replica
    outcome: (
        dict[str, Any] | None
    )  # see the module's text; None: no answer, or it is not in the log


def read(path: Path) -> Iterator[LoggedDecision]:
    """The decisions of one file, in their order. A last line that was cut off is left out.

    Raises
    ------
    DecisionLogError
        With the number of the line.
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
        request=RouteRequest(entry["prompt_tokens"], priority=entry["priority"]),
        fleet=_fleet(entry["fleet"]),
        chosen=entry["chosen"],
        outcome=None,
    )


def _copy(fleet: FleetView) -> dict[str, Any]:
    """What the policy knew; arrays are copies, since the table goes on writing to its own."""
    facts = {name: getattr(fleet, name) for name in _FACTS}
    return facts | {"demand": fleet.demand._asdict()} | fleet.named()


def _fleet(values: dict[str, Any]) -> FleetView:
    known = {*_FACTS, *COLUMN_NAMES}
    if values.keys() != known:
        raise ValueError(f"fleet must have {sorted(known)}, got {sorted(values)}")
    facts = {name: values[name] for name in _FACTS}
    facts["demand"] = Demand(**values["demand"])
    named = {
        name: np.array([math.inf if v is None else v for v in values[name]], np.float64)
        for name in COLUMN_NAMES
    }
    return FleetView.of(facts.pop("replicas"), named, **facts)


def _encode(line: dict[str, Any]) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _decode(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        return dict(orjson.loads(line))
    except (ValueError, TypeError):
        raise DecisionLogError(f"{path}: line {number} is no JSON object: {line[:80]!r}") from None
