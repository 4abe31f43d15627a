"""Part of the GPU benchmark: the tests of the kernels and the device, natively, on all cores.

```
 pytest -n CORES --dist worksteal ──▶ progress and failures in this run's own output
                                  └─▶ junit.xml, read when pytest ends or runs out of time ──▶ a row per test file
```

Most of the time goes into compiling kernels, so the tests of a file are spread over all cores. A test that leaves the
device unusable ends its worker (`gpu_worker`); the next worker runs the remaining tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from quire.cluster.bench.results import report
from tests.perf.gpu.gpu_plan import TEST_FOLDERS
from tests.perf.gpu.gpu_session import NO_TIME, Part, Point, Row, Session, significant
from tests.perf.gpu.processes import hear_interrupts, wait_or_interrupt

ON_A_DEVICE = ("kernel_device", "mark.gpu")  # words in test files that run on a GPU
REHEARSED = ("test_norm.py",)
GRACE_S = 15.0  # for pytest to write its results after SIGINT
WORKERS = 14  # each has a context of about half a GiB on the device


def numerics_points(rehearsal: bool) -> list[Point]:
    """The test files that run on the device."""
    files = sorted(
        path for name in TEST_FOLDERS for path in (report.ROOT / name).rglob("test_*.py")
    )
    return [
        {"file": path.relative_to(report.ROOT).as_posix()}
        for path in files
        if (path.name in REHEARSED if rehearsal else _is_on_a_device(path))
    ]


def _is_on_a_device(path: Path) -> bool:
    text = path.read_text()
    return any(word in text for word in ON_A_DEVICE)


class Numerics(Part):
    """Runs one pytest for all files."""

    def run(self, session: Session, points: list[Point]) -> Iterator[Row]:
        if not points:
            return
        left_s = session.end_s(self.budget_s) - session.clock()
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "junit.xml"
            command = test_command([point["file"] for point in points], session.rehearsal, result)
            status = run_tests(command, max(left_s - GRACE_S, 1.0))
            found = read_counts(result)
        for point in points:
            row = point | found.get(point["file"], {})
            if status is None:
                yield row | {"skipped": NO_TIME}
            elif "tests" in row:
                yield row
            else:
                yield row | {"error": f"pytest ended with {status} and counted no test"}


def test_command(files: list[str], rehearsal: bool, result: Path) -> list[str]:
    """The pytest command, to run in the repository's root."""
    workers = min(len(os.sched_getaffinity(0)), WORKERS)
    return [
        *(sys.executable, "-m", "pytest", *files, "-q", "-p", "tests.perf.gpu.gpu_worker"),
        *("-m", f"{'not gpu' if rehearsal else 'gpu'} and not slow and not soak"),
        *("--device", "cpu" if rehearsal else "cuda", "--rootdir", str(report.ROOT)),
        *("-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider"),
        *("--continue-on-collection-errors", "--tb=short", "--durations=5"),
        *("-o", "junit_family=xunit1", f"--junit-xml={result}"),
    ]


def run_tests(command: list[str], limit_s: float) -> int | None:
    """Run pytest; returns its status, or None if it ran out of time and wrote partial results."""
    process = subprocess.Popen(
        command, cwd=report.ROOT, start_new_session=True, preexec_fn=hear_interrupts
    )
    return wait_or_interrupt(process, limit_s, GRACE_S)


def read_counts(result: Path) -> dict[str, Row]:
    """Counts of each file's tests and names of failed tests; empty if pytest wrote nothing."""
    try:
        cases = list(ElementTree.parse(result).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    rows: dict[str, Row] = {}
    for case in cases:
        file = case.get("file")
        if file is None:  # the interrupted test
            continue
        zero = {"tests": 0, "failed": 0, "skipped_tests": 0, "seconds": 0.0}
        row = rows.setdefault(file, zero)
        row["tests"] += 1
        row["seconds"] = significant(row["seconds"] + float(case.get("time", 0)))
        row["skipped_tests"] += case.find("skipped") is not None
        if case.find("failure") is not None or case.find("error") is not None:
            row["failed"] += 1
            row.setdefault("failures", []).append(case.get("name"))
    return rows


def numerics_bars(rows: list[Row]) -> list[report.Bar]:
    """The bar: no kernel test fails on the device."""
    counted = [row for row in rows if "failed" in row]
    missing = sum("failed" not in row or "skipped" in row for row in rows)
    failed = sum(row["failed"] for row in counted)
    details = {"tests": sum(row["tests"] for row in counted), "missing": missing}
    value = None if (missing or not rows) and not failed else failed
    return [report.Bar("gpu/failed_tests", value, "", 0, details=details)]


NUMERICS = Numerics(
    "numerics", numerics_points, lambda session, point: {}, numerics_bars, budget_s=150
)
