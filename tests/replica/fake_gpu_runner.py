"""Serves mixed requests on a GPU that does not exist, and tells what Triton was asked to compile meanwhile.

Run as a program, without TRITON_INTERPRET: `fake_gpu_runner.py jobs.json out.json`. A job is {"name", "path", "rows",
"config": changes of `serving_config`}, and if it asks for that "compiles" (to a cubin) or "specialises_everything" (as
if no kernel said what not to specialise on; the last job, for it is not undone). `out` gets a `Served` of each.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).parents[2])
)  # for `tests.perf`, where this file is run as a program

import numpy as np
import torch
import triton
from device_harness import Harness, config_of
from fake_device import FakeDevice
from fake_gpu import FakeGpu

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Load, TokenDelta
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.loop import EngineLoop
from quire.replica.model.fusion import fuse_report
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_outputs import InFlight
from tests.perf.gpu.engine.mixed_requests import Asked, mixed_waves

DTYPE = "bfloat16"
BLOCK_SIZE = 16


@dataclass(slots=True)
class Served:
    """What a job found."""

    num_warmed: int  # variants that were there when the runner was ready
    late: list[str]  # those that came later, see `FakeGpu.describe`
    num_compiles: int  # as the runner counts them
    errors: list[str]  # of requests
    seen: dict[str, int]  # what the requests have brought about
    fused: dict[str, int]
    seconds: float
    variants: list[dict[str, Any]]  # all, of a job that compiles


class Anything:
    """A grammar that all tokens are in."""

    error = ""

    def __init__(self, vocab_size: int):
        self._mask = np.full(-(-vocab_size // 32), -1, np.int32)

    def mask(self) -> np.ndarray:
        return self._mask

    def advance(self, token_id: int) -> bool:
        return False


def serving_config(spec: ModelSpec, rows: int, **changes: object) -> EngineConfig:
    """As of a GPU: a cache in which the short requests fit and the long ones do not, with a host tier."""
    values: dict[str, Any] = dict(
        dtype=DTYPE,
        deterministic=False,
        block_size=BLOCK_SIZE,
        max_model_len=320,
        max_batch_tokens=rows + 32,
        max_running_requests=rows,
        max_waiting_requests=1024,
        num_host_blocks=200,
        restore="always",
        async_batching="on",
        check_graphs=True,
    )
    values |= changes
    longest = sequence_blocks(
        spec.groups, values["max_model_len"], values["max_batch_tokens"], BLOCK_SIZE
    )
    values.setdefault("num_blocks", max(longest + 4, (rows + 10) * len(spec.groups)))
    return config_of(spec, **values)


def requests_of(waves: Iterable[list[Asked]], vocab_size: int, rows: int) -> list[list[Request]]:
    """The mixed ones; then what only the loop can be asked for: forks, grammars, and more than the cache holds."""
    made: list[list[Request]] = []
    for w, wave in enumerate(waves):
        made.append(
            [Request((w, i), asked.prompt_ids, asked.params) for i, asked in enumerate(wave)]
        )
    forks = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
    made.append(
        [
            Request(("fork", i), [5] * 21, forks, fork_of=("fork", 0) if i else None)
            for i in range(3)
        ]
    )
    guided = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    made.append([Request(("grammar", i), [7] * (4 + i), guided) for i in range(3)])
    for request in made[-1][:2]:
        request.grammar = Anything(vocab_size)
    long = SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    made.append([Request(("long", i), [9 + i % 90] * (3 + i % 17), long) for i in range(rows // 2)])
    return made


class Waves:
    """Sends each wave of requests when the one before it has ended."""

    def __init__(self, waves: list[list[Request]]):
        self._waves = waves
        self._at = 0
        self._open = {request.key for request in waves[0]}
        self.load: Load | None = None  # at the end

    def on_delta(self, loop: EngineLoop, delta: TokenDelta) -> None:
        """Called with every one."""
        if delta.finish_reason is None:
            return
        self._open.remove(delta.key)
        if self._open:
            return
        self._at += 1
        if self._at == len(self._waves):
            self.load = loop.load()
            return
        wave = self._waves[self._at]
        self._open = {request.key for request in wave}
        for request in wave:
            loop.post(lambda scheduler, request=request: scheduler.add(request))


class Watched:
    """What the steps of a runner were like, from when it is ready."""

    def __init__(self, gpu: FakeGpu):
        self._gpu = gpu
        self.runner: Runner | None = None
        self.num_warmed = 0
        self.rows: set[int] = set()
        self.widths: set[int] = set()  # of block tables
        self.num_chunks = 0  # of prompts that a step did not end

    def prepare(self, runner: Runner) -> None:
        """As the runtime does, then watch."""
        runner.warm_up()
        runner.mark_ready()
        self.runner, self.num_warmed = runner, len(self._gpu.variants)
        launch = runner.launch

        def watch(plan: StepPlan) -> InFlight:
            self.rows.add(plan.num_rows)
            self.widths.add(plan.block_tables.width)
            self.num_chunks += plan.num_rows > len(plan.sampling.token_index)
            return launch(plan)

        runner.launch = watch


def serve(gpu: FakeGpu, model: Harness, rows: int, changes: dict[str, Any]) -> Served:
    """Warm up, be ready, serve all waves."""
    began_s = time.process_time()
    config = serving_config(model.spec, rows, **changes)
    requests = requests_of(mixed_waves(rows, config.max_model_len), config.vocab_size, rows)
    waves, watched, device = Waves(requests), Watched(gpu), FakeDevice(0)
    gpu.forget()
    told = model.serve(
        config,
        device,
        requests[0],
        plans_ahead=config.plans_ahead,
        prepare=watched.prepare,
        on_delta=waves.on_delta,
        expected_keys=[request.key for wave in requests[1:] for request in wave],
        attention_backend="triton",
    )
    return Served(
        num_warmed=watched.num_warmed,
        late=gpu.describe(watched.num_warmed),
        num_compiles=watched.runner.num_compiles,
        errors=[f"{key}: {error}" for key, (_, _, _, error) in told.items() if error],
        seen=dict(
            preemptions=waves.load.num_preemptions,
            restores=waves.load.num_restores,
            replays=device.num_replays,
            chunks=watched.num_chunks,
            max_rows=max(watched.rows),
            min_width=min(watched.widths),
            max_width=max(watched.widths),
        ),
        fused=dict(watched.runner.fused.fused),
        seconds=time.process_time() - began_s,
        variants=[asdict(variant) for variant in gpu.variants] if gpu.compiles else [],
    )


def specialise_everything() -> None:
    """Take back what the decorators of kernels say that every step launches."""
    for name in (
        "attention.attention_decode",
        "attention.attention_prefill",
        "attention.prefill_plan",
        "rows.kv_write",
        "sampling.sampling_kernel",
    ):
        module = importlib.import_module(f"quire.kernels.{name}")
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                for parameter in kernel.params:
                    parameter.do_not_specialize = False
                    parameter.do_not_specialize_on_alignment = False


def main(jobs: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # Nothing is computed: there is nothing to compare.
    for dtype in fuse_report.MAX_DEVIATION:
        fuse_report.MAX_DEVIATION[dtype] = float("inf")
    gpu = FakeGpu()
    gpu.install()
    found: dict[str, Any] = {}
    for job in json.loads(jobs.read_text()):
        gpu.compiles = job.get("compiles", False)
        if job.get("specialises_everything"):
            specialise_everything()
        model = Harness(Path(job["path"]), job["config"].get("dtype", DTYPE))
        try:
            served = serve(gpu, model, job["rows"], job["config"])
        except Exception as error:
            error.add_note(f"job {job['name']}")
            raise
        found[job["name"]] = asdict(served)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
