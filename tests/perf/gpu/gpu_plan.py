"""Thirty minutes on a GPU in three commands of at most ten minutes: `make gpu-1`, `gpu-2`, `gpu-3`.

```
 carry/ ──▶ out/: results to resume        step 1 ─▶ step 2 ─▶ step 3 ─▶ table     a failed step does not stop the
 others
        ──▶ work/triton: compiled kernels       └── out/gpu-N.log, JSON ──┘ └─▶ out/tc.tar.xz
```

`docs/measuring_on_a_gpu.md` explains how to read the results of each command. The commands need neither an installation
nor pip, Ray, a network or git. They leave at most eight files in `out`, each below 16 MiB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from quire.cluster.bench.results import report
from tests.perf.gpu.gpu_carry import CACHE, carry_results, pack_cache, unpack_cache
from tests.perf.gpu.gpu_run import REHEARSAL_PATIENCE
from tests.perf.gpu.processes import hear_interrupts, wait_or_interrupt

LIMIT_S = 600.0  # per command
RESERVE_S = 30.0  # of LIMIT_S, for the caches and the driver itself
START_S = 25.0  # of a step's limit, for imports and the last write; the parts get the rest
GRACE_S = 20.0  # of a step's limit, to end after SIGINT
SHOWN_LINES, SHOWN_COLUMNS = 36, 170  # of a step's output that the terminal shows
LOG_BYTES = 4 << 20  # largest part of the log for one step
TEST_FOLDERS = ("tests/kernels", "tests/replica")  # with tests that need a GPU
THROUGHPUT = "throughput-Qwen3-0.6B"


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark in its own process."""

    name: str
    benchmark: str  # `python -m tests.perf NAME`
    result: str  # name of its file in `out`
    limit_s: float
    look_at: str
    parts: tuple[str, ...] = ()  # empty: all parts
    without: tuple[str, ...] = ()  # parts to leave out
    resumes: bool = False
    has_checkpoints: bool = False

    def arguments(self, out: Path, work: Path, rehearsal: bool) -> list[str]:
        """Arguments of `python -m tests.perf`."""
        found = [self.benchmark, "--out", str(out / self.result)]
        found += ["--budget-s", f"{self.limit_s - START_S - GRACE_S:g}"]
        if self.has_checkpoints:
            found += ["--checkpoints", str(work / "checkpoints")]
        if self.resumes:
            found.append("--resume")
        if rehearsal:
            found.append("--rehearse")
        for option, parts in (("--parts", self.parts), ("--without", self.without)):
            found += [option, *parts] if parts else []
        return found


SMOKE = Step(
    "smoke", "gpu-smoke", "gpu_smoke.json", 140, "errors; findings; graphs_off is -, hits above 0"
)
TESTS = Step(
    *("tests", "gpu-kernels", "gpu_kernels.json", 180, "gpu/failed_tests; names of failures"),
    parts=("numerics",),
    resumes=True,
)
TUNE = Step("tune", "gpu-tune", "gpu_tune.json", 150, "the lines for kernels/tuning.py; off")
PROFILE = Step(
    *("profile", "gpu-profile", "gpu_profile.json", 130, "shares of kernels; gaps_ms"),
    has_checkpoints=True,
)
KERNELS = Step(
    *(
        "kernels",
        "gpu-kernels",
        "gpu_kernels.json",
        235,
        "the largest miss against the predictions",
    ),
    without=TESTS.parts,
    resumes=True,
)


def _engine(name: str, limit_s: float, look_at: str, *parts: str) -> Step:
    return Step(
        *(name, "gpu-engine", "gpu_engine.json", limit_s, look_at),
        parts=parts,
        resumes=True,
        has_checkpoints=True,
    )


