"""The loop's order, its end, its failures and its sleep, with a real scheduler and a runner that only counts."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quire.protos.errors import DeadlineExceeded, EngineError, Overloaded, Unavailable
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.core.request import Request
from quire.replica.core.step_plan import CopiesDone, StepPlan, StepResult
from quire.replica.loop import EngineLoop, LoopOutput
from quire.replica.scheduler.scheduler import Scheduler

TIMEOUT_S = 10.0
CONFIG = EngineConfig(
    model_name="test",
    revision="",
    device="cpu",
    dtype="float32",
    vocab_size=100,
    eos_token_ids=(),
    max_model_len=512,
    block_size=64,  # that of routing: every full block is an event
    num_blocks=16,
    max_batch_tokens=256,
    max_running_requests=2,
    max_waiting_requests=4,
    safety_margin=0.0,
    scheduler="fifo",
    max_prefill_ms=None,
    resume_margin=0.0,
    prefix_caching=True,
    deterministic=True,
    num_threads=1,
)


class CountingRunner:
    """Samples 7 everywhere; `before_step` may raise or wait."""

    num_compiles = 0

    def __init__(self) -> None:
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.num_steps = 0
        self.is_closed = False

    def launch(self, plan: StepPlan) -> StepPlan:
        self.num_steps += 1
        self.before_step(plan)
        return plan

    def take_copies(self) -> CopiesDone:
        return CopiesDone()

    def use_idle(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True

    def collect(self, in_flight: StepPlan) -> StepResult:
        return StepResult(np.full(len(in_flight.sampling.token_index), 7, np.int64), 1e-3)


class Harness:
    """A running loop whose output can be waited for."""

    def __init__(self, config: EngineConfig = CONFIG, *, plans_ahead: bool = False) -> None:
        self.runner = CountingRunner()
        self.scheduler = Scheduler(config)
        self.outputs: list[LoopOutput] = []
        self.clock_offset_s = 0.0
        self._deltas: queue.Queue[TokenDelta] = queue.Queue()
        self._keys = itertools.count()
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            self._on_output,
            clock=lambda: time.monotonic() + self.clock_offset_s,
            plans_ahead=plans_ahead,
        )

    def _on_output(self, output: LoopOutput) -> None:
        self.outputs.append(output)
        for delta in output.deltas:
            self._deltas.put(delta)

    def submit(self, *, length: int = 4, max_tokens: int = 3, **changes: object) -> int:
        key = next(self._keys)
        tokens = (np.arange(length) + 11 * key) % 100
        request = Request(key, tokens, SamplingParams(max_tokens=max_tokens), **changes)
        self.loop.post(lambda scheduler: scheduler.add(request))
        return key

    def last_delta(self, key: int) -> TokenDelta:
        """Wait until the request ends; deltas of others on the way are dropped."""
        while True:
            delta = self._deltas.get(timeout=TIMEOUT_S)
            if delta.key == key and delta.finish_reason is not None:
                return delta

    def first_delta(self, key: int) -> TokenDelta:
        while True:
            delta = self._deltas.get(timeout=TIMEOUT_S)
            if delta.key == key:
                return delta

    def check(self) -> None:
        self.loop.call(lambda scheduler: scheduler.check()).result(TIMEOUT_S)


@pytest.fixture(params=[False, True], ids=["step_by_step", "ahead"])
def harness(request) -> Iterator[Harness]:
    harness = Harness(plans_ahead=request.param)
    harness.loop.start()
    yield harness
    if harness.loop.is_alive():
        harness.check()
    harness.loop.close()
    assert not harness.loop.is_alive()


def test_mail_runs_in_the_order_of_posting_in_the_loops_thread(harness):
    seen: list[tuple[int, str]] = []
    for i in range(200):
        harness.loop.post(lambda _, i=i: seen.append((i, threading.current_thread().name)))
    harness.check()
    assert seen == [(i, "quire-engine") for i in range(200)]


def test_call_returns_results_and_exceptions(harness):
    assert harness.loop.call(lambda scheduler: scheduler.num_waiting).result(TIMEOUT_S) == 0
    with pytest.raises(ZeroDivisionError):
        harness.loop.call(lambda scheduler: 1 // 0).result(TIMEOUT_S)


@pytest.mark.parametrize("leak", ["block", "row", "count"])
def test_an_idle_engine_that_has_leaked_something_ends(harness, caplog, leak):
    harness.last_delta(harness.submit())
    assert harness.loop.is_alive()

    def lose(scheduler: Scheduler) -> None:
        if leak == "block":
            scheduler.memory.blocks.allocate(1)
        elif leak == "row":
            scheduler.rows._free.pop()
        else:
            scheduler.rows.num_decode_tokens += 1

    harness.loop.call(lose).result(TIMEOUT_S)
    harness.loop._thread.join(TIMEOUT_S)
    assert not harness.loop.is_alive()
    assert "no request is alive, but these are held" in caplog.text
    with pytest.raises(Unavailable):
        harness.submit()


def test_a_cancelled_call_does_not_run_and_does_not_hurt(harness):
    """What a router that detaches at once does: its snapshot's future is cancelled before the loop looks."""
    entered, leave, ran = threading.Event(), threading.Event(), []

    def block(scheduler: Scheduler) -> None:
        entered.set()
        leave.wait(TIMEOUT_S)

    running = harness.loop.call(block)
    assert entered.wait(TIMEOUT_S)
    waiting = harness.loop.call(ran.append)
    assert waiting.cancel()
    assert not running.cancel()
    leave.set()
    running.result(TIMEOUT_S)
    harness.check()
    assert ran == []


