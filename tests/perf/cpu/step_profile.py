"""Where the time of an engine's step goes: scheduling, each kind of matrix product, attention, sampling.

    python -m tests.perf step-profile CHECKPOINT [--workloads W1 W2 ...]

On the CPU an operation is complete when its call returns, so the wall time of a call is its cost. The parts are: each
leaf module of the model by its name in the layer; writing keys and values; attention; choosing tokens; the loop's work
before and after the forward pass; and the rest (rotary embedding, residual sums, gate times up, views). A layer that
runs as one call reports the times of its parts under the same names. Products are listed with the rates at which they
read weights and compute. The hooks cost a few microseconds per call, so a run without them is measured too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quire.cluster.bench.engines.engine_process import wait_until_idle
from quire.cluster.bench.load.workloads import WORKLOADS, Workload, batches
from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineArgs
from quire.replica.engine import Engine
from quire.replica.model.fusion.cpu_fused_parts import PackedProduct
from quire.replica.model.fusion.fused_parts import Product
from quire.replica.sampling import step_sampler

# Parts inside `launch`; the remaining time of `launch` is REST.
REST = "rest of the forward pass"
HOST = ("plan", "collect", "commit", "send")


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step, by part."""

    num_tokens: int
    num_decode_rows: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def kind(self) -> str:
        """`decode` if every row has one token, else `prefill`, which includes mixed steps."""
        return "decode" if self.num_tokens == self.num_decode_rows else "prefill"


