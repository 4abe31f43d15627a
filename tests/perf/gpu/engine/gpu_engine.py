"""The engine on a GPU: the right tokens, how near its steps are to the machine's roof, and how it compares.

    python -m tests.perf gpu-engine                         # or: make gpu-engine
    python -m tests.perf gpu-engine --parts decode          # one part; the others' rows are kept with --resume
    python -m tests.perf gpu-engine --resume                # what an earlier run on this commit and GPU left open
    python -m tests.perf gpu-engine --rehearse              # no GPU: every part, tiny models on the CPU

Parts take four minutes at most; what a part has no time for is left open. Models have published shapes and random
weights (`gpu_models.py`), 34 GB in --checkpoints, and are written by the first part that wants them. The result is
written after every part, so a run that is stopped leaves what it has. Neither Ray nor a network is used.

A rehearsal proves that the command runs. It measures nothing: its bars have no value and hold neither way.
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
    """In the order in which they run.

    Parameters
    ----------
    folder
        Where checkpoints of random weights are kept.
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
    """Command line; returns the exit status: 1 where a part raises."""
    options = option_parser().parse_args(arguments)
    return gpu_run.main(BENCHMARK, options, partial(all_parts, options.checkpoints))


if __name__ == "__main__":
    sys.exit(main())
