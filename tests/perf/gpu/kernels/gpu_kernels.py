"""Every kernel on a GPU: right, and how near to the roof. One command, at most six minutes.

    python -m tests.perf gpu-kernels                        # or: make gpu-kernels
    python -m tests.perf gpu-kernels --resume               # what an earlier run on this commit and GPU left open
    python -m tests.perf gpu-kernels --parts decode prefill
    python -m tests.perf gpu-kernels --rehearse             # no GPU: every part, tiny shapes, the interpreter

First the tests of the kernels run natively. Then each part measures one kernel beside the machine's own copy bandwidth
and matrix product, and attention beside torch's SDPA (flash and cuDNN), FlashInfer and FlashAttention where they are
installed. The result is written after every part, so a run that is stopped leaves what it has; shapes that do not
fit the device's memory, or for which no time is left, are listed as skipped.

A rehearsal proves that the command runs. It measures nothing: its bars have no value and hold neither way.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run

if TYPE_CHECKING:
    from tests.perf.gpu.gpu_session import Part

BUDGET_S = 350.0  # of the six minutes; the rest is for imports and the last write
BENCHMARK = gpu_run.Benchmark(
    "python -m tests.perf gpu-kernels",
    "medians of CUDA graph replays between events, L2 cold, candidates in turns",
    report.RESULTS / "gpu_kernels.json",
)


def all_parts() -> list[Part]:
    """In the order in which they run. Imports the kernels, so TRITON_INTERPRET must be decided before."""
    from tests.perf.gpu import gpu_machine
    from tests.perf.gpu.kernels import gpu_attention, gpu_numerics, gpu_rows, gpu_step

    return [
        gpu_numerics.NUMERICS,
        gpu_machine.MACHINE,
        *gpu_attention.PARTS,
        *gpu_rows.PARTS,
        *gpu_step.PARTS,
    ]


def option_parser() -> argparse.ArgumentParser:
    parser = gpu_run.option_parser(BENCHMARK, __doc__)
    parser.set_defaults(budget_s=BUDGET_S)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1 for a test that fails or a kernel that raises."""
    return gpu_run.main(BENCHMARK, option_parser().parse_args(arguments), all_parts)


if __name__ == "__main__":
    sys.exit(main())
