"""Captured decode steps on a device that runs work in any order: the tokens of the plain path, bit for bit.

The real loop, scheduler and runner serve a crowd; then defects are put in, each of which must show.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest
from device_harness import BLOCK_SIZE, Harness, Told, config_of, crowd, prompt, tight
from fake_device import HOST, FakeDevice
from test_async_steps import WAITS, in_which_it_shows

from quire.kernels.cpu.cpu_attention import has_native
from quire.protos.wire import POOLINGS, SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Stream
from quire.replica.model.fusion.fused_parts import NormWeight
from quire.replica.runner import gpu_steps
from quire.replica.runner.device_table import DeviceTable
from quire.replica.runner.graphs.graph_cache import GraphCache, StaleGraph
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.padded_step import PaddedStep
from quire.replica.runner.runner import Runner

SEEDS = 20
SIZES = (1, 2, 4, 6)  # of steps of at most six rows


def fail(message: str) -> None:
    """Raise at a place that messages can be checked against."""
    raise RuntimeError(message)


FAILS_AT = f"test_cuda_graphs.py:{fail.__code__.co_firstlineno + 2}"


def capture_all(runner: Runner) -> None:
    """Warm up, and have every graph, as after some idle time."""
    runner.warm_up()
    for size in SIZES:
        runner.graphs.capture(GraphKey(size, GraphPart.FORWARD))
    assert len(runner.graphs) == 2 * len(SIZES)


def expected_of(model: Harness, config: EngineConfig, requests=crowd) -> Told:
    return model.serve(config, CpuDevice(), requests(), plans_ahead=False)


def plain() -> list[Request]:
    """Nothing that the host has a say in, greedy and drawn; rows come and go."""
    options = [
        dict(temperature=0.0),
        dict(temperature=1.0, top_p=0.9),
        dict(temperature=0.8, min_p=0.1, top_k=20),
        dict(temperature=1.3),
    ]
    return [
        Request(
            i,
            prompt(3 + 5 * i % 23, i),
            SamplingParams(max_tokens=5 + 7 * i % 19, seed=i, ignore_eos=True, **options[i % 4]),
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("cache", [config_of, tight])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_graphs_change_no_token(harness, name, cache):
    model = harness(name)
    config = cache(model.spec, check_graphs=True)
    expected = expected_of(model, config)
    for seed in range(3):
        for plans_ahead in (False, True):
            device = FakeDevice(seed)
            told = model.serve(
                config, device, crowd(), plans_ahead=plans_ahead, prepare=capture_all
            )
            assert told == expected, seed
            assert device.num_replays


def test_steps_of_plain_rows_are_one_graph_and_all_of_them_are_replayed(harness):
    model = harness("llama")
    config = config_of(model.spec, check_graphs=True)
    runners: list[Runner] = []

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        runners.append(runner)

    device = FakeDevice(1)
    told = model.serve(config, device, plain(), plans_ahead=True, prepare=prepare)
    assert told == expected_of(model, config, plain)
    policy = runners[0].graphs.policy.decodes
    assert (policy.num_hits, policy.num_misses) == (device.num_replays, 0)
    assert policy.num_hits > 10 and 0 < policy.num_padding < policy.num_items


def test_few_graphs_that_give_way_to_each_other_change_no_token(harness):
    model = harness("llama")
    config = config_of(model.spec, max_cached_graphs=2, check_graphs=True)
    expected = expected_of(model, config)

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        assert len(runner.graphs) == 2
        runner.graphs.capture(GraphKey(4, GraphPart.FORWARD))
        runner.graphs.capture(GraphKey(2, GraphPart.WHOLE))
        assert len(runner.graphs) == 2

    device = FakeDevice(2)
    assert model.serve(config, device, crowd(), plans_ahead=True, prepare=prepare) == expected
    assert device.num_replays


def test_an_upload_in_several_pieces_changes_no_token(harness, monkeypatch):
    model = harness("gemma3")
    config = tight(model.spec)
    expected = expected_of(model, config)
    monkeypatch.setattr(gpu_steps, "MAX_CHANGES", 3)
    for seed in range(3):
        device = FakeDevice(seed)
        told = model.serve(config, device, crowd(), plans_ahead=True, prepare=capture_all)
        assert told == expected, seed


# -- when there are none -------------------------------------------------------------------------------------


def told_by_graph_cache(caplog) -> list[str]:
    """Others may log as well: libraries that another test imported change what is logged."""
    return [
        r.message for r in caplog.records if r.name == "quire.replica.runner.graphs.graph_cache"
    ]


def test_graphs_are_off_where_the_device_has_none_and_the_log_says_so_once(harness, caplog):
    model = harness("llama")
    config = config_of(model.spec)
    device = FakeDevice(0, no_graphs_because="this device has no graphs")
    with caplog.at_level(logging.INFO, "quire.replica.runner.graphs.graph_cache"):
        told = model.serve(config, device, plain(), plans_ahead=True, prepare=Runner.warm_up)
    assert told == expected_of(model, config, plain)
    assert device.num_replays == 0
    assert told_by_graph_cache(caplog) == ["steps run without graphs: this device has no graphs"]


def test_a_model_that_cannot_be_captured_runs_without_and_the_log_says_why(
    harness, monkeypatch, caplog
):
    def refuse(self, work, *, name, reads=(), writes=()):
        try:
            fail("operation not permitted when stream is capturing\nand more")
        except RuntimeError as error:
            raise ValueError("the capture was invalidated") from error

    model = harness("llama")
    config = config_of(model.spec)
    monkeypatch.setattr(FakeDevice, "capture", refuse)
    with caplog.at_level(logging.INFO, "quire.replica.runner.graphs.graph_cache"):
        told = model.serve(config, FakeDevice(0), plain(), plans_ahead=True, prepare=Runner.warm_up)
    assert told == expected_of(model, config, plain)
    (message,) = told_by_graph_cache(caplog)
    assert message == (
        f"steps run without graphs: a decode step of 6 rows cannot be captured: RuntimeError at {FAILS_AT}: operation "
        "not permitted when stream is capturing"
    )
    with pytest.raises(RuntimeError, match="cuda_graphs is on: a decode step of 6 rows cannot"):
        model.serve(
            config_of(model.spec, cuda_graphs="on"),
            FakeDevice(0),
            plain(),
            plans_ahead=True,
            prepare=Runner.warm_up,
        )


def test_off_is_off_and_on_needs_a_device_that_has_them(harness):
    model = harness("llama")
    device = FakeDevice(0)
    config = config_of(model.spec, cuda_graphs="off")
    model.serve(config, device, plain(), plans_ahead=True, prepare=Runner.warm_up)
    assert device.num_replays == 0
    device = FakeDevice(0, no_graphs_because="it is too old")
    with pytest.raises(ValueError, match="cuda_graphs is on, but it is too old"):
        model.serve(config_of(model.spec, cuda_graphs="on"), device, plain(), plans_ahead=True)


def test_a_size_that_cannot_be_captured_later_is_not_tried_again(harness, monkeypatch, caplog):
    """Though the only graph has given way for it: an idle engine must come to rest."""

    def refuse(self, work, *, name, reads=(), writes=()):
        fail("not this one")

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        for _ in range(20):
            runner.graphs.find(2, GraphPart.FORWARD)
        monkeypatch.setattr(FakeDevice, "capture", refuse)
        assert runner.graphs.use_idle() and not runner.graphs.use_idle()
        assert len(runner.graphs) == 0 and runner.graphs.off_because is None

    model = harness("llama")
    config = config_of(model.spec, max_cached_graphs=1)
    told = model.serve(config, FakeDevice(0), plain(), plans_ahead=True, prepare=prepare)
    assert told == expected_of(model, config, plain)
    messages = told_by_graph_cache(caplog)
    assert messages[0] == (
        f"a decode forward of 2 rows cannot be captured: RuntimeError at {FAILS_AT}: not this one"
    )
    assert len(set(messages)) == len(messages)


def test_a_graph_gives_way_only_when_nothing_is_in_flight(harness):
    """As blocks on their way from the host tier may be, when no step is."""

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        runner._device._pace.eagerness = 0.0
        runner._device.run(Stream.OFFLOAD, lambda: None, name="restore")
        runner.graphs.capture(GraphKey(2, GraphPart.FORWARD))
        assert len(runner.graphs) == 2

    model = harness("llama")
    config = config_of(model.spec, max_cached_graphs=2)
    model.serve(config, FakeDevice(0), plain()[:1], plans_ahead=True, prepare=prepare)


# -- the rehearsal is the judge ------------------------------------------------------------------------------


def make_host_wait(
    monkeypatch, device: FakeDevice, body: str, *, num_rows: int | None = None
) -> None:
    """Have a step read the device's memory from the host; only that of so many rows, if given."""
    real = getattr(PaddedStep, body)

    def read_back(self, inputs, num_blocks=None):
        if num_rows in (None, len(inputs.rows)):
            device.make_host_wait()
        real(self, inputs, num_blocks)

    monkeypatch.setattr(PaddedStep, body, read_back)


