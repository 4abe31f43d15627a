"""The engine's loop: one thread that reads mail, plans, launches, collects, commits and sends.

With `plans_ahead`, a step is planned and launched while the previous step runs; then the tokens of the previous step
are read::

    host     plan 1, launch 1 | plan 2, launch 2 | collect 1, commit 1, send | plan 3, launch 3 | collect 2, ...
    device                    [ step 1 ................ ][ step 2 ........................ ][ step 3 ...

A step is in flight from its launch until it is collected. If the scheduler cannot plan without the tokens of the step
in flight, it returns no plan, and the tokens are read first. If only sampling needs these tokens, the next step is
launched up to its logits, and sampling is queued after the commit::

    host     launch 2 to logits | collect 1, commit 1, masks, sample 2, send | launch 3 to logits | collect 2, ...
    device   step 1 .......... ][ forward 2 .......................... ][ sample 2 ][ forward 3 ...

Without `plans_ahead`, every step is collected immediately after its launch; nothing else differs.

The loop owns the scheduler and the runner, and no other thread touches them while it runs. Other threads use the
mailbox: a queue of closures that the loop runs between two steps. An idle loop sleeps on the mailbox's condition and
uses no CPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

import numpy as np

from quire.protos.errors import StepFailed, Unavailable
from quire.protos.flight_recorder import FlightRecorder
from quire.protos.metric_families import Histogram
from quire.protos.wire import AdapterReport, CacheEvents, Load, TokenDelta
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.core.step_plan import CopiesDone, SamplingBatch, StepPlan, StepResult
from quire.replica.device.time_counters import HostTime
from quire.replica.scheduler.scheduler import Scheduler
from quire.replica.watchdog import StepWatch

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Covers small batches on a GPU to long chunks on a CPU.
STEP_BOUNDARIES_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_NO_MARK = contextlib.nullcontext()
# An idle engine looks so often whether the copies between its tiers have ended.
_COPY_POLL_S = 0.001


class StepRunner(Protocol):
    """The part of the runner that the loop uses."""

    @property
    def num_compiles(self) -> int: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, in_flight: Any, sampling: SamplingBatch) -> None:
        """Queue the sampling of a step that had to wait for the previous step's tokens."""
        ...

    def collect(self, in_flight: Any) -> StepResult: ...

    def take_copies(self) -> CopiesDone:
        """Return which copies between the tiers have ended since the last call or result."""
        ...

    def telemetry(self) -> dict[str, object]:
        """Counters of device time, graphs and copies since the start."""
        ...

    def use_idle(self) -> bool:
        """Prepare for later steps, for at most 1 s; return False if there was nothing to prepare."""
        ...

    def close(self) -> None:
        """End background work that `use_idle` has started. No step may follow."""
        ...


@dataclass(slots=True)
class LoopOutput:
    """Output of one turn of the loop."""

    deltas: DeltaBatch = field(default_factory=lambda: DeltaBatch([]))
    events: CacheEvents | None = None
    events_seq: int = 0
    digest: int = 0
    load: Load = field(default_factory=Load)
    adapters: AdapterReport | None = None  # the newest report


