"""Part of the engine's GPU benchmark: throughput that `deterministic: true` costs, in percent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.cluster.bench.load.workloads import Workload
from quire.cluster.bench.results import report
from tests.perf.gpu.engine.gpu_crowd import Crowds
from tests.perf.gpu.engine.gpu_engine_steps import DECODE_OPTIONS, EnginePart
from tests.perf.gpu.engine.gpu_models import LARGE, SMALL, checkpoint
from tests.perf.gpu.gpu_session import Point, Row, Session, significant, worst

MAX_COST_PERCENT = 15
TURNS = 2  # the faster turn counts
MODELS = (LARGE[0], SMALL)
_WORKLOADS = (
    Workload("256x128->256", 256, 0, 128, 256),
    Workload("32x128->256", 32, 0, 128, 256),
    Workload("16x4096->64", 16, 0, 4096, 64),
)
_REHEARSED = (Workload("4x16->6", 4, 0, 16, 6),)


def part(folder: Path) -> EnginePart:
    """The workloads of each model, with and without the option."""
    measure = Deterministic(folder, Crowds())
    return EnginePart("deterministic", points, measure, bars, budget_s=200, crowds=measure.crowds)


def points(rehearsal: bool) -> list[Point]:
    """The points; the two engines of a model follow each other."""
    workloads = _REHEARSED if rehearsal else _WORKLOADS
    return [
        {"model": model, "deterministic": deterministic, "workload": workload.name}
        for model in ((SMALL,) if rehearsal else MODELS)
        for deterministic in (False, True)
        for workload in workloads
    ]


@dataclass(frozen=True)
class Deterministic:
    """Owns what the part measures with."""

    folder: Path
    crowds: Crowds

    def __call__(self, session: Session, point: Point) -> Row:
        """Time of a workload from its start to its last token; each turn has new prompts."""
        workloads = _REHEARSED if session.rehearsal else _WORKLOADS
        workload = next(w for w in workloads if w.name == point["workload"])
        model = checkpoint(self.folder, point["model"], session)
        crowd = self.crowds.get(
            model,
            session,
            deterministic=point["deterministic"],
            max_model_len=max(w.max_tokens for w in workloads) + 1,
            max_running_requests=max(w.num_requests for w in workloads),
            **DECODE_OPTIONS,
        )
        crowd.serve(workload.prompts("warm-up", model.vocab_size), 2)
        seconds = []
        for turn in range(1 if session.rehearsal else TURNS):
            prompts = workload.prompts(turn, model.vocab_size)
            turns = crowd.serve(prompts, workload.output_tokens)
            seconds.append(turns.times_s[-1] - turns.began_s)
        best_s = min(seconds)
        return {
            "seconds": significant(best_s),
            "tokens_per_s": significant(workload.num_output_tokens / best_s),
        }


def costs(rows: list[Row]) -> list[Row]:
    """Lost tokens per second in percent, for each workload that ran with and without the option."""
    by_point = {(r["model"], r["workload"], r["deterministic"]): r for r in rows}
    found = []
    for (model, workload, deterministic), row in by_point.items():
        plain = by_point.get((model, workload, False), {})
        if not deterministic or "seconds" not in row or "seconds" not in plain:
            continue
        cost = 100 * (1 - plain["seconds"] / row["seconds"])
        found.append({"model": model, "workload": workload, "cost_percent": significant(cost)})
    return found


def bars(rows: list[Row]) -> list[report.Bar]:
    """The bar of the workload with the largest loss; it stays open while a pair is incomplete."""
    alone = [row for row in rows if "seconds" not in row]
    name = "gpu/engine/deterministic_cost_percent"
    return [worst(name, costs(rows) + alone, "cost_percent", "%", MAX_COST_PERCENT, at_most=True)]
