"""Find the fastest tiles on this GPU: candidates for the attention kernels against the current configuration.

    python -m tests.perf gpu-tune                           # three minutes; or a part of: make gpu-1
    python -m tests.perf gpu-tune --rehearse                # no GPU: two candidates in the interpreter

All candidates of a point alternate on the same operands. `off` is the largest difference from the results of the
current configuration: about 1e-2 is the rounding of bfloat16; a larger difference is a fault and excludes the
candidate. The last lines are faster entries for `kernels/tuning.py`. Sampling is measured at three batch sizes.
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
    """All parts in the order in which they run. Imports the kernels, so TRITON_INTERPRET must be set before."""
    from tests.perf.gpu import gpu_machine
    from tests.perf.gpu.kernels import gpu_tiles

    return [gpu_machine.MACHINE, *gpu_tiles.PARTS]


def summary(session: Session, rows: dict[str, list[Row]]) -> str:
    """Format all candidates' times, then the faster entries for `kernels/tuning.py`."""
    from tests.perf.gpu.kernels import gpu_tiles

    return gpu_tiles.summary(session, rows)


def option_parser() -> argparse.ArgumentParser:
    return gpu_run.option_parser(BENCHMARK, __doc__)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if the current configuration failed."""
    options = option_parser().parse_args(arguments)
    return gpu_run.main(BENCHMARK, options, all_parts, summary)


if __name__ == "__main__":
    sys.exit(main())
