"""Sizes and options of a class that computes attention itself."""

from __future__ import annotations

import pytest
import transformers

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.startup import sizing
from quire.replica.startup.cpu_sizing import CpuSizing
from quire.replica.startup.gpu_sizing import GpuSizing
from quire.replica.startup.sizing import resolve


@pytest.fixture
def spec(tmp_path):
    shape = dict(hidden_size=32, n_head=4, n_layer=3, vocab_size=16, seq_length=64)
    config = transformers.BloomConfig(**shape, pad_token_id=0, eos_token_id=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    return ModelSpec.from_checkpoint(tmp_path)


def test_it_is_not_batch_invariant_and_keeps_its_prefix_cache(spec):
    config = resolve(EngineArgs(model="x", device="cpu", dtype="float32"), spec)
    assert (config.deterministic, config.prefix_caching) == (False, True)
    assert config.max_model_len == 64


def test_it_refuses_options_that_it_cannot_have(spec, monkeypatch):
    reason = "BloomForCausalLM cannot have: it computes attention itself"
    with pytest.raises(SizingError, match=f"deterministic is True, which {reason}"):
        resolve(EngineArgs(model="x", device="cpu", deterministic=True), spec)
    monkeypatch.setattr(sizing, "choose_sizing", lambda device, num_threads: GpuSizing())
    with pytest.raises(SizingError, match=f"device is 'cuda', which {reason}"):
        resolve(EngineArgs(model="x"), spec)


def test_its_workspace_has_scores_of_all_heads_and_the_keys_of_all_layers(spec):
    args = EngineArgs(max_batch_tokens=100)
    taken = CpuSizing(num_threads=2).attention_bytes(args, spec, block_size=8, element=4)
    keys_and_values = 2 * 3 * 4 * 8  # of a token, in three layers of four heads
    assert taken.per_request_block == 8 * (2 * 4 * keys_and_values + 3 * 4 * 4 * 100)