def test_a_step_that_makes_the_host_wait_is_refused_by_name_before_any_capture(
    harness, monkeypatch, caplog
):
    model = harness("llama")
    config = config_of(model.spec)
    device = FakeDevice(0)
    make_host_wait(monkeypatch, device, "whole")
    monkeypatch.setattr(FakeDevice, "capture", None)  # an error where it is called
    with caplog.at_level(logging.INFO, "quire.replica.runner.graphs.graph_cache"):
        told = model.serve(config, device, plain(), plans_ahead=True, prepare=Runner.warm_up)
    assert told == expected_of(model, config, plain)
    (message,) = told_by_graph_cache(caplog)
    assert message.startswith(
        "steps run without graphs: a decode step of 6 rows cannot be captured: RuntimeError at fake_device.py:"
    )
    assert message.endswith(": called a synchronizing operation")


def test_a_step_that_is_refused_while_serving_costs_no_other_its_graph(harness, monkeypatch):
    model = harness("llama")
    config = config_of(model.spec)
    device = FakeDevice(0)

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        make_host_wait(monkeypatch, device, "to_logits", num_rows=2)
        for rows in (2, 4):
            for _ in range(20):
                runner.graphs.find(rows, GraphPart.FORWARD)
        while runner.graphs.use_idle():
            pass
        assert runner.graphs.find(2, GraphPart.FORWARD) is None
        assert runner.graphs.find(4, GraphPart.FORWARD) is not None

    told = model.serve(config, device, crowd(), plans_ahead=True, prepare=prepare)
    assert told == expected_of(model, config)
    assert device.num_replays


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_after_a_capture_that_fails_for_good_none_begins_and_steps_run_on(harness, caplog, mode):
    """Before serving: no graph is there."""
    model = harness("llama")
    config = config_of(model.spec, cuda_graphs=mode)
    device = FakeDevice(0, breaks_after=0)
    prepared: list[Runner] = []

    def prepare(runner: Runner) -> None:
        prepared.append(runner)
        runner.warm_up()

    def serve() -> Told:
        return model.serve(config, device, plain(), plans_ahead=True, prepare=prepare)

    if mode == "on":
        with pytest.raises(RuntimeError, match="cuda_graphs is on: a decode step of 6 rows cannot"):
            serve()
        return
    assert serve() == expected_of(model, config, plain)
    assert device.num_broken_captures == 1 and device.num_replays == 0
    assert "the capture was invalidated" in prepared[0].graphs.off_because


