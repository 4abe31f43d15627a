"""Where a decode step's time goes on a GPU: the kernels' shares of whole steps, and the time between kernels.

    python -m tests.perf gpu-profile                        # two minutes; or a part of: make gpu-2
    python -m tests.perf gpu-profile --rehearse             # no GPU: a tiny model on the CPU

```
 turns of the loop, all rows decode
 | skipped |  measured: `ms`, no profiler  | wait | profiled: kernels of a known number of steps | wait |
```

`gaps_ms` is the step's time without a profiler minus the time of its kernels, so the device's idle time between them.
The largest kernels of each point are printed and stored in the result.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run

if TYPE_CHECKING:
    import torch

    from tests.perf.gpu.engine.gpu_crowd import Crowd, Crowds, Reading
    from tests.perf.gpu.gpu_session import Part, Point, Row, Session

BENCHMARK = gpu_run.Benchmark(
    "python -m tests.perf gpu-profile",
    "kernels of 8 steps in which all rows decode, by the profiler; ms by the clock without it",
    report.RESULTS / "gpu_profile.json",
)
CONTEXT = 1024
SKIPPED, MEASURED, PROFILED = 8, 16, 8  # full turns
LARGEST = 15  # kernels listed in a row
_SLACK = 48  # tokens; all rows begin within this number of turns
# A kernel belongs to the first pattern in its name. Triton's kernels come first, since torch's names have many words.
GROUPS = {
    "decode_attention": r"^_decode_",
    "merge": r"^_merge_",
    "prefill_attention": r"^_prefill_",
    "planning": r"^_plan_",
    "kv_write": r"^_kv_write_",
    "norm": r"^_rms_norm_",
    "activation": r"^_gated_",
    "sampling": r"^_sample|^_top_|^_chosen_|^_survey",
    "fixed_products": r"^_matmul_",
    "other_triton": r"^_\w+_kernel",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|xmma",
    "copies": r"memcpy|memset",
    "elementwise": r"elementwise|vectorized|at::native|reduce|index|cat",
}
OTHER = "other"


def points(rehearsal: bool) -> list[Point]:
    """The points: the small model shows the gaps, the large one the kernels."""
    from tests.perf.gpu.engine.gpu_models import SMALL

    if rehearsal:
        return [{"model": SMALL, "rows": 2}]
    return [{"model": name, "rows": rows} for name in (SMALL, "Llama-3.1-8B") for rows in (1, 64)]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the profiled steps, with all its launches."""

    name: str
    us: float  # per step
    count: float  # launches per step


