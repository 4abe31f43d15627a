"""A step of a 0.6B model on the CPU, fused and unfused: decoding at 1, 8 and 32 rows, and a prefill.

The model has random weights and the shape of Qwen3-0.6B with a vocabulary of 32,000 (473 M parameters). Two runners of
the same checkpoint alternate over the same plans: rows of 256 tokens that decode one more token, or a prompt of 512
tokens. The floor of a decode step is the time to read its weights in 16 bits at the speed of a copy (bytes read and
written both count). Coded weights need three quarters of that.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from quire.cluster.bench.results import report
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import BlockTables, SamplingBatch, StepPlan
from quire.replica.runner.runner import Runner
from tests.perf.cpu.cpu_linear import CLOCKS

CONTEXT, BLOCK_SIZE = 256, 32
BLOCKS = CONTEXT // BLOCK_SIZE + 1  # per row
PREFILL_TOKENS = 512
# Goals, set before the first measurement.
GOAL_SPEED_UP = 1.5
GOAL_OF_FLOOR = {1: 0.8, 8: 0.7}


def build_model(folder: Path) -> Path:
    """Save the checkpoint."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_runner(path: Path, dtype: str, fuse: str, threads: int) -> Runner:
    spec = ModelSpec.from_checkpoint(path)
    config = EngineConfig(
        model_name="random",
        revision="",
        device="cpu",
        dtype=dtype,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        num_blocks=32 * BLOCKS,
        max_batch_tokens=PREFILL_TOKENS,
        max_running_requests=32,
        max_waiting_requests=32,
        safety_margin=0.2,
        scheduler="fifo",
        max_prefill_ms=None,
        resume_margin=0.0,
        prefix_caching=False,
        deterministic=dtype == "float32",
        num_threads=threads,
        groups=spec.groups,
        fuse=fuse,
    )
    return Runner.from_config(config, spec)


def make_plan(computed: int, new: int, rows: int) -> StepPlan:
    """A plan of `rows` rows with `computed` cached tokens and `new` tokens to compute, with random ids."""
    rng = np.random.default_rng(0)
    positions = np.tile(np.arange(computed, computed + new, dtype=np.int32), rows)
    num_blocks = -(-(computed + new) // BLOCK_SIZE)
    tables = np.arange(rows * num_blocks, dtype=np.int32).reshape(1, rows, num_blocks)
    of_row = np.repeat(np.arange(rows), new)
    slots = (
        tables[0, of_row, positions // BLOCK_SIZE] * np.int64(BLOCK_SIZE) + positions % BLOCK_SIZE
    )
    cu_q = np.arange(rows + 1, dtype=np.int32) * new
    return StepPlan(
        step=0,
        token_ids=rng.integers(3, 32_000, rows * new).astype(np.int32),
        positions=positions,
        cu_q=cu_q,
        num_sampled=np.ones(rows, np.int32),
        kv_len=np.full(rows, computed + new, np.int32),
        block_tables=BlockTables.of(tables),
        slots=slots[None],
        sampling=SamplingBatch(
            token_index=cu_q[1:] - 1,
            columns=records(rows, temperature=0.0),
            position=np.full(rows, computed + new, np.int64),
        ),
    )


def step_ms(clock: Callable[[], float], runner: Runner, plan: StepPlan) -> list[float]:
    """Run one step."""
    began = clock()
    runner.run(plan)
    return [(clock() - began) * 1e3]


def copy_ms(clock: Callable[[], float], source: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Time of the floor."""
    began = clock()
    target.copy_(source)
    return [(clock() - began) * 1e3]


def measure(
    path: Path, dtype: str, rounds: int, threads: int, clock: Callable[[], float]
) -> list[report.Bar]:
    """The bars of one dtype."""
    runners = {fuse: make_runner(path, dtype, fuse, threads) for fuse in ("auto", "off")}
    weights = ModelSpec.from_checkpoint(path)
    bars = []
    itemsize = getattr(torch, dtype).itemsize
    num_bytes = _read_parameters(weights) * itemsize
    half = torch.ones(num_bytes // 8), torch.ones(num_bytes // 8)
    plans = {f"decode_{rows}_rows": make_plan(CONTEXT, 1, rows) for rows in (1, 8, 32)}
    plans["prefill_512"] = make_plan(0, PREFILL_TOKENS, 1)
    for name, plan in plans.items():
        candidates = {
            fuse: functools.partial(step_ms, clock, runner, plan)
            for fuse, runner in runners.items()
        }
        candidates["floor"] = functools.partial(copy_ms, clock, *half)
        report.alternate(candidates, 1)  # warm-up
        found = report.alternate(candidates, rounds)
        medians = {which: statistics.median(values) for which, values in found.items()}
        details = {
            f"{which}_ms": report.spread_json(report.Spread.of(values))
            for which, values in found.items()
        }
        bars.append(
            report.Bar(
                f"cpu/step_{dtype}_{name}_speed_up",
                medians["off"] / medians["auto"],
                "x",
                GOAL_SPEED_UP,
                at_most=False,
                details=details,
            )
        )
        rows = len(plan.cu_q) - 1
        if rows in GOAL_OF_FLOOR and plan.num_tokens == plan.num_rows:
            bars.append(
                report.Bar(
                    f"cpu/step_{dtype}_{name}_of_floor",
                    medians["floor"] / medians["auto"],
                    "x",
                    GOAL_OF_FLOOR[rows],
                    at_most=False,
                )
            )
    return bars


def _read_parameters(spec: ModelSpec) -> int:
    """Parameters that a decode step reads: those of all layers and the output head."""
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    layers = sum(len(group.layers) for group in spec.groups)
    return layers * (attention + mlp) + spec.vocab_size * spec.hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="as of cpu_linear")
    parser.add_argument(
        "--model", type=Path, help="a checkpoint of this shape; saved anew if absent"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error(
            f"--clock cpu adds up what threads take: needs --threads 1, got {args.threads}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or build_model(Path(folder))
        bars = measure(path, args.dtype, args.rounds, args.threads, CLOCKS[args.clock])
    report.write(
        args.out or report.RESULTS / f"cpu_step_{args.dtype}.json",
        f"python -m tests.perf cpu_step --rounds {args.rounds} --threads {args.threads} --clock {args.clock} "
        f"--dtype {args.dtype}",
        bars,
        method=f"runner's steps in ms of {args.clock} time, context {CONTEXT}, medians, alternated",
    )


if __name__ == "__main__":
    main()
