"""The kernels' GPU benchmark without a GPU: it runs end to end, and reports unfinished runs correctly."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run
from tests.perf.gpu.gpu_run import Results
from tests.perf.gpu.gpu_session import NO_TIME, OutOfRoom, Part, Session, is_final, worst
from tests.perf.gpu.kernels import gpu_kernels, gpu_numerics
from tests.perf.gpu.kernels.gpu_kernels import BENCHMARK
from tests.perf.gpu.kernels.gpu_shapes import MAX_LEN, MODELS, skewed_lengths

COMMITTED = report.RESULTS / "gpu_kernels.json"
# Every bar with its goal.
BARS = {
    "gpu/failed_tests": "<= 0",
    "gpu/decode/Llama-3.1-8B_uniform": ">= 90",
    "gpu/decode/Llama-3.1-8B_skewed": ">= 90",
    "gpu/decode/Qwen3-0.6B_uniform": ">= 90",
    "gpu/decode/Qwen3-0.6B_skewed": ">= 90",
    "gpu/prefill/Llama-3.1-8B_8k": ">= 450",
    "gpu/prefill/Qwen3-0.6B_8k": ">= 450",
    "gpu/kv_write_worst": ">= 85",
    "gpu/norm_worst": ">= 85",
    "gpu/activation_worst": ">= 85",
    "gpu/sampling_worst": "<= 2",
}


def rehearse(*options):
    command = [sys.executable, "-m", "tests.perf", "gpu-kernels", "--rehearse", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_parts_have_every_bar():
    """`test_gpu_plan.py` runs all parts in the interpreter."""
    bars = [bar.to_json() for part in gpu_kernels.all_parts() for bar in part.bars([])]
    assert {bar["name"]: bar["goal"] for bar in bars} == BARS
    assert {(bar["value"], bar["holds"]) for bar in bars} == {(None, None)}


def test_the_committed_result_has_every_bar():
    result = json.loads(COMMITTED.read_text())
    assert {bar["name"]: bar["goal"] for bar in result["bars"]} == BARS
    if result["rehearsal"]:
        assert {bar["holds"] for bar in result["bars"]} == {None}
    else:
        assert result["hardware"]["accelerators"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_kernels.main([]) == 2
    assert "device: torch finds no CUDA device; --rehearse" in capsys.readouterr().err


def test_bad_options_are_named(tmp_path):
    done = rehearse("--parts", "decode", "sort", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "--parts: must be of numerics, machine, decode" in done.stderr
    assert done.stderr.rstrip().endswith("got sort")


def test_a_rehearsal_never_replaces_measurements(tmp_path):
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"rehearsal": False}))
    with pytest.raises(ValueError, match=r"gpu\.json holds measurements"):
        Results(out, rehearsal=True, benchmark=BENCHMARK).check_overwrite()
    Results(out, rehearsal=False, benchmark=BENCHMARK).check_overwrite()


def test_only_rows_of_this_commit_and_machine_are_resumed(tmp_path):
    out = tmp_path / "gpu.json"
    first = Results(out, rehearsal=False, benchmark=BENCHMARK)
    first.rows["norm"] = [{"tokens": 1, "us": 2.0}]
    first.write([], show=False)
    again = Results(out, rehearsal=False, benchmark=BENCHMARK)
    again.load()
    assert again.rows == first.rows
    changed = json.loads(out.read_text()) | {"commit": "0" * 12}
    out.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"--resume: gpu\.json is of commit 000000000000"):
        again.load()


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def session_with(clock, deadline_s=10.0, rehearsal=False):
    return Session(torch.device("cpu"), rehearsal, deadline_s, clock)


def counting_part(clock, **options):
    """Each point takes a second; x = 2 does not fit and x = 3 raises."""

    def measure(session, point):
        clock.now += 1.0
        if point["x"] == 2:
            raise OutOfRoom("memory: needs 9.0 GB, room for 1.0")
        if point["x"] == 3:
            raise ValueError("no\nsuch shape")
        return {"us": float(point["x"])}

    return Part("count", lambda rehearsal: [{"x": x} for x in range(6)], measure, **options)


def test_a_part_ends_in_time_and_says_what_it_left_out():
    clock = Clock()
    part = counting_part(clock, budget_s=4.5)
    rows = list(part.run(session_with(clock), part.points(False)))
    assert rows == [
        {"x": 0, "us": 0.0},
        {"x": 1, "us": 1.0},
        {"x": 2, "skipped": "memory: needs 9.0 GB, room for 1.0"},
        {"x": 3, "error": "ValueError: no"},
        {"x": 4, "us": 4.0},
        {"x": 5, "skipped": NO_TIME},
    ]
    with pytest.raises(ValueError, match="no"):
        list(part.run(session_with(clock, 99, rehearsal=True), [{"x": 3}]))


def test_a_resumed_run_measures_only_what_is_open(tmp_path, capsys):
    clock = Clock()
    part = counting_part(clock, budget_s=4.5)
    results = Results(tmp_path / "gpu.json", rehearsal=False, benchmark=BENCHMARK)
    errors = gpu_run.run(session_with(clock), results, [part], {"count"})
    assert errors == ["count: ValueError: no"]
    before = clock.now
    gpu_run.run(session_with(clock, 99.0), results, [part], {"count"})
    assert clock.now - before == 2.0  # the row with an error and the row without time
    assert sorted(row["x"] for row in results.rows["count"]) == list(range(6))
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["count"]["points"] == 6


def test_a_run_that_is_killed_leaves_the_rows_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "WRITE_PERIOD_S", 0.0)
    out = tmp_path / "gpu.json"
    clock = Clock()
    seen = []

    def measure(session, point):
        if point["x"]:
            seen.append(json.loads(out.read_text())["parts"]["slow"]["rows"])
        return {"us": 1.0}

    part = Part("slow", lambda rehearsal: [{"x": x} for x in range(3)], measure)
    results = Results(out, rehearsal=False, benchmark=BENCHMARK)
    gpu_run.run(session_with(clock), results, [part], {"slow"})
    late = {"skipped": NO_TIME}  # an undecided row, so that no bar holds for lack of rows
    assert seen == [
        [{"x": 0, "us": 1.0}, {"x": 1} | late, {"x": 2} | late],
        [{"x": 0, "us": 1.0}, {"x": 1, "us": 1.0}, {"x": 2} | late],
    ]


def test_parts_share_a_run_that_is_too_short_for_them():
    parts = [
        Part(name, lambda _: [], lambda *_: {}, budget_s=s)
        for name, s in (("a", 30.0), ("b", 90.0), ("c", 50.0))
    ]
    chosen = gpu_run._chosen(parts, None, ["c"])
    assert chosen == {"a", "b"}
    shared, budget_s = gpu_run._share(parts, chosen, 60.0)
    assert [part.budget_s for part in shared[:2]] == [15.0, 45.0] and budget_s == 60.0
    assert gpu_run._share(parts, chosen, 500.0)[0] == parts
    assert gpu_run._share(parts, chosen, None) == (parts, 120.0)


SLOW_TESTS = """
import time
from pathlib import Path

