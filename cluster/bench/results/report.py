"""Results of benchmarks: JSON files with the commit, the hardware, the command, and bars (values with goals).

A result is one JSON file: `{commit, hardware, command, load, bars: [{name, value, unit, goal, holds, ...}]}`.
`hardware` has the CPU model, the number of cores and the accelerators, because the numbers depend on them. The file has
no name of a machine and no path.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "perf" / "results"
COMMIT_VARIABLE = "QUIRE_COMMIT"
_COMMIT = re.compile(r"([0-9a-f]{7,40})(\+?)")
_EXPORTED_COMMIT = ".git_archival.txt"  # `git archive` writes the commit into this file
_COMMIT_LEN = 12


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of repeated measurements."""

    min: float
    median: float
    p90: float
    num: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if not values:
            raise ValueError("no measurements")
        ranked = sorted(values)
        return cls(
            ranked[0], statistics.median(ranked), ranked[int(0.9 * (len(ranked) - 1))], len(ranked)
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """One number with its goal.

    `name` is PART/QUANTITY, as the README quotes it. `value` is None if it has not been measured.
    """

    name: str
    value: float | None
    unit: str
    goal: float
    at_most: bool = True  # False: the value must be at least the goal
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def to_json(self) -> dict[str, Any]:
        goal = f"{'<=' if self.at_most else '>='} {self.goal:g}"
        row = {
            "name": self.name,
            "value": None if self.value is None else float(f"{self.value:.4g}"),
            "unit": self.unit,
            "goal": goal,
            "holds": self.holds,
        }
        return {**row, "details": dict(self.details)} if self.details else row


def spread_json(spread: Spread, digits: int = 4) -> dict[str, float]:
    """A spread with rounded values, for JSON."""
    return {name: float(f"{value:.{digits}g}") for name, value in asdict(spread).items()}


def alternate(
    candidates: Mapping[str, Callable[[], list[float]]], rounds: int
) -> dict[str, list[float]]:
    """Run the candidates alternately, so that other load on the machine affects all candidates alike.

    Parameters
    ----------
    candidates
        Functions that return the measurements of one turn.
    """
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, measure in candidates.items():
            found[name] += measure()
    return found


def hardware() -> dict[str, Any]:
    """CPU model, cores, Python version and accelerators."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    names = output(*command).splitlines()
    if names:
        facts["accelerators"] = names
    return facts


def commit() -> str:
    """Return the measured commit, with a `+` if tracked files differ from it.

    Sources, in this order: the variable `QUIRE_COMMIT` (for copies of a working tree), git, and the file that
    `git archive` fills in. Otherwise "unknown".

    Raises
    ------
    ValueError
        The variable does not hold a commit.
    """
    given = os.environ.get(COMMIT_VARIABLE, "")
    if given:
        if _COMMIT.fullmatch(given) is None:
            raise ValueError(
                f"{COMMIT_VARIABLE}: must be 7 to 40 hexadecimal digits and perhaps a +, got {given!r}"
            )
        return _short(given)
    return _git_commit() or _exported_commit() or "unknown"


def _short(name: str) -> str:
    digits, mark = name.removesuffix("+"), "+" if name.endswith("+") else ""
    return digits[:_COMMIT_LEN] + mark


def _git_commit() -> str:
    """The commit of this repository; empty if Quire's folder is no repository, even if a parent folder is one."""
    if not (ROOT / ".git").exists():
        return ""
    name = output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not name:
        return ""
    changes = output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    others = [line for line in changes.splitlines() if "tests/perf/results/" not in line]
    return _short(name + ("+" if others else ""))


def _exported_commit() -> str:
    path = ROOT / _EXPORTED_COMMIT
    name = path.read_text().strip() if path.exists() else ""
    return _short(name) if _COMMIT.fullmatch(name) else ""


def load_average() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def write(path: Path, command: str, bars: list[Bar], *, show: bool = True, **facts: Any) -> None:
    """Write a result and print its bars.

    Parameters
    ----------
    command
        Command that repeats the measurement.
    show
        Whether to print the bars.
    facts
        More entries of the file.
    """
    result = {
        "commit": commit(),
        "hardware": hardware(),
        "command": command,
        "load": load_average(),
        **facts,
        "bars": [bar.to_json() for bar in bars],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    if show:
        _print_bars(result["bars"])


def _print_bars(rows: list[dict[str, Any]]) -> None:
    width = max((len(row["name"]) for row in rows), default=0)
    marks = {True: "holds", False: "MISSED", None: "not measured"}
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:g}"
        print(
            f"{row['name']:{width}}  {value:>9} {row['unit']:<3} {row['goal']:>8}  {marks[row['holds']]}"
        )


def _cpu_model() -> str:
    """The CPU's name, with family and model on Linux: some names cover several generations."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    model = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and "model" in facts:
        model += f", family {facts['cpu family']} model {facts['model']}"
    return model


def output(*command: str) -> str:
    """Output of a program; empty if the program is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
