"""Compare engines that run the same workloads alternately: seconds, ratios with their spread, percent of the floor.

The load of the machine changes over minutes, so engines that run one after the other cannot be compared. Here they
alternate. Every turn has new prompts, and an engine's process is stopped while another engine runs. A ratio compares
two engines within one turn; its spread is taken over the turns. Each number comes with the CPU time that other
processes used during it.

The floor (`floor.py`: the least time that a workload needs at the machine's measured rates) is computed twice: with the
fastest rates of the whole run, and for each turn with the rates just before and after it. The two differ on hosts
whose memory other virtual machines share, because its speed changes within minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from quire.cluster.bench.engines.engine_process import EngineFailed, EngineProcess, EngineSpec
from quire.cluster.bench.engines.floor import (
    Floor,
    ModelShape,
    Rates,
    best_of,
    floor_of,
    measure_rates,
)
from quire.cluster.bench.load.workloads import Workload

_WARM_UP = Workload("warm-up", 8, 0, 128, 4)


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's run of one workload in one repetition.

    Attributes
    ----------
    repetition
        Number of the turn, the same for all engines; ratios compare engines within one repetition.
    cpu_s
        CPU time of the engine's processes, all threads.
    other_cpu_s
        CPU time of all other processes during the turn.
    peak_rss_mib
        Peak memory of the engine's processes so far.
    rates
        The machine's rates just before and after the turn, the faster of each.
    first_token_s
        Seconds of one more request with a single output token; only for workloads of one request.
    """

    engine: str
    workload: str
    repetition: int
    seconds: float
    cpu_s: float
    other_cpu_s: float
    peak_rss_mib: float
    rates: Rates | None = None
    first_token_s: float | None = None


