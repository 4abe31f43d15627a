"""Captured steps with prefill, padded in rows, tokens and cache: the tokens of the plain path, bit for bit."""

from __future__ import annotations

import pytest
from device_harness import BLOCK_SIZE, Harness, config_of, crowd, prompt, tight
from fake_device import FakeDevice
from test_async_steps import WAITS, in_which_it_shows

from quire.protos.sampling_params import POOLINGS, SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.runner import Runner
from tests.replica.runner.graphs.test_cuda_graphs import expected_of, plain, shows

Q_PADDING = 6
TOKENS, ROWS = (6, 12, 18, 24), (7,)  # of steps of at most 24 tokens and 6 rows


def mixed_config(model: Harness, make=config_of, **changes: object) -> EngineConfig:
    values = dict(q_padding=Q_PADDING, max_cached_graphs=200, check_graphs=True)
    return make(model.spec, **{**values, **changes})


def capture_mixed(runner: Runner) -> None:
    """Have the graph of every shape."""
    runner.warm_up()
    reach = runner.steps.table.blocks.shape[2] * BLOCK_SIZE
    for key in [
        *(GraphKey(n, GraphPart.FORWARD) for n in (1, 2, 4, 6)),
        *(GraphKey(n, part, size, reach) for part in GraphPart for size in TOKENS for n in ROWS),
    ]:
        if key not in runner.graphs._graphs:
            runner.graphs.capture(key)


@pytest.mark.parametrize("make", [config_of, tight])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_graphs_of_mixed_steps_change_no_token(harness, name, make):
    model = harness(name)
    config = mixed_config(model, make)
    expected = expected_of(model, config)
    for seed, plans_ahead in enumerate((False, True, True)):
        runners: list[Runner] = []

        def prepare(runner: Runner, runners=runners) -> None:
            capture_mixed(runner)
            runners.append(runner)

        device = FakeDevice(seed)
        told = model.serve(config, device, crowd(), plans_ahead=plans_ahead, prepare=prepare)
        assert told == expected, seed
        policy = runners[0].graphs.policy
        assert (policy.mixed.num_misses, policy.decodes.num_misses) == (0, 0)
        assert policy.mixed.num_hits > 5
        assert policy.mixed.num_hits + policy.decodes.num_hits == device.num_replays


