"""Engines of several ranks, which are threads of this process, and what they are asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire.protos.adapter_ref import AdapterRef
from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineArgs, EngineConfig
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.ranks.leading_ranks import StartRank, start_thread
from quire.replica.runner.runner import Runner
from quire.replica.speculation.model_drafts import ModelSource
from tests.replica.speculation.test_model_drafts import SameLength

LENGTHS = (70, 1, 33, 16, 40)  # of prompts
STEP_TOKENS = 24
SHARED = 32  # of two prompts
# Of tokens in the cache: half of what the prompts need at the same time.
FEW_BLOCKS = 20


def engine(
    folder: Path,
    num_ranks: int,
    splits: int,
    on_output: Callable[[LoopOutput], None] | None = None,
    node_pool: PoolPlace | None = None,
    start_rank: StartRank = start_thread,
    **changes: object,
) -> Engine:
    options = dict(
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=8,
        num_blocks=200,
        max_batch_tokens=STEP_TOKENS,
    )
    return Engine(
        EngineArgs(
            model=str(folder),
            tensor_parallel=num_ranks,
            reduction_splits=splits,
            **{**options, **changes},
        ),
        on_output=on_output,
        prove=False,
        node_pool=node_pool,
        start_rank=start_rank,
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    made = [rng.integers(3, 120, n).tolist() for n in LENGTHS]
    made[-1][:SHARED] = made[0][:SHARED]
    return made


def params(**changes: object) -> list[SamplingParams]:
    given = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=3)
    sampled = dataclasses.replace(given, temperature=1.0, top_p=0.9, seed=5, repetition_penalty=1.1)
    return [dataclasses.replace((given, sampled)[i % 2], **changes) for i in range(len(LENGTHS))]


def told(outputs) -> list[tuple]:
    """Tokens, their log-probabilities, and those of the prompt."""
    return [
        (o.token_ids, o.logprobs, [x for part in o.prompt_logprobs or () for x in part.logprobs])
        for o in outputs
    ]


@functools.cache
def of_one_rank(folder: Path, splits: int, **changes: object) -> list[list[tuple]]:
    with engine(folder, 1, splits, **changes) as alone:
        scored = alone.generate(prompts(), params(prompt_logprobs=2))
        return [
            told(alone.generate(prompts(), params())),
            told(scored),
            told(alone.generate(prompts(), params(), n=2)),
        ]


def always_draft(config: EngineConfig, runner: Runner) -> ModelSource:
    """Drafts of the runner's model, whatever they cost."""
    return ModelSource(config, runner, SameLength(3))


def adapted(engine: Engine, refs: list[AdapterRef | None]) -> list[list[tuple]]:
    """Answers with each adapter in turn."""
    answers = []
    for ref in refs:
        adapter = None if ref is None else engine.adapter(ref)
        answers.append(told(engine.generate(prompts(), params(), adapter=adapter)))
    return answers
