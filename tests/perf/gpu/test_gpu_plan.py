"""The three commands for a GPU machine without network: each step exists, parses and runs in a copy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cluster.bench.results import report
from tests.perf.__main__ import import_benchmark
from tests.perf.gpu import gpu_plan, gpu_rehearse
from tests.perf.gpu.gpu_carry import CACHE, RESULTS, carry_results, pack_cache, unpack_cache
from tests.perf.gpu.gpu_plan import LIMIT_S, PLANS, RESERVE_S, Step, run_step
from tests.perf.gpu.gpu_run import Results
from tests.perf.gpu.kernels.gpu_kernels import BENCHMARK

STEPS = [step for plan in PLANS.values() for step in plan]
DOCUMENT = report.ROOT / "docs" / "measuring_on_a_gpu.md"
# Libraries that the GPU machine lacks.
FOREIGN = (
    "ray",
    "fastapi",
    "pydantic",
    "llguidance",
    "orjson",
    "prometheus_client",
    "openai",
    "jsonschema",
    "accelerate",
)


def parts_of(step: Step, folder: Path) -> list[str]:
    module = import_benchmark(step.benchmark)
    return [part.name for part in module.all_parts(*[folder] * step.has_checkpoints)]


# -- the plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", PLANS)
def test_a_command_ends_within_ten_minutes_whatever_its_steps_do(number):
    assert sum(step.limit_s for step in PLANS[number]) + RESERVE_S <= LIMIT_S <= 600
    assert all(step.limit_s > gpu_plan.START_S + gpu_plan.GRACE_S for step in PLANS[number])


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_steps_command_parses_and_names_parts_that_exist(step, tmp_path):
    for rehearsal in (False, True):
        arguments = step.arguments(tmp_path / "out", tmp_path, rehearsal)
        options = import_benchmark(step.benchmark).option_parser().parse_args(arguments[1:])
        assert options.out == tmp_path / "out" / step.result
        assert options.rehearse is rehearsal and options.resume is step.resumes
        assert 0 < options.budget_s < step.limit_s
        assert (*(options.parts or ()), *options.without) == step.parts + step.without
    assert {*step.parts, *step.without} <= set(parts_of(step, tmp_path))


def test_the_plans_measure_every_part_of_the_kernels():
    """The tests run in the first command, all other parts in the second."""
    assert gpu_plan.KERNELS.without == gpu_plan.TESTS.parts and not gpu_plan.KERNELS.parts
    assert gpu_plan.TESTS in PLANS[1] and gpu_plan.KERNELS in PLANS[2]


def test_the_document_names_every_step_and_result():
    text = DOCUMENT.read_text()
    assert not [step.name for step in STEPS if f"`{step.name}`" not in text]
    assert not [step.result for step in STEPS if f"`{step.result}`" not in text]
    assert not [n for n in PLANS if f"make gpu-{n}" not in text]


# -- the commands, in a copy without .git, Ray or a network --------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> gpu_rehearse.Copy:
    """A copy in which processes cannot import the libraries that the GPU machine lacks."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({FOREIGN}))\n"
    )
    return gpu_rehearse.copy_tracked(
        tmp_path_factory.mktemp("copy"), environment={"PYTHONPATH": str(site)}
    )


@pytest.mark.parametrize("number", [1, 2])  # test_gpu_engine.py rehearses the parts of the third
def test_a_command_runs_in_a_copy_and_leaves_its_results(copy, number):
    assert not (copy.root / ".git").exists()
    results = copy.check(number, done := copy.make(f"gpu-{number}", GPU_OUT=copy.out))
    lines = done.stdout.splitlines()
    for step, line in zip(PLANS[number], lines[-len(PLANS[number]) :], strict=True):
        assert line.startswith(step.name) and " ok " in line
        measured = set(step.parts or parts_of(step, copy.out)) - set(step.without)
        points = {name: part["points"] for name, part in results[step.result]["parts"].items()}
        assert min(points[name] for name in measured) > 0
        # A rehearsal writes no times, and decides no bar.
        assert {bar["value"] for bar in results[step.result]["bars"]} <= {None}
        assert not any(part["rows"] for part in results[step.result]["parts"].values())
    shutil.rmtree(copy.out)


