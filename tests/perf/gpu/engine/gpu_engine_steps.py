"""Parts of the engine's GPU benchmark: decode steps against the memory's roof, prefill against the products' roof."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cluster.bench.results import report
from tests.perf.gpu.engine.gpu_crowd import Crowd, Crowds, Reading, between, random_prompts
from tests.perf.gpu.engine.gpu_models import LARGE, NAMES, SMALL, checkpoint
from tests.perf.gpu.gpu_session import Part, Point, Row, Session, significant, worst

ROWS = (1, 64, 128, 256)
CONTEXT = 1024  # tokens
PREFILL_TOKENS = 8192
SKIPPED, MEASURED = 8, 64  # full turns
_SLACK = 48  # tokens; all rows begin within this number of turns
HOST_ROWS = 256  # rows of the small model at which the host's time counts
# All rows at once, no reserve, no offloading.
DECODE_OPTIONS: dict[str, Any] = dict(
    safety_margin=0.0, resume_margin=0.0, max_prefill_ms=None, node_pool_gib=0.0
)


@dataclass(frozen=True, kw_only=True)
class EnginePart(Part):
    """A part whose engines run in this process and are closed when it ends."""

    crowds: Crowds

    def run(self, session: Session, points: list[Point]) -> Iterator[Row]:
        try:
            yield from super().run(session, points)
        finally:
            self.crowds.close()


def parts(folder: Path) -> list[Part]:
    """The decode and prefill parts, for the models in this folder."""
    steps = Steps(folder, Crowds())
    return [
        EnginePart(
            "decode", decode_points, steps.decode, decode_bars, budget_s=200, crowds=steps.crowds
        ),
        EnginePart(
            "prefill",
            prefill_points,
            steps.prefill,
            prefill_bars,
            budget_s=120,
            crowds=steps.crowds,
        ),
    ]


def decode_points(rehearsal: bool) -> list[Point]:
    """The points, the small model first: its steps show the host's time."""
    if rehearsal:
        return [{"model": SMALL, "rows": 2, "context": 32}]
    names = (SMALL, *(name for name in NAMES if name != SMALL))
    return [{"model": name, "rows": rows, "context": CONTEXT} for name in names for rows in ROWS]


def prefill_points(rehearsal: bool) -> list[Point]:
    """The points: one prompt that fills a step."""
    names, tokens = ((SMALL,), 64) if rehearsal else (LARGE, PREFILL_TOKENS)
    return [{"model": name, "tokens": tokens} for name in names]


class Window:
    """Reads the counters at the first and the last measured full turn, after some skipped turns."""

    def __init__(self, crowd: Crowd, skipped: int, measured: int):
        self._crowd = crowd
        self._numbers = (skipped, skipped + measured)
        self.readings: list[Reading] = []

    def on_full(self, number: int) -> None:
        if number in self._numbers:
            self.readings.append(self._crowd.read())


@dataclass(frozen=True)
class Steps:
    """Owns what the two parts measure with."""

    folder: Path
    crowds: Crowds

    def decode(self, session: Session, point: Point) -> Row:
        """Time of a step in which all rows decode, relative to reading weights and KV at the copy's speed.

        Raises
        ------
        RuntimeError
            The rows did not decode together for long enough.
        """
        rows, context = point["rows"], point["context"]
        skipped, measured = (2, 6) if session.rehearsal else (SKIPPED, MEASURED)
        model = checkpoint(self.folder, point["model"], session)
        max_tokens = skipped + measured + _SLACK
        most = rows if session.rehearsal else max(ROWS)
        crowd = self.crowds.get(
            model,
            session,
            max_model_len=context + max_tokens + 1,
            max_running_requests=most,
            **DECODE_OPTIONS,
        )
        prompts = random_prompts(rows, context, model.vocab_size, rows)
        crowd.serve(prompts, 2)  # now the prompts are cached, so all rows begin within a few turns
        window = Window(crowd, skipped, measured)
        crowd.serve(prompts, max_tokens, on_full=window.on_full)
        if len(window.readings) < 2:
            raise RuntimeError(
                f"{rows} rows decoded side by side for fewer than {skipped + measured} steps"
            )
        first, last = window.readings
        step_ms = 1e3 * (last.at_s - first.at_s) / measured
        shape = model.shape
        seen = context + skipped + measured / 2  # mean keys per row
        num_bytes = shape.weight_bytes + shape.kv_bytes_per_token * rows * seen
        # The bandwidth of a copy counts bytes read and bytes written.
        floor_ms = 1e3 * num_bytes / session.copy_bytes_per_s
        row = {
            "ms": significant(step_ms),
            "percent_of_floor": significant(100 * floor_ms / step_ms),
            **between(first, last),
        }
        row["host_percent"] = significant(100 * row["host_ms"] / step_ms)
        return row

    def prefill(self, session: Session, point: Point) -> Row:
        """Rate from a prompt's submission to its first token, relative to the measured matrix product."""
        length = point["tokens"]
        model = checkpoint(self.folder, point["model"], session)
        crowd = self.crowds.get(
            model,
            session,
            max_model_len=length + 8,
            max_batch_tokens=max(length, 256),
            max_running_requests=1,
            prefix_caching=False,
            **DECODE_OPTIONS,
        )
        seconds = []
        for seed in range(2 if session.rehearsal else 6):
            prompts = random_prompts(1, length, model.vocab_size, seed)
            turns = crowd.serve(prompts, 1)
            seconds.append(turns.times_s[-1] - turns.began_s)
        median_s = statistics.median(seconds[1:])  # the first is the warm-up
        shape = model.shape
        flops = 2 * (shape.layer_parameters * length + shape.head_parameters)
        flops += shape.attention_flops(length**2 / 2)  # causal
        return {
            "ms": significant(1e3 * median_s),
            "tokens_per_s": significant(length / median_s),
            "tflops": significant(flops / median_s / 1e12),
            "percent_of_gemm": significant(100 * flops / median_s / session.gemm_flops_per_s),
        }


def decode_bars(rows: list[Row]) -> list[report.Bar]:
    host = [row for row in rows if (row["model"], row["rows"]) == (SMALL, HOST_ROWS)]
    return [
        worst("gpu/engine/decode_percent_of_floor", rows, "percent_of_floor", "%", 85),
        worst("gpu/engine/decode_gap_us", rows, "gap_us", "us", 50, at_most=True),
        # Below 100 the engine's thread waits for the device in every step, and the device never waits.
        worst("gpu/engine/host_percent_of_step", host, "host_percent", "%", 100, at_most=True),
    ]


def prefill_bars(rows: list[Row]) -> list[report.Bar]:
    return [worst("gpu/engine/prefill_percent_of_gemm", rows, "percent_of_gemm", "%", 65)]
