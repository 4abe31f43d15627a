"""Adapters on a GPU that does not exist: interpreted kernels, streams in any order, captured steps."""

from __future__ import annotations

from collections.abc import Iterator

import device_harness
import model_zoo
import numpy as np
import pytest
import torch
import triton
from adapter_folders import save_adapter
from device_harness import Harness, config_of, prompt
from fake_device import FakeDevice
from step_driver import Driver, engine_config, make_runner

from quire.protos.adapter_ref import AdapterRef
from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.core.adapter import Adapter, AdapterLoad
from quire.replica.core.request import Request
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.loader import load_model
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.runner import Runner
from tests.kernels.compile.interpreter import repair_interpreter

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="the kernels are not interpreted"
)
repair_interpreter()
OPTIONS = dict(max_loaded_adapters=2, max_adapter_rank=8, max_running_requests=4, block_size=16)


def served(harness: Harness, folders, device, backend, **options) -> tuple[dict, Runner]:
    """The tokens of requests with three adapters and without, two slots."""
    adapters: list[Adapter | None] = [None]
    runners: list[Runner] = []

    def prepare(runner: Runner) -> None:
        plan = runner.trash_plans.plan([3, 1], 0.0)
        runner.run(plan._replace(adapters=np.ones(2, np.int32)))
        if runner.graphs is not None:
            for size in (2, 4):
                for is_adapted in (False, True):
                    runner.graphs.capture(GraphKey(size, GraphPart.WHOLE, is_adapted=is_adapted))
            runner.graphs._serves = True
        for folder in folders:
            ref = AdapterRef.of_folder(folder.name, str(folder))
            adapters.append(Adapter(ref, runner.adapted.read(folder)))
        runners.append(runner)

    def requests() -> Iterator[Request]:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        for i in range(5):
            yield Request(i, prompt(3 + 2 * i, i), params, adapter=adapters[i % 4])

    config = config_of(harness.spec, **OPTIONS, **options)
    told = harness.serve(
        config,
        device,
        requests(),
        plans_ahead=not device.is_immediate,
        prepare=prepare,
        expected_keys=(),
        attention_backend=backend,
    )
    return {key: (tokens, error) for key, (tokens, _, _, error) in told.items()}, runners[0]


def logits_of_a_step(runner: Runner, folders) -> np.ndarray:
    """[rows, vocab] of prompts with two adapters and without, in one step."""
    # The hooks are proven by a step with an empty slot.
    runner.run(runner.trash_plans.plan([2], 0.0)._replace(adapters=np.ones(1, np.int32)))
    for slot, folder in enumerate(folders, start=1):
        ref = AdapterRef.of_folder(folder.name, str(folder))
        runner.adapted.load([AdapterLoad(slot, Adapter(ref, runner.adapted.read(folder)))])
    driver = Driver(runner)
    slots = (2, 0, 1)
    sequences = [driver.add(prompt(3 + i, i), 1, adapter=slots[i]) for i in range(3)]
    driver.advance([(sequence, len(sequence.tokens)) for sequence in sequences])
    return np.stack([sequence.logits[0] for sequence in sequences])


@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_of_interpreted_kernels_equal_those_of_the_cpu(tmp_path, deterministic):
    path = model_zoo.build("llama", tmp_path, num_hidden_layers=1)
    folders = [
        save_adapter(tmp_path / str(i), path, rank=2 + 3 * i, seed=i, size=0.7) for i in range(2)
    ]
    expected = logits_of_a_step(make_runner(path, **OPTIONS), folders)
    spec = ModelSpec.from_checkpoint(path)
    config = engine_config(spec, deterministic=deterministic, **OPTIONS)
    pool = KVPool(config.num_blocks, spec.groups, config.block_size, torch.float32)
    model = load_model(spec, "cpu", "float32")
    runner = Runner(config, spec, model, pool, attention_backend="triton")
    pool.poison()
    found = logits_of_a_step(runner, folders)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_tokens_equal_those_of_the_cpu_in_any_order_of_the_streams(
    tmp_path, monkeypatch, cuda_graphs
):
    monkeypatch.setattr(device_harness, "TIMEOUT_S", 900.0)
    path = model_zoo.build("llama", tmp_path, num_hidden_layers=1)
    folders = [
        save_adapter(tmp_path / str(i), path, rank=2 + 3 * i, seed=i, size=0.7) for i in range(3)
    ]
    harness = Harness(path)
    expected, _ = served(harness, folders, CpuDevice(), None)
    found, runner = served(
        harness, folders, FakeDevice(seed=5), "triton", deterministic=False, cuda_graphs=cuda_graphs
    )
    assert found == expected
    assert len({tuple(tokens) for tokens, _ in found.values()}) == 5
    if cuda_graphs == "on":
        used = [key for key in runner.graphs.policy._captured if key.is_adapted]
        assert used and runner.graphs.policy.decodes.num_hits > 2