def test_graphs_that_are_there_when_a_capture_fails_for_good_serve_on(harness):
    model = harness("llama")
    config = config_of(model.spec)
    device = FakeDevice(0, breaks_after=len(SIZES))

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        for rows in (2, 4, 6):
            for _ in range(20):
                runner.graphs.find(rows, GraphPart.FORWARD)
        assert runner.graphs.use_idle() and not runner.graphs.use_idle()
        assert len(runner.graphs) == len(SIZES)

    told = model.serve(config, device, plain(), plans_ahead=True, prepare=prepare)
    assert told == expected_of(model, config, plain)
    assert device.num_broken_captures == 1 and device.num_replays


# -- when they are captured ----------------------------------------------------------------------------------


def test_what_steps_miss_is_captured_when_there_is_none_to_run_and_not_before(harness, monkeypatch):
    """FakeDevice refuses a capture with work in flight."""
    model = harness("llama")
    done: list[str] = []  # by the engine's thread
    runners: list[Runner] = []
    real_launch, real_capture = Runner.launch, GraphCache.capture

    def launch(self, plan):
        done.append("step")
        return real_launch(self, plan)

    def capture(self, key):
        done.append("capture")
        real_capture(self, key)

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        runners.append(runner)
        monkeypatch.setattr(Runner, "launch", launch)
        monkeypatch.setattr(GraphCache, "capture", capture)

    ruled = [
        Request(i, prompt(5, i), SamplingParams(max_tokens=20 - 9 * i, ignore_eos=True, logprobs=1))
        for i in range(2)
    ]
    device = FakeDevice(3)
    model.serve(config_of(model.spec), device, ruled, plans_ahead=True, prepare=prepare)
    graphs = runners[0].graphs
    assert graphs.policy.decodes.num_misses == 19
    while graphs.use_idle():
        pass
    assert len(graphs) == len(SIZES) + 2  # of one and of two rows, to the logits
    assert done == ["step"] * 20 + ["capture"] * 2


