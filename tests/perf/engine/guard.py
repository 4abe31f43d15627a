"""The regression guard: Quire against transformers' continuous batching, in one run, as ratios.

    python -m tests.perf guard

Times depend on the machine and on whatever else it does; how many times as fast as another engine in the same minute
does so much less, and least of all in CPU time of engines with one thread each. Both engines load the same small
random weights and take turns over the same prompts; the ratio is taken turn by turn. A workload fails when the median
of its ratios lies below the committed floor by more than the spread that this very run shows. The floors are in
`guard_floors.json`; they lie well under what was measured, so that a failure is a regression and not a neighbour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.cluster.bench.engines.checkpoints import VOCAB_SIZE, build
from quire.cluster.bench.engines.compare import Comparison, compare
from quire.cluster.bench.engines.engine_process import EngineSpec
from quire.cluster.bench.load.workloads import Workload, batches

FLOORS = Path(__file__).with_name("guard_floors.json")
PEER = "transformers"
TURNS = 9
_BUDGET_S = 25.0  # no turn starts later: loading and the last turn come on top
# On a shared machine threads wait for each other, and use CPU time for it; one waits only for its turn.
_THREADS = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """One workload's ratio beside its floor."""

    workload: str
    floor: float
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """Uncertainty of the median: 1.25 standard errors, the deviation taken from the median's own.

        The median absolute deviation, scaled to a normal distribution's, is not moved by one turn in which somebody
        else had the core.
        """
        median = self.median
        deviation = 1.4826 * statistics.median(abs(ratio - median) for ratio in self.ratios)
        return 1.2533 * deviation / len(self.ratios) ** 0.5

    @property
    def holds(self) -> bool:
        """False when even the median plus its spread is below the floor."""
        return self.median + self.spread >= self.floor

    def __str__(self) -> str:
        word = "holds" if self.holds else "FAILED"
        return (
            f"{self.workload:14}{self.median:>7.2f}x ± {self.spread:.2f} of {PEER}, floor {self.floor:g}x, "
            f"{len(self.ratios)} turns ({min(self.ratios):.2f} to {max(self.ratios):.2f}): {word}"
        )


def judge(found: Comparison, floors: dict[str, float]) -> list[Verdict]:
    """The verdict of each workload.

    Raises
    ------
    RuntimeError
        An engine failed, or a workload has no turns.
    """
    if found.failures:
        raise RuntimeError("; ".join(found.failures.values()))
    verdicts = []
    for workload, floor in floors.items():
        ratios = found.ratios("quire", PEER, workload, cpu=True)
        if not ratios:
            raise RuntimeError(f"{workload}: no turns")
        verdicts.append(Verdict(workload, floor, tuple(ratios)))
    return verdicts


def measure(
    folder: Path, workloads: Sequence[Workload], turns: int, quire_options: dict[str, object]
) -> Comparison:
    """Both engines in turns on the `tiny` checkpoint, which is made in `folder`."""
    # Without instructions for it torch's products of bfloat16 take ten times as long as those of float32: against
    # that an engine that widens its weights could lose a lot before it fell below the floors.
    dtype = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    model = str(build("tiny", folder / "tiny", dtype))
    shape = {"model": model, "dtype": dtype, "threads": _THREADS}
    options = {"max_model_len": 512, "kv_cache_gib": 0.1, "max_prefill_ms": None, **quire_options}
    specs = [
        EngineSpec("quire", "quire", options=options, **shape),
        EngineSpec(PEER, PEER, options={"num_blocks": 40, "max_batch_tokens": 1024}, **shape),
    ]
    with (folder / "engines.log").open("w") as log:
        found = compare(
            specs, workloads, turns, VOCAB_SIZE, log, rates_budget_s=0.1, budget_s=_BUDGET_S
        )
    if found.failures:
        print((folder / "engines.log").read_text()[-4000:], file=sys.stderr)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a workload is below its floor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="default: %(default)s")
    parser.add_argument("--floors", type=Path, default=FLOORS, help="default: the committed ones")
    parser.add_argument(
        "--quire-options", type=json.loads, default={}, help="EngineArgs as JSON, to see it fail"
    )
    options = parser.parse_args(arguments)
    floors = json.loads(options.floors.read_text())["floors"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), list(batches(floors)), options.turns, options.quire_options)
    verdicts = judge(found, floors)
    print("\n".join(map(str, verdicts)))
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
