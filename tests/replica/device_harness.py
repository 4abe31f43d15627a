"""The real loop, scheduler and runner on a device that the test chooses, and the requests that it serves."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable

import numpy as np
import torch
from step_driver import engine_config

from quire.kernels.attention.paged_attention import Backend
from quire.protos.sampling_params import POOLINGS, SamplingParams
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.draft_source import DraftSource
from quire.replica.core.request import Request
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.loop import EngineLoop, LoopOutput
from quire.replica.model.loader import load_model
from quire.replica.runner.runner import Runner
from quire.replica.scheduler.scheduler import Scheduler

TIMEOUT_S = 60.0
BLOCK_SIZE = 8
Told = dict[object, tuple]


def config_of(spec: ModelSpec, **changes: object) -> EngineConfig:
    values = dict(
        block_size=BLOCK_SIZE,
        num_blocks=200,
        max_batch_tokens=24,
        max_running_requests=6,
        max_waiting_requests=64,
        safety_margin=0.0,
        prefix_caching=True,
        max_model_len=96,
    )
    return engine_config(spec, **{**values, **changes})


def tight(spec: ModelSpec, spare: int = 5, **changes: object) -> EngineConfig:
    """A cache that is always too small, with a host tier: blocks move in most steps, however long that takes."""
    one = sequence_blocks(spec.groups, 60, 24, BLOCK_SIZE)
    values = dict(num_blocks=one + spare, num_host_blocks=60, restore="always")
    return config_of(spec, **{**values, **changes})


class Harness:
    """A checkpoint whose weights are loaded once, for runners on one device after another."""

    def __init__(self, path, dtype: str = "float32"):
        self.spec = ModelSpec.from_checkpoint(path)
        self.model = load_model(self.spec, "cpu", dtype)

    def serve(
        self,
        config: EngineConfig,
        device: Device,
        requests: Iterable[Request],
        *,
        plans_ahead: bool,
        prepare: Callable[[Runner], None] = lambda runner: None,
        on_delta: Callable[[EngineLoop, object], None] = lambda loop, delta: None,
        expected_keys: Iterable[object] = (),
        attention_backend: Backend | None = None,
        draft_source: DraftSource | None = None,
    ) -> Told:
        """Run the requests, all submitted before the first step; of each the tokens, log-probs and how it ended.

        `prepare` gets the runner before it serves; `expected_keys` are those of requests that `on_delta` submits.
        """
        dtype = getattr(torch, config.pool_dtype)
        pool = KVPool(config.num_blocks, self.spec.groups, config.block_size, dtype)
        pool.poison()
        # A runner changes its model's modules in place.
        model = copy.deepcopy(self.model)
        runner = Runner(
            config, self.spec, model, pool, device=device, attention_backend=attention_backend
        )
        runner.host_pool.poison()
        prepare(runner)
        scheduler = Scheduler(config, draft_source=draft_source)
        outputs: queue.Queue[LoopOutput] = queue.Queue()
        loop = EngineLoop(scheduler, runner, outputs.put, plans_ahead=plans_ahead, mark=runner.mark)
        tokens: dict[object, list[int]] = {}
        scores: dict[object, list] = {}
        told: Told = {}
        for key in expected_keys:
            tokens[key], scores[key] = [], []
        for request in requests:
            tokens[request.key], scores[request.key] = [], []
            loop.post(lambda scheduler, request=request: scheduler.add(request))
        loop.start()
        try:
            while len(told) < len(tokens):
                for delta in outputs.get(timeout=TIMEOUT_S).deltas:
                    assert delta.key not in told, "a delta follows the last one of its request"
                    assert delta.index == len(tokens[delta.key]) or not delta.token_ids
                    tokens[delta.key] += delta.token_ids
                    scores[delta.key] += [
                        tuple(s) for s in map(_values, delta.facts.logprobs or ())
                    ]
                    if delta.facts.embedding is not None:
                        scores[delta.key].append(delta.facts.embedding.tobytes())
                    if delta.finish_reason is not None:
                        error = None if delta.facts.error is None else str(delta.facts.error)
                        told[delta.key] = (
                            tokens[delta.key],
                            scores[delta.key],
                            delta.finish_reason,
                            error,
                        )
                    on_delta(loop, delta)
            if loop.is_alive():
                loop.call(lambda scheduler: scheduler.check()).result(TIMEOUT_S)
        finally:
            loop.close()
        return told


def _values(score) -> tuple:
    return score.logprob, tuple(score.top_ids), tuple(score.top_logprobs)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 170, length).tolist()


def crowd() -> list[Request]:
    """Prompts of one chunk and of several, that begin alike and not; greedy and drawn; stopped by length and by id.

    The last two are embeddings.
    """
    trunk = prompt(18, 99)
    requests = []
    for i in range(10):
        ids = (trunk if i % 3 == 0 else []) + prompt(3 + 7 * i % 31, i)
        options = dict(max_tokens=4 + 5 * i % 17, seed=i, ignore_eos=True)
        options |= [
            dict(temperature=0.0, logprobs=2),
            dict(temperature=1.0, top_p=0.9),
            dict(temperature=0.7, top_k=9, repetition_penalty=1.2, min_tokens=3),
            dict(temperature=1.3, stop_token_ids=tuple(range(3, 60))),
        ][i % 4]
        requests.append(Request(i, ids, SamplingParams(**options)))
    for pooling in POOLINGS:
        requests.append(Request(pooling, trunk + prompt(21, 7), SamplingParams(pooling=pooling)))
    return requests


def long_crowd() -> list[Request]:
    """More and longer answers than a tight cache holds: requests give way and return all the time."""
    return [
        Request(
            i,
            prompt(5 + 7 * i % 19, i),
            SamplingParams(
                max_tokens=30,
                seed=i,
                ignore_eos=True,
                temperature=1.0,
                stop_token_ids=tuple(range(3, 9)) if i % 2 else (),
            ),
        )
        for i in range(12)
    ]