def test_a_request_runs_to_its_end(harness):
    delta = harness.last_delta(harness.submit(max_tokens=5))
    assert delta.finish_reason == "length"
    assert delta.facts.num_output_tokens == 5
    tokens = [(d.index, d.token_ids) for output in harness.outputs for d in output.deltas]
    assert tokens == [(i, [7]) for i in range(5)]


def test_a_refusal_is_sent_like_any_delta(harness):
    leave = threading.Event()
    harness.loop.post(lambda _: leave.wait(TIMEOUT_S) and None)
    keys = [harness.submit() for _ in range(CONFIG.max_waiting_requests + 1)]
    leave.set()
    delta = harness.last_delta(keys[-1])
    assert delta.finish_reason == "error"
    assert isinstance(delta.facts.error, Overloaded)
    assert delta.facts.error.retry_after_s >= 1


def test_an_idle_loop_sleeps_and_wakes_for_mail(harness, monkeypatch):
    num_plans = 0
    plan = harness.scheduler.plan

    def counted(now_s: float) -> StepPlan | None:
        nonlocal num_plans
        num_plans += 1
        return plan(now_s)

    monkeypatch.setattr(harness.scheduler, "plan", counted)
    cpu_s = []
    for _ in range(2):
        harness.last_delta(harness.submit())
        # Without a request alive: mail itself costs one turn.
        cpu_s.append(harness.loop.call(lambda _: time.thread_time()).result(TIMEOUT_S))
        time.sleep(0.05)
        before = num_plans
        time.sleep(0.3)
        assert num_plans == before
    assert cpu_s[1] - cpu_s[0] < 0.1


def test_events_are_numbered_without_gaps_and_digests_follow(harness):
    for _ in range(6):
        harness.last_delta(harness.submit(length=130, max_tokens=1))
    harness.loop.call(lambda scheduler: scheduler.clear_cache()).result(TIMEOUT_S)
    harness.check()
    deadline_s = time.monotonic() + TIMEOUT_S
    while harness.outputs[-1].digest and time.monotonic() < deadline_s:
        time.sleep(0.01)
    seq, held = 0, set()
    for output in list(harness.outputs):
        if output.events is not None:
            assert output.events.seq == seq + 1
            seq = output.events.seq
            if output.events.cleared:
                held.clear()
            held -= set(output.events.removed.tolist())
            held |= set(output.events.stored.tolist())
        assert output.events_seq == seq
        digest = 0
        for routing_hash in held:
            digest ^= routing_hash
        assert output.digest == digest
    assert seq >= 7
    assert held == set()