class EngineLoop:
    """Runs steps until closed.

    Parameters
    ----------
    scheduler, runner
        Owned by the loop from now on.
    on_output
        Called in the loop's thread after every turn with output; must not block or raise.
    clock
        Monotonic seconds.
    step_timeout_s
        Seconds that any step may take before `step_watch` reports it as hung.
    recorder
        Records the requests of every step in a file that can be read after a crash.
    plans_ahead
        Launch a step before the previous one is collected.
    mark
        Marks parts of the loop for a profiler.
    save_blocks
        Copies blocks to the host tier while no step is in flight.
    adapter_report
        Returns the newest report of the engine's adapters; called after every turn.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        on_output: Callable[[LoopOutput], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        step_timeout_s: float = 10.0,
        recorder: FlightRecorder | None = None,
        plans_ahead: bool = False,
        mark: Callable[[str], AbstractContextManager[None]] | None = None,
        save_blocks: Callable[[np.ndarray], None] | None = None,
        adapter_report: Callable[[], AdapterReport | None] | None = None,
    ):
        self.step_watch = StepWatch(step_timeout_s, clock)
        self._scheduler = scheduler
        self._runner = runner
        self._on_output = on_output
        self._recorder = recorder
        self._mark = mark or (lambda name: _NO_MARK)
        self._save_blocks = save_blocks
        self._adapter_report = adapter_report or (lambda: None)
        self._adapters_seq = 0  # of the last report that was sent
        self._busy_s: float | None = None  # end of the last step; None while idle
        self._clock = clock
        self._max_in_flight = (
            1 if plans_ahead else 0
        )  # steps in flight while the next one is planned
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()  # launched, not collected
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.num_failed_in_a_row = 0  # consecutive failed steps
        self.time = HostTime()
        self.step_seconds = Histogram(STEP_BOUNDARIES_S)  # of successful steps
        # Deltas (new output of requests) of this turn, except those of a committed step.
        self._deltas: list[TokenDelta] = []
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop after the running step and join the thread for at most `timeout_s`; live requests end with `abort`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        # A finaliser that runs in the loop's own thread may close the engine.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def load(self) -> Load:
        """Return the load for the router's cost; a reading from another thread may be one step old."""
        busy_s = self._busy_s
        stalled_s = 0.0 if busy_s is None else max(0.0, self._clock() - busy_s)
        return self._scheduler.load(self._runner.num_compiles, stalled_s)

    def post(self, action: Callable[[Scheduler], TokenDelta | None]) -> None:
        """Run `action` in the loop between two steps. If it returns a delta, the loop sends it.

        Raises
        ------
        Unavailable
            The loop has been closed or has failed.
        """

        def run() -> None:
            delta = action(self._scheduler)
            if delta is not None:
                self._deltas.append(delta)

        self._put(run)

    def call(self, action: Callable[[Scheduler], T]) -> Future[T]:
        """Run `action` in the loop between two steps; the future gets its result or exception.

        Raises
        ------
        Unavailable
            The loop has been closed or has failed.
        """
        future: Future[T] = Future()

        def run() -> None:
            # The caller may have cancelled the future; from now on it cannot.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action(self._scheduler))
            except Exception as error:
                future.set_exception(error)

        self._put(run)
        return future

    def _put(self, mail: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise Unavailable("the engine is closed")
            self._mail.append(mail)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            logger.exception("the engine's loop failed")
        self._end()

    def _turn(self) -> None:
        self._drain_mailbox()
        began = perf_counter()
        with self._mark("plan"):
            plan = self._scheduler.plan(self._clock())
        if plan is not None:
            self.time.plan_s += perf_counter() - began
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._max_in_flight):
            self._send(self._collect())
            self._busy_s = self._clock()
        elif plan is not None:
            self._send(DeltaBatch([]))  # send ended requests without waiting for the step
            self._busy_s = self._clock()
        else:
            self._busy_s = None
            copies = self._runner.take_copies()
            self._scheduler.note_copies(copies)
            self._send(DeltaBatch(self._scheduler.take_ended()))
            if not copies.are_all:
                self._sleep(self._clock() + _COPY_POLL_S)
                return
            # A leak of blocks or rows ends the engine while it is idle, and Serve starts another replica.
            self._scheduler.check_idle()
            if self._publish():
                return
            if self._mail or not self._runner.use_idle():
                self._sleep(self._scheduler.next_deadline_s())

    def _publish(self) -> bool:
        """While the engine is idle, copy some filled blocks to the node's pool. Returns whether there were any."""
        if self._save_blocks is None:
            return False
        pairs = self._scheduler.plan_idle_copies()
        if len(pairs):
            self.step_watch.begin("a save of blocks", 0.0)
            self._save_blocks(pairs)
            self.step_watch.end()
        self._scheduler.end_idle_copies()
        return len(pairs) > 0

    def _end(self) -> None:
        """Run late mail, end every live request with `abort`, and send both results."""
        with self._wake:
            self._closing = True
        self.step_watch.close()
        try:
            self._drain_mailbox()
            self._deltas.extend(self._scheduler.abort_all())
            self._send(DeltaBatch([]))
        except Exception:  # after a failed turn the scheduler may be inconsistent
            logger.exception("the engine's loop could not end its requests")
        self._runner.close()

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step. If that fails, collect the steps in flight, then end the requests of this step."""
        if not self._in_flight:
            self.step_watch.begin(f"step {plan.step}", self._predicted_s(plan))
        self._record(plan)
        began = perf_counter()
        try:
            with self._mark("launch"):
                self._in_flight.append((plan, self._runner.launch(plan)))
            self.time.launch_s += perf_counter() - began
            self.time.num_steps += 1
        except Exception as error:
            while self._in_flight:  # earlier steps may succeed
                self._deltas.extend(self._collect())
            if self._scheduler.num_in_flight:  # 0 if an earlier step failed, and this one with it
                self._deltas.extend(self._fail(plan, error))
            self._watch_next()

    def _collect(self) -> DeltaBatch:
        """Wait for the oldest step in flight and commit it."""
        plan, launched = self._in_flight.popleft()
        began = perf_counter()
        try:
            with self._mark("wait"):
                result = self._runner.collect(launched)
        except Exception as error:
            return DeltaBatch(self._fail(plan, error))
        finally:
            self._watch_next()
        self.num_failed_in_a_row = 0
        self.step_seconds.observe(result.duration_s)
        collected = perf_counter()
        self.time.wait_s += collected - began
        with self._mark("commit"):
            deltas = self._scheduler.commit(plan, result, self._clock())
        self.time.commit_s += perf_counter() - collected
        if len(self._in_flight) > self._scheduler.num_in_flight:  # the commit found a wrong result
            self._abandon()
        return self._sample_next(deltas)

    def _sample_next(self, deltas: DeltaBatch) -> DeltaBatch:
        """Queue the sampling of the next step if it waits for the tokens just committed, and return their deltas.

        If this fails, send them, and return the last deltas of the failed requests.
        """
        if not self._in_flight or not self._in_flight[0][0].awaits_tokens:
            return deltas
        plan, launched = self._in_flight[0]
        began = perf_counter()
        try:
            with self._mark("sample"):
                self._runner.sample(launched, self._scheduler.complete(plan))
        except Exception as error:
            self._send(deltas)
            deltas = DeltaBatch(self._fail(plan, error))
        self.time.sample_s += perf_counter() - began
        return deltas

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenDelta]:
        """End the requests of a failed step and of the steps behind it, and clear the prefix cache.

        The failed step may have left incomplete KV, which the steps behind it have read. Other requests continue.
        """
        logger.error("step %d failed", plan.step, exc_info=error)
        self.num_failed_in_a_row += 1
        self._abandon()
        message = f"the engine failed in step {plan.step} ({type(error).__name__})"
        deltas = self._scheduler.fail_step(plan, StepFailed(message))
        self._scheduler.clear_cache()
        return deltas

    def _abandon(self) -> None:
        """Wait for the steps in flight and discard their results."""
        while self._in_flight:
            _, launched = self._in_flight.popleft()
            with contextlib.suppress(Exception):
                self._runner.collect(launched)

    def _watch_next(self) -> None:
        """Called when a step is over: watch the next step in flight."""
        self.step_watch.end()
        if self._in_flight:
            behind = self._in_flight[0][0]
            self.step_watch.begin(f"step {behind.step}", self._predicted_s(behind))
        elif self._recorder is not None:
            self._recorder.end()

    def _record(self, plan: StepPlan) -> None:
        """Record the requests of the step about to be launched and of the running step."""
        if self._recorder is not None:
            self._recorder.begin(plan.step, self._scheduler.stream_ids_in_flight)

    def _predicted_s(self, plan: StepPlan) -> float:
        return self._scheduler.speed.predicted_step_s(plan.num_tokens - plan.num_decode_rows)

    def _drain_mailbox(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _send(self, deltas: DeltaBatch) -> None:
        events = self._scheduler.events
        batch = events.flush()
        if self._deltas:
            deltas.whole[:0] = self._deltas
            self._deltas = []
        adapters = self._adapter_report()
        adapters_seq = 0 if adapters is None else adapters.seq
        if not len(deltas) and batch is None and adapters_seq == self._adapters_seq:
            return
        self._adapters_seq = adapters_seq
        began = perf_counter()
        with self._mark("send"):
            self._on_output(
                LoopOutput(deltas, batch, events.seq, events.digest, self.load(), adapters)
            )
        self.time.send_s += perf_counter() - began

    def _sleep(self, until_s: float | None) -> None:
        """Sleep until there is mail, or until the first deadline of a paused request."""
        with self._wake:
            while not self._mail and not self._closing:
                left_s = None if until_s is None else until_s - self._clock()
                if left_s is not None and left_s <= 0:
                    return
                self._wake.wait(left_s)
        self._busy_s = self._clock()
