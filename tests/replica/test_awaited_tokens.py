"""Rows whose next token depends on the one before it: their steps are launched ahead up to the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from device_harness import Harness, config_of, prompt, tight
from fake_device import FakeDevice

from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.loop import EngineLoop
from quire.replica.runner.gpu_steps import GpuSteps
from quire.replica.runner.runner import Runner
from quire.replica.scheduler.scheduler import Scheduler
from tests.replica.runner.graphs.test_cuda_graphs import capture_all
from tests.replica.runner.graphs.test_mixed_graphs import capture_mixed, mixed_config

SEEDS = 6
VOCAB = 176  # of the checkpoints of the zoo


class AnyToken:
    """The mask after a draft that its grammar refuses: nobody needs it."""

    def mask(self) -> np.ndarray:
        return np.full(-(-VOCAB // 32), -1, np.int32)


class Stairs:
    """A grammar: each token is one more than the one before it, modulo 5; complete after so many."""

    error = ""

    def __init__(self, length: int):
        self._left = length
        self._last = 0

    def mask(self) -> np.ndarray:
        assert self._left > 0, "nobody may follow"
        packed = np.zeros(-(-VOCAB // 32), np.uint32)
        for i in range(3, 170):
            if i % 5 == (self._last + 1) % 5:
                packed[i // 32] |= np.uint32(1 << (i % 32))
        return packed.view(np.int32)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        last, left = self._last, self._left
        for i, token_id in enumerate(token_ids):
            if not 3 <= token_id < 170 or token_id % 5 != (last + 1) % 5 or left == 1:
                return i
            last, left = token_id, left - 1
        return len(token_ids)

    def ahead(self, token_ids: Sequence[int]) -> Stairs | AnyToken:
        if self.num_allowed(token_ids) < len(token_ids):
            return AnyToken()
        further = Stairs(self._left)
        further._last = self._last
        for token_id in token_ids:
            further.advance(token_id)
        return further

    def advance(self, token_id: int) -> bool:
        assert token_id % 5 == (self._last + 1) % 5, "it is not in the language"
        self._last = token_id
        self._left -= 1
        return self._left == 0


def crowd(with_plain: bool = True) -> list[Request]:
    """Grammars that end early and late, words that must not come, and rows without either."""
    requests = []
    for i in range(9):
        kind = i % 3
        if kind == 2 and not with_plain:
            continue
        options = dict(
            max_tokens=6 + 5 * i % 13, seed=i, ignore_eos=True, temperature=(0.0, 1.3)[i % 2]
        )
        if kind == 1:
            # After each of twelve ids, half of the allowed ids must not follow.
            options["allowed_token_ids"] = tuple(range(3, 43))
            options["bad_words"] = tuple((a, b) for a in range(3, 15) for b in range(3, 43, 2))
        request = Request(i, prompt(3 + 7 * i % 23, i), SamplingParams(**options))
        if kind == 0:
            request.grammar = Stairs(3 + i)
        requests.append(request)
    return requests


def expected_of(model: Harness, config: EngineConfig):
    expected = model.serve(config, CpuDevice(), crowd(), plans_ahead=False)
    assert {reason for _, _, reason, _ in expected.values()} == {"length", "stop"}
    return expected


def test_the_vocabulary_is_that_of_the_checkpoints(harness):
    assert -(-harness("llama").spec.vocab_size // 32) == -(-VOCAB // 32)


@pytest.mark.parametrize("cache", [config_of, tight])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_they_change_no_token(harness, name, cache):
    model = harness(name)
    config = cache(model.spec)
    expected = expected_of(model, config)
    assert model.serve(config, CpuDevice(), crowd(), plans_ahead=True) == expected
    for seed in range(3):
        for prepare in (lambda runner: None, capture_all):
            device = FakeDevice(seed)
            told = model.serve(config, device, crowd(), plans_ahead=True, prepare=prepare)
            assert told == expected, seed
    config = mixed_config(model, cache)
    device = FakeDevice(4)
    told = model.serve(config, device, crowd(), plans_ahead=True, prepare=capture_mixed)
    assert told == expected


def test_the_steps_stay_queued(harness, monkeypatch):
    """Nearly every step is launched before the one before it is collected, and none samples before that."""
    model = harness("llama")
    done: list[tuple[str, int]] = []
    steps: dict[int, int] = {}
    real_launch, real_collect, real_sample = Runner.launch, Runner.collect, Runner.sample

    def launch(self, plan):
        done.append(("launch", plan.step))
        in_flight = real_launch(self, plan)
        steps[id(in_flight)] = plan.step
        kept.append(in_flight)
        return in_flight

    def collect(self, in_flight):
        done.append(("collect", steps[id(in_flight)]))
        return real_collect(self, in_flight)

    def sample(self, in_flight, sampling):
        done.append(("sample", steps[id(in_flight)]))
        real_sample(self, in_flight, sampling)

    kept: list[object] = []  # so that no two have the same id
    monkeypatch.setattr(Runner, "launch", launch)
    monkeypatch.setattr(Runner, "collect", collect)
    monkeypatch.setattr(Runner, "sample", sample)
    model.serve(config_of(model.spec), FakeDevice(1), crowd(False), plans_ahead=True)
    at = {entry: i for i, entry in enumerate(done)}
    sampled = [step for what, step in done if what == "sample"]
    assert len(sampled) > 0.6 * len(steps)
    for step in sampled:
        assert at["launch", step] < at["collect", step - 1] < at["sample", step]
        assert at["sample", step] < at.get(("launch", step + 1), len(done))


def test_holds_are_counted_and_every_part_of_the_loop_is_marked(harness):
    model = harness("llama")
    runners: list[Runner] = []
    loops: dict[str, EngineLoop] = {}

    def prepare(runner: Runner) -> None:
        capture_all(runner)
        runners.append(runner)

    device = FakeDevice(1)
    model.serve(
        config_of(model.spec),
        device,
        crowd(),
        plans_ahead=True,
        prepare=prepare,
        on_delta=lambda loop, delta: loops.update(last=loop),
    )
    told = runners[0].telemetry()["device"]
    assert 0 < told["num_holds"] < told["num_steps"]
    assert loops["last"].time.sample_s > 0
    assert set(device.marks) == {"plan", "launch", "wait", "commit", "sample", "send"}
    assert device.marks.count("sample") == told["num_holds"]
    assert device.marks.count("launch") == device.marks.count("wait") == told["num_steps"]


# -- defects -------------------------------------------------------------------------------------------------


def shows(model: Harness, config: EngineConfig, prepare: Callable[[Runner], None]) -> bool:
    expected = expected_of(model, config)
    return any(
        model.serve(config, FakeDevice(seed), crowd(), plans_ahead=True, prepare=prepare)
        != expected
        for seed in range(SEEDS)
    )


def test_masks_of_a_token_too_early_are_found(harness, monkeypatch):
    real = EngineLoop._launch

    def launch(self, plan):
        real(self, plan)
        if plan.awaits_tokens and self._in_flight and self._in_flight[-1][1].sample is not None:
            self._runner.sample(self._in_flight[-1][1], plan.sampling)

    monkeypatch.setattr(EngineLoop, "_launch", launch)
    monkeypatch.setattr(EngineLoop, "_sample_next", lambda self, deltas: deltas)
    model = harness("llama")
    assert shows(model, config_of(model.spec), capture_all)


def test_words_that_are_looked_up_a_token_too_early_are_found(harness, monkeypatch):
    monkeypatch.setattr(Scheduler, "complete", lambda self, plan: plan.sampling)
    model = harness("llama")
    assert shows(model, config_of(model.spec), capture_all)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("broken", ["the step before", "the masks", "the draw"])
def test_a_failure_between_the_halves_ends_their_rows_and_no_others(
    harness, monkeypatch, broken, seed
):
    """The half that is abandoned may still read its inputs."""
    model = harness("llama")
    config = config_of(model.spec)
    expected = expected_of(model, config)
    failed: list[set[object]] = []
    real_collect, real_complete = Runner.collect, Scheduler.complete
    real_end = GpuSteps.end

    def keys_in_flight(scheduler: Scheduler) -> set[object]:
        rows = np.unique(np.concatenate([step.rows for step in scheduler.steps]))
        return {scheduler.rows.keys[row] for row in rows.tolist()}

    loops: list[EngineLoop] = []
    real_init = EngineLoop.__init__

    def init(self, *args, **kwargs):
        real_init(self, *args, **kwargs)
        loops.append(self)

    def collect(self, in_flight):
        result = real_collect(self, in_flight)
        behind = loops[-1]._in_flight if loops else ()  # none yet: warm-up
        if not failed and behind and behind[0][0].awaits_tokens and behind[0][0].step > 5:
            failed.append(keys_in_flight(loops[-1]._scheduler))
            raise RuntimeError("it failed on the device")
        return result

    def complete(self, plan):
        sampling = real_complete(self, plan)
        if not failed and plan.step > 5:
            failed.append(keys_in_flight(self))
            raise RuntimeError("a grammar failed")
        return sampling

    def end(self, in_flight):
        if not failed and in_flight.sampling_begun is not None:
            failed.append(keys_in_flight(loops[-1]._scheduler))
            raise RuntimeError("the draw is queued, its end is not")
        real_end(self, in_flight)

    monkeypatch.setattr(EngineLoop, "__init__", init)
    if broken == "the masks":
        monkeypatch.setattr(Scheduler, "complete", complete)
    elif broken == "the draw":
        monkeypatch.setattr(GpuSteps, "end", end)
    else:
        monkeypatch.setattr(Runner, "collect", collect)
    told = model.serve(config, FakeDevice(seed), crowd(), plans_ahead=True, prepare=capture_all)
    ended = {key for key, (_, _, reason, _) in told.items() if reason == "error"}
    assert ended and ended <= failed[0] and len(ended) < len(told)
    assert len({told[key][3] for key in ended}) == 1, "no other step has failed"
    for key in told.keys() - ended:
        assert told[key] == expected[key]
