"""Fault injection for tests: a request's label selects a fault of its replica.

The application uses `faulty_actor.FaultyReplica` instead of `Replica` only if `fault_injection` is set; no other code
of the serving path refers to it. A request selects a fault with its `x-request-id` (HTTP) or `request_id` (gRPC):

```
 fault:KIND[:NUMBER][!]@INDEX
```

The fault happens when the request's output token INDEX is computed or sent. It does not happen in attempts that
continue a stream from another replica, unless the label has `!`: then it follows the request from replica to replica.

| kind | NUMBER | effect |
|---|---|---|
| `kill` | | SIGKILL during the step, as if the process were killed from outside |
| `crash` | | a segmentation fault during the step |
| `hang` | seconds | the step does not return for this time |
| `slow` | milliseconds | this step and later steps with the request take this much longer |
| `fail` | | the step raises |
| `oom` | | an allocation fails in the step |
| `drag` | milliseconds | this step and all later steps take this much longer |
| `crawl` | milliseconds | as `drag`, and the engine measures the time as part of its steps, as on a slower device |
| `stretch` | factor | this step and all later steps take this many times as long, as `crawl` does; 1 ends it |
| `leak` | KiB | this step and all later steps leak this much memory |
| `clock` | seconds | the engine's clock jumps by this time, which may be negative |
| `forget` | seconds | the cache is cleared this long after the step started |
| `drop` | | the frame with the token is not sent |
| `lose` | | the frame is sent without the request's token, with the tokens of other requests |
| `duplicate` | | the frame is sent twice, followed by the frame before it |
| `delay` | seconds | this frame and all later ones are sent this much later |
| `corrupt` | | one bit of the frame is flipped |
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.protos.wire import Frame, Submit
from quire.replica.core.step_plan import CopiesDone, SamplingBatch, StepPlan, StepResult
from quire.replica.engine import Engine
from quire.replica.loop import StepRunner

logger = logging.getLogger("ray.serve")
IN_STEP = (
    "kill",
    "crash",
    "hang",
    "slow",
    "fail",
    "oom",
    "drag",
    "crawl",
    "stretch",
    "leak",
    "clock",
    "forget",
)
IN_STREAM = ("drop", "lose", "duplicate", "delay", "corrupt")
_LABEL = re.compile(r"fault:([a-z]+)(?::(-?[0-9.]+))?(!?)@([0-9]+)")


@dataclass(slots=True)
class Fault:
    """One fault that has not happened yet or is in effect."""

    kind: str
    number: float
    index: int  # of the output token
    router_id: str
    stream_id: int
    seed: int
    position: int  # of the token in the sequence
    fired: bool = False

    def is_in(self, plan: StepPlan) -> bool:
        """Whether the step computes the fault's token, or, for `slow`, this token or a later one of the request."""
        sampling, columns = plan.sampling, plan.sampling.columns
        mine = (columns["seed"] == np.uint64(self.seed)) & (columns["choice"] == 0)
        if self.kind == "slow":
            return bool((mine & (sampling.position >= self.position)).any())
        return bool((mine & (sampling.position == self.position)).any())


def parse(submit: Submit) -> Fault | None:
    """The fault that a request's label selects in this attempt, or None.

    Raises
    ------
    ValueError
        The label starts with `fault:` but does not have the form above or names an unknown kind.
    """
    if not submit.request_id.startswith("fault:") or submit.params.choice:
        return None
    match = _LABEL.fullmatch(submit.request_id)
    if match is None or match[1] not in IN_STEP + IN_STREAM:
        raise ValueError(f"no fault: {submit.request_id!r}")
    index = int(match[4])
    if submit.num_emitted and not match[3]:
        return None
    return Fault(
        match[1],
        float(match[2] or 0),
        index,
        submit.router_id,
        submit.stream_id,
        submit.params.seed,
        len(submit.prompt_ids) - submit.num_emitted + index,
    )


