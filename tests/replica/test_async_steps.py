"""One step in flight: the same tokens as step by step, on the CPU and on a device that runs work in any order.

The real loop, scheduler and runner run on `FakeDevice`. Then each of the waits, and the quarantine, is left out:
whatever of it is needed must show in the tokens or as a poisoned read.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from device_harness import Harness, Told, config_of, crowd, long_crowd, prompt, tight
from fake_device import HOST, FakeDevice
from step_driver import Driver
from transformers import Lfm2Config, Lfm2ForCausalLM

from quire.protos.wire import TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Device
from quire.replica.device.host_pool import HostPool
from quire.replica.kv_cache.deferred_frees import DeferredFrees
from quire.replica.loop import EngineLoop
from quire.replica.runner import gpu_steps
from quire.replica.runner.gpu_steps import GpuSteps
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_inputs import InputRing
from quire.replica.runner.step_outputs import StepOutputs
from quire.replica.scheduler import speed

SEEDS = 20


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


def test_a_step_in_flight_changes_no_token_of_a_recurrent_model(tmp_path):
    """A row's slot is used again as soon as the row is; requests start and return from snapshots in both tiers."""
    config = Lfm2Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        vocab_size=173,
        eos_token_id=2,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    model = Harness(tmp_path)
    changes = dict(num_host_blocks=0, prefix_caching=False, has_states=True)
    config = tight(model.spec, **changes)
    parent = crowd()[1]

    def prepare(runner: Runner) -> None:
        if runner.graphs is not None:
            runner.graphs.capture_first()
        runner.states.poison()

    poisoned = dict(prepare=prepare)

    def requests() -> list[Request]:
        forks = (Request(f"fork {i}", prompt(10, 1), parent.params, fork_of=1) for i in range(2))
        again = [Request(f"again {r.key}", r.token_ids.tolist(), r.params) for r in crowd()]
        return [*crowd(), *forks, *again]

    expected = tokens_of(
        model.serve(config, CpuDevice(), requests(), plans_ahead=False, **poisoned)
    )
    snapshots = dict(num_snapshots=5, num_host_snapshots=30)
    cached = tight(model.spec, has_states=True, prefix_caching=True, **snapshots)
    hits: list[tuple[int, int]] = []

    def note(loop: EngineLoop, delta: TokenDelta) -> None:
        hits.append((delta.facts.num_cached_tokens, delta.facts.num_host_cached_tokens))

    for seed in range(2):
        for changed in (config, cached):
            device = FakeDevice(seed)
            told = model.serve(
                changed, device, requests(), plans_ahead=True, on_delta=note, **poisoned
            )
            assert tokens_of(told) == expected, seed
            assert device.num_replays > 0
    assert max(hits) > (0, 0) and max(on_host for _, on_host in hits) > 0


def tokens_of(told: Told) -> dict[object, tuple]:
    """Without log-probabilities: the number of a recurrent model's tokens in a step changes their last bits."""
    return {key: (tokens, reason) for key, (tokens, _, reason, _) in told.items()}


def test_logits_of_plans_without_a_request_table_are_those_of_the_cpu(harness):
    model = harness("llama")
    config = config_of(model.spec)

    def logits_on(device: Device) -> list[torch.Tensor]:
        runner = Runner.with_pool(config, model.spec, copy.deepcopy(model.model), device=device)
        driver = Driver(runner)
        sequences = [driver.add(prompt(n, n), 1) for n in (9, 4)]
        return [
            runner.forward(driver.plan([(s, len(s.tokens))])[0]).clone()
            for s in (*sequences, *sequences)
        ]

    expected = logits_on(CpuDevice())
    for seed in range(6):
        for found, right in zip(logits_on(FakeDevice(seed)), expected, strict=True):
            assert torch.equal(found, right), seed


# -- defects -------------------------------------------------------------------------------------------------


def shows(model: Harness, config: EngineConfig, expected: Told, requests=crowd, **defect) -> bool:
    """Whether a defect of the device shows in what is told, under one of some seeds."""
    return any(
        model.serve(config, FakeDevice(seed, **defect), requests(), plans_ahead=True) != expected
        for seed in range(SEEDS)
    )


WAITS = {
    ("h2d", "step done"): "the inputs of a step are overwritten while it reads them",
    ("compute", "inputs copied"): "a step reads inputs that are not there yet",
    ("compute", "blocks saved"): "a step writes a block before it is saved",
    ("compute", "blocks restored"): "a step reads a block before it is restored",
    ("d2h", "step done"): "the tokens are copied before they are sampled",
    (HOST, "tokens arrived"): "the host reads tokens before they arrive",
}
# Of differences that are too many for one upload: the ring of two turns more than once in a step.
WAITS_OF_PIECES = {
    ("h2d", "differences applied"): "differences are overwritten before they are in the table",
    (HOST, "inputs copied"): "a staging buffer is written again before it has been copied",
}


