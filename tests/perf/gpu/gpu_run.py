"""Shared by the GPU benchmarks: options, the session, the rows of all parts, and the run itself.

```
 options ──▶ session (device, roofs, time) ──▶ part by part: open points ──▶ rows ──▶ the result file
                                                     ▲                                             │
                                                     └────────────── --resume ─────────────────────┘
```
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.bench.results import report

if TYPE_CHECKING:
    from tests.perf.gpu.gpu_session import Part, Point, Row, Session

REHEARSAL_PATIENCE = 10.0  # factor of the budget in a rehearsal, because its machine may be busy
WRITE_PERIOD_S = 5.0  # a killed part loses at most the rows of this time
_CELL = 24  # widest cell of a table, in characters


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One GPU benchmark with its command line and result."""

    command: str  # command that runs it
    method: str  # how its numbers are measured
    result: Path
    shows_rows: bool = False  # print a table of every part's rows, not only its bars


def option_parser(benchmark: Benchmark, description: str) -> argparse.ArgumentParser:
    """The options of all GPU benchmarks."""
    parser = argparse.ArgumentParser(
        prog=benchmark.command,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--resume", action="store_true", help="keep what the result file has")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these")
    parser.add_argument("--without", nargs="+", metavar="PART", default=[], help="all but these")
    parser.add_argument("--out", type=Path, default=benchmark.result)
    parser.add_argument(
        "--budget-s",
        type=float,
        help="seconds for all parts; where they ask for more, each gets its share",
    )
    return parser


def main(
    benchmark: Benchmark,
    options: argparse.Namespace,
    make_parts: Callable[[], list[Part]],
    summarise: Callable[[Session, dict[str, list[Row]]], str] | None = None,
) -> int:
    """Run the chosen parts; returns the exit status: 1 if a row has an error or a test failed.

    Parameters
    ----------
    make_parts
        Makes all parts in the order in which they run; called after the session has chosen Triton's mode.
    summarise
        Makes a text about all rows, printed last.
    """
    try:
        session = open_session(options.rehearse)
        parts = make_parts()
        chosen = _chosen(parts, options.parts, options.without)
        parts, budget_s = _share(parts, chosen, options.budget_s)
        patience = REHEARSAL_PATIENCE if options.rehearse else 1.0
        session.deadline_s = session.clock() + patience * budget_s
        results = Results(options.out, options.rehearse, benchmark)
        results.check_overwrite()
        if options.resume:
            results.load()
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    errors = run(session, results, parts, chosen)
    if summarise is not None:
        print(summarise(session, results.rows), flush=True)
    failed = sum(row.get("failed", 0) for rows in results.rows.values() for row in rows)
    print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors or failed else 0


def _chosen(parts: list[Part], wanted: list[str] | None, without: list[str]) -> set[str]:
    names = [part.name for part in parts]
    unknown = {*(wanted or ()), *without} - set(names)
    if unknown:
        raise ValueError(
            f"--parts: must be of {', '.join(names)}, got {', '.join(sorted(unknown))}"
        )
    return set(wanted or names) - set(without)


def _share(parts: list[Part], chosen: set[str], budget_s: float | None) -> tuple[list[Part], float]:
    """The parts with their time limits, and the limit of the run (None: the sum of the parts')."""
    wanted_s = sum(part.budget_s for part in parts if part.name in chosen)
    if budget_s is None:
        return parts, wanted_s
    share = min(1.0, budget_s / wanted_s)
    return [replace(part, budget_s=share * part.budget_s) for part in parts], budget_s


def open_session(rehearsal: bool) -> Session:
    """A session on the GPU, or on the CPU with Triton's interpreter; its deadline is not set yet.

    Raises
    ------
    RuntimeError
        There is no GPU, and this is not a rehearsal.
    """
    if rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from tests.perf.gpu.gpu_session import Session

    if rehearsal:
        from tests.kernels.compile.interpreter import repair_interpreter

        repair_interpreter()
    elif not torch.cuda.is_available():
        raise RuntimeError("device: torch finds no CUDA device; --rehearse needs none")
    torch.manual_seed(0)
    return Session(torch.device("cpu" if rehearsal else "cuda"), rehearsal, time.monotonic())


def differs(found: dict[str, Any], rehearsal: bool) -> str:
    """Why a run here cannot resume a result; empty if it can.

    With GPUs only the cards are compared: another machine may have the same card with another CPU.
    """
    if found["rehearsal"] != rehearsal:
        return f"is {'a rehearsal' if found['rehearsal'] else 'of measurements'}"
    if found["commit"] != report.commit():
        return f"is of commit {found['commit']}, not {report.commit()}"
    was, now = (_card(hardware) for hardware in (found["hardware"], report.hardware()))
    return "" if was == now else f"is of hardware {was}, not {now}"


