"""Does the engine run on this GPU? A tiny model of every served architecture answers with several options.

    python -m tests.perf gpu-smoke                          # two minutes; or a part of: make gpu-1
    python -m tests.perf gpu-smoke --rehearse               # no GPU: a few engines on the CPU

Each point starts an engine and serves the same prompts twice greedily, then with log-probs, penalties and truncated
sampling. A row describes the engine: graphs or the reason why there are none, replayed steps, kernels compiled after
the start, fused and unfused modules. `findings` lists the faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.bench.results import report
from tests.perf.gpu import gpu_run

if TYPE_CHECKING:
    from quire.replica.engine import Engine
    from tests.perf.gpu.gpu_session import Part, Point, Row, Session

BENCHMARK = gpu_run.Benchmark(
    "python -m tests.perf gpu-smoke",
    "an engine a row, six prompts of 5 to 170 tokens; findings are faults",
    report.RESULTS / "gpu_smoke.json",
    shows_rows=True,
)
BUDGET_S = 150.0
# Random weights give flat logits. A wide initialisation separates the largest logit from the others.
INITIALIZER_RANGE = 0.25
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"cuda_graphs": "off"},
    "mixed graphs": {"q_padding": 64},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"weights": "fp8"},
}
_COMMON: dict[str, Any] = dict(
    dtype="bfloat16",
    max_model_len=512,
    kv_cache_gib=0.2,
    node_pool_gib=0.05,
    max_running_requests=32,
)
PROMPTS = (5, 40, 33, 170, 64, 90)  # lengths in tokens
NEW_TOKENS = 24
# Options that need other kernels than greedy requests.
_SAMPLING: tuple[dict[str, Any], ...] = (
    dict(temperature=0.8, top_p=0.9, seed=1),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.7, presence_penalty=0.5, seed=2),
)


def points(rehearsal: bool) -> list[Point]:
    """The points: one architecture with all options, then the other architectures."""
    from tests.perf.gpu.gpu_tiny_models import NAMES

    if rehearsal:
        return [
            {"model": "llama", "options": "default"},
            {"model": "gpt_oss", "options": "no graphs"},
        ]
    return [
        *({"model": NAMES[0], "options": name} for name in OPTIONS),
        *({"model": name, "options": "default"} for name in NAMES[1:]),
    ]


def measure(session: Session, point: Point) -> Row:
    """Start an engine of this architecture, serve, and describe it."""
    import torch

    from quire.replica.engine import Engine
    from tests.perf.gpu import gpu_tiny_models

    options = _COMMON | OPTIONS[point["options"]]
    if session.rehearsal:
        options |= {"num_blocks": 64, "kv_cache_gib": None, "node_pool_gib": 0.0}
    changes = {"initializer_range": INITIALIZER_RANGE}
    with tempfile.TemporaryDirectory() as folder:
        gpu_tiny_models.write(point["model"], Path(folder), torch.bfloat16, **changes)
        with Engine(model=folder, device=session.device.type, **options) as engine:
            different = serve(engine, NEW_TOKENS if not session.rehearsal else 4)
            row = describe(engine, different)
    row["findings"] = findings(row, options, session.device.type)
    row["failed"] = len(row["findings"])
    return row


def serve(engine: Engine, max_tokens: int) -> int:
    """Serve every kind of request; returns the number of greedy answers that differ in the second run."""
    from quire.protos.sampling_params import SamplingParams
    from tests.perf.gpu.engine.gpu_crowd import random_prompts
    from tests.perf.gpu.gpu_tiny_models import VOCAB_SIZE

    prompts = [random_prompts(1, length, VOCAB_SIZE, length)[0] for length in PROMPTS]

    def answers(**sampling: Any) -> list[list[int]]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        return [list(out.token_ids) for out in engine.generate(prompts, params, progress=False)]

    first, second = (answers(temperature=0.0) for _ in range(2))
    for sampling in _SAMPLING:
        answers(**sampling)
    return sum(a != b for a, b in zip(first, second, strict=True))


def describe(engine: Engine, different: int) -> Row:
    """Columns that describe the engine."""
    told = engine.telemetry()
    graphs = told.get("graphs", {})
    return {
        "start_s": round(sum(engine.startup_s.values()), 1),
        "same_twice": different == 0,
        "graphs_off": graphs.get("off_because"),
        "hits": graphs.get("num_hits", 0),
        "misses": graphs.get("num_misses", 0),
        "compiles": engine.load().num_compiles,
        "fused": ", ".join(f"{n} {kind}" for kind, n in sorted(engine.fused["fused"].items())),
        "dropped": engine.fused["dropped"][:3],
        "startup_s": {name: round(s, 2) for name, s in engine.startup_s.items()},
    }


def findings(row: Row, options: dict[str, Any], device: str) -> list[str]:
    """The faults in an engine's columns, one line each."""
    found = []
    if not row["same_twice"]:
        found.append("the same prompts were answered with other tokens")
    if row["compiles"]:
        found.append(f"{row['compiles']} kernels or graphs were made after the start")
    if device == "cuda" and options.get("cuda_graphs") != "off":
        if row["graphs_off"]:
            found.append(f"no graphs: {row['graphs_off']}")
        elif not row["hits"]:
            found.append("no step was replayed as a graph")
    return found


def bars(rows: list[Row]) -> list[report.Bar]:
    from tests.perf.gpu.gpu_session import worst

    return [worst("gpu/smoke_findings", rows, "failed", "", 0, at_most=True)]


def summary(session: Session, rows: dict[str, list[Row]]) -> str:
    """The findings and errors of all rows, one line each."""
    lines = []
    for row in rows.get("serve", []):
        where = f"{row['model']}, {row['options']}: "
        lines += [where + text for text in row.get("findings", [])]
        lines += [where + row["error"]] if "error" in row else []
    return "\n".join(lines or ["nothing found"])


def all_parts() -> list[Part]:
    from tests.perf.gpu.gpu_session import Part

    return [Part("serve", points, measure, bars, BUDGET_S)]


def option_parser() -> argparse.ArgumentParser:
    return gpu_run.option_parser(BENCHMARK, __doc__)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if an engine failed or a row has findings."""
    return gpu_run.main(BENCHMARK, option_parser().parse_args(arguments), all_parts, summary)


if __name__ == "__main__":
    sys.exit(main())
