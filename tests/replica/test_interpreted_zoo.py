"""Every served architecture through the kernels of a GPU, in Triton's interpreter: the logits of the CPU's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_zoo
import numpy as np
import pytest
import triton
from interpreted_runner import interpreted_runner
from step_driver import Driver, make_runner

from quire.kernels.interpreter import repair_interpreter
from quire.replica.runner import Runner

pytestmark = [
    pytest.mark.timeout(300),  # some 2 s a model on an idle core
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the kernels are not interpreted"),
]
LENGTHS, CHUNK, STEPS = (11, 1, 3), 6, 2

# The smallest shapes that the kernels take; windows that the prompts leave.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_mixed": dict(sliding_window=6),
    "mistral": dict(sliding_window=6),
    "phi3": dict(sliding_window=6),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "gemma2": dict(sliding_window=6),
    "gemma3": dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(sliding_window=6),
}
# What the structure allows on a GPU, and the lengths of the chains.
WHOLE = dict(layers=2, norms=1, decoders=1), [2]
FUSED: dict[str, tuple[dict[str, int], list[int]]] = {
    **dict.fromkeys(model_zoo.NAMES, WHOLE),
    "olmo2": (dict(MLPs=2, norms=9), []),  # norms after, and over all heads
    "granite": (dict(attentions=2, MLPs=2, norms=5), []),  # scaled residuals
    "gemma2": (dict(attentions=2, MLPs=2, norms=9), []),  # norms before and after
    "gemma3": (dict(attentions=2, MLPs=2, norms=9), []),
    "gpt_oss": (dict(attentions=2, norms=5), []),  # experts
    "qwen3_moe": (dict(attentions=1, layers=1, norms=3), [1]),  # experts in one of the layers
}


def build(name: str, folder: Path) -> Path:
    changes = dict(num_hidden_layers=2, head_dim=64, **CHANGES.get(name, {}))
    return model_zoo.build(name, folder, **changes)


def generate(runner: Runner) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens of a few prompts in chunks beside decodes, and the logits [n, vocab] that they come from."""
    driver = Driver(runner)
    rng = np.random.default_rng(3)
    sequences = [driver.add(rng.integers(3, 173, n).tolist(), STEPS) for n in LENGTHS]
    tokens = driver.generate(sequences, STEPS, CHUNK)
    return tokens, np.stack([row for s in sequences for row in s.logits])


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_a_gpus_kernels_give_the_logits_of_the_cpus(name, tmp_path):
    repair_interpreter()
    path = build(name, tmp_path)
    runner = interpreted_runner(path, dtype="float32")
    fused, chains = FUSED[name]
    assert (dict(runner.fused.fused), runner.fused.chains) == (fused, chains)
    tokens, logits = generate(runner)
    expected_tokens, expected = generate(make_runner(path, fuse="off"))
    assert tokens == expected_tokens
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
