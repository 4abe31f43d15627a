"""Starts of the 0.6B shape on a CPU next to a live engine of it: with packed weights from a file, and without.

Each start is a new process, to its first token; both kinds in alternation. The page cache has the checkpoint and the
file. The cache folder is a temporary one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from quire.cluster.bench.engines.checkpoints import build
from quire.cluster.bench.results import report
from quire.cluster.bench.startup_command import GOAL_BESIDE_S, started

# Set before the first measurement in alternation: at most 0.7 of the time.
GOAL_RATIO = 0.7


def first_token_s(engine: dict[str, Any], phases: list[dict[str, float]]) -> list[float]:
    """Seconds of one start; its phases are added to `phases`."""
    with started(engine) as one:
        phases.append(one["phases_s"])
        return [one["first_token_s"]]


def measure(folder: Path, rounds: int) -> list[report.Bar]:
    """The bars."""
    engine = dict(
        model=str(build("halfb", folder / "halfb")),
        dtype="bfloat16",
        num_threads=2,
        kv_cache_gib=0.5,
        max_model_len=2048,
    )
    kept = engine | {"cache_packed_weights": True}
    phases: dict[str, list[dict[str, float]]] = {"packed": [], "kept": []}
    with started(kept):
        candidates = {
            "packed": partial(first_token_s, engine, phases["packed"]),
            "kept": partial(first_token_s, kept, phases["kept"]),
        }
        found = report.alternate(candidates, rounds)
    details = {
        name: {
            **report.spread_json(report.Spread.of(values)),
            "phases_s": {
                phase: round(statistics.median(one[phase] for one in phases[name]), 2)
                for phase in phases[name][0]
            },
        }
        for name, values in found.items()
    }
    medians = {name: statistics.median(values) for name, values in found.items()}
    return [
        report.Bar(
            "start/first_token_beside_another_kept_s",
            medians["kept"],
            "s",
            GOAL_BESIDE_S,
            details=details,
        ),
        report.Bar("start/kept_over_packed", medians["kept"] / medians["packed"], "x", GOAL_RATIO),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path(tempfile.gettempdir()) / "quire-checkpoints",
        help="where random weights are kept",
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS / "packed_start.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUIRE_CACHE"] = folder
        bars = measure(args.checkpoints, args.rounds)
    report.write(
        args.out,
        f"python -m tests.perf packed_start --rounds {args.rounds}",
        bars,
        method="seconds from the start of a process to its first token, medians; alternated",
    )


if __name__ == "__main__":
    main()
