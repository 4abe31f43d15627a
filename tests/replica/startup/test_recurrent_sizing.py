"""Sizes and options of models with recurrent layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.device.state_pool import slot_bytes
from quire.replica.model.layers.state_layers import split_state_layers
from quire.replica.model.loader import empty_model
from quire.replica.startup import sizing
from quire.replica.startup.cpu_sizing import CpuSizing
from quire.replica.startup.device_sizing import GIB
from quire.replica.startup.memory_table import memory_table
from quire.replica.startup.sizing import resolve


@pytest.fixture
def recurrent(tmp_path: Path) -> ModelSpec:
    layers = ["conv", "full_attention", "conv"]
    shape = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    config = Lfm2Config(
        **shape,
        layer_types=layers,
        num_hidden_layers=3,
        vocab_size=16,
        eos_token_id=2,
        pad_token_id=0,
    )
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    return ModelSpec.from_checkpoint(tmp_path)


def test_slots_of_recurrent_layers_are_counted(recurrent):
    sizes = (10**6, 512, 512, 8 * GIB, 8 * GIB)
    args = EngineArgs(max_running_requests=3, num_blocks=100)
    plain, table = (
        memory_table(args, recurrent, CpuSizing(num_threads=2), "float32", *sizes, states=states)
        for states in (0, 4 * 10**6)
    )
    assert table.states == plain.remainder - table.remainder == 4 * 10**6
    assert "states" in str(table) and "states" not in str(plain)


def test_a_recurrent_model_gets_options_that_it_can_have(recurrent, monkeypatch):
    config = resolve(EngineArgs(model="x", device="cpu"), recurrent)
    assert config.has_states
    found = (
        config.prefix_caching,
        config.num_host_blocks,
        config.cuda_graphs,
        config.deterministic,
    )
    assert found == (True, 0, "auto", False)
    assert config.num_snapshots == 4 * config.num_rows
    assert config.max_running_requests == EngineArgs().max_running_requests
    # With little memory, slots take half of it: those of running requests half of that.
    slot = 2 * 192  # two convolutions of 32 channels and 3 inputs in float32
    monkeypatch.setattr(sizing, "slot_bytes", lambda layout: GIB if layout else 0)
    monkeypatch.setattr(sizing, "available_bytes", lambda device: 32 * GIB)
    args = EngineArgs(model="x", device="cpu", max_memory_percent=0.5)
    small = resolve(args, recurrent)
    assert (small.max_running_requests, small.num_snapshots, small.prefix_caching) == (3, 3, True)
    # 1 GiB of host memory for blocks, the other one for one snapshot.
    hosted = resolve(dataclasses.replace(args, cpu_offload_gib=2.0), recurrent)
    assert hosted.num_host_snapshots == 1
    assert hosted.num_host_blocks * hosted.block_size * 128 == GIB
    plain = resolve(dataclasses.replace(args, prefix_caching=False), recurrent)
    assert (plain.max_running_requests, plain.num_snapshots, plain.prefix_caching) == (6, 0, False)
    assert slot <= slot_bytes(split_state_layers(empty_model(recurrent, "float32"))) <= 2 * slot


def test_a_recurrent_model_is_deterministic_where_the_user_asks_for_it_on_the_cpu(recurrent):
    args = EngineArgs(model="x", device="cpu")
    assert not resolve(args, recurrent).deterministic
    assert resolve(dataclasses.replace(args, deterministic=True), recurrent).deterministic
    asked = dataclasses.replace(args, deterministic=True, dtype="bfloat16")
    with pytest.raises(SizingError, match=r"deterministic is true, .* 'float32'"):
        resolve(asked, recurrent)
