"""An engine in its own process, which is stopped while another engine is measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from quire.cluster.bench.engines import engine_adapters

_END_S = 20.0  # grace period before an engine is killed
_SETTLE_PERIOD_S = 1.0
_IDLE_CORES = 0.1  # an engine that uses fewer cores is idle


class EngineFailed(RuntimeError):
    """An engine could not be loaded or could not answer; the message has its name and its error."""


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """CPU time and memory of an engine's processes.

    `peak_rss_mib` is the sum of the processes' peaks; shared pages count once for each process.
    """

    cpu_s: float
    peak_rss_mib: float


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to run.

    `parse` reads one from `NAME[=JSON]`. The JSON may have `engine` (one of `engine_adapters.ENGINES`; default NAME),
    `model`, `dtype`, `threads`, `options`, `env` and `python`, the interpreter of the engine's environment.
    """

    name: str  # shown in tables
    engine: str
    model: str
    dtype: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def __post_init__(self) -> None:
        if self.engine not in engine_adapters.ENGINES:
            known = ", ".join(engine_adapters.ENGINES)
            raise ValueError(f"engine: must be one of {known}, got {self.engine!r}")
        if self.threads < 1:
            raise ValueError(f"threads: must be >= 1, got {self.threads}")

    @classmethod
    def parse(cls, text: str, *, model: str, dtype: str, threads: int) -> EngineSpec:
        """Parse a command-line argument; the keyword arguments are defaults.

        Raises
        ------
        ValueError
            A field is unknown or invalid; the message names it.
        """
        name, _, rest = text.partition("=")
        try:
            given = json.loads(rest) if rest else {}
        except ValueError as error:
            raise ValueError(f"engine {name}: not JSON: {error}") from None
        allowed = {"engine", "model", "dtype", "threads", "options", "env", "python"}
        if unknown := set(given) - allowed:
            raise ValueError(f"engine {name}: unknown {', '.join(sorted(unknown))}")
        return cls(
            **{
                "name": name,
                "engine": name,
                "model": model,
                "dtype": dtype,
                "threads": threads,
                **given,
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON, without paths of this machine."""
        return {
            "engine": self.engine,
            "model": Path(self.model).name,
            "dtype": self.dtype,
            "threads": self.threads,
            "options": dict(self.options),
            "env": {name: value for name, value in self.env.items() if "/" not in value},
        }


def wait_until_idle(used_s: Callable[[], float], most_s: float) -> float:
    """Wait until `used_s`, a reading of CPU seconds, stops growing, at most `most_s`. Returns the seconds waited."""
    began, now_s = time.perf_counter(), used_s()
    while time.perf_counter() - began < most_s:
        time.sleep(_SETTLE_PERIOD_S)
        before_s, now_s = now_s, used_s()
        if now_s - before_s < _IDLE_CORES * _SETTLE_PERIOD_S:
            break
    return time.perf_counter() - began


class EngineProcess:
    """A loaded engine in its own process.

    Parameters
    ----------
    log
        File for the engine's output.

    Raises
    ------
    EngineFailed
        The engine could not be loaded.
    """

    def __init__(self, spec: EngineSpec, log: TextIO):
        self.spec = spec
        facts = {
            "model": spec.model,
            "dtype": spec.dtype,
            "threads": spec.threads,
            "options": dict(spec.options),
        }
        command = ["env", *(f"{name}={value}" for name, value in spec.env.items())]
        # -I keeps the folder of engine_adapters.py off the import path.
        command += [spec.python, "-I", engine_adapters.__file__, spec.engine, json.dumps(facts)]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # one process group, which is stopped as a whole
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        try:
            self.startup: dict[str, float] = self._read()
        except BaseException:
            self.close()
            raise
        self.startup["ready_s"] = time.perf_counter() - began

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Generate `max_tokens` tokens for each prompt; returns `seconds` and `outputs`.

        Raises
        ------
        EngineFailed
            The engine failed, or an answer has another number of tokens.
        """
        request = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        try:
            self._stdin.write(json.dumps(request) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"{self.spec.name}: the process has ended") from None
        answer = self._read()
        lengths = {len(output) for output in answer["outputs"]}
        if len(answer["outputs"]) != len(prompts) or lengths != {max_tokens}:
            raise EngineFailed(
                f"{self.spec.name}: wanted {len(prompts)} answers of {max_tokens} tokens, got "
                f"{len(answer['outputs'])} of {sorted(lengths)}"
            )
        return answer

    @contextlib.contextmanager
    def awake(self) -> Iterator[EngineProcess]:
        """Let the engine run during the block; it is stopped before and after."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self._signal(signal.SIGSTOP)

    def usage(self) -> GroupUsage:
        """CPU time and memory of the engine's processes so far; zeros where /proc is absent."""
        cpu_ticks = peak_kib = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) != self._process.pid:
                    continue
                status = (folder / "status").read_text()
            # The process has ended.
            except OSError:
                continue
            cpu_ticks += int(fields[11]) + int(fields[12])
            peak_kib += int(status.partition("VmHWM:")[2].split()[0])
        return GroupUsage(cpu_ticks / os.sysconf("SC_CLK_TCK"), peak_kib / 1024)

    def settle(self, most_s: float) -> None:
        """Wait until the engine's background work no longer uses CPU, at most `most_s`; add the time to `startup`."""
        self.startup["settled_s"] = wait_until_idle(lambda: self.usage().cpu_s, most_s)

    def stop(self) -> None:
        """Stop the engine until the next `awake`."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._stdout.close()

    def _read(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            raise EngineFailed(f"{self.spec.name}: the process has ended; see its log")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{self.spec.name}: {answer['error']}")
        return answer

    def _signal(self, number: int) -> None:
        # Signal the group and not the process: the group exists as long as one of the engine's child processes runs.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
