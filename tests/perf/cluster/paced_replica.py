"""The application with a device whose steps take 20 ms and compute nothing, to measure everything else.

Scheduler, cache, loop, actor, frames, routers and proxies are the product's; only the runner is replaced. Its steps
follow each other without gaps, as on a GPU with a fast host, and their tokens repeat `TEXT`. `import_path:
tests.perf.cluster.paced_replica:build` takes the arguments of `quire.cluster.app:build`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ray.serve import Application

from quire.cluster.app import application
from quire.cluster.config.app_config import AppConfig
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.core.step_plan import StepPlan, StepResult
from quire.replica.engine import Engine
from quire.replica.loop import StepRunner
from quire.replica.serving.actor import Replica
from quire.router.text.tokenizer import TextTokenizer

STEP_S = 0.02
# Each token ends with a whole character, so each token is an event.
TEXT = "A quire is a gathering of pages, and many voices that sing the same words at one time. "


class _Launched(NamedTuple):
    plan: StepPlan
    started_s: float  # time.perf_counter at which the device begins the step
    ends_s: float


class PacedRunner:
    """A `StepRunner` whose steps take 20 ms.

    Parameters
    ----------
    text_ids
        [n] tokens that the answers repeat.
    """

    num_compiles = 0

    def __init__(self, text_ids: np.ndarray, step_s: float = STEP_S):
        self._text_ids = text_ids.astype(np.int64)
        self._step_s = step_s
        self._free_s = 0.0  # when the device has finished all launched steps

    def launch(self, plan: StepPlan) -> _Launched:
        started_s = max(time.perf_counter(), self._free_s)
        self._free_s = started_s + self._step_s
        return _Launched(plan, started_s, self._free_s)

    def collect(self, in_flight: _Launched) -> StepResult:
        time.sleep(max(0.0, in_flight.ends_s - time.perf_counter()))
        positions = in_flight.plan.sampling.position
        tokens = self._text_ids[positions % len(self._text_ids)]
        return StepResult(tokens, self._step_s)

    def use_idle(self) -> bool:
        return False

    def close(self) -> None:
        """See `StepRunner.close`; there are no threads to end."""

    def telemetry(self) -> dict[str, object]:
        return {}


class PacedEngine(Engine):
    """An engine with the paced device. The model is loaded but not used."""

    def _equip(self, runner: StepRunner) -> tuple[StepRunner, Callable[[], float]]:
        tokenizer = TextTokenizer.load(resolve_checkpoint("embedded", None, weights=False))
        text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
        return PacedRunner(text_ids), time.monotonic


class PacedReplica(Replica):
    """A replica with a paced engine."""

    engine_class = PacedEngine


def build(args: dict[str, Any]) -> Application:
    """The application of `quire.cluster.app` with paced replicas."""
    return application(AppConfig.from_args(args), PacedReplica)