class StepRecorder:
    """Times the parts of an engine's steps while it is installed.

    The hooks run in the engine's thread; read the recorder only while the engine is idle.
    """

    def __init__(self, engine: Engine):
        self.steps: list[StepTimes] = []
        self.weights: dict[
            str, tuple[int, int]
        ] = {}  # by part: parameters of all layers, and their bytes
        self._engine = engine
        self._began_plan_s = 0.0

    @contextmanager
    def installed(self) -> Iterator[StepRecorder]:
        """Record during the block. The engine must be idle at its start and end."""
        loop = self._engine._loop
        runner, scheduler = loop._runner, loop._scheduler
        with ExitStack() as stack:

            def replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
                stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

            replace(scheduler, "plan", self._plan)
            replace(scheduler, "commit", self._timed("commit"))
            replace(runner, "launch", self._timed("launch"))
            replace(runner, "collect", self._timed("collect"))
            replace(loop, "_on_output", self._timed("send"))
            replace(runner.pool, "write", self._timed("write keys and values"))
            replace(step_sampler, "sample", self._timed("choose tokens"))
            for attention in runner._attentions:
                replace(attention, "plan", self._timed("plan attention"))
            kinds = {type(attention) for attention in runner._attentions}
            for kind in kinds:
                replace(kind, "__call__", self._timed("attention"))
            if runner._forward._workspace is not None:
                workspace = runner._forward._workspace
                stack.enter_context(mock.patch.object(workspace, "on_times", self._add_all))
            for name, module in runner.model.named_modules():
                if not list(module.children()):
                    stack.callback(self._hook(name, module))
            yield self

    def _plan(self, call: Callable) -> Callable:
        def plan(*args: Any) -> Any:
            began = time.perf_counter()
            made = call(*args)
            if made is not None:
                self.steps.append(StepTimes(made.num_tokens, made.num_decode_rows))
                self._add("plan", began)
            return made

        return plan

    def _timed(self, part: str) -> Callable[[Callable], Callable]:
        def wrap(call: Callable) -> Callable:
            def timed(*args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    self._add(part, began)

            return timed

        return wrap

    def _hook(self, name: str, module: torch.nn.Module) -> Callable[[], None]:
        """Time a leaf module; returns the handles that remove its hooks."""
        part = name.rpartition(".")[2]
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def after(*_: Any) -> None:
            self._add(part, began)

        own = None  # number of parameters and bytes of a product's weight
        if isinstance(module, PackedProduct):
            own = module.packed.columns * module.packed.depth, module.packed.num_bytes
        elif isinstance(module, torch.nn.Linear | Product):
            own = module.weight.numel(), module.weight.nbytes
        if own is not None:
            count, size = self.weights.get(part, (0, 0))
            self.weights[part] = (count + own[0], size + own[1])
        handles = (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        )
        return lambda: [handle.remove() for handle in handles]

    def _add(self, part: str, began: float) -> None:
        if self.steps:  # the loop may turn without work before the first step
            self.steps[-1].seconds[part] += time.perf_counter() - began

    def _add_all(self, seconds: dict[str, float]) -> None:
        if self.steps:
            for part, part_s in seconds.items():
                self.steps[-1].seconds[part] += part_s


def run(engine: Engine, workload: Workload, repetition: int | str) -> float:
    """Run one workload; returns its seconds."""
    prompts = workload.prompts(repetition, engine.config.vocab_size)
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.generate(prompts, params, progress=False)
    return time.perf_counter() - began


def table(steps: list[StepTimes], weights: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of one kind of step: mean milliseconds, share of the step, rates of the products."""
    num_steps = len(steps)
    tokens = statistics.fmean(step.num_tokens for step in steps)
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        for part, seconds in step.seconds.items():
            sums[part] += seconds / num_steps
    launch = sums.pop("launch")
    inside = sum(seconds for part, seconds in sums.items() if part not in HOST)
    sums[REST] = launch - inside
    total = sum(sums.values())
    rows = []
    for part, seconds in sorted(sums.items(), key=lambda item: -item[1]):
        row = {
            "part": part,
            "ms": _round(1e3 * seconds),
            "percent": round(100 * seconds / total, 1),
        }
        # The head runs only on rows that sample, so its flops do not follow from the tokens.
        if part in weights and seconds > 0:
            count, size = weights[part]
            row["weights_gb_per_s"] = _round(size / seconds / 1e9)
            if part != "lm_head":
                row["gflop_per_s"] = _round(2 * count * tokens / seconds / 1e9)
        rows.append(row)
    return rows


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def measure(engine: Engine, workload: Workload) -> dict[str, Any]:
    """Run a workload without and with the recorder; returns a table for each kind of step."""
    plain_s = run(engine, workload, "plain")
    recorder = StepRecorder(engine)
    with recorder.installed():
        recorded_s = run(engine, workload, "recorded")
    found: dict[str, Any] = {
        "seconds": round(plain_s, 3),
        "seconds_with_recorder": round(recorded_s, 3),
    }
    for kind in ("decode", "prefill"):
        steps = [step for step in recorder.steps if step.kind == kind]
        if steps:
            found[kind] = {
                "num_steps": len(steps),
                "tokens_per_step": round(statistics.fmean(s.num_tokens for s in steps), 1),
                "parts": table(steps, recorder.weights),
            }
    return found


def print_tables(name: str, found: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"\n{name}: {found['seconds']:.2f} s ({found['seconds_with_recorder']:.2f} s recorded)")
    for kind in ("decode", "prefill"):
        if kind not in found:
            continue
        facts = found[kind]
        print(f"  {kind}: {facts['num_steps']} steps of {facts['tokens_per_step']} tokens")
        for row in facts["parts"]:
            rates = "".join(
                f"{row[key]:>9g} {unit}"
                for key, unit in (("weights_gb_per_s", "GB/s"), ("gflop_per_s", "GFLOP/s"))
                if key in row
            )
            print(f"    {row['part']:26}{row['ms']:>9g} ms {row['percent']:>5}%{rates}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", help="folder; `python -m tests.perf checkpoints` makes one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--kv-cache-gib", type=float, default=4.0)
    parser.add_argument(
        "--max-prefill-ms",
        type=json.loads,
        default=EngineArgs().max_prefill_ms,
        help="as in the configuration; null: prompts as long as a step takes, as `compare` has it",
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS / "step_profile.json")
    options = parser.parse_args()
    chosen = list(batches(options.workloads))
    shape = {
        "model": options.checkpoint,
        "dtype": options.dtype,
        "kv_cache_gib": options.kv_cache_gib,
        "max_model_len": max(2048, *(w.max_tokens for w in chosen)),
        "max_prefill_ms": options.max_prefill_ms,
    }
    profiles = {}
    with Engine(**shape) as engine:
        run(engine, Workload("warm-up", 8, 0, 128, 4), 0)
        wait_until_idle(time.process_time, most_s=60.0)  # until its cache's pages are in memory
        for workload in chosen:
            profiles[workload.name] = measure(engine, workload)
            print_tables(workload.name, profiles[workload.name])
        startup_s = {name: round(s, 2) for name, s in engine.startup_s.items()}
        threads = engine.config.num_threads
    report.write(
        options.out,
        f"python -m tests.perf step-profile {Path(options.checkpoint).name} "
        f"--workloads {' '.join(w.name for w in chosen)} --max-prefill-ms {json.dumps(options.max_prefill_ms)}",
        [],
        method="wall time around every call in the engine's thread, means over the steps of a run",
        checkpoint=Path(options.checkpoint).name,
        dtype=options.dtype,
        num_threads=threads,
        startup_s=startup_s,
        profiles=profiles,
    )


if __name__ == "__main__":
    main()