def test_all_modules_of_kernels_and_replica_can_be_imported_there(copy):
    """Only the Ray shell and the process that checks grammars need a missing library."""
    assert copy.import_all().splitlines() == [
        "quire.replica.grammar.check_process needs llguidance",
        "quire.replica.serving.actor needs ray",
        "quire.replica.serving.faults.faulty_actor needs ray",
        "quire.replica.serving.node_checkpoints needs ray",
        "quire.replica.serving.rank_actor needs ray",
        "quire.replica.serving.ray_metrics needs ray",
    ]


def test_the_tests_for_a_gpu_are_collected_there(copy):
    """An import error in one module would stop `make gpu`. The copy has no native library either."""
    assert not list(copy.root.rglob("*.so"))
    assert "tests collected" in copy.collect_tests()


def test_make_gpu_selects_from_these_folders():
    recipe = (report.ROOT / "Makefile").read_text().split("\ngpu:\n")[1].split("\n\n")[0]
    assert "pytest -m gpu " in recipe and " ".join(gpu_plan.TEST_FOLDERS) in recipe
    with_mark = {
        path.relative_to(report.ROOT).parts[:2]
        for path in (report.ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path.name != Path(__file__).name
    }
    assert {"/".join(parts) for parts in with_mark} <= set(gpu_plan.TEST_FOLDERS)


def test_a_missing_result_is_noticed(copy):
    copy.out.mkdir()
    done = subprocess.CompletedProcess([], 0, "", "")
    with pytest.raises(gpu_rehearse.RehearsalError, match=r"gpu-3: lacks \['gpu-3.log', 'gpu_eng"):
        copy.check(3, done)
    copy.out.rmdir()


# -- steps ---------------------------------------------------------------------------------------------------


def run(tmp_path, code: str, limit_s: float = 60.0) -> gpu_plan.Outcome:
    step = Step("s", "none", "none.json", limit_s, "")
    command = [sys.executable, "-c", code]
    return run_step(step, command, dict(os.environ), tmp_path / "log", limit_s)


def test_a_step_that_fails_stops_no_other_and_the_command_fails(tmp_path, monkeypatch, capsys):
    ran = []

    def fake_step(step, command, environment, log, limit_s):
        ran.append(step.name)
        return gpu_plan.Outcome(step, 1 if step.name == "smoke" else 0, 1.0)

    monkeypatch.setattr(gpu_plan, "run_step", fake_step)
    folders = [f"--{name}={tmp_path / name}" for name in ("out", "carry", "work")]
    assert gpu_plan.main(["1", *folders]) == 1
    assert ran == [step.name for step in PLANS[1]]
    assert "smoke      failed: 1" in capsys.readouterr().out
    assert gpu_plan.main(["2", *folders]) == 0


def test_a_step_without_end_is_interrupted_then_killed_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_plan, "GRACE_S", 2.0)
    polite = "import time\ntry: time.sleep(99)\nexcept KeyboardInterrupt: print('wrote it')"
    assert run(tmp_path, polite, 4.0).status is None
    assert "wrote it" in (tmp_path / "log").read_text()
    stubborn = (
        "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print(subprocess.Popen(['sleep', '99']).pid, flush=True); time.sleep(99)"
    )
    began_s = time.monotonic()
    assert run(tmp_path, stubborn, 4.0).status is None
    assert time.monotonic() - began_s < 30
    child = int((tmp_path / "log").read_text().split()[-1])
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("a process of the step runs on")


def test_a_long_output_keeps_its_beginning_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_plan, "LOG_BYTES", 2000)
    assert run(tmp_path, "print('before')").status == 0
    assert run(tmp_path, "print('first'); print('x' * 9999); print('last')").status == 0
    text = (tmp_path / "log").read_text()
    assert len(text) < 3500
    places = [text.index("before"), text.index("\nfirst"), text.index("left out")]
    assert places == sorted(places) and text.endswith("x\nlast\n")


# -- carried files --------------------------------------------------------------------------------------------


