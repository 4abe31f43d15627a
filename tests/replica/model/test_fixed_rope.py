"""RoPE variants that transformers changes with the batch: what is served is what one sequence alone gets."""

from __future__ import annotations

from pathlib import Path

import model_zoo
import numpy as np
import pytest
import torch
import transformers
from step_driver import Driver, make_runner

from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.startup.sizing import resolve

# Heads of 16, of which 12 rotate.
SHORT = [1.0 + i / 10 for i in range(6)]
LONG = [1.0 + 3 * i for i in range(6)]
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=SHORT,
    long_factor=LONG,
    partial_rotary_factor=0.75,
)
NUM_SHORT, STEPS = 64, 6


def build(folder: Path, name: str = "phi3", **changes: object) -> Path:
    """A model with `longrope`: in all layers, or in the full-attention layers of Gemma 3, whose heads have 24."""
    rope: dict[str, object] = LONGROPE | changes
    if name == "phi3":
        options = dict(rope_parameters=rope, original_max_position_embeddings=NUM_SHORT)
    else:
        factors = dict(short_factor=SHORT * 2, long_factor=LONG * 2, partial_rotary_factor=1.0)
        rope |= factors | dict(original_max_position_embeddings=NUM_SHORT, factor=8.0)
        local = dict(rope_type="default", rope_theta=1e4)
        options = dict(rope_parameters=dict(full_attention=rope, sliding_attention=local))
    return model_zoo.build(name, folder, **options)


def logits_and_tokens(path: Path, lengths: tuple[int, ...], **config: object):
    """Prompts and output tokens by sequence, and each output token's logits, of one batch with mixed steps."""
    driver = Driver(make_runner(path, **config))
    rng = np.random.default_rng(5)
    sequences = [driver.add(rng.integers(3, 173, n).tolist(), STEPS) for n in lengths]
    driver.generate(sequences, STEPS, 16)
    return [(s.tokens, np.stack(s.logits)) for s in sequences]


def assert_same(path: Path, found) -> None:
    """Compare with transformers' forward pass of each sequence alone, and with its `generate`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    for tokens, logits in found:
        prompt = torch.tensor([tokens[:-STEPS]])
        with torch.inference_mode():
            expected = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -STEPS:]
        assert np.abs(logits - expected.numpy()).max() < 1e-4 * float(expected.std())
        out = model.generate(
            prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert out[0].tolist() == tokens


@pytest.mark.parametrize(
    "name, max_model_len, lengths",
    [
        # The last sequence ends with the last position of the short factors.
        ("phi3", NUM_SHORT, (5, 40, NUM_SHORT - STEPS)),
        ("phi3", 128, (NUM_SHORT + 1, 100, 90)),
        ("gemma3", 128, (NUM_SHORT + 1, 90)),
    ],
)
def test_longrope_gives_what_generate_gives_on_one_side_of_the_switch(
    tmp_path, name, max_model_len, lengths
):
    path = build(tmp_path, name)
    assert_same(path, logits_and_tokens(path, lengths, max_model_len=max_model_len))


def test_longrope_of_a_long_context_has_long_factors_for_short_sequences_too(tmp_path):
    """A token's values do not depend on the longest sequence of its batch."""
    found = logits_and_tokens(build(tmp_path / "served"), (5, 90), max_model_len=128)
    assert_same(build(tmp_path / "long", short_factor=LONG), found)


def test_the_default_context_is_the_one_that_generate_agrees_with(tmp_path):
    spec = ModelSpec.from_checkpoint(build(tmp_path))
    assert (spec.short_context, spec.max_position_embeddings) == (NUM_SHORT, 512)
    assert resolve(EngineArgs(device="cpu"), spec).max_model_len == NUM_SHORT
    assert resolve(EngineArgs(device="cpu", max_model_len=512), spec).max_model_len == 512


def test_dynamic_is_served_as_far_as_it_does_not_change(tmp_path):
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
    path = model_zoo.build("llama", tmp_path, rope_parameters=rope, max_position_embeddings=96)
    assert_same(path, logits_and_tokens(path, (5, 90), max_model_len=96))
    spec = ModelSpec.from_checkpoint(path)
    assert resolve(EngineArgs(device="cpu"), spec).max_model_len == 96
    with pytest.raises(SizingError, match=r"max_model_len 97 exceeds .*max_position_embeddings 96"):
        resolve(EngineArgs(device="cpu", max_model_len=97), spec)
