"""A step that does not return is noticed, neither early nor late, and one that does never is."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.errors import EngineError
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.core.request import Request
from quire.replica.watchdog import SLACK, StepWatch

SECONDS = st.floats(0, 100)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), max_size=8), st.floats(0.5, 20))
def test_a_step_is_overdue_beyond_timeout_and_prediction(steps, timeout_s):
    now = [0.0]
    step_watch = StepWatch(timeout_s, clock=lambda: now[0])
    for number, (idle_s, taken_s, predicted_s) in enumerate(steps):
        now[0] += idle_s
        assert step_watch.complaint() is None, "nothing runs"
        step_watch.begin(f"step {number}", predicted_s)
        began_s = now[0]
        now[0] += taken_s
        limit_s = max(timeout_s, SLACK * predicted_s)
        complaint = step_watch.complaint()
        assert (complaint is not None) == (now[0] - began_s > limit_s)
        if complaint is not None:
            assert f"step {number} has run for {now[0] - began_s:.1f} s" in complaint
            assert f"limit is {limit_s:.1f} s" in complaint
        step_watch.end()


def test_the_thread_tells_once_and_only_of_a_step_that_hangs():
    step_watch, told = StepWatch(0.2), []
    thread = step_watch.watch(told.append)
    for number in range(20):  # together far longer than the timeout
        step_watch.begin(f"step {number}", 0.0)
        thread.join(0.03)
        step_watch.end()
    assert thread.is_alive() and told == []
    step_watch.begin("step 99", 0.0)
    thread.join(10)
    assert not thread.is_alive()
    assert len(told) == 1 and told[0].startswith("step 99 has run for 0.")


def test_the_thread_ends_with_the_watch():
    step_watch, told = StepWatch(60.0), []
    thread = step_watch.watch(told.append)
    step_watch.close()
    thread.join(10)
    assert not thread.is_alive() and told == []


@pytest.fixture
def engine():
    with Engine(num_blocks=64, max_model_len=256, num_threads=1, step_timeout_s=1.0) as engine:
        yield engine


def test_an_engine_whose_step_hangs_is_not_healthy(engine, monkeypatch):
    engine.generate(["A quire"], SamplingParams(max_tokens=4, temperature=0))
    engine.check_health()
    end_s = time.monotonic() + 10  # the loop's thread may still send the last token
    while engine.load().stalled_s:
        assert time.monotonic() < end_s, "idle"
        time.sleep(0.01)
    hanging, over = threading.Event(), threading.Event()
    collect = engine._loop._runner.collect

    def hang(in_flight):
        hanging.set()
        over.wait(60)
        return collect(in_flight)

    monkeypatch.setattr(engine._loop._runner, "collect", hang)
    told: list[str] = []
    thread = engine.watch(told.append)
    engine.submit(Request("r", [5, 6, 7], SamplingParams(max_tokens=2)))
    try:
        assert hanging.wait(10)
        thread.join(30)
        assert len(told) == 1 and "the limit is 1.0 s" in told[0]
        with pytest.raises(EngineError, match=r"has run for \d+\.\d s; the limit is 1\.0 s"):
            engine.check_health()
        assert engine.load().stalled_s > 0.9
    finally:
        over.set()


def test_an_engine_predicts_its_first_step():
    """Otherwise the first chunk of a large model would count as hung after `step_timeout_s`."""
    with Engine(model="embedded", num_threads=1, num_blocks=64) as engine:
        step_s = engine.call(lambda scheduler: scheduler.speed.predicted_step_s(512)).result(60)
        assert engine.load().prefill_s_per_token == 0.0
    assert 1e-3 < step_s < 60
