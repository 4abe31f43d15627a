"""Part of the engine's GPU benchmark: kernels that are compiled while the engine serves.

A kernel's first launch compiles it for about a second, and every row of that step waits. The warm-up therefore launches
all kernels. The engine counts later compilations; the goal is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from tests.perf.gpu.engine.gpu_models import SMALL, checkpoint
from tests.perf.gpu.engine.mixed_requests import mixed_waves
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, free_memory, worst

ROWS = 256
MAX_MODEL_LEN = 512
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"cuda_graphs": "off"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}


def compiles_points(rehearsal: bool) -> list[Point]:
    """One model with every setting; in a rehearsal, the settings that the CPU supports."""
    settings = ["default"] if rehearsal else list(SETTINGS)
    return [{"model": SMALL, "setting": setting} for setting in settings]


@dataclass(frozen=True)
class Compiles:
    """Owns what the part measures with."""

    folder: Path  # for checkpoints

    def measure(self, session: Session, point: Point) -> Row:
        """Serve requests of all kinds; returns the number of compilations."""
        model = checkpoint(self.folder, point["model"], session)
        rows = 8 if session.rehearsal else ROWS
        num_requests = 0
        with Engine(
            model=str(model.path),
            device=session.device.type,
            dtype=model.dtype,
            max_running_requests=rows,
            max_model_len=MAX_MODEL_LEN,
            # Small, because the session holds memory too.
            kv_cache_gib=0.25 if session.rehearsal else 4.0,
            node_pool_gib=0.0,
            **SETTINGS[point["setting"]],
        ) as engine:
            for wave in mixed_waves(rows, MAX_MODEL_LEN):
                prompts = [asked.prompt_ids for asked in wave]
                params = [asked.params for asked in wave]
                num_requests += len(engine.generate(prompts, params, progress=False))
            forks = SamplingParams(max_tokens=6, ignore_eos=True)
            num_requests += len(engine.generate(prompts[:1], forks, n=3, progress=False))
            num_compiles = engine.load().num_compiles
        free_memory()
        return {"requests": num_requests, "compiles": num_compiles}


def compiles_bars(rows: list[Row]) -> list[report.Bar]:
    return [worst("gpu/engine/compiles_after_ready", rows, "compiles", "kernels", 0, at_most=True)]


def parts(folder: Path) -> list[Part]:
    """The part, for a model in this folder."""
    measure = Compiles(folder).measure
    return [Part("compiles", compiles_points, measure, compiles_bars, budget_s=100)]
