"""The first parts of the GPU benchmark: are the kernels right on this machine, and how fast is the machine itself?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import torch

from quire.bench import report
from quire.bench.gpu_session import NO_TIME, Part, Point, Row, Session, significant

TESTS = report.ROOT / "tests" / "kernels"
REHEARSED_TESTS = ("test_activation.py",)
COPY_BYTES = 2 << 30
GEMM_SIZE = 8192
POLL_S = 0.2


def machine_points(rehearsal: bool) -> list[Point]:
    """A copy and a matrix product."""
    if rehearsal:
        return [{"roof": "copy", "bytes": 1 << 20}, {"roof": "gemm", "size": 64}]
    return [{"roof": "copy", "bytes": COPY_BYTES}, {"roof": "gemm", "size": GEMM_SIZE}]


def measure_machine(session: Session, point: Point) -> Row:
    """The roofs; the session keeps them. A copy's bytes count twice, read and written."""
    if point["roof"] == "copy":
        source = session.normal(point["bytes"] // 2)
        calls = [partial(torch.empty_like(source).copy_, source)]
        rate = 2 * point["bytes"] / (session.timer.one(calls).median * 1e-3)
        session.copy_bytes_per_s = rate
        return {"gb_per_s": significant(rate / 1e9)}
    size = point["size"]
    x, w = session.normal(size, size), session.normal(size, size)
    calls = [partial(torch.mm, x, w, out=torch.empty_like(x))]
    rate = 2 * size**3 / (session.timer.one(calls).median * 1e-3)
    session.gemm_flops_per_s = rate
    return {"tflops": significant(rate / 1e12)}


def numerics_points(rehearsal: bool) -> list[Point]:
    """The test files whose kernels run on the device."""
    files = [path.name for path in TESTS.glob("test_*.py") if "kernel_device" in path.read_text()]
    return [{"file": name} for name in sorted(files) if not rehearsal or name in REHEARSED_TESTS]


@dataclass
class _TestRun:
    """One test file in a process of its own."""

    point: Point
    process: subprocess.Popen[bytes]
    began_s: float
    result: Path

    def row(self, session: Session) -> Row:
        """Its counts; what pytest printed last where it could not count."""
        seconds = significant(session.clock() - self.began_s)
        try:
            suite = ElementTree.parse(self.result).getroot().find("testsuite")
        except (OSError, ElementTree.ParseError):
            suite = None
        if suite is None:
            return self.point | {"error": f"pytest ended with {self.process.returncode}"}
        tests, failures, errors, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
        )
        failed = [case.get("name") for case in suite if case.find("failure") is not None]
        return self.point | {
            "tests": tests,
            "failed": failures + errors,
            "skipped_tests": skipped,
            "seconds": seconds,
            **({"failures": failed} if failed else {}),
        }


class Numerics(Part):
    """The tests of the kernels, natively, a process a file: most of the time goes into compiling kernels."""

    def run(self, session: Session, points: list[Point]) -> Iterator[Row]:
        end_s = session.end_s(self.budget_s)
        waiting, running = list(points), []
        slots = len(os.sched_getaffinity(0))
        with tempfile.TemporaryDirectory() as folder:
            try:
                while waiting or running:
                    while waiting and len(running) < slots and session.clock() < end_s:
                        running.append(_start(session, waiting.pop(0), Path(folder)))
                    done = [run for run in running if run.process.poll() is not None]
                    running = [run for run in running if run not in done]
                    yield from (run.row(session) for run in done)
                    if session.clock() >= end_s:
                        late = [run.point for run in running] + waiting
                        yield from (point | {"skipped": NO_TIME} for point in late)
                        return
                    if not done:
                        time.sleep(POLL_S)
            finally:
                for run in running:
                    run.process.kill()
                    run.process.wait()


def _start(session: Session, point: Point, folder: Path) -> _TestRun:
    result = folder / f"{point['file']}.xml"
    marks = "not slow and not soak" + (" and not gpu" if session.rehearsal else "")
    command = [
        *(sys.executable, "-m", "pytest", str(TESTS / point["file"]), "-q", "-m", marks),
        *("--device", session.device.type, "--rootdir", str(report.ROOT)),
        *("-p", "no:cacheprovider", f"--junit-xml={result}"),
    ]
    with (folder / f"{point['file']}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=report.ROOT, stdout=log, stderr=subprocess.STDOUT)
    return _TestRun(point, process, session.clock(), result)


def numerics_bars(rows: list[Row]) -> list[report.Bar]:
    """No test of any kernel fails on the device."""
    counted = [row for row in rows if "failed" in row]
    missing = len(rows) - len(counted)
    failed = sum(row["failed"] for row in counted)
    details = {"tests": sum(row["tests"] for row in counted), "missing": missing}
    value = None if missing and not failed else failed
    return [report.Bar("gpu/failed_tests", value, "", 0, details=details)]


MACHINE = Part("machine", machine_points, measure_machine)
NUMERICS = Numerics(
    "numerics",
    numerics_points,
    lambda session, point: {},
    numerics_bars,
    budget_s=150,
)