def in_which_it_shows(wait: tuple[str, str]) -> dict[str, bool]:
    """Of the configuration: a save in the step behind a restore waits for both, so there must be few of them."""
    return {"prefix_caching": wait != ("compute", "blocks restored")}


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: "-".join(wait).replace(" ", "_"))
def test_each_wait_is_needed_and_its_lack_is_found(harness, wait):
    model = harness("llama")
    config = tight(model.spec, **in_which_it_shows(wait))
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    assert shows(model, config, expected, ignored_waits=[wait]), WAITS[wait]


@pytest.mark.parametrize("wait", WAITS_OF_PIECES, ids=lambda wait: "-".join(wait).replace(" ", "_"))
def test_each_wait_between_pieces_of_an_upload_is_needed_too(harness, monkeypatch, wait):
    monkeypatch.setattr(gpu_steps, "MAX_CHANGES", 1)
    model = harness("llama")
    config = tight(model.spec)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    assert model.serve(config, FakeDevice(0), crowd(), plans_ahead=True) == expected
    assert shows(model, config, expected, ignored_waits=[wait]), WAITS_OF_PIECES[wait]


def test_there_is_no_other_wait(harness, monkeypatch):
    """Nor in warm-up and capture, in rows that await tokens, in a draw of the host's or in small pieces."""
    monkeypatch.setattr(gpu_steps, "MAX_CHANGES", 1)
    model = harness("llama")
    waits: set[tuple[str, str]] = set()
    for seed in range(3):
        for prefix_caching in (True, False):
            device = FakeDevice(seed)
            config = tight(model.spec, prefix_caching=prefix_caching)
            model.serve(config, device, crowd(), plans_ahead=True, prepare=Runner.warm_up)
            waits |= device.waits
    assert waits == {*WAITS, *WAITS_OF_PIECES}


def test_a_step_that_fails_half_queued_disturbs_no_other(harness, monkeypatch):
    """No event marks its end, so the next step would overwrite the inputs that it still reads."""
    model = harness("llama")
    real = GpuSteps.end
    for make in (config_of, tight):
        config = make(model.spec)
        expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
        for seed in range(8):
            count = itertools.count()

            def end(self, in_flight, count=count):
                if next(count) == 11:
                    raise RuntimeError("its draw is queued, its end is not")
                real(self, in_flight)

            monkeypatch.setattr(GpuSteps, "end", end)
            told = model.serve(config, FakeDevice(seed), crowd(), plans_ahead=True)
            errors = {error for _, _, _, error in told.values() if error is not None}
            assert errors == {"the engine failed in step 12 (RuntimeError)"}, (make, seed)
            for key, answer in told.items():
                assert answer[2] == "error" or answer == expected[key], (make, seed)


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
    expected = model.serve(config, CpuDevice(), long_crowd(), plans_ahead=False)
    monkeypatch.setattr(DeferredFrees, "launch", lambda self, step: None)
    assert shows(model, config, expected, long_crowd)


def test_results_that_are_written_again_too_early_are_found(harness, monkeypatch):
    model = harness("llama")
    config = config_of(model.spec)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    real = StepOutputs.__init__
    monkeypatch.setattr(
        StepOutputs,
        "__init__",
        lambda self, *args, **options: real(self, *args, **options, depth=1),
    )
    assert shows(model, config, expected)


def test_a_step_that_does_not_wait_for_the_blocks_it_reads_is_found(harness, monkeypatch):
    """Those of a request that comes back alone, which no other step could hide."""
    model = harness("llama")
    config = tight(model.spec, prefix_caching=False)
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    real = HostPool.move

    def move(self, saves, restores, **options):
        real(self, saves, restores, **{**options, "used_now": False})

    monkeypatch.setattr(HostPool, "move", move)
    assert shows(model, config, expected)


def test_blocks_that_are_written_while_they_are_saved_behind_a_step_are_found(harness, monkeypatch):
    """Saves that a step does not need, and that a later one must wait for."""
    model = harness("llama")
    config = tight(model.spec, prefix_caching=False)
    expected = model.serve(config, CpuDevice(), long_crowd(), plans_ahead=False)
    monkeypatch.setattr(HostPool, "_wait_for_saves", lambda self, written: None)
    assert shows(model, config, expected, long_crowd)


@pytest.mark.parametrize("restore", ["auto", "always"])
def test_copying_back_and_computing_again_give_the_same_tokens(harness, monkeypatch, restore):
    """This device's copies take seconds, so `auto` computes once it knows, and tries a copy again some time."""
    monkeypatch.setattr(speed, "_LEAST_MEASURED", 1)
    model = harness("llama")
    config = tight(model.spec, restore=restore)
    expected = model.serve(config, CpuDevice(), long_crowd(), plans_ahead=False)
    counts = []
    for seed in range(3):
        loops = {}
        told = model.serve(
            config,
            FakeDevice(seed),
            long_crowd(),
            plans_ahead=True,
            on_delta=lambda loop, delta, loops=loops: loops.update(last=loop),
        )
        assert told == expected, seed
        copies = loops["last"]._scheduler.copies
        counts.append((copies.num_copied, copies.num_computed))
    assert all(copied for copied, _ in counts)
    assert any(computed for _, computed in counts) == (restore == "auto")
