"""Drafts change no token and no bit of a log-probability: the real loop, scheduler and runner on several devices."""

from __future__ import annotations

import pytest
from device_harness import Harness, Told, config_of, crowd, long_crowd, tight
from fake_device import FakeDevice
from oracle_drafts import OracleDrafts
from test_awaited_tokens import crowd as constrained_crowd

from quire.replica.config import EngineConfig
from quire.replica.device.cpu_device import CpuDevice

CROWDS = {"any": crowd, "long": long_crowd, "constrained": constrained_crowd}


def plain(model: Harness, config: EngineConfig, requests) -> Told:
    return model.serve(config, CpuDevice(), requests(), plans_ahead=False)


def oracle(model: Harness, expected: Told, **options) -> OracleDrafts:
    outputs = {key: told[0] for key, told in expected.items()}
    return OracleDrafts(outputs, model.spec.vocab_size, **options)


@pytest.mark.parametrize("requests", CROWDS)
@pytest.mark.parametrize("cache", [config_of, tight])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_change_nothing(harness, name, cache, requests):
    model = harness(name)
    config = cache(model.spec)
    expected = plain(model, config, CROWDS[requests])
    for seed, (device, plans_ahead) in enumerate(
        [(CpuDevice(), False), (CpuDevice(), True), (FakeDevice(1), True), (FakeDevice(2), True)]
    ):
        source = oracle(model, expected, seed=seed)
        told = model.serve(
            config, device, CROWDS[requests](), plans_ahead=plans_ahead, draft_source=source
        )
        assert told == expected, seed
        assert 0 < source.num_accepted < source.num_drafted
        assert not source.live