@dataclass(slots=True)
class Faults:
    """Armed faults and their lasting effects. Faults are armed in the event loop and happen in both threads."""

    waiting: list[Fault] = field(default_factory=list)
    clock_offset_s: float = 0.0
    drag_s: float = 0.0  # added to each step
    crawl_s: float = 0.0  # added to each step and to its measured duration
    stretch: float = 1.0  # factor of each step's duration, in addition
    leak_bytes: int = 0  # per step
    leaked: list[bytes] = field(default_factory=list)

    def arm(self, fault: Fault) -> None:
        self.waiting.append(fault)

    def now_s(self) -> float:
        """The engine's clock."""
        return time.monotonic() + self.clock_offset_s

    def of_step(self, plan: StepPlan) -> Iterator[Fault]:
        """Faults that happen in this step."""
        for fault in list(self.waiting):
            if fault.kind in IN_STEP and not fault.fired and fault.is_in(plan):
                fault.fired = fault.kind != "slow"
                yield fault

    def of_frame(self, router_id: str, frame: Frame) -> Fault | None:
        """The fault that happens to this frame, or None."""
        for fault in self.waiting:
            if fault.kind in IN_STREAM and fault.router_id == router_id and not fault.fired:
                for delta in frame.token_deltas():
                    ends = delta.index + len(delta.token_ids)
                    if delta.key == fault.stream_id and delta.index <= fault.index < ends:
                        fault.fired = True
                        return fault
        return None


class FaultyRunner:
    """A `StepRunner` with injected faults.

    Parameters
    ----------
    clear_cache
        Called in a new thread for `forget`.
    """

    def __init__(self, runner: StepRunner, faults: Faults, clear_cache: Callable[[], None]):
        self._runner = runner
        self._faults = faults
        self._clear_cache = clear_cache

    @property
    def num_compiles(self) -> int:
        return self._runner.num_compiles

    def launch(self, plan: StepPlan) -> Any:
        for fault in self._faults.of_step(plan):
            logger.warning("fault: %s %g in step %d", fault.kind, fault.number, plan.step)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "crash":
                signal.raise_signal(signal.SIGSEGV)  # in this thread, so the step does not continue
            elif fault.kind == "hang":
                time.sleep(fault.number)
            elif fault.kind == "slow":
                time.sleep(fault.number / 1000)
            elif fault.kind == "fail":
                raise RuntimeError("a fault was asked for")
            elif fault.kind == "oom":
                raise MemoryError("a fault was asked for")
            elif fault.kind == "drag":
                self._faults.drag_s = fault.number / 1000
            elif fault.kind == "crawl":
                self._faults.crawl_s = fault.number / 1000
            elif fault.kind == "stretch":
                self._faults.stretch = fault.number
            elif fault.kind == "leak":
                self._faults.leak_bytes = int(fault.number * 1024)
            elif fault.kind == "forget":
                threading.Timer(fault.number, self._clear_cache).start()
            else:
                self._faults.clock_offset_s += fault.number
        if self._faults.drag_s:
            time.sleep(self._faults.drag_s)
        if self._faults.leak_bytes:
            # Bytes other than zero, because the kernel allocates no memory for untouched zero pages.
            self._faults.leaked.append(b"\xff" * self._faults.leak_bytes)
        return self._runner.launch(plan)

    def sample(self, in_flight: Any, sampling: SamplingBatch) -> None:
        self._runner.sample(in_flight, sampling)

    def collect(self, in_flight: Any) -> StepResult:
        result = self._runner.collect(in_flight)
        more_s = self._faults.crawl_s + (self._faults.stretch - 1) * result.duration_s
        if more_s > 0:
            time.sleep(more_s)
            result = dataclasses.replace(result, duration_s=result.duration_s + more_s)
        return result

    def take_copies(self) -> CopiesDone:
        return self._runner.take_copies()

    def use_idle(self) -> bool:
        return self._runner.use_idle()

    def close(self) -> None:
        self._runner.close()

    def telemetry(self) -> dict[str, object]:
        return self._runner.telemetry()


class FaultyEngine(Engine):
    """An engine with injected faults in its steps."""

    def _equip(self, runner: StepRunner) -> tuple[StepRunner, Callable[[], float]]:
        self.faults = Faults()
        return FaultyRunner(runner, self.faults, self._forget), self.faults.now_s

    def _forget(self) -> None:
        self.call(lambda scheduler: scheduler.clear_cache()).result()


def disturbed(fault: Fault, data: bytes, before: bytes) -> list[bytes]:
    """The encoded frames to send instead of `data`. `before` is the encoded frame before it; empty for the first."""
    kind = fault.kind
    if kind == "drop":
        return []
    if kind == "lose":
        return [_without(Frame.decode(data), fault.stream_id).encode()]
    if kind == "duplicate":
        return [data, data, before] if before else [data, data]
    if kind == "corrupt":
        middle = len(data) // 2
        return [data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]]
    return [data]


def _without(frame: Frame, stream_id: int) -> Frame:
    if frame.tokens is None:
        return frame
    kept = frame.tokens.stream_ids != stream_id
    facts = [facts for facts, is_kept in zip(frame.facts, kept, strict=False) if is_kept]
    return dataclasses.replace(frame, tokens=frame.tokens.select(kept), facts=facts)
