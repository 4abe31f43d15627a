"""The KV pool gets what weights, workspace and graphs leave of a device: measured before, and true afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from fake_device import FakeDevice

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.device.kv_pool import KVPool
from quire.replica.runner import runner
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.startup import device_memory, runtime
from quire.replica.startup.device_memory import LEAST_GRAPH_BYTES, graph_bytes

MAX_GRAPHS = 9
SIZES = (6, 4, 2, 1)  # of steps of six rows


@pytest.fixture(autouse=True)
def collections_are_short() -> Iterator[None]:
    """A start collects garbage several times. Each time would search all that the tests before have imported."""
    gc.collect()
    gc.freeze()
    yield


def test_the_largest_graph_counts_once_and_the_others_as_their_mean():
    unit = LEAST_GRAPH_BYTES
    assert graph_bytes([], 8) == 0
    assert graph_bytes([90 * unit, 3 * unit, 5 * unit], 8) == 90 * unit + 7 * 4 * unit
    assert graph_bytes([90 * unit, 0, 0], 8) == 90 * unit + 7 * unit
    assert graph_bytes([90 * unit], 1) == 90 * unit


class Start:
    """An engine's start on a device whose memory is counted, the weights and the pool with it."""

    def __init__(
        self, zoo, monkeypatch, total_bytes: int, *, keeps_workspace: bool = False, **args: object
    ):
        self.spec = ModelSpec.from_checkpoint(zoo("llama"))
        self.device = FakeDevice(
            0, total_bytes=total_bytes, graph_bytes=50_000, keeps_workspace=keeps_workspace
        )
        self.total_bytes = total_bytes
        device = self.device

        class CountedPool(KVPool):
            def __init__(self, *args: object, **kwargs: object):
                super().__init__(*args, **kwargs)
                device.hold(self.data)

        def load_model(*args: object, **options: object) -> torch.nn.Module:
            model = real_load(*args, **options)
            self.weights = sum(p.nbytes for p in model.parameters())
            for parameter in model.parameters():
                device.hold(parameter)
            return model

        real_load = runtime.load_model
        monkeypatch.setattr(runtime, "load_model", load_model)
        monkeypatch.setattr(runtime, "open_device", lambda name, use_nvtx: device)
        monkeypatch.setattr(runtime, "resolve_checkpoint", lambda *args: self.spec.path)
        monkeypatch.setattr(device_memory, "KVPool", CountedPool)
        monkeypatch.setattr(runner, "KVPool", CountedPool)
        monkeypatch.setattr(device_memory, "LEAST_GRAPH_BYTES", 1)
        values = dict(
            device="cpu",
            dtype="float32",
            num_threads=1,
            fuse="off",
            max_running_requests=6,
            max_batch_tokens=24,
            max_memory_percent=0.8,
            max_cached_graphs=MAX_GRAPHS,
            node_pool_gib=0,
        )
        self.args = EngineArgs(**{**values, **args})

    def run(self) -> runtime.Runtime:
        return runtime.load_runtime(self.args, {}, lambda spec, device: None)

    @property
    def used(self) -> int:
        return self.total_bytes - self.device.free_bytes()

    @property
    def budget(self) -> int:
        return int(self.args.max_memory_percent * self.total_bytes)


def capture_all(started: runtime.Runtime) -> None:
    """As many as may be kept."""
    graphs = started.runner.graphs
    for size in SIZES:
        graphs.capture(GraphKey(size, GraphPart.FORWARD))
    graphs.capture(GraphKey(3, GraphPart.WHOLE))
    assert len(graphs) == MAX_GRAPHS


TOTAL = 3_500_000


@pytest.mark.parametrize("keeps_workspace", [False, True])
def test_the_pool_gets_what_is_left_when_all_graphs_are_there(zoo, monkeypatch, keeps_workspace):
    start = Start(zoo, monkeypatch, TOTAL, keeps_workspace=keeps_workspace)
    started = start.run()
    capture_all(started)
    block = started.runner.pool.data[0].nbytes
    assert start.budget - 2 * block < start.used <= start.budget
    assert started.config.num_blocks == started.runner.pool.num_blocks > 10


