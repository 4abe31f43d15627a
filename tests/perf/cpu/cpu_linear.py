"""CPU matrix products at the row counts of decode steps and prefill: packed weights against torch.

The weights of several layers are used in turn; together they exceed the caches, as a model's weights do. The candidates
alternate: the packed product, `torch.nn.functional.linear`, and a copy of as many bytes (read and written both count).
In float32 there are also the fixed-height tiles that `deterministic` uses without the compiled library; in bfloat16
also the same weights uncoded. Each bar is a ratio of medians of weight bytes per second: packed to the copy, to torch,
and to uncoded weights. Bytes count in the dtype; coded weights are a quarter smaller, so a product of few rows can be
faster than the copy.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from quire.cluster.bench.results import report
from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear
from quire.replica.model.deterministic.cpu_tiles import fitting_tile_rows, tiled_linear

COLUMNS, DEPTH, LAYERS = 6144, 1024, 8  # gate and up of a 0.6B model: 96 MiB in bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
# Goals, set before the first measurement: few rows run at the memory's speed, no row count is slower than torch.
GOAL_OF_COPY = {1: 0.8, 2: 0.8, 4: 0.8, 8: 0.8, 16: 0.6, 32: 0.3}
GOAL_OF_TORCH = 1.0
GOAL_OF_UNCODED = 1.0  # goal, set when coded weights were introduced


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(clock: Callable[[], float], work: Callable[[], object]) -> list[float]:
    """Measure one turn after one warm-up turn."""
    work()
    began = clock()
    work()
    return [clock() - began]


def measure(
    name: str, dtype: torch.dtype, rounds: int, clock: Callable[[], float]
) -> list[report.Bar]:
    """The bars of one dtype."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(COLUMNS, DEPTH, generator=generator).to(dtype) / 32 for _ in range(LAYERS)
    ]
    packed = [PackedWeight.pack([weight]) for weight in weights]
    is_coded = packed[0].code is not None
    uncoded = [PackedWeight.pack([weight], coded=False) for weight in weights if is_coded]
    num_bytes = sum(weight.nbytes for weight in weights)
    source, target = torch.ones(num_bytes // 8), torch.ones(num_bytes // 8)
    bars = []
    for rows in ROWS:
        x = torch.randn(rows, DEPTH, generator=generator).to(dtype)
        candidates = {
            "packed": lambda x=x: [packed_linear(x, weight) for weight in packed],
            "torch": lambda x=x: [F.linear(x, weight) for weight in weights],
            "copy": lambda: target.copy_(source),
        }
        if is_coded:
            candidates["uncoded"] = lambda x=x: [packed_linear(x, weight) for weight in uncoded]
        if dtype == torch.float32:
            heights = fitting_tile_rows(weights[0])
            candidates["tiles"] = lambda x=x, h=heights: [
                tiled_linear(x, weight, h) for weight in weights
            ]
        turns = {
            which: functools.partial(seconds, clock, work) for which, work in candidates.items()
        }
        found = report.alternate(turns, rounds)
        medians = {which: statistics.median(values) for which, values in found.items()}
        details = {
            f"{which}_gb_per_s": round(num_bytes / median / 1e9, 2)
            for which, median in medians.items()
        }
        flops = 2 * rows * COLUMNS * DEPTH * LAYERS
        details["packed_gflop_per_s"] = round(flops / medians["packed"] / 1e9, 1)
        details["torch_gflop_per_s"] = round(flops / medians["torch"] / 1e9, 1)
        if rows in GOAL_OF_COPY:
            bars.append(
                report.Bar(
                    f"cpu/linear_{name}_{rows}_rows_of_copy",
                    medians["copy"] / medians["packed"],
                    "x",
                    GOAL_OF_COPY[rows],
                    at_most=False,
                    details=details,
                )
            )
        if "uncoded" in medians:
            bars.append(
                report.Bar(
                    f"cpu/linear_{name}_{rows}_rows_of_uncoded",
                    medians["uncoded"] / medians["packed"],
                    "x",
                    GOAL_OF_UNCODED,
                    at_most=False,
                )
            )
        bars.append(
            report.Bar(
                f"cpu/linear_{name}_{rows}_rows_of_torch",
                medians["torch"] / medians["packed"],
                "x",
                GOAL_OF_TORCH,
                at_most=False,
                details={} if rows in GOAL_OF_COPY else details,
            )
        )
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu: processor time, for one thread on a machine that does other things too",
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS / "cpu_linear.json")
    args = parser.parse_args()
    library = native_library.load()
    if library is None:
        parser.error("needs the compiled library: install with a C compiler")
    if args.clock == "cpu" and args.threads != 1:
        parser.error(
            f"--clock cpu adds up what threads take: needs --threads 1, got {args.threads}"
        )
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        bars = [
            bar
            for name, dtype in DTYPES.items()
            for bar in measure(name, dtype, args.rounds, CLOCKS[args.clock])
        ]
    report.write(
        args.out,
        f"python -m tests.perf cpu_linear --rounds {args.rounds} --threads {args.threads} --clock {args.clock}",
        bars,
        instructions=native_library.ISAS[library.best_isa],
        method=f"{LAYERS} weights [{COLUMNS}, {DEPTH}] in turn; {args.clock} time, medians, alternated",
    )


if __name__ == "__main__":
    main()
