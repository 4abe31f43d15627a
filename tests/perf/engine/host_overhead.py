"""Host time of one decode step, with a forward pass that takes no time.

    python -m tests.perf host_overhead [--rows 256 1024] [--out FILE]

Quire: `Scheduler.plan`, `Scheduler.commit`, cache events, load, and the encoded frame for one router: all work of the
engine between two forward passes, and that of the actor's event loop. Sampled tokens are random. Prefix caching is on,
blocks have 32 tokens, and prompts have different lengths, so some blocks fill up in every step.

transformers: `prepare_next_batch` and `update_batch` of its continuous batching on its fastest path: with the decode
fast path (block tables) that it has only on GPUs, prefix sharing on, no streaming. It sends no results.

The result is the median wall time of alternating steps. A step is a hundred times shorter than a time slice, so other
load on the machine interrupts few steps. (Reading the CPU-time clock takes longer than a step in some sandboxes.)
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Frame
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.loop import LoopOutput
from quire.replica.scheduler.scheduler import Scheduler
from quire.replica.serving.attached_routers import AttachedRouters, _Attachment

VOCAB = 32_000
EOS = 2
BLOCK_SIZE = 32
MAX_LEN = 8192
PROMPT_TOKENS = 64  # up to 63 more per prompt, so that rows fill their blocks in different steps
GENERATED = 64  # tokens of each row before the first measurement
STEPS_PER_TURN = 64  # every row fills two blocks
GOALS_MS = {256: 0.1, 1024: 0.4}
MAX_RATIO = 0.02  # relative to transformers' host time


class QuireHost:
    """An engine with a stubbed forward pass and one attached router.

    Parameters
    ----------
    rows
        Requests that decode.
    waiting
        Requests that stay in the queue.
    scheduler
        Order of the queue.
    max_len
        Tokens of prompt and answer; the measurement ends 128 tokens before.
    """

    def __init__(
        self, rows: int, waiting: int = 0, scheduler: str = "fifo", max_len: int = MAX_LEN
    ):
        blocks_per_row = -(-max_len // BLOCK_SIZE)
        self.scheduler = Scheduler(
            EngineConfig(
                model_name="stub",
                revision="",
                device="cpu",
                dtype="float32",
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                max_model_len=max_len,
                block_size=BLOCK_SIZE,
                num_blocks=rows * blocks_per_row,
                max_batch_tokens=max(rows, 8192),
                max_running_requests=rows,
                max_waiting_requests=waiting + rows,
                safety_margin=0.0,
                prefix_caching=True,
                deterministic=True,
                num_threads=1,
                scheduler=scheduler,
                max_prefill_ms=100.0,
                resume_margin=0.1,
            )
        )
        self._rng = np.random.default_rng(0)
        self._publish = _publisher()
        for i in range(rows + waiting):
            length = PROMPT_TOKENS + int(self._rng.integers(0, 64))
            request = Request(
                ("router", i),
                self._rng.integers(EOS + 1, VOCAB, length),
                SamplingParams(max_tokens=max_len - 128, seed=i + 1),
                source=1,
                stream_id=i,
                arrival_s=0.0,
                deadline_s=1e9 - i,
                priority=i % 3,
            )
            refusal = self.scheduler.add(request)
            if refusal is not None:
                raise RuntimeError(f"the stub request was refused: {refusal.facts.error}")
        while self.scheduler.load().num_waiting > waiting:
            self.step()
        self.run(GENERATED)

    def run(self, steps: int) -> list[float]:
        """Host milliseconds of each step."""
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        """Run one step; returns its host milliseconds."""
        tokens = self._rng.integers(EOS + 1, VOCAB, self.scheduler.config.max_running_requests)
        began = time.perf_counter_ns()
        plan = self.scheduler.plan(0.0)
        result = StepResult(tokens[: len(plan.sampling.token_index)], 0.01)
        deltas = self.scheduler.commit(plan, result, 0.0)
        events = self.scheduler.events
        batch = events.flush()
        self._publish(
            LoopOutput(deltas, batch, events.seq, events.digest, self.scheduler.load())
        ).encode()
        return (time.perf_counter_ns() - began) / 1e6


def _publisher() -> Callable[[LoopOutput], Frame]:
    """Run `AttachedRouters.publish` for one attached router; returns the queued frame."""
    attachments = AttachedRouters("epoch", on_detach=lambda router_id: None)
    attachment = _Attachment(1, time.monotonic, heartbeat_s=3600, max_heartbeat_s=3600)
    attachments._by_router["router"] = attachment

    def publish(output: LoopOutput) -> Frame:
        attachments.publish(output)
        return attachment._frames.pop()

    return publish


class TransformersHost:
    """transformers' continuous batching without calls of its model."""

    def __init__(self, rows: int):
        import torch
        from transformers import (
            ContinuousBatchingConfig,
            GenerationConfig,
            LlamaConfig,
            LlamaForCausalLM,
        )
        from transformers.generation.continuous_batching.requests import RequestState

        torch.set_num_threads(1)
        page = 256
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                max_position_embeddings=MAX_LEN,
            )
        ).to(torch.bfloat16)
        manager = model.init_continuous_batching(
            GenerationConfig(max_new_tokens=MAX_LEN - 128, eos_token_id=EOS, do_sample=True),
            ContinuousBatchingConfig(
                page_size=page,
                num_blocks=rows * 8,
                max_batch_tokens=max(rows, 8192),
                max_requests_per_batch=rows,
                max_blocks_per_request=32,
                use_cuda_graph=False,
                use_async_batching=False,
                allow_block_sharing=True,
            ),
        )
        # The fast path without a mask, as with flash attention on a GPU; no kernel is called.
        model.config._attn_implementation = "flash_attention_2"
        manager.continuous_batching_config.max_blocks_per_request = 32
        self._batch = manager._create_batch_processor()
        rng = np.random.default_rng(0)
        for i in range(rows):
            length = PROMPT_TOKENS + int(rng.integers(0, 64))
            self._batch.scheduler.add_waiting_request(
                RequestState(
                    request_id=f"request-{i}",
                    initial_tokens=rng.integers(EOS + 1, VOCAB, length).tolist(),
                    max_new_tokens=MAX_LEN - 128,
                    eos_token_id=EOS,
                )
            )
        self._torch = torch
        self._generator = torch.Generator().manual_seed(0)
        while self._batch.scheduler.waiting_requests:
            self.step()
        self.run(GENERATED)
        if not self._batch.inputs_and_outputs.use_block_table:
            raise RuntimeError("transformers did not take its decode fast path")

    def run(self, steps: int) -> list[float]:
        """Host milliseconds of each step."""
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        """Run one step; returns its host milliseconds without the stub's random numbers."""
        batch, io = self._batch, self._batch.inputs_and_outputs
        began = time.perf_counter_ns()
        if not batch.prepare_next_batch():
            raise RuntimeError("transformers scheduled nothing")
        planned = time.perf_counter_ns()
        io.output_ids.random_(EOS + 1, VOCAB, generator=self._generator)
        sampled = time.perf_counter_ns()
        with self._torch.no_grad():
            io.retrieve_device_outputs()
            batch.update_batch()
        return (planned - began + time.perf_counter_ns() - sampled) / 1e6