# -- defects -------------------------------------------------------------------------------------------------


def shows(
    model: Harness,
    config: EngineConfig,
    prepare: Callable[[Runner], None],
    requests: Callable[[], list[Request]] = crowd,
) -> bool:
    """Whether a defect that `prepare` puts in shows in what is told, under one of some seeds."""
    expected = expected_of(model, config, requests)
    return any(
        model.serve(config, FakeDevice(seed), requests(), plans_ahead=True, prepare=prepare)
        != expected
        for seed in range(SEEDS)
    )


@pytest.mark.parametrize(
    "wait",
    [wait for wait in WAITS if wait != (HOST, "tokens arrived")],
    ids=lambda wait: "-".join(wait).replace(" ", "_"),
)
def test_with_graphs_each_wait_is_needed_too(harness, wait):
    def prepare(runner: Runner) -> None:
        capture_all(runner)
        runner._device.ignore([wait])

    model = harness("llama")
    config = tight(model.spec, **in_which_it_shows(wait))
    # Requests that generate: embeddings leave so few copies in flight that the last wait is seldom needed.
    assert shows(model, config, prepare, lambda: crowd()[: -len(POOLINGS)]), WAITS[wait]


def move_inputs(runner: Runner) -> None:
    """The step's inputs lie elsewhere than when the graphs were captured."""
    capture_all(runner)
    ring = runner.steps.inputs
    ring.inputs = ring.inputs.clone()


def test_a_graph_of_inputs_that_have_moved_is_found_out(harness):
    model = harness("llama")
    assert shows(model, config_of(model.spec), move_inputs)


MOVED = {
    "the step's inputs": "the step's inputs",
    "the KV pool": "the KV pool",
    "block tables": "block tables",
    "the rows' places": "the rows' places",
    "a weight": "decoder.layers.0.input_layernorm.weight",
    "a table of the model": "decoder.rotary_emb.inv_freq",
    "a fused norm's weight": "decoder.norm.weight",
    "a fused norm of heads": "decoder.layers.0.attention.q_norm",
    "a fused product's bias": "decoder.layers.0.attention.qkv.bias",
}


@pytest.mark.parametrize("what", MOVED)
def test_the_guard_names_the_buffer_that_has_moved(harness, what, caplog):
    fuse = "auto" if "fused" in what else "off"
    if fuse == "auto" and not has_native():
        pytest.skip("installed without a C compiler")

    def prepare(runner: Runner) -> None:
        capture_all(runner)
        queued, decoder = runner.steps, runner.model.model
        if what == "the step's inputs":
            queued.inputs.inputs = queued.inputs.inputs.clone()
        elif what == "the KV pool":
            runner.pool.data = runner.pool.data.clone()
        elif what == "block tables":
            queued.table.blocks = queued.table.blocks.clone()
        elif what == "the rows' places":
            queued._fixed._cu_q = queued._fixed._cu_q.clone()
        elif what == "a weight":
            weight = decoder.layers[0].input_layernorm.weight
            weight.data = weight.data.clone()
        elif what == "a table of the model":
            decoder.rotary_emb.inv_freq = decoder.rotary_emb.inv_freq.clone()
        elif what == "a fused norm's weight":
            decoder.norm.weight = moved(decoder.norm.weight)
        elif what == "a fused product's bias":
            qkv = decoder.layers[0].attention.qkv
            qkv.bias = qkv.bias.clone()
        else:
            attention = decoder.layers[0].attention
            attention.norms = tuple(map(moved, attention.norms))

    def moved(norm: NormWeight) -> NormWeight:
        return dataclasses.replace(norm, weight=norm.weight.clone())

    model = harness("qwen2" if "bias" in what else "qwen3")
    config = config_of(model.spec, check_graphs=True, fuse=fuse)
    told = model.serve(config, FakeDevice(0), plain(), plans_ahead=False, prepare=prepare)
    assert "error" in {reason for _, _, reason, _ in told.values()}
    message = str(next(r.exc_info[1] for r in caplog.records if r.exc_info))
    assert f"was captured with {MOVED[what]} at address" in message