def test_the_table_holds_the_measured_terms(zoo, monkeypatch, caplog):
    start = Start(zoo, monkeypatch, TOTAL)
    with caplog.at_level("INFO", "quire.replica.startup.sizing"):
        start.run()
    *_, record = [r for r in caplog.records if r.name == "quire.replica.startup.sizing"]
    table = record.args[1]
    assert table.is_measured and table.available == TOTAL and table.weights == start.weights
    assert table.graphs > MAX_GRAPHS * 50_000  # and what they share
    assert 0 <= table.remainder < table.block
    text = str(table)
    assert "measured at the largest batch" in text and "graphs" in text


def test_what_eager_steps_leave_for_reuse_is_workspace_and_no_graphs_size(zoo, monkeypatch):
    """torch's allocator keeps memory; a capture takes none of it, and the rehearsal before adds to it."""
    measured = []
    real = runtime.measure_memory

    def measure(*args: object):
        result = real(*args)
        measured.append(result[0])
        return result

    monkeypatch.setattr(runtime, "measure_memory", measure)
    Start(zoo, monkeypatch, TOTAL).run()
    start = Start(zoo, monkeypatch, TOTAL, keeps_workspace=True)
    start.device._kept_bytes = 1_000_000  # by an earlier engine of the process
    start.run()
    without, kept = measured
    assert kept.graphs == without.graphs
    assert kept.workspace - without.workspace >= 10_000
    assert (kept.available, kept.weights) == (without.available, without.weights)


@pytest.mark.parametrize("left_out", ["graphs", "workspace"])
def test_a_term_that_is_left_out_shows_as_too_much_memory(zoo, monkeypatch, left_out, caplog):
    real = runtime.measure_memory

    def measure(*args: object):
        measured, fused = real(*args)
        values = {name: getattr(measured, name) for name in measured.__slots__}
        return type(measured)(**{**values, left_out: 0}), fused

    monkeypatch.setattr(runtime, "measure_memory", measure)
    start = Start(zoo, monkeypatch, TOTAL)
    started = start.run()
    capture_all(started)
    assert start.used > start.budget
    # The same budget, and nothing beyond it.
    changes = dict(max_memory_percent=1.0, max_cached_graphs=len(SIZES))
    start = Start(zoo, monkeypatch, start.budget, **changes)
    with pytest.raises(SizingError, match=r"ran out of memory while the engine started.*GiB"):
        start.run()


def test_graphs_that_are_off_take_nothing(zoo, monkeypatch):
    with_graphs = Start(zoo, monkeypatch, TOTAL).run()
    without = Start(zoo, monkeypatch, TOTAL, cuda_graphs="off").run()
    assert without.config.num_blocks > with_graphs.config.num_blocks


def test_what_does_not_fit_is_an_error_with_the_numbers(zoo, monkeypatch):
    start = Start(zoo, monkeypatch, TOTAL, num_blocks=5000)
    with pytest.raises(
        SizingError, match=r"num_blocks 5000 does not fit, at most \d+ do(.|\n)*graphs"
    ):
        start.run()
    with pytest.raises(SizingError, match=r"ran out of memory while the engine started, of the"):
        Start(zoo, monkeypatch, 300_000).run()


def test_a_graph_for_which_no_memory_is_left_is_refused_and_serving_goes_on(
    zoo, monkeypatch, caplog
):
    start = Start(zoo, monkeypatch, TOTAL)
    graphs = start.run().runner.graphs
    others = torch.empty(start.device.free_bytes() - 10, dtype=torch.uint8)
    start.device.hold(others)
    for _ in range(20):
        graphs.find(3, GraphPart.FORWARD)
    assert graphs.use_idle() and not graphs.use_idle()
    assert "no memory left for it" in caplog.text
    assert graphs.find(3, GraphPart.WHOLE) is not None


def test_a_graph_gets_what_eager_steps_left_for_reuse_only_if_it_lacks_memory(zoo, monkeypatch):
    start = Start(zoo, monkeypatch, TOTAL, keeps_workspace=True)
    device = start.device
    graphs = start.run().runner.graphs
    device._kept_bytes = kept = 200_000

    def use_idle(size: int) -> None:
        for _ in range(20):
            graphs.find(size, GraphPart.FORWARD)
        assert graphs.use_idle()
        assert graphs.find(size, GraphPart.FORWARD) is not None

    use_idle(1)
    assert device._kept_bytes == kept
    others = torch.empty(device.free_bytes() - 10, dtype=torch.uint8)
    device.hold(others)
    use_idle(2)
    assert device._kept_bytes < kept