def result(path: Path, rehearsal: bool = False, **changes: object) -> None:
    made = Results(path, rehearsal, BENCHMARK)
    made.rows["norm"] = [{"tokens": 1, "us": 2.0}]
    made.write([], show=False)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_carried_result_is_resumed(tmp_path):
    carry, out = tmp_path / "carry", tmp_path / "out"
    out.mkdir()
    result(carry / RESULTS[0])
    assert list(carry_results(carry, out, rehearsal=False)) == [f"{RESULTS[0]}: resumed"]
    resumed = Results(out / RESULTS[0], rehearsal=False, benchmark=BENCHMARK)
    resumed.load()
    assert resumed.rows == {"norm": [{"tokens": 1, "us": 2.0}]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commit": "0" * 12}, "is of commit 000000000000, not"),
        ({"hardware": {"accelerators": ["Other GPU"]}}, "is of hardware"),
        ({"rehearsal": True}, "is a rehearsal"),
        ({"rehearsal": None, "commit": None}, "is of measurements"),
    ],
)
def test_a_result_that_cannot_be_resumed_is_named_and_kept(tmp_path, changes, reason):
    carry, out = tmp_path / "carry", tmp_path / "out"
    for folder in (carry, out):
        result(folder / RESULTS[1], **changes)
    is_rehearsal = changes.get("rehearsal", False) is None
    lines = list(carry_results(carry, out, rehearsal=is_rehearsal))
    assert len(lines) == 2 and reason in lines[0]
    assert not (out / RESULTS[1]).exists()
    assert (out / "gpu_engine.1.json").exists() and (carry / RESULTS[1]).exists()


def test_another_processor_beside_the_same_card_does_not_end_a_run(tmp_path, monkeypatch):
    machine = {"cpu": "one", "cores": 16, "accelerators": ["GPU"]}
    monkeypatch.setattr(report, "hardware", lambda: machine)
    result(tmp_path / RESULTS[0])
    monkeypatch.setattr(report, "hardware", lambda: machine | {"cpu": "another", "cores": 8})
    Results(tmp_path / RESULTS[0], rehearsal=False, benchmark=BENCHMARK).load()
    monkeypatch.setattr(report, "hardware", lambda: machine | {"accelerators": ["Other"]})
    with pytest.raises(ValueError, match="is of hardware"):
        Results(tmp_path / RESULTS[0], rehearsal=False, benchmark=BENCHMARK).load()


COMPILE = """
import sys
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add_one(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 1)

hits = []
triton.knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
source = ASTSource(add_one, signature={"x": "*fp32", "SIZE": "constexpr"}, constexprs={"SIZE": 64})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert len(kernel.asm["cubin"]) > 1000
print(hits[0], sorted(kernel.asm))
"""


def compile_with(cache: Path) -> str:
    path = cache.parent / "compiled.py"
    path.write_text(COMPILE)
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_that_one_machine_compiled_are_not_compiled_by_the_next(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert compile_with(first).startswith("False")
    archive = tmp_path / CACHE
    packed = pack_cache(first, archive)
    assert 0 < packed < sum(path.is_file() for path in first.rglob("*"))
    assert unpack_cache(archive, second) == packed
    shutil.rmtree(first)  # Triton's file lists have its paths
    printed = compile_with(second)
    assert printed.startswith("True") and "ptx" not in printed
    assert unpack_cache(tmp_path / "none", second) == 0


# -- pytest on a GPU -----------------------------------------------------------------------------------------

TESTS = """
import sys, types
import pytest

class Cuda:
    broken = False

    def is_initialized(self):
        return True

    def synchronize(self):
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

cuda = Cuda()
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

@pytest.mark.parametrize("n", range(6))
def test_one(n):
    cuda.synchronize()
    if n == 2:
        cuda.broken = True
        raise RuntimeError("n is two")
"""


def test_a_test_that_breaks_the_device_ends_its_worker_alone(tmp_path):
    (tmp_path / "test_device_breaks.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-n", "1"]
    command += ["--dist", "worksteal", "-p", "tests.perf.gpu.gpu_worker", str(tmp_path)]
    command += ["-o", "junit_family=xunit1", f"--junit-xml={tmp_path / 'junit.xml'}"]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take longer to load than the test
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=report.ROOT)
    from tests.perf.gpu.kernels.gpu_numerics import read_counts

    assert "5 passed" in done.stdout, done.stdout
    assert "n is two" in done.stdout and "crashed" in done.stdout
    assert "the device is unusable after it: an illegal memory access" in done.stderr + done.stdout
    (row,) = read_counts(tmp_path / "junit.xml").values()
    assert row["failed"] == 2 and row["tests"] == 7