def test_padding_that_writes_to_a_live_block_is_found(harness):
    def prepare(runner: Runner) -> None:
        capture_all(runner)
        ring = runner.steps.inputs
        assert ring._padding["slots"] == runner.pool.trash_block * BLOCK_SIZE
        ring._padding["slots"] = 3 * BLOCK_SIZE

    model = harness("llama")
    assert shows(model, config_of(model.spec, num_blocks=60), prepare, plain)


def test_padding_that_answers_for_a_live_row_is_found(harness):
    """It would leave its token in the row, for the next step to read."""

    def prepare(runner: Runner) -> None:
        capture_all(runner)
        ring = runner.steps.inputs
        assert ring._padding["rows"] == runner.config.num_rows
        ring._padding["rows"] = 0

    model = harness("llama")
    assert shows(model, config_of(model.spec), prepare, plain)


def test_a_graph_that_has_been_freed_is_not_replayed(harness):
    model = harness("llama")

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        old = runner.graphs.find(2, GraphPart.WHOLE)
        for size in (1, 6, 2):  # it is the one used longest ago by now
            runner.graphs.find(size, GraphPart.WHOLE)
        runner.graphs.find(4, GraphPart.WHOLE)
        with pytest.raises(RuntimeError, match="freed while work is in flight"):
            raise_if_freed_in_flight(runner, old)
        for key in ((1, GraphPart.FORWARD), (2, GraphPart.FORWARD), (4, GraphPart.FORWARD)):
            runner.graphs.capture(GraphKey(*key))
        with pytest.raises(StaleGraph, match="the graph of a decode step of 2 rows has been freed"):
            runner.graphs.replay(old)
        with pytest.raises(RuntimeError, match="is replayed after it was freed"):
            runner._device.replay(old.graph)

    config = config_of(model.spec, max_cached_graphs=4)
    model.serve(config, FakeDevice(0), plain()[:1], plans_ahead=True, prepare=prepare)


def raise_if_freed_in_flight(runner: Runner, cached) -> None:
    device = FakeDevice(0)
    device._pace.eagerness = 0.0
    device.replay(cached.graph)
    device.release(cached.graph)


@pytest.mark.parametrize("lost", ["blocks", "limits"])
def test_differences_that_do_not_arrive_are_found(harness, monkeypatch, lost):
    real = DeviceTable.apply

    def apply(self, new):
        none = {"blocks": dict(at=new.at[:0], blocks=new.blocks[:0])}
        none["limits"] = dict(rows=new.rows[:0], limits=new.limits[:0])
        real(self, new._replace(**none[lost]))

    monkeypatch.setattr(DeviceTable, "apply", apply)
    model = harness("llama")
    assert shows(model, config_of(model.spec), capture_all)


def test_a_step_that_fails_before_it_is_queued_loses_no_difference(harness, monkeypatch):
    """Its changes are of other rows too: they are told again."""
    model = harness("llama")
    config = config_of(model.spec)
    expected = expected_of(model, config, plain)
    real = gpu_steps.GpuSteps.forward
    failed: list[int] = []

    def forward(self, plan, in_flight):
        if plan.step == 4:
            failed.extend(plan.rows.tolist())
            raise RuntimeError("it fails before anything is queued")
        return real(self, plan, in_flight)

    monkeypatch.setattr(gpu_steps.GpuSteps, "forward", forward)
    told = model.serve(config, FakeDevice(0), plain(), plans_ahead=True, prepare=capture_all)
    ended = {key for key, (_, _, reason, _) in told.items() if reason == "error"}
    assert failed and 0 < len(ended) < len(told)
    for key in told.keys() - ended:
        assert told[key] == expected[key]


