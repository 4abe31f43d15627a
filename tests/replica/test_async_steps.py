"""One step in flight: the same tokens as step by step, on the CPU and on a device that runs work in any order.

The real loop, scheduler and runner run on `FakeDevice`. Then each of the waits, and the quarantine, is left out:
whatever of it is needed must show in the tokens or as a poisoned read.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from fake_device import HOST, FakeDevice
from step_driver import engine_config

from quire.protos.wire import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.device import CpuDevice, Device
from quire.replica.groups import sequence_blocks
from quire.replica.kv_pool import KVPool
from quire.replica.loader import load_model
from quire.replica.loop import EngineLoop, LoopOutput
from quire.replica.quarantine import Quarantine
from quire.replica.request import Request
from quire.replica.runner import Runner
from quire.replica.scheduler import Scheduler
from quire.replica.spec import ModelSpec
from quire.replica.step_inputs import InputRing

TIMEOUT_S = 60.0
BLOCK_SIZE = 8
SEEDS = 20
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


def tight(spec: ModelSpec, spare: int = 5) -> EngineConfig:
    """A cache that is always too small, with a host tier: blocks move in most steps."""
    one = sequence_blocks(spec.groups, 60, 24, BLOCK_SIZE)
    return config_of(spec, num_blocks=one + spare, num_host_blocks=60)


class Harness:
    """A checkpoint whose weights are loaded once, for runners on one device after another."""

    def __init__(self, path):
        self.spec = ModelSpec.from_checkpoint(path)
        config = config_of(self.spec)
        self.model = load_model(self.spec, "cpu", config.dtype)

    def serve(
        self,
        config: EngineConfig,
        device: Device,
        requests: Iterable[Request],
        *,
        plans_ahead: bool,
        on_delta: Callable[[EngineLoop, object], None] = lambda loop, delta: None,
    ) -> Told:
        """Run the requests, all submitted before the first step; of each the tokens, log-probs and how it ended."""
        pool = KVPool(config.num_blocks, self.spec.groups, BLOCK_SIZE, getattr(torch, config.dtype))
        pool.poison()
        # A runner changes its model's modules in place.
        runner = Runner(config, self.spec, copy.deepcopy(self.model), pool, device=device)
        runner.host_pool.poison()
        scheduler = Scheduler(config)
        outputs: queue.Queue[LoopOutput] = queue.Queue()
        loop = EngineLoop(scheduler, runner, outputs.put, plans_ahead=plans_ahead)
        tokens: dict[object, list[int]] = {}
        scores: dict[object, list] = {}
        told: Told = {}
        for request in requests:
            tokens[request.key], scores[request.key] = [], []
            loop.post(lambda scheduler, request=request: scheduler.add(request))
        loop.start()
        try:
            while len(told) < len(tokens):
                for delta in outputs.get(timeout=TIMEOUT_S).deltas:
                    assert delta.index == len(tokens[delta.key]) or not delta.token_ids
                    tokens[delta.key] += delta.token_ids
                    scores[delta.key] += [tuple(s) for s in map(_values, delta.logprobs or ())]
                    if delta.finish_reason is not None:
                        error = None if delta.error is None else str(delta.error)
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
    """Prompts of one chunk and of several, that begin alike and not; greedy and drawn; stopped by length and by id."""
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
    return requests


@pytest.fixture(scope="module")
def harness(zoo):
    made: dict[str, Harness] = {}

    def get(name: str) -> Harness:
        if name not in made:
            made[name] = Harness(zoo(name))
        return made[name]

    return get


@pytest.mark.parametrize("cache", [config_of, tight])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_in_flight_changes_no_token(harness, name, cache):
    model = harness(name)
    config = cache(model.spec)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    assert {reason for _, _, reason, _ in expected.values()} == {"length", "stop"}
    assert model.serve(config, CpuDevice(), crowd(), plans_ahead=True) == expected
    for seed in range(3):
        for plans_ahead in (False, True):
            device = FakeDevice(seed)
            assert model.serve(config, device, crowd(), plans_ahead=plans_ahead) == expected, seed


# -- defects -------------------------------------------------------------------------------------------------


def shows(model: Harness, config: EngineConfig, expected: Told, **defect) -> bool:
    """Whether a defect of the device shows in what is told, under one of some seeds."""
    return any(
        model.serve(config, FakeDevice(seed, **defect), crowd(), plans_ahead=True) != expected
        for seed in range(SEEDS)
    )


WAITS = {
    ("h2d", "step done"): "the inputs of a step are overwritten while it reads them",
    ("compute", "inputs copied"): "a step reads inputs that are not there yet",
    ("compute", "blocks moved"): "a step reads a block before it is restored",
    ("d2h", "step done"): "the tokens are copied before they are sampled",
    (HOST, "tokens arrived"): "the host reads tokens before they arrive",
}


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: "-".join(wait).replace(" ", "_"))
def test_each_wait_is_needed_and_its_lack_is_found(harness, wait):
    model = harness("llama")
    config = tight(model.spec)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    assert shows(model, config, expected, ignored_waits=[wait]), WAITS[wait]


def test_there_is_no_other_wait(harness):
    """But one: the ring of two is not written again before the step that used it has been collected."""
    model = harness("llama")
    device = FakeDevice(0)
    model.serve(tight(model.spec), device, crowd(), plans_ahead=True)
    assert device.waits == {*WAITS, (HOST, "inputs copied")}


def test_staging_that_is_written_again_too_early_is_found(harness, monkeypatch):
    model = harness("llama")
    config = config_of(model.spec)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    real = InputRing.__init__
    monkeypatch.setattr(InputRing, "__init__", lambda *args: real(*args, depth=1))
    for seed in range(3):  # one buffer is enough if it is waited for
        assert model.serve(config, FakeDevice(seed), crowd(), plans_ahead=True) == expected
    assert shows(model, config, expected, ignored_waits=[(HOST, "inputs copied")])


def test_blocks_that_are_handed_out_while_a_step_uses_them_are_found(harness, monkeypatch):
    """Sliding windows leave blocks behind in most steps, which requests that return take at once."""
    model = harness("gemma3")
    config = tight(model.spec, spare=0)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    real = Quarantine.give_back

    def at_once(self, blocks, step, *, passed=False):
        real(self, blocks, None, passed=passed)

    monkeypatch.setattr(Quarantine, "give_back", at_once)
    assert shows(model, config, expected)
