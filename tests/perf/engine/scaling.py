"""Growth of a step's time: linear in its tokens, flat in waiting requests, cached blocks and generated tokens.

    python -m tests.perf scaling CHECKPOINT

Tokens: whole forward passes on the device, with prompts of 1 to 512 tokens in one step. All other series measure the
host's work for a decode step of 64 rows with a stubbed forward pass, as in `host_overhead`, against waiting requests (0
to 100,000), blocks in the prefix cache (10^3 to 10^6), and tokens that each row has generated (64 to 16,384). One more
series measures the admission of a fully cached prompt of 1,024 tokens against the number of cached blocks.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.bench.results import plots, report
from quire.cluster.bench.results.report import Bar, Spread, spread_json
from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.scheduler import Scheduler
from tests.perf.engine.host_overhead import BLOCK_SIZE, EOS, VOCAB, QuireHost

ROWS = 64
TOKENS = (1, 8, 32, 64, 128, 192, 256, 320, 384, 448, 512)
WAITING = (0, 100, 1000, 10_000, 100_000)
CACHED = (1000, 10_000, 100_000, 1_000_000)
GENERATED = (64, 1024, 4096, 16_384)
# Goals, set before the first measurement.
MAX_GROWTH = 1.25  # of a flat series: the slowest median relative to the smallest point's
MAX_RESIDUAL = 0.15  # of the linear series: deviation from the fitted line, from 64 tokens on


class CacheHost:
    """A scheduler with a stubbed forward pass and a prefix cache that is filled step by step.

    Parameters
    ----------
    num_blocks
        Most blocks of the prefix cache; the pool also has room for the rows.
    """

    PROMPT = 4096  # tokens of a prompt that fills the cache
    HIT = 1024  # tokens of the prompt for the timed admission

    def __init__(self, num_blocks: int):
        self._rng = np.random.default_rng(0)
        self._next_key = 0
        self.scheduler = Scheduler(
            EngineConfig(
                model_name="stub",
                revision="",
                device="cpu",
                dtype="float32",
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                max_model_len=max(GENERATED) + 4096,
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks + ROWS * 64 + 2 * self.PROMPT // BLOCK_SIZE,
                max_batch_tokens=self.PROMPT + ROWS,
                max_running_requests=ROWS + 1,
                max_waiting_requests=ROWS + 1,
                safety_margin=0.0,
                scheduler="fifo",
                resume_margin=0.0,
                prefix_caching=True,
                deterministic=True,
                num_threads=1,
                max_prefill_ms=None,
            )
        )
        self._known: np.ndarray | None = None  # a cached prompt

    def fill(self, num_cached: int) -> None:
        """Serve prompts one after the other until this number of blocks is cached; then start the rows."""
        while self.scheduler.load().blocks_cached < num_cached:
            prompt = self._add(self.PROMPT, 1)
            if self._known is None:
                self._known = prompt[: self.HIT]
            self._step()
        for _ in range(ROWS):
            self._add(32, 2048 - 64)
        while self.scheduler.load().num_waiting:
            self._step()

    def decode_ms(self, steps: int) -> list[float]:
        """Times of steps in which all rows decode."""
        return [self._step() for _ in range(steps)]

    def admit_ms(self, count: int) -> list[float]:
        """Times of steps that also admit and finish a cached prompt."""
        found = []
        for _ in range(count):
            self._add_known()
            found.append(self._step())
            self._step()
        return found

    def _add(self, length: int, max_tokens: int) -> np.ndarray:
        prompt = self._rng.integers(EOS + 1, VOCAB, length)
        self._submit(prompt, max_tokens)
        return prompt

    def _add_known(self) -> None:
        self._submit(self._known, 1)

    def _submit(self, prompt: np.ndarray, max_tokens: int) -> None:
        self._next_key += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refusal = self.scheduler.add(Request(self._next_key, prompt, params))
        if refusal is not None:
            raise RuntimeError(f"the stub request was refused: {refusal.facts.error}")

    def _step(self) -> float:
        tokens = self._rng.integers(EOS + 1, VOCAB, ROWS + 1)
        began = time.perf_counter_ns()
        plan = self.scheduler.plan(0.0)
        result = StepResult(tokens[: len(plan.sampling.token_index)], 0.01)
        self.scheduler.commit(plan, result, 0.0)
        self.scheduler.events.flush()
        return (time.perf_counter_ns() - began) / 1e6


def point(x: int, values: Sequence[float]) -> dict[str, Any]:
    return {"x": x, **spread_json(Spread.of(list(values)))}


def over_tokens(checkpoint: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Times of whole steps with one prompt of this length."""
    from quire.replica.engine import Engine

    with Engine(model=checkpoint, dtype=dtype, max_model_len=2048, kv_cache_gib=0.5) as engine:
        runner = engine._loop._runner  # the loop is idle: it has no requests

        def measure(num_tokens: int) -> Callable[[], list[float]]:
            plan = runner.trash_plans.plan([num_tokens], 0.0)
            return lambda: [1e3 * runner.run(plan).duration_s]

        candidates = {str(n): measure(n) for n in TOKENS}
        report.alternate(candidates, 1)
        found = report.alternate(candidates, rounds)
    return [point(n, found[str(n)]) for n in TOKENS]