def test_close_ends_the_living_and_joins():
    harness = Harness()
    harness.runner.before_step = lambda plan: time.sleep(1e-3)
    harness.loop.start()
    running, queued = harness.submit(max_tokens=400), harness.submit(max_tokens=400)
    harness.first_delta(running)
    harness.loop.close()
    assert not harness.loop.is_alive()
    assert harness.runner.is_closed
    ends = {d.key: d.finish_reason for o in harness.outputs for d in o.deltas if d.finish_reason}
    assert ends == {running: "abort", queued: "abort"}
    harness.scheduler.check()
    assert harness.scheduler.memory.blocks.num_in_use == 0
    with pytest.raises(Unavailable, match="closed"):
        harness.submit()
    with pytest.raises(Unavailable, match="closed"):
        harness.loop.call(lambda scheduler: None)
    harness.loop.close()  # a second time does nothing


def test_close_answers_mail_that_the_loop_has_not_read():
    harness = Harness()
    entered, leave = threading.Event(), threading.Event()

    def block(plan: StepPlan) -> None:
        entered.set()
        leave.wait(TIMEOUT_S)

    harness.runner.before_step = block
    harness.loop.start()
    running = harness.submit()
    assert entered.wait(TIMEOUT_S)
    late, call = harness.submit(), harness.loop.call(lambda scheduler: scheduler.num_waiting)
    closer = threading.Thread(target=harness.loop.close)
    closer.start()
    while not harness.loop._closing:
        time.sleep(1e-3)
    leave.set()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert call.result(0) == 1
    ends = {d.key: d.finish_reason for o in harness.outputs for d in o.deltas if d.finish_reason}
    assert ends == {running: "abort", late: "abort"}


def test_a_failing_step_ends_only_its_rows(harness):
    """Two rows run, two requests wait: the step fails under the two, the others are served."""
    leave = threading.Event()
    harness.loop.post(lambda _: leave.wait(TIMEOUT_S) and None)

    def fail_once(plan: StepPlan) -> None:
        harness.runner.before_step = lambda plan: None
        raise ValueError("boom")

    harness.runner.before_step = fail_once
    keys = [harness.submit(length=100) for _ in range(4)]
    leave.set()
    harness.last_delta(keys[3])
    ends = {d.key: d for o in harness.outputs for d in o.deltas if d.finish_reason}
    assert [ends[key].finish_reason for key in keys] == ["error", "error", "length", "length"]
    for key in keys[:2]:
        assert isinstance(ends[key].facts.error, EngineError)
        assert (
            "step 1" in ends[key].facts.error.message
            and "ValueError" in ends[key].facts.error.message
        )
        assert "boom" not in ends[key].facts.error.message  # may hold what clients should not see
    assert harness.loop.num_failed_in_a_row == 0
    harness.check()
    # What the failed step would have cached is not matched.
    retry = harness.last_delta(harness.submit(length=100))
    assert retry.finish_reason == "length"


def test_failed_steps_in_a_row_are_counted(harness):
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("sticky")

    harness.runner.before_step = fail
    for i in range(1, 4):
        assert harness.last_delta(harness.submit()).finish_reason == "error"
        assert harness.loop.num_failed_in_a_row == i
    harness.runner.before_step = lambda plan: None
    assert harness.last_delta(harness.submit()).finish_reason == "length"
    assert harness.loop.num_failed_in_a_row == 0


def test_a_broken_scheduler_ends_the_loop_and_leaves_nobody_waiting(monkeypatch):
    harness = Harness()
    commit, num_commits = harness.scheduler.commit, itertools.count(1)

    def breaks(*args: object) -> DeltaBatch:
        if next(num_commits) == 5:
            raise AssertionError("records disagree")
        return commit(*args)

    monkeypatch.setattr(harness.scheduler, "commit", breaks)
    harness.loop.start()
    running = harness.submit(max_tokens=400)
    harness.first_delta(running)
    assert harness.last_delta(running).finish_reason == "abort"  # a router goes on elsewhere
    harness.loop._thread.join(TIMEOUT_S)
    assert not harness.loop.is_alive()
    with pytest.raises(Unavailable):
        harness.submit()


