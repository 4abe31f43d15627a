"""Which tiles are the fastest on this GPU? Candidates for the attention kernels against today's configuration.

    python -m tests.perf gpu-tune                           # three minutes; or a part of: make gpu-1
    python -m tests.perf gpu-tune --rehearse                # no GPU: two candidates in the interpreter

All candidates of a point take turns over the same operands. `off` is the largest difference from the results of
today's configuration: about 1e-2 is the rounding of bfloat16, more is a fault, and such a candidate can't win. The
last lines say which entries of `kernels/tuning.py` would be faster, as they would stand there. Sampling is measured at
three batch sizes.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run

if TYPE_CHECKING:
    from tests.perf.gpu.gpu_session import Part, Row, Session

BENCHMARK = gpu_run.Benchmark(
    "python -m tests.perf gpu-tune",
    "medians of CUDA graph replays, candidates in turns over the same operands",
    report.RESULTS / "gpu_tune.json",
)


def all_parts() -> list[Part]:
    """In the order in which they run. Imports the kernels, so TRITON_INTERPRET must be decided before."""
    from tests.perf.gpu import gpu_machine
    from tests.perf.gpu.kernels import gpu_tiles

    return [gpu_machine.MACHINE, *gpu_tiles.PARTS]


def summary(session: Session, rows: dict[str, list[Row]]) -> str:
    """All candidates' times, then the entries that would be faster."""
    from tests.perf.gpu.kernels import gpu_tiles

    return gpu_tiles.summary(session, rows)


def option_parser() -> argparse.ArgumentParser:
    return gpu_run.option_parser(BENCHMARK, __doc__)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where today's configuration fails."""
    options = option_parser().parse_args(arguments)
    return gpu_run.main(BENCHMARK, options, all_parts, summary)


if __name__ == "__main__":
    sys.exit(main())
