"""W1 to W5 on the 0.6B shape: bars of Quire against transformers, OpenVINO and vLLM on the CPU.

    python -m tests.perf cpu-workloads TURNS.jsonl ... [--baseline quire-torch --prefix cpu/without_compiler]

Reads the turns of `quire bench compare halfb` (`compare.jsonl`), from one run or from several short runs with different
--first-repetition; tests/perf/README.md has the commands. Engines that were not run have no rows and no bars. With
--baseline the bars are those of another engine, for example of Quire without a compiler.

The floor uses the rates of the run. On the processor on which the goals were set, a second floor uses the rates of the
run that set the goals (the reference), so that percentages can be compared with that run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cluster.bench.engines import compare
from quire.cluster.bench.engines.floor import ModelShape, Rates, floor_of
from quire.cluster.bench.load.workloads import WORKLOADS
from quire.cluster.bench.results import plots, report

QUIRE = "quire"
PREFIX = "cpu"
# Goals, set before the first measurement: percent of the floor, and speed relative to transformers' continuous
# batching.
FLOOR_GOALS = {"W1": 78, "W2": 70, "W3": 92, "W4": 72, "W5": 98}
TRANSFORMERS_GOALS = {"W1": 3.0, "W2": 3.0, "W4": 3.0}
# Processor and rates with which the goals were set. The floor of one stream counts the tokens after the first.
REFERENCE_CPU = "AMD EPYC, family 25 model 17"
REFERENCE_RATES = Rates(memory_gb_per_s=33.0, gflop_per_s=410.0)


def bars(summary: dict[str, Any], baseline: str = QUIRE, prefix: str = PREFIX) -> list[report.Bar]:
    """The bars of all workloads with turns; peers are all engines other than Quire."""
    rows = {(row["engine"], row["workload"]): row for row in summary["rows"]}
    found = []
    for workload, goal in FLOOR_GOALS.items():
        row = rows.get((baseline, workload))
        if row is None:
            continue
        found.append(
            report.Bar(
                f"{prefix}/{workload}_percent_of_floor",
                row["percent_of_floor"],
                "%",
                goal,
                at_most=False,
                details={"seconds": row["seconds"], "floor_s": row["floor_s"]},
            )
        )
        if beside := row.get("percent_of_floor_beside"):
            found.append(
                report.Bar(
                    f"{prefix}/{workload}_percent_of_floor_beside",
                    beside["median"],
                    "%",
                    goal,
                    at_most=False,
                    details={"percent": beside},
                )
            )
        peers = [
            rows[engine, workload]
            for engine in summary["engines"]
            if not engine.startswith(QUIRE) and "ratio" in rows.get((engine, workload), {})
        ]
        found += [_against(row, peer, prefix) for peer in peers]
        if peers:
            # The best peer by the ratio within a turn: the machine's speed differs between turns.
            best = min(peers, key=lambda peer: peer["ratio"]["median"])
            found.append(
                report.Bar(
                    f"{prefix}/{workload}_over_best_peer",
                    best["ratio"]["median"],
                    "x",
                    1.0,
                    at_most=False,
                    details={"peer": best["engine"], "ratio": best["ratio"]},
                )
            )
    return found


def reference_bars(
    summary: dict[str, Any], shape: ModelShape, baseline: str = QUIRE, prefix: str = PREFIX
) -> list[report.Bar]:
    """Bars of the floor at the reference rates."""
    found = []
    for row in summary["rows"]:
        goal = FLOOR_GOALS.get(row["workload"])
        if row["engine"] != baseline or goal is None:
            continue
        workload = WORKLOADS[row["workload"]]
        floor = floor_of(workload, shape, REFERENCE_RATES)
        if "ms_per_token" in row:
            least = 1e3 * floor.decode_s / (workload.output_tokens - 1)
            taken, unit = row["ms_per_token"], "ms_per_token"
        else:
            least, taken, unit = floor.total_s, row["seconds"], "s"
        found.append(
            report.Bar(
                f"{prefix}/{workload.name}_percent_of_reference_floor",
                100 * least / taken["median"],
                "%",
                goal,
                at_most=False,
                details={unit: taken, "floor": round(least, 3), "rates": REFERENCE_RATES.to_json()},
            )
        )
    return found


def _against(row: dict[str, Any], peer: dict[str, Any], prefix: str) -> report.Bar:
    workload, engine = peer["workload"], peer["engine"]
    goal = TRANSFORMERS_GOALS.get(workload, 1.0) if engine == "transformers" else 1.0
    return report.Bar(
        f"{prefix}/{workload}_over_{engine}",
        peer["ratio"]["median"],
        "x",
        goal,
        at_most=False,
        details={
            "ratio": peer["ratio"],
            "seconds": row["seconds"],
            f"{engine}_seconds": peer["seconds"],
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("turns", type=Path, nargs="+", help="compare.jsonl of each run")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "cpu_workloads.json")
    parser.add_argument("--baseline", default=QUIRE, help="name of the engine whose bars these are")
    parser.add_argument("--prefix", default=PREFIX, help="of the bars' names")
    options = parser.parse_args(arguments)
    found = compare.read(options.turns)
    shape = ModelShape.of_checkpoint(options.checkpoint)
    summary = compare.summarise(found, list(WORKLOADS.values()), shape, options.baseline)
    print(compare.table(summary, options.baseline))
    found_bars = bars(summary, options.baseline, options.prefix)
    if report.hardware()["cpu"] == REFERENCE_CPU:
        found_bars += reference_bars(summary, shape, options.baseline, options.prefix)
    report.write(
        options.out,
        f"quire bench compare {options.checkpoint.name} --engines {' '.join(found.settings)}",
        found_bars,
        method="engines in turns, each in a process of its own that stands still while another runs; ratios turn "
        "by turn; medians",
        model=options.checkpoint.name,
        **summary,
    )
    plots.comparison(summary["rows"], options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
