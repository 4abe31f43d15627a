"""Decode with weights of 4 bits on the CPU against bfloat16: all products of a step of the 0.6B shape.

A quarter of Qwen3-0.6B: 7 of 28 layers, and a quarter of the output head, which is bfloat16 in both. Together the
weights exceed the caches. The candidates alternate in one run. A bar is the time of bfloat16 (stored in 12 bits,
`weight_code.py`) divided by the time of 4 bits with groups of 128.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import torch

from quire.cluster.bench.results import report
from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_linear import PackedWeight, packed_linear
from tests.perf.cpu.cpu_linear import CLOCKS, seconds

LAYERS, GROUP = 7, 128
# Output and input features: q k v, output, gate up, down.
PRODUCTS = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
HEAD = (151_936 // 4, 1024)
# Rows and goals. Many rows are bound by the multipliers, and the numbers are decoded for them in addition.
GOALS = {1: 1.3, 2: 1.3, 4: 1.2, 8: 1.0, 32: 0.9, 128: 0.9}


def in_bfloat16(columns: int, depth: int) -> PackedWeight:
    """A weight of normal numbers."""
    return PackedWeight.pack([torch.randn(columns, depth).mul_(depth**-0.5).bfloat16()])


def in_four_bits(columns: int, depth: int) -> PackedWeight:
    """A weight of random numbers, with scales and zero points."""
    words = torch.randint(-(2**31), 2**31, (columns, depth // 8)).int()
    groups = (columns, depth // GROUP)
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8)
    return PackedWeight.of_numbers(words, torch.rand(groups) * depth**-0.5, zeros)


def measure(rounds: int, clock: str) -> list[report.Bar]:
    """The bars of all numbers of rows."""
    head = in_bfloat16(*HEAD)
    layers = {
        name: [make(*shape) for _ in range(LAYERS) for shape in PRODUCTS]
        for name, make in (("bf16", in_bfloat16), ("w4", in_four_bits))
    }
    megabytes = {name: sum(w.num_bytes for w in held) / 1e6 for name, held in layers.items()}
    bars = []
    for rows, goal in GOALS.items():
        inputs = {depth: torch.randn(rows, depth).bfloat16() for _, depth in PRODUCTS}
        parts = {**layers, "head": [head]}
        turns = {
            name: functools.partial(
                seconds,
                CLOCKS[clock],
                lambda held=held, x=inputs: [packed_linear(x[w.depth], w) for w in held],
            )
            for name, held in parts.items()
        }
        found = report.alternate(turns, rounds)
        medians = {name: statistics.median(values) for name, values in found.items()}
        step = {name: medians[name] + medians["head"] for name in layers}
        bars.append(
            report.Bar(
                f"kernels/w4_cpu_decode_ratio_{rows}_rows",
                step["bf16"] / step["w4"],
                "x",
                goal,
                at_most=False,
                details={
                    "without_the_head": round(medians["bf16"] / medians["w4"], 3),
                    **{f"{name}_ms": round(1e3 * value, 2) for name, value in medians.items()},
                    **{f"{name}_layers_mb": round(size, 1) for name, size in megabytes.items()},
                },
            )
        )
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="as of cpu_linear")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "cpu_w4.json")
    args = parser.parse_args()
    library = native_library.load()
    if library is None:
        parser.error("needs the compiled library: install with a C compiler")
    if args.clock == "cpu" and args.threads != 1:
        parser.error(f"--clock cpu needs --threads 1, got {args.threads}")
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        bars = measure(args.rounds, args.clock)
    report.write(
        args.out,
        f"python -m tests.perf cpu_w4 --rounds {args.rounds} --threads {args.threads} --clock {args.clock}",
        bars,
        instructions=native_library.ISAS[library.best_isa],
        method=f"{LAYERS} layers and a quarter of the head; {args.clock} time, medians, alternated",
    )


if __name__ == "__main__":
    main()