def test_deadlines_fire_while_others_keep_the_loop_busy(harness):
    harness.runner.before_step = lambda plan: time.sleep(1e-3)
    busy = [harness.submit(max_tokens=400) for _ in range(2)]  # both rows, for at least 0.4 s
    begun_s = time.monotonic()
    waiting = harness.submit(deadline_s=begun_s + 0.1)
    delta = harness.last_delta(waiting)
    assert time.monotonic() - begun_s >= 0.1
    assert delta.finish_reason == "abort"
    assert isinstance(delta.facts.error, DeadlineExceeded)
    deltas = [delta for output in harness.outputs for delta in output.deltas]
    assert not {delta.key for delta in deltas if delta.finish_reason} & set(busy), "they are busy"
    for key in busy:
        harness.loop.post(lambda scheduler, key=key: scheduler.abort(key))


def test_a_running_request_ends_at_its_deadline(harness):
    harness.runner.before_step = lambda plan: time.sleep(1e-3)
    key = harness.submit(max_tokens=400)
    harness.first_delta(key)
    late = harness.submit(max_tokens=400, deadline_s=time.monotonic() + 0.05)
    delta = harness.last_delta(late)
    assert isinstance(delta.facts.error, DeadlineExceeded)
    assert 0 < delta.facts.num_output_tokens < 400
    harness.loop.post(lambda scheduler: scheduler.abort(key))


def test_a_deadline_that_has_passed_at_submit_is_told_by_an_idle_loop(harness):
    delta = harness.last_delta(harness.submit(deadline_s=time.monotonic() - 1))
    assert isinstance(delta.facts.error, DeadlineExceeded)
    assert harness.runner.num_steps == 0


def test_a_deadline_ends_a_paused_request_while_the_loop_sleeps(harness):
    harness.runner.before_step = lambda plan: time.sleep(1e-3)
    key = harness.submit(max_tokens=400, deadline_s=time.monotonic() + 0.3)
    harness.loop.post(lambda scheduler: scheduler.pause(key))
    delta = harness.last_delta(key)
    assert isinstance(delta.facts.error, DeadlineExceeded)
    assert harness.runner.num_steps == delta.facts.num_output_tokens < 200


@pytest.mark.parametrize("seed", range(3))
def test_the_loop_never_sleeps_on_a_live_request(seed):
    """Sleeping without a timeout is right only if no plan means nobody is alive, however full the cache is."""
    rng = np.random.default_rng(seed)
    config_changes = dict(num_blocks=8, block_size=16, max_model_len=128, safety_margin=0.3)
    config = dataclasses.replace(CONFIG, **config_changes)
    harness = Harness(config)
    scheduler, plan, idle_with_work = harness.scheduler, harness.scheduler.plan, []

    def checked(now_s: float) -> StepPlan | None:
        step = plan(now_s)
        if step is None and scheduler.book.requests:
            idle_with_work.append(list(scheduler.book.requests))
        return step

    scheduler.plan = checked
    harness.loop.start()
    keys = []
    for _ in range(40):
        length = int(rng.integers(1, 100))
        max_tokens = int(rng.integers(1, 128 - length))
        deadline_s = time.monotonic() + 0.02 if rng.random() < 0.3 else None
        keys.append(harness.submit(length=length, max_tokens=max_tokens, deadline_s=deadline_s))
        if rng.random() < 0.3:
            victim = keys[int(rng.integers(len(keys)))]
            harness.loop.post(lambda scheduler, key=victim: scheduler.abort(key))
        time.sleep(float(rng.random()) * 2e-3)
    ends: set[int] = set()
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(ends) < len(keys) and time.monotonic() < deadline_s:
        ends = {d.key for o in list(harness.outputs) for d in o.deltas if d.finish_reason}
        time.sleep(0.01)
    assert ends == set(keys)
    assert idle_with_work == []
    harness.check()
    harness.loop.close()
