"""Makes step plans by hand: the tests' stand-in for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import BlockTables, SamplingBatch, StepPlan
from quire.replica.runner.runner import Runner
from quire.replica.sampling.sampler import sample


def engine_config(spec: ModelSpec, **changes: object) -> EngineConfig:
    """A small CPU configuration for `spec`."""
    values = dict(
        model_name="test",
        revision="",
        device="cpu",
        dtype="float32",
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=256,
        block_size=16,
        num_blocks=256,
        max_batch_tokens=64,
        max_running_requests=16,
        max_waiting_requests=16,
        safety_margin=0.2,
        scheduler="fifo",
        max_prefill_ms=None,
        resume_margin=0.0,
        prefix_caching=False,
        deterministic=True,
        num_threads=1,
        groups=spec.groups,
    )
    return EngineConfig(**{**values, **changes})


def make_runner(path: Path, **changes: object) -> Runner:
    """A runner of the checkpoint, its pool poisoned with NaN."""
    spec = ModelSpec.from_checkpoint(path)
    runner = Runner.from_config(engine_config(spec, **changes), spec)
    runner.pool.poison()
    return runner


@dataclass
class Sequence:
    """One request: its tokens so far, the blocks it owns and how many of its tokens are in the cache."""

    tokens: list[int]
    blocks: np.ndarray  # [G, max blocks] int32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    computed: int = 0
    adapter: int = 0  # slot
    logits: list[np.ndarray] = field(default_factory=list)  # each [vocab] float32


class Driver:
    """Owns the blocks of a runner's pool, hands them out in random order."""

    def __init__(self, runner: Runner, seed: int = 0):
        self.runner = runner
        self.free = list(np.random.default_rng(seed).permutation(runner.config.num_blocks))
        self.step = 0

    def add(self, tokens: list[int], max_tokens: int = 0, **params: object) -> Sequence:
        """Reserve blocks for `tokens` and `max_tokens` more."""
        num_groups = len(self.runner.pool.groups)
        count = num_groups * -(-(len(tokens) + max_tokens) // self.runner.config.block_size)
        assert count <= len(self.free)
        blocks, self.free = self.free[:count], self.free[count:]
        return Sequence(
            list(tokens), np.asarray(blocks, np.int32).reshape(num_groups, -1), **params
        )

    def plan(self, work: list[tuple[Sequence, int]]) -> tuple[StepPlan, list[Sequence]]:
        """A step that computes the next `count` tokens of each sequence; and the sequences that sample."""
        work = sorted(work, key=lambda item: item[1] > 1)
        counts = [count for _, count in work]
        cu_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        size = self.runner.config.block_size
        width = max(s.blocks.shape[1] for s, _ in work)
        tables = np.zeros((len(self.runner.pool.groups), len(work), width), np.int32)
        positions = [np.arange(s.computed, s.computed + count) for s, count in work]
        slots = [
            s.blocks[:, p // size].astype(np.int64) * size + p % size
            for (s, _), p in zip(work, positions, strict=True)
        ]
        for row, (sequence, _) in enumerate(work):
            tables[:, row, : sequence.blocks.shape[1]] = sequence.blocks
        token_ids = [s.tokens[s.computed : s.computed + count] for s, count in work]
        adapters = np.array([s.adapter for s, _ in work], np.int32)
        done = [i for i, (s, count) in enumerate(work) if s.computed + count == len(s.tokens)]
        sampling = [work[i][0] for i in done]
        self.step += 1
        plan = StepPlan(
            step=self.step,
            token_ids=np.concatenate(token_ids).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            cu_q=cu_q,
            num_sampled=np.isin(np.arange(len(work)), done).astype(np.int32),
            kv_len=np.array([s.computed + count for s, count in work], np.int32),
            block_tables=BlockTables.of(tables),
            slots=np.ascontiguousarray(np.concatenate(slots, axis=1)),
            adapters=adapters if adapters.any() else adapters[:0],
            sampling=SamplingBatch(
                token_index=np.array([cu_q[i + 1] - 1 for i in done], np.int32),
                columns=records(
                    len(sampling),
                    temperature=[s.temperature for s in sampling],
                    top_k=[s.top_k for s in sampling],
                    top_p=[s.top_p for s in sampling],
                    seed=np.array([s.seed for s in sampling], np.uint64),
                ),
                position=np.array([len(s.tokens) for s in sampling], np.int64),
            ),
        )
        return plan, sampling

    def advance(self, work: list[tuple[Sequence, int]]) -> None:
        """Run one step: logits and tokens are appended to the sequences that sample."""
        plan, sampling = self.plan(work)
        logits = self.runner.forward(plan)
        tokens = sample(logits.clone(), plan.sampling)
        for sequence, count in work:
            sequence.computed += count
            self.poison_what_fell_out(sequence)
        for sequence, row, token in zip(sampling, logits.numpy(), tokens, strict=True):
            sequence.logits.append(row)
            sequence.tokens.append(int(token))

    def poison_what_fell_out(self, sequence: Sequence) -> None:
        """NaN into the blocks that the scheduler would have given to somebody else by now."""
        pool = self.runner.pool
        for g, group in enumerate(pool.groups):
            end = int(group.first_key(sequence.computed)) // self.runner.config.block_size
            pool.data[torch.from_numpy(sequence.blocks[g, :end]).long()] = float("nan")

    def generate(self, sequences: list[Sequence], max_tokens: int, chunk: int) -> list[list[int]]:
        """Run to `max_tokens` new tokens each: decodes and chunks of at most `chunk` tokens mixed."""
        ends = [len(s.tokens) + max_tokens for s in sequences]
        while any(len(s.tokens) < end for s, end in zip(sequences, ends, strict=True)):
            self.advance(
                [
                    (s, min(len(s.tokens) - s.computed, chunk))
                    for s, end in zip(sequences, ends, strict=True)
                    if len(s.tokens) < end
                ]
            )
        return [s.tokens[-max_tokens:] for s in sequences]
