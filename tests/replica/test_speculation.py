"""Drafts change no token and no bit of a log-probability: the real loop, scheduler and runner on several devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_harness import Harness, Told, config_of, crowd, long_crowd, tight
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from oracle_drafts import OracleDrafts
from test_awaited_tokens import crowd as constrained_crowd

from quire.replica.config import EngineConfig
from quire.replica.core.step_plan import Drafts
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.request_table.drafting import Drafting
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_inputs import StepInputs
from quire.replica.sampling.draft_check import counting, newest_rows
from quire.replica.sampling.token_counts import TokenCounts
from tests.replica.runner.graphs.test_mixed_graphs import capture_mixed, mixed_config

CROWDS = {"any": crowd, "long": long_crowd, "constrained": constrained_crowd}


def plain(model: Harness, config: EngineConfig, requests) -> Told:
    return model.serve(config, CpuDevice(), requests(), plans_ahead=False)


def oracle(model: Harness, expected: Told, **options) -> OracleDrafts:
    outputs = {key: told[0] for key, told in expected.items()}
    return OracleDrafts(outputs, model.spec.vocab_size, **options)


@pytest.mark.parametrize(
    ("name", "cache", "requests"),
    [
        ("gemma3", config_of, "any"),
        ("llama", tight, "any"),
        ("gemma3", tight, "long"),
        ("llama", config_of, "constrained"),
    ],
)
def test_drafts_change_nothing(harness, name, cache, requests):
    model = harness(name)
    config = cache(model.spec)
    expected = plain(model, config, CROWDS[requests])
    for seed, (device, plans_ahead) in enumerate([(CpuDevice(), False), (FakeDevice(1), True)]):
        source = oracle(model, expected, seed=seed)
        told = model.serve(
            config, device, CROWDS[requests](), plans_ahead=plans_ahead, draft_source=source
        )
        assert told == expected, seed
        assert 0 < source.num_accepted < source.num_drafted
        assert not source.live


@pytest.mark.parametrize("cache", [config_of, tight])
def test_drafts_change_nothing_in_graphs(harness, cache):
    model = harness("llama")
    config = mixed_config(model, cache)
    expected = plain(model, config, crowd)
    used = {"mixed": 0, "drafts": 0}

    def prepare(runner: Runner) -> None:
        capture_mixed(runner)
        real = runner.steps._queue_mixed

        def queue_mixed(plan, in_flight, graph):
            used["mixed"] += 1
            used["drafts"] += plan.sampling.drafts is not None
            return real(plan, in_flight, graph)

        runner.steps._queue_mixed = queue_mixed

    for seed in range(1):
        # Graphs of this test have seven samples.
        source = oracle(model, expected, seed=seed, max_draft_tokens=2, silent=0.6)
        device = FakeDevice(seed)
        told = model.serve(
            config, device, crowd(), plans_ahead=True, prepare=prepare, draft_source=source
        )
        assert told == expected, seed
    assert used["drafts"] > 5


def test_rows_with_a_draft_in_flight_may_be_left_out(harness, monkeypatch):
    """Few rows with a draft do not stop the planning ahead of the others."""
    monkeypatch.setattr(Drafting, "LOCKSTEP_SHARE", 2.0)
    model = harness("gemma3")
    config = tight(model.spec)
    expected = plain(model, config, crowd)
    for seed in range(1):
        source = oracle(model, expected, seed=seed)
        device = FakeDevice(seed)
        assert (
            model.serve(config, device, crowd(), plans_ahead=True, draft_source=source) == expected
        )


def changes_tokens(model: Harness) -> bool:
    config = config_of(model.spec)
    expected = plain(model, config, crowd)
    source = oracle(model, expected, seed=1)
    try:
        device = FakeDevice(1)
        told = model.serve(config, device, crowd(), plans_ahead=True, draft_source=source)
    except AssertionError:
        return True
    return told != expected


def test_an_acceptance_of_wrong_tokens_is_found(harness, monkeypatch):
    real = Drafts.counting

    def counting(self: Drafts, drawn: np.ndarray) -> np.ndarray:
        """The first drafted token of a row is never refused."""
        counts = real(self, drawn)
        counts[(self.offset == 1) & ~counts] = True
        return counts

    monkeypatch.setattr(Drafts, "counting", counting)
    assert changes_tokens(harness("llama"))


def test_a_device_that_keeps_another_token_is_found(harness, monkeypatch):
    monkeypatch.setattr(StepInputs, "newest_rows", lambda self, tokens, rows, padding_row: rows)
    assert changes_tokens(harness("llama"))


def test_counts_of_penalties_that_ignore_drafts_are_found(harness, monkeypatch):
    real = TokenCounts.ahead
    monkeypatch.setattr(TokenCounts, "ahead", lambda self, rows, ahead: real(self, rows, ahead[:0]))
    assert changes_tokens(harness("llama"))


@given(st.data())
def test_host_and_device_agree_on_the_samples_that_count(data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    offset = np.concatenate([np.arange(1 + n) for n in lengths])
    tokens = st.lists(st.integers(0, 1), min_size=len(offset), max_size=len(offset))
    drawn, drafted = (np.array(data.draw(tokens), np.int64) for _ in range(2))
    expected, last = [], []
    for i, at in enumerate(offset.tolist()):
        expected.append(at == 0 or (expected[-1] and drafted[i] == drawn[i - 1]))
    for i, counts in enumerate(expected):
        is_end = i + 1 == len(offset) or offset[i + 1] == 0
        last.append(counts and (is_end or not expected[i + 1]))
    assert Drafts(offset, drafted).counting(drawn).tolist() == expected
    on_device = [torch.from_numpy(array) for array in (drawn, drafted, offset)]
    assert counting(*on_device).tolist() == expected
    rows = np.repeat(np.arange(len(lengths)), np.array(lengths) + 1)
    kept = newest_rows(*on_device, torch.from_numpy(rows), 99)
    assert kept.tolist() == np.where(last, rows, 99).tolist()
    assert kept[kept < 99].tolist() == list(range(len(lengths)))
