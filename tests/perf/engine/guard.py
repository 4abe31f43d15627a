"""The regression guard: Quire against transformers' continuous batching, in one run, as ratios.

    python -m tests.perf guard

Times depend on the machine and its load. The speed relative to another engine in the same minute depends on them much
less, least of all as CPU time of engines with one thread each. Both engines load the same small random weights and
alternate over the same prompts; a ratio compares two runs of one turn. A workload fails if the median of its ratios is
below the committed floor by more than this run's spread. The floors in `guard_floors.json` are well below the measured
ratios, so a failure is a regression and not load on the machine.
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
_BUDGET_S = 12.0  # no turn starts later; loading and the last turn are not included
# On a shared machine several threads spend CPU time waiting for each other; one thread does not.
_THREADS = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ratios of one workload and its floor."""

    workload: str
    floor: float
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> float:
        """Uncertainty of the median: 1.25 standard errors.

        The standard deviation is estimated from the median absolute deviation, scaled as for a normal distribution:
        one turn with another process on the core does not change it.
        """
        median = self.median
        deviation = 1.4826 * statistics.median(abs(ratio - median) for ratio in self.ratios)
        return 1.2533 * deviation / len(self.ratios) ** 0.5

    @property
    def holds(self) -> bool:
        """False if even the median plus its spread is below the floor."""
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
    """Run both engines alternately on the `tiny` checkpoint, which is created in `folder`."""
    # Without bfloat16 instructions torch's bfloat16 products take ten times as long as in float32. Relative to that, an
    # engine that converts its weights could lose much speed before its ratio fell below the floors.
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
            specs, workloads, turns, VOCAB_SIZE, log, rates_budget_s=None, budget_s=_BUDGET_S
        )
    if found.failures:
        print((folder / "engines.log").read_text()[-4000:], file=sys.stderr)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the guard; returns the exit status: 1 if a workload is below its floor."""
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
