"""Faults on demand, for tests of what survives them; only with `fault_injection` in the configuration.

A request names its fault by its seed, which it keeps wherever it moves. It comes with the token at `FAULT_POSITION`
of prompt and output together:

| seed | what happens |
|---|---|
| `CRASH` | the process dies of a segmentation fault, on every replica that gets there |
| `RAISE` | the step raises, on every replica that gets there |
| `HANG` | the step does not return; on the next replica, where that token is the first, it does |
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np

from quire.replica.plan import StepPlan, StepResult

CRASH, RAISE, HANG = 0xFA017_0001, 0xFA017_0002, 0xFA017_0003
FAULT_POSITION = 64


class FaultyRunner:
    """A runner that does to its process what the seeds of its rows say; see `loop.StepRunner`."""

    def __init__(self, runner: Any):
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        batch = plan.sampling
        for i in np.flatnonzero(np.isin(batch.seed, (CRASH, RAISE, HANG))).tolist():
            seed, position = int(batch.seed[i]), int(batch.position[i])
            if seed == HANG and position == FAULT_POSITION and i < plan.num_decode_rows:
                threading.Event().wait()
            if seed == CRASH and position >= FAULT_POSITION:
                signal.raise_signal(signal.SIGSEGV)  # in this thread: the step does not go on
            if seed == RAISE and position >= FAULT_POSITION:
                raise RuntimeError("a fault that a test asked for")
        return self._runner.launch(plan)

    def collect(self, in_flight: Any) -> StepResult:
        return self._runner.collect(in_flight)