@dataclass(slots=True)
class Comparison:
    """Turns, rates and failures of a run. `settings` has the engines' settings by name, in the order of the tables."""

    settings: dict[str, dict[str, Any]]
    startup: dict[str, dict[str, float]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # engine: message
    rates: list[Rates] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write everything as JSON lines for `read`; each line is an engine, a turn, rates or a failure."""
        lines: list[dict[str, Any]] = [
            {"engine": name, "settings": settings, "startup": self.startup.get(name)}
            for name, settings in self.settings.items()
        ]
        lines += [{"turn": asdict(turn)} for turn in self.turns]
        lines += [{"rates": asdict(rates)} for rates in self.rates]
        lines += [{"failed": name, "message": text} for name, text in self.failures.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def seconds(self, engine: str, workload: str) -> list[float]:
        """Seconds of every turn of an engine and workload, in order."""
        return [t.seconds for t in self.turns if (t.engine, t.workload) == (engine, workload)]

    def ratios(self, engine: str, other: str, workload: str, *, cpu: bool = False) -> list[float]:
        """Speed of `engine` divided by the speed of `other` in each repetition. Above 1, `engine` is faster.

        Parameters
        ----------
        cpu
            Compare CPU time instead of wall time. This works on a busy machine, but only if both engines have one
            thread: threads that wait for each other use CPU time too.
        """
        found: dict[int, dict[str, float]] = defaultdict(dict)
        for turn in self.turns:
            if turn.workload == workload:
                found[turn.repetition][turn.engine] = turn.cpu_s if cpu else turn.seconds
        return [row[other] / row[engine] for row in found.values() if {engine, other} <= row.keys()]


def compare(
    specs: Sequence[EngineSpec],
    workloads: Sequence[Workload],
    repetitions: int,
    vocab_size: int,
    log: TextIO,
    *,
    keep: Path | None = None,
    rates_budget_s: float | None = 1.5,
    settle_s: float = 60.0,
    budget_s: float | None = None,
    first_repetition: int = 0,
    skip: frozenset[tuple[str, str]] = frozenset(),
    progress: Callable[[Turn | str], None] = lambda what: None,
) -> Comparison:
    """Load the engines, then run every workload on them alternately.

    An engine that fails is named in `failures` and left out; the others continue.

    Parameters
    ----------
    log
        File for the engines' output.
    keep
        File that holds the results so far; it is rewritten after every turn.
    rates_budget_s
        Seconds for each measurement of the machine's rates: before the first turn and after every repetition. A
        measurement between two turns gets a quarter. None: the rates are not measured.
    settle_s
        Longest wait, in seconds, for an engine's background work before the first turn. Quire allocates the memory
        pages of its cache in this time.
    budget_s
        Seconds after the engines were loaded. The first repetition always runs; no other one starts later than this.
    first_repetition
        Number of the first repetition; another number means other prompts.
    skip
        Pairs (engine, workload) to leave out.
    progress
        Called with every turn, and with a message for every engine that is ready or has failed.
    """
    found = Comparison({spec.name: spec.to_json() for spec in specs})
    if len(found.settings) < len(specs):
        raise ValueError("engines: two have the same name; write NAME={...}")
    with ExitStack() as stack:
        running: dict[str, EngineProcess] = {}
        for spec in specs:
            try:
                process = EngineProcess(spec, log)
                stack.callback(process.close)
                process.generate(_WARM_UP.prompts(spec.name, vocab_size), _WARM_UP.output_tokens)
            except EngineFailed as error:
                found.failures[spec.name] = str(error)
                progress(str(error))
                continue
            process.settle(settle_s)
            process.stop()
            running[spec.name] = process
            found.startup[spec.name] = process.startup
            progress(f"{spec.name} is ready after {process.startup['ready_s']:.1f} s")

        def rates(share: float = 1.0) -> list[Rates]:
            if rates_budget_s is None:
                return []
            return [measure_rates(specs[0].dtype, share * rates_budget_s)]

        found.rates += rates()
        before = rates(0.25)
        began_s = time.perf_counter()
        for repetition in range(first_repetition, first_repetition + repetitions):
            late = budget_s is not None and time.perf_counter() - began_s > budget_s
            if late and repetition > first_repetition:
                break
            for workload in workloads:
                names = [name for name in running if (name, workload.name) not in skip]
                # Reverse the order in every other repetition.
                for name in names if repetition % 2 == 0 else reversed(names):
                    turn = _run(running[name], workload, repetition, vocab_size, found)
                    if turn is None:
                        running.pop(name).close()
                        progress(found.failures[name])
                    else:
                        after = rates(0.25)
                        if after:
                            turn = dataclasses.replace(turn, rates=best_of(before + after))
                        before = after
                        found.turns.append(turn)
                        progress(turn)
                    if keep is not None:
                        found.write(keep)
            found.rates += rates()
    if keep is not None:
        found.write(keep)
    return found


def read(paths: Sequence[Path]) -> Comparison:
    """Merge runs that `Comparison.write` has written.

    Raises
    ------
    ValueError
        Two runs have the same turn of an engine, or different settings for an engine.
    """
    found = Comparison({})
    seen: set[tuple[str, str, int]] = set()
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "turn" in row:
                turn = Turn(**row["turn"])
                if row["turn"].get("rates") is not None:
                    turn = dataclasses.replace(turn, rates=Rates(**row["turn"]["rates"]))
                key = (turn.engine, turn.workload, turn.repetition)
                if key in seen:
                    raise ValueError(f"{path.name}: {key} occurs twice; see --first-repetition")
                seen.add(key)
                found.turns.append(turn)
            elif "rates" in row:
                found.rates.append(Rates(**row["rates"]))
            elif "failed" in row:
                found.failures[row["failed"]] = row["message"]
            else:
                name = row["engine"]
                if found.settings.setdefault(name, row["settings"]) != row["settings"]:
                    raise ValueError(f"{path.name}: {name} has other settings than before")
                if row["startup"] is not None:
                    found.startup.setdefault(name, row["startup"])
    return found


def _run(
    process: EngineProcess, workload: Workload, repetition: int, vocab_size: int, found: Comparison
) -> Turn | None:
    """Run one turn. If the engine fails, record the failure in `found` and return None."""
    name = process.spec.name
    prompts = workload.prompts(repetition, vocab_size)
    with process.awake():
        before_s, before = busy_cpu_s(), process.usage()
        try:
            answer = process.generate(prompts, workload.output_tokens)
        except EngineFailed as error:
            found.failures[name] = str(error)
            return None
        after = process.usage()
        own_s = after.cpu_s - before.cpu_s
        others_s = max(0.0, busy_cpu_s() - before_s - own_s)
        first_token_s = None
        if workload.num_requests == 1 < workload.output_tokens:
            others = workload.prompts(f"{repetition}-first", vocab_size)
            try:
                first_token_s = process.generate(others, 1)["seconds"]
            except EngineFailed as error:
                found.failures[name] = str(error)
                return None
    return Turn(
        name,
        workload.name,
        repetition,
        answer["seconds"],
        own_s,
        others_s,
        after.peak_rss_mib,
        first_token_s=first_token_s,
    )


def busy_cpu_s() -> float:
    """CPU seconds of all processes since the machine started; 0 where /proc is absent."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, _ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# --------------------------------------------------------------------------------------------------
# Summaries
# --------------------------------------------------------------------------------------------------


def summarise(
    found: Comparison, workloads: Sequence[Workload], shape: ModelShape | None, baseline: str
) -> dict[str, Any]:
    """Summarise the whole comparison as data for JSON.

    Parameters
    ----------
    shape
        The model's shape, for the floor; None if it is not known.
    baseline
        Engine that the others are compared with: `ratio` above 1 means that the baseline is faster.
    """
    rates = best_of(found.rates) if found.rates else None
    rows = []
    for workload in workloads:
        floor = floor_of(workload, shape, rates) if shape and rates else None
        for engine in found.settings:
            seconds = found.seconds(engine, workload.name)
            if seconds:
                row = _row(found, engine, workload, seconds, floor, baseline)
                if shape and (beside := _beside(found, engine, workload, shape)):
                    row["percent_of_floor_beside"] = spread(beside)
                rows.append(row)
    return {
        "rates": rates.to_json() if rates else None,
        "engines": found.settings,
        "startup_s": {
            name: {key: round(value, 2) for key, value in startup.items()}
            for name, startup in found.startup.items()
        },
        "failures": found.failures,
        "rows": rows,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of a few values."""
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {
        **{name: float(f"{value:.4g}") for name, value in named.items()},
        "turns": len(values),
    }


def _row(
    found: Comparison,
    engine: str,
    workload: Workload,
    seconds: list[float],
    floor: Floor | None,
    baseline: str,
) -> dict[str, Any]:
    turns = [t for t in found.turns if (t.engine, t.workload) == (engine, workload.name)]
    median = statistics.median(seconds)
    row: dict[str, Any] = {
        "workload": workload.name,
        "engine": engine,
        "seconds": spread(seconds),
        "output_tokens_per_s": round(workload.num_output_tokens / median, 1),
        "cpu_s": spread([t.cpu_s for t in turns]),
        "other_cpu_cores": [round(t.other_cpu_s / t.seconds, 2) for t in turns],
        "peak_rss_mib": round(max(t.peak_rss_mib for t in turns)),
    }
    if floor is not None:
        row["floor_s"] = round(floor.total_s, 3)
        row["percent_of_floor"] = round(100 * floor.total_s / median, 1)
    after_first = [
        1e3 * (t.seconds - t.first_token_s) / (workload.output_tokens - 1)
        for t in turns
        if t.first_token_s is not None
    ]
    if after_first:
        row["ms_per_token"] = spread(after_first)
    if engine != baseline and (ratios := found.ratios(baseline, engine, workload.name)):
        row["ratio"] = spread(ratios)
        row["cpu_ratio"] = spread(found.ratios(baseline, engine, workload.name, cpu=True))
    return row


def _beside(found: Comparison, engine: str, workload: Workload, shape: ModelShape) -> list[float]:
    """Percent of the floor of each turn, at the machine's rates just before and after the turn."""
    return [
        100 * floor_of(workload, shape, turn.rates).total_s / turn.seconds
        for turn in found.turns
        if (turn.engine, turn.workload) == (engine, workload.name) and turn.rates is not None
    ]


def table(summary: dict[str, Any], baseline: str) -> str:
    """Format a summary for a terminal."""
    rows = [
        [
            "workload",
            "engine",
            "s",
            "tokens/s",
            "of floor",
            "beside",
            f"{baseline} is",
            "CPU s",
            "in CPU time",
            "others' cores",
        ]
    ]
    for row in summary["rows"]:
        ratio, cpu_ratio = row.get("ratio"), row.get("cpu_ratio")
        rows.append(
            [
                row["workload"],
                row["engine"],
                f"{row['seconds']['median']:.3f}",
                f"{row['output_tokens_per_s']:.1f}",
                f"{row['percent_of_floor']:.0f}%" if "percent_of_floor" in row else "-",
                f"{row['percent_of_floor_beside']['median']:.0f}%"
                if "percent_of_floor_beside" in row
                else "-",
                f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"
                if ratio
                else "",
                f"{row['cpu_s']['median']:.2f}",
                f"{cpu_ratio['median']:.2f}x" if cpu_ratio else "",
                f"{max(row['other_cpu_cores']):.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    if summary["rates"]:
        memory, products = summary["rates"].values()
        lines.append(
            f"floor: {memory:g} GB/s, {products:g} GFLOP/s, the fastest of this run; beside: of each turn's minute"
        )
    lines += summary["failures"].values()
    return "\n".join(lines)
