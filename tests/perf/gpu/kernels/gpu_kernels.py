"""Every kernel on a GPU: correctness, and speed relative to the machine's roof. One command, at most six minutes.

    python -m tests.perf gpu-kernels                        # or: make gpu-kernels
    python -m tests.perf gpu-kernels --resume               # the open points of an earlier run on this commit and GPU
    python -m tests.perf gpu-kernels --parts decode prefill
    python -m tests.perf gpu-kernels --rehearse             # no GPU: every part, tiny shapes, the interpreter

First the kernels' tests run natively. Then each part measures one kernel against the machine's copy bandwidth and
matrix product; attention is also measured against torch's SDPA (flash and cuDNN) and, if installed, FlashInfer and
FlashAttention. The result is written after every part, so an interrupted run keeps its finished parts. Shapes that do
not fit the device's memory or the remaining time are listed as skipped.

A rehearsal only shows that the command runs: its bars have no value.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run

if TYPE_CHECKING:
    from tests.perf.gpu.gpu_session import Part

BUDGET_S = 350.0  # six minutes without imports and the last write
BENCHMARK = gpu_run.Benchmark(
    "python -m tests.perf gpu-kernels",
    "medians of CUDA graph replays between events, L2 cold, candidates in turns",
    report.RESULTS / "gpu_kernels.json",
)


def all_parts() -> list[Part]:
    """All parts in the order in which they run. Imports the kernels, so TRITON_INTERPRET must be set before."""
    from tests.perf.gpu import gpu_machine
    from tests.perf.gpu.kernels import gpu_attention, gpu_latents, gpu_numerics, gpu_rows, gpu_step

    return [
        gpu_numerics.NUMERICS,
        gpu_machine.MACHINE,
        *gpu_attention.PARTS,
        gpu_latents.LATENTS,
        *gpu_rows.PARTS,
        *gpu_step.PARTS,
    ]


def option_parser() -> argparse.ArgumentParser:
    parser = gpu_run.option_parser(BENCHMARK, __doc__)
    parser.set_defaults(budget_s=BUDGET_S)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if a test failed or a kernel raised an error."""
    return gpu_run.main(BENCHMARK, option_parser().parse_args(arguments), all_parts)


if __name__ == "__main__":
    sys.exit(main())
