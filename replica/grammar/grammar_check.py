"""Asks a process of its own whether a grammar can be compiled and served: the engine's side of `check_process.py`.

Compilers of grammars have inputs of a kilobyte that take gigabytes and minutes, inside calls that nothing can
interrupt. So each grammar is first compiled in a child that can be killed.
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

_START_S = 60.0  # for Python, llguidance and a tokenizer of 200,000 tokens on a busy machine
_END_S = 1.0
# Ray changes sys.path of its workers, which a new interpreter would not have.
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from quire.replica.grammar.check_process import main
main()
"""
_ANSWER_MARGIN_S = 5.0  # beyond the child's wall clock


class Outcome(StrEnum):
    """What a judge says of a grammar."""

    GOOD = "good"
    INVALID = "invalid"  # the compiler refuses it; it says why
    SLOW = "slow"  # its processor time is used up
    LARGE = "large"  # its memory is used up
    CRASH = "crash"  # it ended the child
    LATE = "late"  # its wall clock is used up: the machine's fault as well
    UNUSABLE = "unusable"  # the tokenizer, not the grammar


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The answer of a judge, and why."""

    outcome: Outcome
    message: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one judgement may take."""

    cpu_s: float
    wall_s: float
    nice: int


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen
    connection: socket.socket
    lines: Any = field(repr=False)


class GrammarChecker:
    """One judging process, started when the first grammar comes and again when it has died.

    `judge` is for one thread; `close` for any.
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
        """Of the process, None when there is none."""
        process = self._process
        return None if process is None else process.popen.pid

    def check(self, kind: str, text: str) -> CheckResult:
        """Compile a grammar of `protos.wire` within the budget, and compute some masks.

        Raises
        ------
        EngineError
            The judging process cannot run.
        """
        job = {
            "kind": kind,
            "text": text,
            "json_white_space": self._json_white_space,
            "cpu_s": self._budget.cpu_s,
            "wall_s": self._budget.wall_s,
        }
        for _ in range(2):  # the process may have been killed since the last grammar, or for memory
            try:
                return self._ask(job)
            except (OSError, ValueError) as error:
                self._stop()
                reason = error
        raise EngineError(f"the process that checks grammars has died twice: {reason}")

    def close(self) -> None:
        """End the process; a judgement that runs raises."""
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
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
            self._process = _Process(popen, ours, ours.makefile("rb"))
            return self._process

    def _stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.connection.shutdown(
                socket.SHUT_RDWR
            )  # it ends, and the child that it has forked
        try:
            process.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
        # A thread that reads now finds the end, and lets go of `lines`.
        process.lines.close()
        process.connection.close()


def _receive(process: _Process, timeout_s: float) -> dict[str, Any]:
    process.connection.settimeout(timeout_s)
    line = process.lines.readline()
    if not line:
        raise ConnectionError("its connection has ended")
    message: dict[str, Any] = json.loads(line)
    return message