def over_waiting(steps: int) -> list[dict[str, Any]]:
    """Times of decode steps with this number of waiting requests."""
    hosts = {str(n): QuireHost(ROWS, waiting=n) for n in WAITING}
    return _series(hosts, WAITING, steps)


def over_generated(steps: int) -> list[dict[str, Any]]:
    """Times of decode steps of rows with this number of generated tokens."""
    hosts = {}
    for num_generated in GENERATED:
        host = QuireHost(ROWS, max_len=max(GENERATED) + 4096)
        host.run(num_generated - GENERATED[0])
        hosts[str(num_generated)] = host
    return _series(hosts, GENERATED, steps)


def _series(hosts: dict[str, QuireHost], xs: Sequence[int], steps: int) -> list[dict[str, Any]]:
    gc.collect()
    gc.freeze()  # as a replica does after loading
    found = report.alternate(
        {name: lambda host=host: host.run(steps) for name, host in hosts.items()}, 6
    )
    gc.unfreeze()
    return [point(x, found[str(x)]) for x in xs]


def over_cached(steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Times of decode steps, and of steps that admit a cached prompt, with this number of cached blocks."""
    hosts = {}
    for num_cached in CACHED:
        hosts[num_cached] = CacheHost(num_cached)
        hosts[num_cached].fill(num_cached)
    gc.collect()
    gc.freeze()
    decode = report.alternate(
        {str(n): lambda host=host: host.decode_ms(steps) for n, host in hosts.items()}, 6
    )
    admit = report.alternate(
        {str(n): lambda host=host: host.admit_ms(steps // 2) for n, host in hosts.items()}, 6
    )
    gc.unfreeze()
    return [point(n, decode[str(n)]) for n in CACHED], [point(n, admit[str(n)]) for n in CACHED]


def growth(points: Sequence[dict[str, Any]]) -> float:
    """The slowest median relative to the first point's."""
    return max(p["median"] for p in points) / points[0]["median"]


def residual(points: Sequence[dict[str, Any]], least: int = 64) -> float:
    """Largest relative distance of a median from the line fitted to the points from `least` on."""
    used = [(p["x"], p["median"]) for p in points if p["x"] >= least]
    x, y = np.array(used, float).T
    slope, intercept = np.polyfit(x, y, 1)
    line = slope * x + intercept
    return float(np.max(np.abs(y - line) / line))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="of the forward passes")
    parser.add_argument("--steps", type=int, default=64, help="of a turn, elsewhere")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "scaling.json")
    options = parser.parse_args()
    tokens = over_tokens(options.checkpoint, options.dtype, options.rounds)
    waiting, generated = over_waiting(options.steps), over_generated(options.steps)
    decode, admit = over_cached(options.steps)
    flat = {"waiting": waiting, "generated": generated, "cached": decode, "cached_admission": admit}
    bars = [
        Bar("cpu/scaling_tokens_residual", residual(tokens), "", MAX_RESIDUAL),
        *(
            Bar(f"engine/scaling_{name}_growth", growth(p), "x", MAX_GROWTH)
            for name, p in flat.items()
        ),
    ]
    name = Path(options.checkpoint).name
    report.write(
        options.out,
        f"python -m tests.perf scaling {name}",
        bars,
        method="medians in alternation; tokens: a whole step of the model, milliseconds; the rest: host milliseconds "
        f"of a decode step of {ROWS} rows with a stubbed forward pass",
        checkpoint=name,
        tokens=tokens,
        **flat,
    )
    host = "ms of the host per step"
    plots.scaling(
        [
            {"what": "tokens of a step", "points": tokens, "log_x": False, "unit": "ms per step"},
            {"what": "waiting requests", "points": waiting[1:], "log_x": True, "unit": host},
            {"what": "cached blocks", "points": decode, "log_x": True, "unit": host},
            {
                "what": "cached blocks, admitting 1,024 cached tokens",
                "points": admit,
                "log_x": True,
                "unit": host,
            },
            {
                "what": "tokens generated by each row",
                "points": generated,
                "log_x": True,
                "unit": host,
            },
        ],
        options.out.with_suffix(".png"),
    )


if __name__ == "__main__":
    main()