def _card(hardware: dict[str, Any]) -> Any:
    return hardware.get("accelerators") or hardware


class Results:
    """The rows of a run by part, and their file.

    Parameters
    ----------
    path
        File that is written after each part.
    rehearsal
        Whether this is a rehearsal without measurements.
    benchmark
        The benchmark that the file names.
    """

    def __init__(self, path: Path, rehearsal: bool, benchmark: Benchmark):
        self._path = path
        self._rehearsal = rehearsal
        self.benchmark = benchmark
        self.rows: dict[str, list[Row]] = {}

    def load(self) -> None:
        """Load the rows of an earlier run of the same commit on the same card.

        Raises
        ------
        ValueError
            The run had another commit or card; the message has the difference.
        """
        if not self._path.exists():
            return
        found = json.loads(self._path.read_text())
        reason = differs(found, self._rehearsal)
        if reason:
            raise ValueError(f"--resume: {self._path.name} {reason}")
        self.rows = {name: part["rows"] for name, part in found["parts"].items()}

    def check_overwrite(self) -> None:
        """Refuse to replace GPU measurements with a rehearsal."""
        if self._rehearsal and self._path.exists():
            if not json.loads(self._path.read_text()).get("rehearsal"):
                raise ValueError(
                    f"--rehearse: {self._path.name} holds measurements; give another file with --out"
                )

    def write(self, parts: list[Part], *, show: bool, **facts: Any) -> None:
        """Write all rows and their bars."""
        bars = [bar for part in parts for bar in part.bars(self.rows.get(part.name, []))]
        rows = self.rows
        if self._rehearsal:
            bars = [replace(bar, value=None, details={}) for bar in bars]
            rows = {name: [] for name in rows}
        done = {
            name: {"points": len(self.rows[name]), "rows": found} for name, found in rows.items()
        }
        report.write(
            self._path,
            self.benchmark.command + (" --rehearse" if self._rehearsal else ""),
            bars,
            show=show,
            method=self.benchmark.method,
            rehearsal=self._rehearsal,
            **facts,
            parts=done,
        )


def run(session: Session, results: Results, parts: list[Part], chosen: set[str]) -> list[str]:
    """Run the chosen parts; returns the errors of their rows."""
    from tests.perf.gpu.gpu_session import NO_TIME, free_memory, is_final
    from tests.perf.gpu.kernels.gpu_peers import installed

    facts = _versions() | {"peers": ["torch SDPA", *installed()]}
    errors = []
    for part in parts:
        if part.name not in chosen and part.name != "machine":
            continue
        began_s = session.clock()
        points = part.points(session.rehearsal)
        kept = [row for row in results.rows.get(part.name, []) if is_final(row)]
        if part.name == "machine":
            kept = []  # `machine` always runs, because the session needs its rates
        new: list[Row] = []
        written_s = session.clock()
        for row in part.run(session, _without_row(points, kept)):
            new.append(row)
            if session.clock() - written_s >= WRITE_PERIOD_S:
                rows = kept + new
                left = [point | {"skipped": NO_TIME} for point in _without_row(points, rows)]
                results.rows[part.name] = rows + left
                results.write(parts, show=False, **facts)
                written_s = session.clock()
        rows = results.rows[part.name] = kept + new
        free_memory()
        errors += [f"{part.name}: {row['error']}" for row in new if "error" in row]
        results.write(parts, show=False, **facts)
        skipped = sum("skipped" in row for row in rows)
        print(
            f"{part.name:14}{len(new):5} measured{len(kept):5} kept{skipped:5} skipped"
            f"{session.clock() - began_s:8.1f} s",
            flush=True,
        )
        if results.benchmark.shows_rows:
            print(table(rows), flush=True)
    results.write(parts, show=True, **facts)
    return errors


def _without_row(points: list[Point], rows: list[Row]) -> list[Point]:
    return [point for point in points if not any(point.items() <= row.items() for row in rows)]


def table(rows: Sequence[Row]) -> str:
    """Format rows as a table with a column for each key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    return "\n".join(
        "  " + "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _CELL else text[: _CELL - 3] + "..."


def _versions() -> dict[str, str]:
    import numpy
    import torch
    import transformers
    import triton

    return {module.__name__: module.__version__ for module in (torch, triton, transformers, numpy)}
