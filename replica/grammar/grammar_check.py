"""Checks in a separate process whether a grammar can be compiled and served: the engine's side of `check_process.py`.

Compiling a grammar of one kilobyte can take gigabytes and minutes, in a call that cannot be interrupted. So each
grammar is first compiled in a child process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from quire.protos.errors import EngineError

# Time to start Python and load llguidance and a tokenizer of 200,000 tokens on a busy machine.
_START_S = 60.0
_END_S = 1.0
# Ray changes `sys.path` of its workers; the new interpreter needs the same.
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from quire.replica.grammar.check_process import main
main()
"""
# Seconds to wait for an answer in addition to the child's wall-clock limit.
_ANSWER_MARGIN_S = 5.0


class Outcome(StrEnum):
    """The result of a check."""

    GOOD = "good"
    # The compiler refuses the grammar.
    INVALID = "invalid"
    # The check exceeded its CPU time.
    SLOW = "slow"
    # The check exceeded its memory.
    LARGE = "large"
    # The grammar crashed the child.
    CRASH = "crash"
    # The check exceeded its wall-clock limit, perhaps because the machine is busy.
    LATE = "late"
    # llguidance cannot use the tokenizer, so every grammar is refused.
    UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check, and the reason."""

    outcome: Outcome
    message: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one check: CPU seconds, wall-clock seconds, and the `nice` value of the process."""

    cpu_s: float
    wall_s: float
    nice: int


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: socket.socket
    lines: Any = field(repr=False)


class GrammarChecker:
    """One checking process, started for the first grammar and again after it has died.

    Call `check` from one thread only; `close` from any.
    """

    def __init__(
        self,
        tokenizer_path: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        json_white_space: str,
        budget: Budget,
    ):
        self._options = {
            "tokenizer_path": str(tokenizer_path),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
            "nice": budget.nice,
        }
        self._json_white_space = json_white_space
        self._budget = budget
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None if no process runs."""
        process = self._process
        return None if process is None else process.popen.pid

    def check(self, kind: str, text: str) -> CheckResult:
        """Compile a grammar of `protos.wire` within the budget, and compute some masks.

        Raises
        ------
        EngineError
            The checking process cannot run.
        """
        job = {
            "kind": kind,
            "text": text,
            "json_white_space": self._json_white_space,
            "cpu_s": self._budget.cpu_s,
            "wall_s": self._budget.wall_s,
        }
        # Retry once: the process may have died since the last check, for example when the kernel was short of memory.
        for _ in range(2):
            try:
                return self._ask(job)
            except (OSError, ValueError) as error:
                self._stop()
                reason = error
        raise EngineError(f"the process that checks grammars has died twice: {reason}")

    def close(self) -> None:
        """End the process. A `check` that is running in another thread raises."""
        with self._lock:
            self._is_closed = True
        self._stop()

    def _ask(self, job: dict[str, Any]) -> CheckResult:
        process = self._process
        if process is None:
            process = self._start()
            ready = _receive(process, _START_S)
            if ready["outcome"] == Outcome.UNUSABLE:
                self._stop()
                return CheckResult(Outcome.UNUSABLE, ready["message"])
        process.connection.sendall(json.dumps(job).encode() + b"\n")
        answer = _receive(process, self._budget.wall_s + _ANSWER_MARGIN_S)
        answer["outcome"] = Outcome(answer["outcome"])
        return CheckResult(**answer)

    def _start(self) -> _Process:
        ours, theirs = socket.socketpair()
        options = json.dumps({**self._options, "fd": theirs.fileno(), "path": sys.path})
        with self._lock, theirs:
            if self._is_closed:
                ours.close()
                raise EngineError("the engine is closed")
            popen = subprocess.Popen(
                [sys.executable, "-c", _MAIN, options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # In a new session, Ctrl-C in a terminal does not reach the process.
                start_new_session=True,
            )
            self._process = _Process(popen, ours, ours.makefile("rb"))
            return self._process

    def _stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        # The closed connection makes the process kill its child and exit.
        with contextlib.suppress(OSError):
            process.connection.shutdown(socket.SHUT_RDWR)
        try:
            process.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
        # A thread blocked in `lines.readline` now gets the end of the stream, so `lines.close` can take its lock.
        process.lines.close()
        process.connection.close()


def _receive(process: _Process, timeout_s: float) -> dict[str, Any]:
    process.connection.settimeout(timeout_s)
    line = process.lines.readline()
    if not line:
        raise ConnectionError("its connection has ended")
    message: dict[str, Any] = json.loads(line)
    return message