def measure(rows: int, turns: int, generated: int, waiting: int) -> list[report.Bar]:
    """The bars of one number of rows."""
    fresh, crowded, aged = QuireHost(rows), QuireHost(rows, waiting), QuireHost(rows)
    ranked = QuireHost(rows, waiting, "priority")
    aged.run(generated - GENERATED)
    transformers = TransformersHost(rows)
    hosts = {
        "quire": lambda: fresh.run(STEPS_PER_TURN),
        "waiting": lambda: crowded.run(STEPS_PER_TURN),
        "priority": lambda: ranked.run(STEPS_PER_TURN),
        "generated": lambda: aged.run(STEPS_PER_TURN),
        "transformers": lambda: transformers.run(8),
    }
    gc.collect()
    gc.freeze()  # as a replica does after loading
    found = report.alternate(hosts, turns)
    gc.unfreeze()
    spreads = {name: report.Spread.of(values) for name, values in found.items()}
    own, peer = spreads["quire"], spreads["transformers"]
    goal = GOALS_MS.get(rows, 0.4 * rows / 1024)
    case = {"rows": rows, "block_size": BLOCK_SIZE}
    return [
        report.Bar(
            f"engine/host_ms_{rows}",
            own.median,
            "ms",
            goal,
            details={**case, "generated": GENERATED, **report.spread_json(own)},
        ),
        report.Bar(
            f"engine/host_ms_{rows}_waiting",
            spreads["waiting"].median,
            "ms",
            goal,
            details={**case, "waiting": waiting, **report.spread_json(spreads["waiting"])},
        ),
        report.Bar(
            f"engine/host_ms_{rows}_priority",
            spreads["priority"].median,
            "ms",
            goal,
            details={**case, "waiting": waiting, **report.spread_json(spreads["priority"])},
        ),
        report.Bar(
            f"engine/host_ms_{rows}_generated",
            spreads["generated"].median,
            "ms",
            goal,
            details={**case, "generated": generated, **report.spread_json(spreads["generated"])},
        ),
        report.Bar(
            f"engine/host_ratio_{rows}",
            own.median / peer.median,
            "x",
            MAX_RATIO,
            details={**case, "transformers_ms": report.spread_json(peer)},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--turns", type=int, default=8, help=f"of {STEPS_PER_TURN} steps")
    parser.add_argument("--generated", type=int, default=4096, help="tokens of the old requests")
    parser.add_argument("--waiting", type=int, default=20_000, help="requests in the long queue")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "host_overhead.json")
    args = parser.parse_args()
    rows = " ".join(map(str, args.rows))
    bars = [bar for n in args.rows for bar in measure(n, args.turns, args.generated, args.waiting)]
    report.write(
        args.out,
        f"python -m tests.perf host_overhead --rows {rows}",
        bars,
        method="wall time per step on one core, medians; alternated",
    )


if __name__ == "__main__":
    main()