class Recording:
    """Reads the engine's counters around some steps, then profiles more steps, in the engine's thread.

    Parameters
    ----------
    lengths
        Numbers of full turns to skip, measure and profile.
    """

    def __init__(self, crowd: Crowd, device: torch.device, lengths: tuple[int, int, int]):
        from torch.profiler import ProfilerActivity, profile

        self._crowd = crowd
        self._device = device
        skipped, measured, profiled = lengths
        self._first, self._last = skipped, skipped + measured
        self._end = self._last + profiled
        self._num_profiled = profiled
        is_gpu = device.type == "cuda"
        self._time_key = "self_device_time_total" if is_gpu else "self_cpu_time_total"
        activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
        # The first use loads the profiler's library, which takes seconds.
        with profile(activities=[activity]):
            pass
        self._profiler = profile(activities=[activity])
        self.readings: list[Reading] = []
        self.is_complete = False

    def on_full(self, number: int) -> None:
        if number in (self._first, self._last):
            self.readings.append(self._crowd.read())
        if number == self._last:
            self._wait()
            self._profiler.start()
        elif number == self._end:
            self._wait()
            self._profiler.stop()
            self.is_complete = True

    def _wait(self) -> None:
        """Wait for the step that was launched ahead, at both ends, so that the number of profiled steps is known."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def kernels(self) -> list[Kernel]:
        """The profiled kernels, the largest first."""
        found = [
            Kernel(
                e.key, getattr(e, self._time_key) / self._num_profiled, e.count / self._num_profiled
            )
            for e in self._profiler.key_averages()
        ]
        return sorted((kernel for kernel in found if kernel.us > 0), key=lambda k: -k.us)


def measure(folder: Path, crowds: Crowds, session: Session, point: Point) -> Row:
    """Measure the time of a step, of its kernels by group, and the largest kernels.

    Raises
    ------
    RuntimeError
        The rows did not decode together for long enough.
    """
    from tests.perf.gpu.engine.gpu_crowd import random_prompts
    from tests.perf.gpu.engine.gpu_engine_steps import DECODE_OPTIONS
    from tests.perf.gpu.engine.gpu_models import checkpoint

    rows = point["rows"]
    context = 32 if session.rehearsal else CONTEXT
    lengths = (2, 2, 4) if session.rehearsal else (SKIPPED, MEASURED, PROFILED)
    max_tokens = sum(lengths) + _SLACK
    model = checkpoint(folder, point["model"], session)
    most = max(p["rows"] for p in points(session.rehearsal))
    crowd = crowds.get(
        model,
        session,
        max_model_len=context + max_tokens + 1,
        max_running_requests=most,
        **DECODE_OPTIONS,
    )
    prompts = random_prompts(rows, context, model.vocab_size, rows)
    crowd.serve(prompts, 2)  # now the prompts are cached, so all rows begin within a few turns
    recording = Recording(crowd, session.device, lengths)
    crowd.serve(prompts, max_tokens, on_full=recording.on_full)
    if not recording.is_complete:
        raise RuntimeError(f"{rows} rows decoded side by side for fewer than {sum(lengths)} steps")
    first, last = recording.readings
    step_ms = 1e3 * (last.at_s - first.at_s) / lengths[1]
    return {
        **describe(step_ms, recording.kernels()),
        "compiles": crowd.engine.load().num_compiles,
        "startup_s": {name: round(s, 2) for name, s in crowd.engine.startup_s.items()},
    }


def describe(step_ms: float, kernels: list[Kernel]) -> Row:
    """The columns of a step of this length with these kernels; shares are of the kernels' time."""
    from tests.perf.gpu.gpu_session import significant

    total_us = sum(kernel.us for kernel in kernels)
    shares = dict.fromkeys((*GROUPS, OTHER), 0.0)
    for kernel in kernels:
        shares[group_of(kernel.name)] += 100 * kernel.us / total_us
    return {
        "ms": significant(step_ms),
        "kernels_ms": significant(total_us / 1e3),
        "gaps_ms": significant(step_ms - total_us / 1e3),
        "kernels": significant(sum(kernel.count for kernel in kernels)),
        "percent": {name: significant(share) for name, share in shares.items() if share},
        "largest": [
            {"name": k.name[:120], "us": significant(k.us), "count": significant(k.count)}
            for k in kernels[:LARGEST]
        ],
    }


def group_of(kernel: str) -> str:
    """The group of a kernel, from its name."""
    found = (name for name, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, OTHER)


def summary(session: Session, rows: dict[str, list[Row]]) -> str:
    """Format one paragraph per row."""
    return "\n".join(line for row in rows.get("profile", []) for line in _lines(row))


def _lines(row: Row) -> Iterable[str]:
    where = f"{row['model']}, {row['rows']} rows"
    if "ms" not in row:
        yield f"{where}: {row.get('error') or row.get('skipped')}"
        return
    yield (
        f"{where}: {row['ms']:g} ms a step, {row['kernels_ms']:g} in {row['kernels']:g} kernels, "
        f"{row['gaps_ms']:g} between them; {row['compiles']} compiled since the start"
    )
    ranked = sorted(row["percent"].items(), key=lambda item: -item[1])
    yield "  " + ", ".join(f"{name} {share:.1f}%" for name, share in ranked)
    for kernel in row["largest"]:
        yield f"  {kernel['us']:10g} us  {kernel['count']:6g}x  {kernel['name'][:100]}"


def all_parts(folder: Path) -> list[Part]:
    """All parts, for the models in this folder."""
    from tests.perf.gpu.engine.gpu_crowd import Crowds
    from tests.perf.gpu.engine.gpu_engine_steps import EnginePart

    crowds = Crowds()
    return [
        EnginePart("profile", points, partial(measure, folder, crowds), budget_s=110, crowds=crowds)
    ]


def option_parser() -> argparse.ArgumentParser:
    parser = gpu_run.option_parser(BENCHMARK, __doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path("bench-checkpoints"))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if an engine failed."""
    options: Any = option_parser().parse_args(arguments)
    return gpu_run.main(BENCHMARK, options, partial(all_parts, options.checkpoints), summary)


if __name__ == "__main__":
    sys.exit(main())
