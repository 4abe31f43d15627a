"""The engine on a GPU: correct tokens, steps relative to the machine's roof, comparison with transformers.

    python -m tests.perf gpu-engine                         # or: make gpu-engine
    python -m tests.perf gpu-engine --parts decode          # one part; --resume keeps the rows of the others
    python -m tests.perf gpu-engine --resume                # the open points of an earlier run on this commit and GPU
    python -m tests.perf gpu-engine --rehearse              # no GPU: every part, tiny models on the CPU

A part takes four minutes at most; points without time stay open. Models have published shapes and random weights
(`gpu_models.py`), 34 GB in --checkpoints; the first part that needs a model writes it. The result is written after
every part, so an interrupted run keeps its finished parts. Neither Ray nor a network is needed.

A rehearsal only shows that the command runs: its bars have no value.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run

if TYPE_CHECKING:
    from tests.perf.gpu.gpu_session import Part

BENCHMARK = gpu_run.Benchmark(
    "python -m tests.perf gpu-engine",
    "steps in which all rows decode, by the loop's clock and the device's events; workloads to their last token, the "
    "faster of two turns",
    report.RESULTS / "gpu_engine.json",
    shows_rows=True,
)


def all_parts(folder: Path) -> list[Part]:
    """All parts, in the order in which they run.

    Parameters
    ----------
    folder
        Folder for checkpoints with random weights.
    """
    from tests.perf.gpu import gpu_machine
    from tests.perf.gpu.engine import (
        gpu_engine_compiles,
        gpu_engine_deterministic,
        gpu_engine_offload,
        gpu_engine_start,
        gpu_engine_steps,
        gpu_engine_throughput,
        gpu_engine_tokens,
    )

    return [
        gpu_machine.MACHINE,
        gpu_engine_tokens.TOKENS,
        *gpu_engine_start.parts(folder),
        *gpu_engine_compiles.parts(folder),
        *gpu_engine_steps.parts(folder),
        *gpu_engine_offload.parts(folder),
        gpu_engine_deterministic.part(folder),
        *gpu_engine_throughput.parts(folder),
    ]


def option_parser() -> argparse.ArgumentParser:
    parser = gpu_run.option_parser(BENCHMARK, __doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path("bench-checkpoints"))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a part raised an error."""
    options = option_parser().parse_args(arguments)
    return gpu_run.main(BENCHMARK, options, partial(all_parts, options.checkpoints))


if __name__ == "__main__":
    sys.exit(main())
