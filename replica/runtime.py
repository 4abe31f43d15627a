"""What an engine runs on: checkpoint → spec → sizes → model, KV pool and runner, warmed up. Imports torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from quire.replica.checkpoint import resolve_checkpoint
from quire.replica.config import EngineArgs, EngineConfig
from quire.replica.runner import Runner
from quire.replica.sizing import resolve
from quire.replica.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything that is decided and loaded before the first step."""

    checkpoint: Path
    spec: ModelSpec
    config: EngineConfig
    runner: Runner


def load_runtime(args: EngineArgs, startup_s: dict[str, float]) -> Runtime:
    """Load what `args` names and warm it up: nothing is compiled or first touched afterwards.

    Parameters
    ----------
    startup_s
        Gets the seconds of the phases `checkpoint`, `load` and `warm_up`.

    Raises
    ------
    CheckpointError, SizingError
        The checkpoint cannot be served, or does not fit.
    """
    began = time.perf_counter()
    checkpoint = resolve_checkpoint(args.model, args.revision)
    spec = ModelSpec.from_checkpoint(checkpoint)
    config = resolve(args, spec, checkpoint)
    startup_s["checkpoint"] = -began + (began := time.perf_counter())
    runner = Runner.from_config(config, spec)
    startup_s["load"] = -began + (began := time.perf_counter())
    runner.warm_up()
    runner.mark_ready()
    startup_s["warm_up"] = time.perf_counter() - began
    return Runtime(checkpoint, spec, config, runner)
