"""A draft model changes no token and no bit: the real loop and scheduler, a runner of each model, two devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import pytest
from device_harness import Harness, Told, config_of, crowd, prompt, tight
from fake_device import FakeDevice

from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan, StepResult
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Device
from quire.replica.runner.runner import Runner
from quire.replica.speculation.model_drafts import ModelSource
from quire.replica.speculation_options import SpeculationOptions
from quire.replica.startup.draft_model import DraftModel
from quire.replica.startup.memory_table import NO_DRAFT_MODEL


class WatchedSource(ModelSource):
    """A `ModelSource` that counts the drafts of greedy requests, and the tokens that the draft model computes."""

    def __init__(self, config: EngineConfig, runner: Runner):
        super().__init__(config, runner)
        self.num_drafted = self.num_accepted = self.num_computed = 0
        self.most_tokens = 0
        run = runner.run

        def count(plan: StepPlan) -> StepResult:
            self.num_computed += plan.num_tokens
            self.most_tokens = max(self.most_tokens, plan.num_tokens)
            return run(plan)

        runner.run = count

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        if request.params.temperature == 0 and request.params.repetition_penalty == 1:
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def drafting(config: EngineConfig, draft: Harness, device: Device) -> WatchedSource:
    """A source whose model is that of `draft`; its pool is poisoned with NaN."""
    model = DraftModel(draft.spec, "float32", "auto", NO_DRAFT_MODEL)
    runner = Runner.with_pool(
        model.config(config), draft.spec, copy.deepcopy(draft.model), device=device
    )
    runner.pool.poison()
    return WatchedSource(config, runner)


def with_drafts(config: EngineConfig) -> dict:
    return {"speculation": SpeculationOptions(method="draft_model", draft_model="x", **config)}


def forks() -> list[Request]:
    """Two prompts of several blocks, each with a parent and three forks; greedy and drawn."""
    requests = []
    for p, temperature in enumerate((0.0, 1.0)):
        for choice in range(4):
            params = SamplingParams(
                max_tokens=20 + choice, temperature=temperature, seed=p, ignore_eos=True
            )
            parent = (p, 0) if choice else None
            requests.append(Request((p, choice), prompt(29, p), params, fork_of=parent))
    return requests


def plain(model: Harness, config: EngineConfig, requests: Iterable[Request]) -> Told:
    return model.serve(config, CpuDevice(), requests, plans_ahead=False)


@pytest.mark.parametrize(
    ("name", "cache", "requests"),
    [
        ("llama", config_of, crowd),
        ("qwen3", tight, crowd),
        ("llama", config_of, forks),
    ],
)
def test_drafts_of_the_same_model_change_nothing_and_are_accepted(harness, name, cache, requests):
    model = harness(name)
    config = cache(model.spec, **with_drafts({"max_draft_tokens": 4}))
    expected = plain(model, config, requests())
    for device, plans_ahead in ((CpuDevice(), False), (FakeDevice(1), True)):
        source = drafting(config, model, device)
        told = model.serve(config, device, requests(), plans_ahead=plans_ahead, draft_source=source)
        assert told == expected
        assert not source._rows
        assert source.most_tokens <= config.max_batch_tokens
        assert source.acceptance > 0.9


@pytest.mark.parametrize(("target", "draft"), [("llama", "llama_mha"), ("gemma3", "llama_mha")])
def test_drafts_of_another_model_change_nothing(harness, target, draft):
    model = harness(target)
    config = tight(model.spec, **with_drafts({"max_draft_tokens": 3}))
    source = drafting(config, harness(draft), device := FakeDevice(2))
    told = model.serve(config, device, crowd(), plans_ahead=True, draft_source=source)
    assert told == plain(model, config, crowd())
    assert source.num_drafted > 20 and source.acceptance < 0.2


def greedy(key: object, ids: list[int], max_tokens: int, **options: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(key, ids, params, **options)


def test_a_cached_prefix_is_not_computed_again(harness):
    """Also by the draft model: of the second request it computes what follows the shared blocks. Tenants share none."""
    model = harness("llama")
    config = config_of(model.spec, **with_drafts({"max_draft_tokens": 4}))
    trunk = prompt(64, 5)
    numbers = []
    for tenant in ("a", "b"):
        source = drafting(config, model, device := CpuDevice())
        first = greedy("first", trunk + prompt(3, 1), 8, tenant="a")
        computed = []

        def on_delta(loop, delta, tenant=tenant, computed=computed, source=source):
            if delta.key == "first" and delta.finish_reason is not None:
                computed.append(source.num_computed)
                second = greedy("second", trunk + prompt(3, 2), 8, tenant=tenant)
                loop.post(lambda scheduler: scheduler.add(second))

        model.serve(
            config,
            device,
            [first],
            plans_ahead=False,
            on_delta=on_delta,
            expected_keys=["second"],
            draft_source=source,
        )
        assert source.acceptance > 0.9
        numbers.append((computed[0], source.num_computed - computed[0]))
    (first, again), (_, of_another) = numbers
    assert first > 64 and again < 30
    assert of_another == first


def test_a_long_prompt_delays_no_other_request(harness):
    """The draft model computes it in parts, and drafts for the others meanwhile."""
    model = harness("llama")
    config = config_of(model.spec, max_batch_tokens=16, **with_drafts({"max_draft_tokens": 2}))
    source = drafting(config, model, device := CpuDevice())
    drafted = {}
    propose = source.propose

    def watch(requests, room):
        drafts = propose(requests, room)
        for request, draft in zip(requests, drafts, strict=True):
            drafted.setdefault(request.key, []).append(len(draft) > 0)
        return drafts

    source.propose = watch
    requests = [greedy("short", prompt(4, 1), 40), greedy("long", prompt(70, 2), 12)]
    model.serve(config, device, requests, plans_ahead=False, draft_source=source)
    assert source.most_tokens <= 16
    waited = drafted["long"].index(True)
    assert waited >= 3 and np.mean(drafted["short"]) > 0.9


def test_a_request_longer_than_the_draft_models_context_is_served(harness):
    model = harness("llama")
    config = config_of(model.spec, **with_drafts({"max_draft_tokens": 4}))
    source = drafting(config, model, device := CpuDevice())
    source._max_len = 20
    requests = [greedy(0, prompt(6, 1), 30), greedy(1, prompt(40, 1), 10)]
    told = model.serve(config, device, requests, plans_ahead=False, draft_source=source)
    assert {key: len(tokens) for key, (tokens, *_) in told.items()} == {0: 30, 1: 10}
    assert 0 < source.num_drafted <= 14
