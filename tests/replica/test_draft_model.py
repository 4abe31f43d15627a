"""A draft model changes no token and no bit: the real loop and scheduler, a runner of each model, two devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import model_zoo
import numpy as np
import pytest
import torch
from device_harness import Harness, Told, config_of, crowd, prompt, tight
from fake_device import FakeDevice

from quire.kernels.attention.paged_attention import Backend
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import KVPool
from quire.replica.runner.cpu_steps import CpuSteps
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_outputs import InFlight
from quire.replica.speculation.model_drafts import ModelSource
from quire.replica.speculation_options import SpeculationOptions
from quire.replica.startup.draft_model import DraftModel
from quire.replica.startup.memory_table import NO_DRAFT_MODEL
from tests.kernels.compile.interpreter import repair_interpreter
from tests.replica.speculation.test_model_drafts import SameLength


class WatchedSource(ModelSource):
    """A `ModelSource` that counts the drafts of greedy requests, and the tokens that the draft model computes.

    On the CPU it follows which token each slot of the draft's pool holds, and compares all that a step reads.
    """

    def __init__(self, config: EngineConfig, runner: Runner):
        super().__init__(config, runner, SameLength(config.speculation.max_draft_tokens))
        self.num_drafted = self.num_accepted = self.num_computed = 0
        self.most_tokens = 0
        # [slots], the token that each holds; None: tokens are not known at the launch.
        self.held: np.ndarray | None = None
        self.problems: list[str] = []
        self.num_followed = 0
        self.sampled = np.zeros(config.num_rows + 1, np.int64)  # [rows], by the newest step
        if isinstance(runner.steps, CpuSteps):
            self.held = np.full((config.num_blocks + 1) * config.block_size, -1)
        self.runner, launch = runner, runner.launch

        def count(plan: StepPlan) -> InFlight:
            self.num_computed += plan.num_tokens
            self.most_tokens = max(self.most_tokens, plan.num_tokens)
            if self.held is not None:
                self._follow(plan)
            in_flight = launch(plan)
            self.sampled[plan.rows] = in_flight.slot.result[: plan.num_rows].numpy()
            return in_flight

        runner.launch = count

    def _follow(self, plan: StepPlan) -> None:
        """Write the step's tokens, all of them to blocks of their rows, and compare what each row reads."""
        ids = np.where(
            plan.token_ids < 0, self.sampled[np.maximum(-1 - plan.token_ids, 0)], plan.token_ids
        )
        self.held[plan.slots[0]] = ids
        requests = {row.request.row: row.request for row in self._rows.values()}
        tables, size = plan.block_tables.gather()[0], self._block_size
        for i, row in enumerate(plan.rows.tolist()):
            position = np.arange(plan.kv_len[i])
            slots = tables[i, position // size] * size + position % size
            known = requests[row].token_ids[: len(slots)]
            if self.held[slots[: len(known)]].tolist() != known.tolist():
                self.problems.append(f"row {row} reads other tokens")
            own = self._reserve(requests[row], 0)
            written = plan.slots[0, plan.cu_q[i] : plan.cu_q[i + 1]] // size
            if not np.isin(written, own).all():
                self.problems.append(f"row {row} writes to blocks of others")
            self.num_followed += 1

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        super().observe(request, num_drafted, num_accepted)
        if request.params.temperature == 0 and request.params.repetition_penalty == 1:
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def drafting(
    config: EngineConfig, draft: Harness, device: Device, backend: Backend | None = None
) -> WatchedSource:
    """A source whose model is that of `draft`; its pool is poisoned with NaN."""
    own = DraftModel(draft.spec, "float32", "auto", NO_DRAFT_MODEL).config(config)
    pool = KVPool(own.num_blocks, own.groups, own.block_size, torch.float32)
    pool.poison()
    model = copy.deepcopy(draft.model)
    runner = Runner(own, draft.spec, model, pool, device=device, attention_backend=backend)
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
    ("name", "cache", "requests", "device"),
    [
        ("llama", config_of, crowd, FakeDevice(1)),
        ("qwen3", tight, crowd, CpuDevice()),
        ("llama", config_of, forks, CpuDevice()),
    ],
)
def test_drafts_of_the_same_model_change_nothing_and_are_accepted(
    harness, name, cache, requests, device
):
    model = harness(name)
    config = cache(model.spec, **with_drafts({"max_draft_tokens": 4}))
    source = drafting(config, model, device)
    told = model.serve(
        config, device, requests(), plans_ahead=not device.is_immediate, draft_source=source
    )
    assert told == plain(model, config, requests())
    assert not source._rows
    assert source.most_tokens <= config.max_batch_tokens
    assert source.acceptance > 0.9
    assert not source.problems and not source._has_failed
    assert source.num_followed > 50 or not device.is_immediate


def test_drafts_of_another_model_change_nothing(harness):
    model = harness("gemma3")
    config = tight(model.spec, **with_drafts({"max_draft_tokens": 3}))
    source = drafting(config, harness("llama_mha"), device := FakeDevice(2))
    told = model.serve(config, device, crowd(), plans_ahead=True, draft_source=source)
    assert told == plain(model, config, crowd())
    assert source.num_drafted > 20 and source.acceptance < 0.2


def test_the_draft_model_runs_in_graphs_and_with_the_kernels_of_a_gpu(tmp_path):
    repair_interpreter()
    model = Harness(model_zoo.build("llama", tmp_path, num_hidden_layers=1))
    config = config_of(model.spec, block_size=16, **with_drafts({"max_draft_tokens": 3}))
    source = drafting(config, model, device := FakeDevice(3), "triton")
    graphs = source.runner.graphs
    for size in (1, 2, 4):
        graphs.capture(GraphKey(size, GraphPart.WHOLE))
    graphs._serves = True

    def requests() -> list[Request]:
        return [greedy(i, prompt(5 + 3 * i, i), 9) for i in range(2)]

    told = model.serve(config, device, requests(), plans_ahead=True, draft_source=source)
    assert told == plain(model, config, requests())
    assert source.acceptance > 0.9
    assert graphs.policy.decodes.num_hits >= 3


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


def test_a_draft_model_that_fails_ends_no_request(harness, caplog):
    model = harness("llama")
    config = config_of(model.spec, **with_drafts({"max_draft_tokens": 4}))
    source = drafting(config, model, device := CpuDevice())
    launch = source.runner.launch

    def fail(plan: StepPlan) -> InFlight:
        if source.num_drafted > 10:
            raise RuntimeError("out of memory")
        return launch(plan)

    source.runner.launch = fail
    told = model.serve(config, device, crowd(), plans_ahead=False, draft_source=source)
    assert told == plain(model, config, crowd())
    assert caplog.text.count("the draft model failed") == 1


def test_an_engine_loads_both_models():
    speculation = dict(method="draft_model", draft_model="embedded", max_draft_tokens=3)
    limits = dict(model="embedded", device="cpu", num_threads=1, num_blocks=64)
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 1.0)
    ]
    answers = []
    for options in ({}, {"speculation": speculation}):
        with Engine(**limits, **options) as engine:
            answers.append(engine.generate(["A quire is", "Ray"], params))
            engine.check()
    plain_answers, drafted = answers
    assert [a.token_ids for a in plain_answers] == [a.token_ids for a in drafted]
    assert drafted[0].num_accepted >= 0.9 * (drafted[0].num_drafted or 0)