def test_quick():
    pass

def test_bad():
    assert 1 == 2

def test_without_end():
    Path(__file__).with_name("begun").touch()
    time.sleep(600)
"""


class Patient(subprocess.Popen):
    """Its limit passes when the endless test has begun; then it has 120 s to end, for slow machines."""

    begun: Path

    def wait(self, timeout: float | None = None) -> int:
        if timeout != LIMIT_S:
            return super().wait(120)
        until = time.monotonic() + 120
        while not self.begun.exists() and time.monotonic() < until:
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(self.args, timeout)


LIMIT_S = 10.0


def test_tests_without_end_are_interrupted_and_the_others_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds to load
    (tmp_path / "test_slow.py").write_text(SLOW_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(Patient, "begun", tmp_path / "begun", raising=False)
    monkeypatch.setattr(gpu_numerics.subprocess, "Popen", Patient)
    result = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", str(tmp_path)]
    assert gpu_numerics.run_tests([*command, f"--junit-xml={result}"], LIMIT_S) is None
    (row,) = gpu_numerics.read_counts(result).values()
    assert (row["tests"], row["failed"], row["failures"]) == (2, 1, ["test_bad"])


def test_files_whose_tests_did_not_end_are_open(monkeypatch):
    counts = {"tests/a.py": {"tests": 3, "failed": 1, "skipped_tests": 0, "seconds": 1.0}}
    monkeypatch.setattr(gpu_numerics, "read_counts", lambda result: counts)
    points = [{"file": "tests/a.py"}, {"file": "tests/b.py"}]
    part = gpu_numerics.NUMERICS
    monkeypatch.setattr(gpu_numerics, "run_tests", lambda command, limit_s: None)
    rows = list(part.run(session_with(Clock()), points))
    assert not any(is_final(row) for row in rows) and rows[0]["failed"] == 1
    (bar,) = part.bars(rows)
    assert (bar.value, bar.holds, bar.details["missing"]) == (1, False, 2)
    monkeypatch.setattr(gpu_numerics, "run_tests", lambda command, limit_s: 1)
    rows = list(part.run(session_with(Clock()), points))
    assert "tests" in rows[0] and rows[1]["error"] == "pytest ended with 1 and counted no test"
    assert part.bars([])[0].value is None
    assert part.bars([rows[0] | {"failed": 0}])[0].holds is True


def test_every_test_file_of_a_kernel_runs_on_the_device():
    files = {point["file"] for point in gpu_numerics.numerics_points(False)}
    assert {"tests/kernels/rows/test_norm.py", "tests/replica/device/test_device.py"} <= files
    assert {point["file"] for point in gpu_numerics.numerics_points(True)} <= files


def test_a_bar_is_the_worst_row_and_open_while_rows_are_missing():
    rows = [
        {"x": 1, "percent": 95.0},
        {"x": 2, "percent": 91.0},
        {"x": 3, "skipped": "memory: ..."},
    ]
    bar = worst("a", rows, "percent", "%", 90)
    assert (bar.value, bar.holds, bar.details["at"]) == (91.0, True, {"x": 2})
    for reason in ({"skipped": NO_TIME}, {"error": "ValueError: no"}):
        bar = worst("a", [*rows, {"x": 4, **reason}], "percent", "%", 90)
        assert (bar.value, bar.holds, bar.details["missing"]) == (None, None, 1)
        assert bar.details["so_far"] == 91.0
    # One row below the goal decides the bar.
    late = [*rows, {"x": 4, "skipped": NO_TIME}]
    assert worst("a", late, "percent", "%", 92).holds is False
    assert worst("a", rows, "percent", "%", 92, at_most=True).value == 95.0
    assert worst("a", [], "percent", "%", 92).holds is None


@given(batch=st.integers(1, 512), context=st.sampled_from([1, 7, 512, 4096, 32768]))
def test_skewed_lengths_hold_as_many_tokens_as_uniform_ones(batch, context):
    lengths = skewed_lengths(batch, context)
    assert len(lengths) == batch and sum(lengths) == batch * context
    assert 1 <= min(lengths) and max(lengths) <= MAX_LEN
    assert batch == 1 or context < 7 or max(lengths) > context


def test_models_have_the_shapes_of_their_configurations():
    assert MODELS["Llama-3.1-8B"].token_bytes == 4096  # 128 KiB in 32 layers
    assert all(model.heads % model.kv_heads == 0 for model in MODELS.values())