def test_drawing_on_the_device_equals_drawing_from_the_plan(harness):
    """The same keys from the table's limits as from seed, choice and position."""
    model = harness("llama")
    config = config_of(model.spec)
    seeds = [0, 1, 2**63, 2**64 - 1]

    def requests() -> list[Request]:
        return [
            Request(i, prompt(4, 1), SamplingParams(max_tokens=6, seed=seed, temperature=1.5))
            for i, seed in enumerate(seeds)
        ]

    told = model.serve(config, FakeDevice(5), requests(), plans_ahead=True, prepare=capture_all)
    assert told == expected_of(model, config, requests)
    assert len({tuple(tokens) for tokens, *_ in told.values()}) == len(seeds)


# -- telemetry -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_the_runner_counts_steps_gaps_graphs_and_copies(harness, plans_ahead):
    model = harness("llama")
    runners: list[Runner] = []
    loops = []
    copies_before: list[int] = []  # uploads of warm-up and capture

    def prepare(runner: Runner) -> None:
        capture_all(runner)
        runners.append(runner)
        copies_before.append(runner.steps.inputs.num_copies)

    device = FakeDevice(4)
    model.serve(
        config_of(model.spec),
        device,
        plain(),
        plans_ahead=plans_ahead,
        prepare=prepare,
        on_delta=lambda loop, delta: loops.append(loop),
    )
    told, host = runners[0].telemetry(), loops[0].time
    steps = told["device"]["num_steps"]
    assert steps == host.num_steps > 20
    assert told["device"]["num_gaps"] == steps - 1  # all were submitted at once
    assert told["device"]["busy_ms"] >= 1e3 and told["device"]["gap_us"] >= 1e6
    assert told["graphs"]["num_hits"] == device.num_replays
    assert told["graphs"]["num_captures"] == told["graphs"]["num_cached"] == 2 * len(SIZES)
    assert 0 < told["graphs"]["padding"] < 0.5
    assert told["uploads"]["num_copies"] - copies_before[0] == steps  # one bulk copy each
    assert told["downloads"]["num_copies"] > steps
    assert told["downloads"]["num_bytes"] >= 8 * told["graphs"]["num_items"]
    assert told["device"]["num_holds"] == 0
    assert min(host.plan_s, host.launch_s, host.wait_s, host.commit_s, host.send_s) > 0


def test_moves_between_the_tiers_are_counted_and_timed(harness):
    model = harness("llama")
    runners: list[Runner] = []

    def prepare(runner: Runner) -> None:
        capture_all(runner)
        runners.append(runner)

    device = FakeDevice(4)
    model.serve(tight(model.spec), device, crowd(), plans_ahead=True, prepare=prepare)
    runners[0]._device.synchronize()
    runners[0].host_pool.take_measured()
    told = runners[0].telemetry()["tiers"]
    assert told["num_saved"] > 0 and told["num_restored"] > 0
    assert told["num_saved"] + told["num_restored"] < device.num_copies
    assert told["restore_s"] >= told["num_restored"]  # a second for each piece of work
    assert told["block_bytes"] == runners[0].pool.data[0].nbytes


def test_the_time_in_which_nothing_runs_is_no_gap(harness):
    model = harness("llama")
    runners: list[Runner] = []

    def prepare(runner: Runner) -> None:
        runner.warm_up()
        runners.append(runner)

    def ask_later(loop, delta) -> None:
        if delta.key == 0 and delta.finish_reason is not None:
            while runners[0].steps._done is not None:  # until the loop has fallen idle
                loop.call(lambda scheduler: None).result(60)
            late = Request(1, prompt(5, 1), SamplingParams(max_tokens=4, ignore_eos=True))
            loop.post(lambda scheduler: scheduler.add(late))

    first = Request(0, prompt(5, 0), SamplingParams(max_tokens=4, ignore_eos=True))
    second = Request(1, prompt(5, 1), SamplingParams(max_tokens=4, ignore_eos=True))
    model.serve(
        config_of(model.spec),
        FakeDevice(4),
        [first],
        plans_ahead=True,
        prepare=prepare,
        on_delta=ask_later,
        expected_keys=[second.key],
    )
    told = runners[0].telemetry()["device"]
    assert told["num_gaps"] == told["num_steps"] - 2
