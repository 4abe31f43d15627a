"""Concurrent requests of an engine in this process, with the time of each token.

```
 turns     t0    t1    t2    t3    ...    t9    of the engine's loop, and the number of rows that got a token
 rows      2     5     8     8            8
                       └── full turns ──┘       only these are measured as steps of 8 rows
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput
from quire.replica.scheduler.scheduler import Scheduler
from tests.perf.gpu.engine.gpu_models import Checkpoint
from tests.perf.gpu.gpu_session import Row, Session, free_memory, significant

TIMEOUT_S = 180.0
_HOST_PARTS = ("plan", "launch", "commit", "send")


@dataclass(slots=True)
class Turns:
    """Output of the engine's loop while a crowd was served."""

    began_s: float = 0.0  # `time.perf_counter`, like all times here
    times_s: list[float] = field(default_factory=list)
    keys: list[list[int]] = field(default_factory=list)  # requests that got a token, by turn

    def arrivals_s(self, count: int) -> list[list[float]]:
        """[count] times of each request's tokens, in seconds after the start."""
        found: list[list[float]] = [[] for _ in range(count)]
        for time_s, keys in zip(self.times_s, self.keys, strict=True):
            for key in keys:
                found[key].append(time_s - self.began_s)
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """The engine's counters at the end of a turn."""

    at_s: float
    told: dict[str, Any]  # `Engine.telemetry`


class Crowd:
    """Owns an engine.

    Parameters
    ----------
    checkpoint
        The checkpoint to load.
    options
        More fields of `EngineArgs`.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, **options: Any):
        self._turns = Turns()
        self._open: set[int] = set()
        self._error: Exception | None = None
        self._done = threading.Event()
        self._on_full: Callable[[int], None] | None = None
        self._num_full = 0
        self._size = 0
        self.checkpoint = checkpoint
        self.engine = Engine(
            on_output=self._on_output,
            model=str(checkpoint.path),
            device=device,
            dtype=checkpoint.dtype,
            **options,
        )

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        at_s: Sequence[float] | None = None,
        on_full: Callable[[int], None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Turns:
        """Answer all prompts greedily, each with exactly `max_tokens` tokens.

        Parameters
        ----------
        at_s
            Send times in seconds after the start, ascending; by default all prompts are sent at once.
        on_full
            Called in the engine's thread after each full turn (every request got a token) with the number of earlier
            full turns.

        Raises
        ------
        TimeoutError
            The crowd takes longer than `timeout_s`.
        QuireError
            A request failed.
        """
        self._open, self._size = set(range(len(prompts))), len(prompts)
        self._error, self._on_full, self._num_full = None, on_full, 0
        self._done.clear()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
        self._turns = Turns(time.perf_counter())
        for i, request in enumerate(requests):
            if at_s is not None:
                time.sleep(max(0.0, self._turns.began_s + at_s[i] - time.perf_counter()))
            self.engine.submit(request)
        if not self._done.wait(timeout_s):
            left = len(self._open)
            raise TimeoutError(f"{left} of {self._size} requests are open after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._turns

    def read(self) -> Reading:
        """Read the counters; within `on_full`, these are of the end of the turn."""
        return Reading(time.perf_counter(), self.engine.telemetry())

    def call(self, action: Callable[[Scheduler], Any]) -> Any:
        """Run `action` between two steps; returns its result as a future."""
        return self.engine.call(action)

    def close(self) -> None:
        self.engine.close()

    def _on_output(self, output: LoopOutput) -> None:
        """Record a turn; runs in the engine's thread."""
        deltas = output.deltas
        keys = deltas.keys.tolist()
        keys += [delta.key for delta in deltas.whole for _ in delta.token_ids]
        if keys:
            self._turns.times_s.append(time.perf_counter())
            self._turns.keys.append(keys)
        ended = [delta for delta in deltas.whole if delta.finish_reason is not None]
        for delta in ended:
            self._open.discard(delta.key)
            self._error = self._error or delta.facts.error
        if len(keys) == self._size and self._on_full is not None:
            self._on_full(self._num_full)
            self._num_full += 1
        if ended and not self._open:
            self._done.set()


class Crowds:
    """Keeps the last engine for the next point with the same options, because loading 8B takes seconds."""

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._crowd: Crowd | None = None

    def get(self, checkpoint: Checkpoint, session: Session, **options: Any) -> Crowd:
        """An engine with this checkpoint and these options; another open engine is closed first."""
        key = (checkpoint.path, *sorted(options.items()))
        if key != self._key or self._crowd is None:
            self.close()
            self._crowd = Crowd(checkpoint, session.device.type, **options)
            self._key = key
        return self._crowd

    def close(self) -> None:
        """Close the engine and free the device's memory."""
        if self._crowd is not None:
            self._crowd.close()
            self._crowd = self._key = None
            free_memory()


def random_prompts(rows: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """[rows][length] ids in [3, vocab_size)."""
    return np.random.default_rng(seed).integers(3, vocab_size, (rows, length)).tolist()


def between(first: Reading, last: Reading) -> Row:
    """Means of the steps between two readings; the device's only if it queues its work.

    `gap_us` is the device's idle time between two steps; `host_ms` is the engine thread's work per step without
    waiting.
    """
    was, now = first.told, last.told
    num_steps = now["host"]["num_steps"] - was["host"]["num_steps"]
    row: Row = {}
    for part in _HOST_PARTS:
        row[f"{part}_ms"] = _mean(was["host"], now["host"], f"{part}_ms", "num_steps")
    row["host_ms"] = significant(sum(row[f"{part}_ms"] for part in _HOST_PARTS))
    row["steps"] = num_steps
    if "device" in now:
        row["gap_us"] = _mean(was["device"], now["device"], "gap_us", "num_gaps")
        row["busy_ms"] = _mean(was["device"], now["device"], "busy_ms", "num_steps")
        for counter in ("num_hits", "num_misses"):
            row[counter] = now["graphs"][counter] - was["graphs"][counter]
    return row


def _mean(was: dict[str, float], now: dict[str, float], mean: str, count: str) -> float:
    """The mean between two readings of a running mean."""
    between = now[count] - was[count]
    return significant((now[mean] * now[count] - was[mean] * was[count]) / max(between, 1))
