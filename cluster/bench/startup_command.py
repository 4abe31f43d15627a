"""Run `quire bench startup`: new engine processes, from their start to their first token, and their memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from quire.cluster.bench.engines.checkpoints import SHAPES, build
from quire.cluster.bench.results import report
from quire.cluster.bench.results.report import Bar, Spread, spread_json

# Seconds to the first token alone, and beside another process with the same model; megabytes besides weights and cache.
GOAL_S, GOAL_BESIDE_S, GOAL_MB = 10.0, 3.0, 500.0
_COMMAND = (sys.executable, "-m", "quire.cluster.bench.engines.first_token")


@contextlib.contextmanager
def started(engine: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A new process with this engine, until the end of the block.

    Yields
    ------
    `first_token_s` since the process was started, `phases_s` of it, and the process's memory in bytes.

    Raises
    ------
    ValueError
        The process ended before its first token; its error is on standard error.
    """
    began_s = time.time()
    with subprocess.Popen(
        [*_COMMAND, json.dumps(engine)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        messages: list[tuple[float, dict[str, Any]]] = []
        for line in process.stdout:
            if line.startswith("{"):
                messages.append((time.time(), json.loads(line)))
            if len(messages) == 2:
                break
        else:
            raise ValueError(f"the engine's process ended with status {process.wait()}")
        (first_s, first), (_, memory) = messages
        phases = {"process": first["began_s"] - began_s, **first["phases_s"]}
        yield {"first_token_s": first_s - began_s, "phases_s": phases, **memory}


def bars_of(found: list[dict[str, Any]], is_beside: bool) -> list[Bar]:
    """The bars of some processes."""
    first_s = Spread.of([one["first_token_s"] for one in found])
    phases = {
        name: [round(one["phases_s"][name], 2) for one in found] for name in found[0]["phases_s"]
    }
    extra_mb = [
        (one["peak_rss_bytes"] - one["weights_bytes"] - one["cache_bytes"]) / 1e6 for one in found
    ]
    facts: dict[str, Any] = {
        f"{name}_mb": round(found[-1][f"{name}_bytes"] / 1e6)
        for name in ("peak_rss", "weights", "cache")
    }
    facts["blocks_without_content"] = found[-1]["blocks_without_content"]
    goal_s = GOAL_BESIDE_S if is_beside else GOAL_S
    name = "start/first_token_beside_another_s" if is_beside else "start/first_token_s"
    details = {**spread_json(first_s), "phases_s": phases}
    return [
        Bar(name, first_s.median, "s", goal_s, details=details),
        Bar(
            "start/resident_besides_weights_and_cache_mb",
            max(extra_mb),
            "MB",
            GOAL_MB,
            details=facts,
        ),
    ]


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    model = options.model
    if model in SHAPES and not Path(model).is_dir():
        model = str(build(model, Path(options.checkpoints) / model))
    engine: dict[str, Any] = {"model": model, "dtype": options.dtype, **options.engine_options}
    engine.setdefault("num_threads", options.threads)
    engine.setdefault("kv_cache_gib", 0.5)
    if options.model != "embedded":
        engine.setdefault("max_model_len", 2048)
    with contextlib.ExitStack() as stack:
        if options.beside:
            stack.enter_context(started(engine))
        found = []
        for _ in range(options.repetitions):
            with started(engine) as one:
                found.append(one)
    bars = bars_of(found, options.beside)
    for name in found[0]["phases_s"]:
        seconds = [one["phases_s"][name] for one in found]
        print(f"{name:12}{median(seconds):8.2f} s   ({min(seconds):.2f} to {max(seconds):.2f})")
    options.out.mkdir(parents=True, exist_ok=True)
    report.write(
        options.out / "startup.json",
        f"quire bench startup {Path(options.model).name}{' --beside' * options.beside}",
        bars,
        model=Path(options.model).name,
        settings={key: value for key, value in engine.items() if key != "model"},
    )
    return 0