def test_hits_misses_and_padding_are_those_of_the_steps(harness, monkeypatch):
    model = harness("llama")
    config = mixed_config(model)
    shapes: list[tuple[int, int]] = []  # rows and tokens of the steps with prefill
    runners: list[Runner] = []
    real = Runner.launch

    def launch(self, plan):
        if plan.num_tokens > plan.num_decode_rows:
            shapes.append((plan.num_rows, plan.num_tokens))
        return real(self, plan)

    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        for key in list(runner.graphs._graphs):
            if key.num_tokens == 24:  # then also those of 18 tokens have none that serves
                runner.graphs.policy.remove(key)
                runner._device.release(runner.graphs._graphs.pop(key).graph)
        runners.append(runner)
        monkeypatch.setattr(Runner, "launch", launch)

    told = model.serve(config, FakeDevice(2), plain(), plans_ahead=True, prepare=prepare)
    monkeypatch.undo()
    assert told == expected_of(model, config, plain)
    hits = [tokens for _, tokens in shapes if tokens <= 18]
    padded = sum(-(-tokens // Q_PADDING) * Q_PADDING for tokens in hits)
    use = runners[0].telemetry()["graphs"]["mixed"]
    assert 0 < len(hits) < len(shapes)
    assert (use["num_hits"], use["num_misses"]) == (len(hits), len(shapes) - len(hits))
    assert use["padding"] == pytest.approx(1 - sum(hits) / padded)


def test_kv_padding_makes_a_graph_for_each_reach_and_changes_no_token(harness, monkeypatch):

    def requests() -> list[Request]:
        """Steps of at most 24 tokens: the first end within 16 tokens of their row, the last beyond 48."""
        lengths = (5, 7, 20, 40, 60)
        return [
            Request(i, prompt(n, i), SamplingParams(max_tokens=4)) for i, n in enumerate(lengths)
        ]

    model = harness("llama")
    config = mixed_config(model, kv_padding=16)
    expected = expected_of(model, config, requests)
    used: set[int] = set()
    real = GraphCache.find_mixed

    def find(self, *args, **options):
        cached = real(self, *args, **options)
        if cached is not None:
            used.add(cached.key.kv_tokens)
        return cached

    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        for part in GraphPart:
            for size in TOKENS:
                for n in ROWS:
                    for reach in (16, 32, 48, 64):
                        runner.graphs.capture(GraphKey(n, part, size, reach))
        monkeypatch.setattr(GraphCache, "find_mixed", find)

    config = mixed_config(model, kv_padding=16, max_cached_graphs=400)
    for seed in range(2):
        device = FakeDevice(seed)
        told = model.serve(config, device, requests(), plans_ahead=True, prepare=prepare)
        assert told == expected
    assert used == {16, 32, 48, 64}


def test_without_padding_configured_mixed_steps_run_as_they_are(harness):
    model = harness("llama")
    config = config_of(model.spec)
    runners: list[Runner] = []

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        runners.append(runner)

    model.serve(config, FakeDevice(0), plain(), plans_ahead=True, prepare=prepare)
    use = runners[0].telemetry()["graphs"]["mixed"]
    assert not any(use.values())


def test_scored_and_pooled_prompts_are_not_for_graphs(harness):
    """They need hidden states: the same tokens, scores and embeddings, and neither hits nor misses."""

    def requests() -> list[Request]:
        params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=2)
        embedded = [SamplingParams(pooling=pooling) for pooling in POOLINGS]
        return [Request(i, prompt(11 + i, i), p) for i, p in enumerate([params] * 3 + embedded)]

    model = harness("llama")
    config = mixed_config(model)
    runners: list[Runner] = []

    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        runners.append(runner)

    told = model.serve(config, FakeDevice(1), requests(), plans_ahead=True, prepare=prepare)
    assert told == expected_of(model, config, requests)
    assert runners[0].graphs.policy.mixed.num_hits == 0
    assert runners[0].graphs.policy.decodes.num_hits > 0


def test_a_shape_that_steps_miss_is_captured_when_idle(harness, monkeypatch):
    model = harness("llama")
    config = mixed_config(model, max_cached_graphs=5)
    runners: list[Runner] = []
    captured: list[GraphKey] = []
    real = GraphCache.capture

    def capture(self, key):
        captured.append(key)
        real(self, key)

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        runners.append(runner)
        monkeypatch.setattr(GraphCache, "capture", capture)

    def one_by_one(loop, delta) -> None:
        if delta.finish_reason is not None and delta.key < 11:
            late = Request(
                delta.key + 1, prompt(10, delta.key + 1), SamplingParams(max_tokens=1, logprobs=0)
            )
            loop.post(lambda scheduler: scheduler.add(late))

    first = Request(0, prompt(10, 0), SamplingParams(max_tokens=1, logprobs=0))
    model.serve(
        config,
        FakeDevice(3),
        [first],
        plans_ahead=True,
        prepare=prepare,
        on_delta=one_by_one,
        expected_keys=range(1, 12),
    )
    graphs = runners[0].graphs
    while graphs.use_idle():
        pass
    assert captured == [GraphKey(7, GraphPart.FORWARD, 12, 96)]
    assert len(graphs) == 5 and graphs.policy.mixed.num_hits + graphs.policy.mixed.num_misses == 12


# -- defects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [wait for wait in WAITS if wait[0] != "host"],
    ids=lambda wait: "-".join(wait).replace(" ", "_"),
)
def test_each_wait_is_needed(harness, wait):
    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        runner._device.ignore([wait])

    model = harness("llama")
    config = mixed_config(model, tight, **in_which_it_shows(wait))
    assert shows(model, config, prepare), WAITS[wait]


@pytest.mark.parametrize("what", ["writes to a live block", "answers for a live row"])
def test_padding_that_is_not_out_of_the_way_is_found(harness, what):
    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        ring = runner.steps.inputs
        if what == "answers for a live row":
            ring._padding |= {"rows": 0, "sample_rows": 0}
        else:
            ring._padding["slots"] = 3 * BLOCK_SIZE

    model = harness("llama")
    assert shows(model, mixed_config(model, num_blocks=60), prepare, plain)


def test_a_graph_whose_block_tables_are_too_short_is_found(harness, monkeypatch):
    real = GraphCache.find_mixed

    def find(self, num_rows, num_tokens, kv_len, part, **options):
        return real(self, num_rows, num_tokens, 1, part, **options)

    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        for size in TOKENS:
            for n in ROWS:
                runner.graphs.capture(GraphKey(n, GraphPart.WHOLE, size, 8))

    monkeypatch.setattr(GraphCache, "find_mixed", find)
    model = harness("llama")
    assert shows(model, mixed_config(model, kv_padding=8), prepare, plain)