PLANS: dict[int, tuple[Step, ...]] = {
    # Does the engine run, are the kernels correct, which tiles are the fastest?
    1: (SMOKE, TESTS, _engine("compiles", 100, "compiles is 0 in every row", "compiles"), TUNE),
    # Profile of a decode step, and the kernels' measurements.
    2: (
        PROFILE,
        KERNELS,
        _engine("decode", 200, "percent_of_floor, gap_us, host_percent", "decode"),
    ),
    # The engine's tokens and throughput.
    3: (
        _engine("tokens", 190, "different and beyond_margin are 0", "tokens"),
        _engine("transfer", 180, "percent_of_gemm, percent_of_link", "prefill", "offload"),
        _engine("throughput", 200, "ratio, varlen_ratio, percent_of_floor", THROUGHPUT),
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended."""

    step: Step
    status: int | None  # None: the step ran out of time
    seconds: float

    def line(self) -> str:
        how = {None: "no time", 0: "ok"}.get(self.status, f"failed: {self.status}")
        times = f"{self.seconds:6.0f} of {self.step.limit_s:.0f} s"
        return f"{self.step.name:11}{how:12}{times}   {self.step.result:18} {self.step.look_at}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a step failed or ran out of time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=int, choices=PLANS, help="of the command")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder of the results")
    parser.add_argument("--carry", type=Path, default=Path("gpu-out"), help="earlier results")
    parser.add_argument("--work", type=Path, default=Path(".cache/gpu"), help="caches, checkpoints")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args(arguments)
    out, carry, work = (path.absolute() for path in (options.out, options.carry, options.work))
    # A shell's background job ignores SIGINT, and the steps would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    cache = work / "triton"
    log = out / f"gpu-{options.number}.log"
    log.write_text("")
    _say(log, *_facts(work))
    _say(log, f"compiled kernels: {unpack_cache(carry / CACHE, cache)} files")
    _say(log, *carry_results(carry, out, options.rehearse))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_CACHE_DIR": str(cache),
    }
    if options.rehearse:
        environment["OMP_NUM_THREADS"] = (
            "1"  # torch's threads spin while other processes need the cores
        )
    outcomes = []
    for step in PLANS[options.number]:
        command = [sys.executable, "-m", "tests.perf"]
        command += step.arguments(out, work, options.rehearse)
        limit_s = step.limit_s * (REHEARSAL_PATIENCE if options.rehearse else 1.0)
        outcomes.append(run_step(step, command, environment, log, limit_s))
    cache.mkdir(exist_ok=True)
    _say(log, f"compiled kernels: {pack_cache(cache, out / CACHE)} files, in {CACHE}")
    _say(log, "", *(outcome.line() for outcome in outcomes))
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


def run_step(
    step: Step, command: list[str], environment: dict[str, str], log: Path, limit_s: float
) -> Outcome:
    """Run a step with its output in the log, and print the end of the output."""
    _say(log, "", f"== {step.name}: {' '.join(command[1:])}")
    begins = log.stat().st_size
    began_s = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=report.ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )
    status = wait_or_interrupt(process, max(limit_s - GRACE_S, 0.0), GRACE_S)
    _cut(log, begins)
    lines = log.read_bytes()[begins:].decode(errors="replace").splitlines()
    for line in lines[-SHOWN_LINES:]:
        print(line[:SHOWN_COLUMNS], flush=True)
    return Outcome(step, status, time.monotonic() - began_s)


def _cut(log: Path, begins: int) -> None:
    """Keep only the first and the last part of a long output."""
    held = log.read_bytes()
    printed = held[begins:]
    if len(printed) > LOG_BYTES:
        half = LOG_BYTES // 2
        left_out = f"\n... {len(printed) - LOG_BYTES} bytes are left out ...\n".encode()
        log.write_bytes(held[:begins] + printed[:half] + left_out + printed[-half:])


def _say(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        for line in lines:
            print(line, flush=True)
            print(line, file=file)


def _facts(work: Path) -> list[str]:
    """Describe the machine in a few lines, before the first step."""
    query = "--query-gpu=name,driver_version,memory.total"
    free_gb = shutil.disk_usage(work).free / 1e9
    shared_gb = shutil.disk_usage("/dev/shm").free / 1e9 if Path("/dev/shm").exists() else 0.0
    return [
        f"commit {report.commit()}, Python {sys.version.split()[0]}",
        f"GPU: {report.output('nvidia-smi', query, '--format=csv,noheader') or 'none'}",
        f"{report.hardware()['cpu']}, {len(os.sched_getaffinity(0))} cores; "
        f"free: {free_gb:.0f} GB on the disk, {shared_gb:.0f} in /dev/shm",
        f"C compiler: {shutil.which('gcc') or shutil.which('cc') or 'none, Triton needs one'}",
    ]


if __name__ == "__main__":
    sys.exit(main())
