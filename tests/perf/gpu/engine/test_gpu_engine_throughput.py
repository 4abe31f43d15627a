"""Throughput against transformers without a GPU: its rows and bars, and when a contestant is stopped."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from quire.cluster.bench.engines.floor import Rates, floor_of
from quire.cluster.bench.load.workloads import Workload
from tests.perf.gpu.engine import gpu_engine_throughput, gpu_models
from tests.perf.gpu.engine.gpu_contestants import ContestantProcess, Job, Served
from tests.perf.gpu.gpu_session import NO_TIME, Session

WORKLOAD = Workload("w", 4, 0, 16, 8)


def session(rehearsal: bool) -> Session:
    return Session(torch.device("cpu"), rehearsal, time.monotonic() + 3000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def task(share: float | None = None) -> gpu_engine_throughput.Task:
    shape = gpu_models.ModelShape(32, 32, 8, 128, 7_000_000_000, 500_000_000, 2)
    floor = floor_of(WORKLOAD, shape, Rates(3000.0, 700_000.0))
    at_s = None if share is None else [0.0, 0.1, 0.2, 0.3]
    return gpu_engine_throughput.Task({"workload": "w"}, WORKLOAD, share, floor, at_s)


def served(seconds: float) -> Served:
    return Served([0.25 * seconds] * 4, [seconds] * 4)


def theirs(seconds: float, fast_steps: int) -> Served:
    facts = {"attention": "x", "steps": 100, "fast_steps": fast_steps}
    return dataclasses.replace(served(seconds), facts=facts)


def test_twice_as_fast_or_near_the_floor_is_asked_and_four_times_of_the_slow_path():
    one = task()
    own = served(one.floor.total_s / 0.5)  # half of the floor's speed
    fast = gpu_engine_throughput.peer_row(one, own, theirs(1.5 * own.seconds, 90), {})
    assert fast["ratio"] == 1.5 and fast["of_goal"] == pytest.approx(50 / 65, rel=1e-3)
    near = served(one.floor.total_s / 0.8)
    row = gpu_engine_throughput.peer_row(one, near, theirs(1.1 * near.seconds, 90), {})
    assert row["of_goal"] == pytest.approx(80 / 65, rel=1e-3)
    slow = gpu_engine_throughput.peer_row(one, near, theirs(3 * near.seconds, 40), {})
    assert slow["varlen_ratio"] == 3.0 and "of_goal" not in slow
    bars = gpu_engine_throughput.bars_of("m")([fast, row, slow])
    assert [(bar.name, bar.holds) for bar in bars] == [
        ("gpu/engine/throughput_of_goal/m", False),
        ("gpu/engine/ratio_to_varlen/m", False),
    ]


def test_latencies_count_from_when_a_request_came():
    row = gpu_engine_throughput.own_row(task(0.5), Served([0.5] * 4, [1.2] * 4))
    assert row["ttft_p99_ms"] == 500.0 and row["ttft_p50_ms"] == 300.0
    assert row["tpot_p50_ms"] == 100.0 and "percent_of_floor" not in row


class Sluggish:
    """Replaces `ContestantProcess`: a turn takes a given time, and is stopped if it has less."""

    def __init__(self, *args):
        self.seconds = 0.0

    def warm_up(self, job: Job, timeout_s: float) -> None:
        self.seconds = job.setting["s"]

    def turn(self, timeout_s: float) -> Served:
        time.sleep(max(0.0, min(self.seconds, timeout_s)))
        if self.seconds > timeout_s:
            raise TimeoutError
        return theirs(0.1, 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def peer(folder, monkeypatch):
    def make(left_s: float, *seconds: float) -> gpu_engine_throughput.Peer:
        tried = [{"s": s} for s in seconds]
        monkeypatch.setattr(gpu_engine_throughput, "settings", lambda device: tried)
        one = session(rehearsal=False)
        model = gpu_models.checkpoint(folder, gpu_models.SMALL, session(rehearsal=True))
        return gpu_engine_throughput.Peer(one, model, one.clock() + left_s)

    monkeypatch.setattr(gpu_engine_throughput, "ContestantProcess", Sluggish)
    monkeypatch.setattr(gpu_engine_throughput, "MIN_STOP_S", 0.0)
    return make


def test_transformers_is_stopped_when_enough_is_known(peer):
    own = [served(0.02)]
    with peer(600.0, 99.0) as one:
        row = one.row(task(), own)
    assert row["varlen_ratio"] == row["ratio"] >= 5 and row["peer_stopped_after_s"] >= 0.1
    with peer(600.0, 99.0, 0.0) as one:  # another setting is fast enough
        row = one.row(task(), own)
    assert row["ratio"] == 5.0 and row["peer_setting"] == "s=0.0"


def test_what_was_stopped_for_lack_of_time_is_open(peer):
    own = [served(1.0)]
    with peer(0.1, 99.0) as one:
        assert one.row(task(), own) == {"skipped": NO_TIME}
    own = [served(0.02)]
    with peer(0.11, 99.0, 99.0) as one:  # the second setting had no time and may be faster
        assert one.row(task(), own) == {"skipped": NO_TIME}


def test_a_contestant_that_fails_says_why_and_one_that_hangs_is_ended(folder):
    model = gpu_models.checkpoint(folder, gpu_models.SMALL, session(rehearsal=True))
    missing = dataclasses.replace(model, path=folder / "missing")
    with pytest.raises(RuntimeError, match=r"quire: .*missing"):
        ContestantProcess("quire", missing, "cpu", {}, 900.0)
    options = dict(max_model_len=256)
    with ContestantProcess("quire", model, "cpu", options, 900.0) as quire:
        quire.warm_up(Job([[[5, 6]]], 10_000), 900.0)
        with pytest.raises(RuntimeError, match=r"quire: .*max_tokens"):
            quire.turn(900.0)
        quire.warm_up(Job([[[5, 6]] * 8], 200), 900.0)
        with pytest.raises(TimeoutError, match="quire: no answer"):
            quire.turn(0.0)
        process = quire._process
    assert not process.is_alive()
