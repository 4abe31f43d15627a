"""A request with an adapter has the logits of the checkpoint with the adapter merged, alone and in any batch."""

from __future__ import annotations

from pathlib import Path

import model_zoo
import numpy as np
import pytest
import torch
import w4_checkpoints
from adapter_folders import ALL_LAYERS, save_adapter, save_merged
from step_driver import Driver, make_runner

from quire.kernels.cpu import native_library
from quire.protos.adapter_ref import AdapterRef
from quire.replica.core.adapter import Adapter, AdapterLoad
from quire.replica.runner.runner import Runner

LENGTHS = (40, 1, 23, 16)
STEPS = 4
OPTIONS = dict(max_loaded_adapters=4, max_adapter_rank=16, max_batch_tokens=64)


def adapted_runner(path: Path, **changes: object) -> Runner:
    runner = make_runner(path, **{**OPTIONS, **changes})
    runner.warm_up()
    runner.pool.poison()
    return runner


def load(runner: Runner, slot: int, folder: Path) -> None:
    ref = AdapterRef.of_folder(folder.name, str(folder))
    runner.adapted.load([AdapterLoad(slot, Adapter(ref, runner.adapted.read(folder)))])


def logits_of(
    runner: Runner, adapters: list[int], which: list[int] | None = None
) -> list[np.ndarray]:
    """[steps, vocab] of each prompt, with the adapter of its slot; `which` prompts of all, together in each step."""
    runner.pool.poison()
    driver = Driver(runner)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, runner.spec.vocab_size, n).tolist() for n in LENGTHS]
    which = list(range(len(prompts))) if which is None else which
    sequences = [driver.add(prompts[i], STEPS, adapter=adapters[i]) for i in which]
    # The tokens after the prompt are the same with every adapter, so that logits can be compared.
    for _ in range(STEPS):
        work = [(s, min(13, len(s.tokens) - s.computed)) for s in sequences]
        while work:
            driver.advance(work)
            work = [(s, n) for s in sequences if (n := min(13, len(s.tokens) - s.computed)) > 1]
        for sequence in sequences:
            sequence.tokens[-1] = (7 * len(sequence.tokens)) % runner.spec.vocab_size
    return [np.stack(s.logits) for s in sequences]


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma2", "llama_mha", "qwen3_moe"])
def test_logits_equal_those_of_the_merged_checkpoint(zoo, tmp_path, name):
    targets = (*ALL_LAYERS, "qkv_proj", "gate_up_proj")
    if name == "qwen3_moe":
        targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    folders = [
        save_adapter(tmp_path / "a", zoo(name), rank=4, seed=1, targets=targets),
        save_adapter(tmp_path / "b", zoo(name), rank=9, seed=2, targets=targets, use_rslora=True),
        save_adapter(tmp_path / "c", zoo(name), rank=1, seed=3, targets=("o_proj", "v_proj")),
    ]
    if name == "phi3":
        folders[2] = save_adapter(tmp_path / "c", zoo(name), rank=1, seed=3, targets=("qkv_proj",))
    runner = adapted_runner(zoo(name))
    for slot, folder in enumerate(folders, start=1):
        load(runner, slot, folder)
    found = logits_of(runner, [1, 2, 3, 0])
    base = make_runner(zoo(name))
    for i, folder in enumerate(folders):
        merged = make_runner(save_merged(tmp_path / f"merged {i}", zoo(name), folder))
        (expected,) = logits_of(merged, [0] * 4, [i])
        (plain,) = logits_of(base, [0] * 4, [i])
        assert deviation(found[i], expected) < 1e-5
        assert deviation(plain, expected) > 1e-2, "the adapter must change the logits"
    (expected,) = logits_of(base, [0] * 4, [3])
    np.testing.assert_array_equal(found[3], expected)


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-4), ("bfloat16", 0.05)])
def test_an_adapter_over_weights_of_four_bits_is_that_over_the_dequantised_ones(
    tmp_path, desc_act, dtype, bound
):
    source = model_zoo.build("qwen3", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    config = w4_checkpoints.config_of("gptq", 32, desc_act=desc_act)
    coded, plain = w4_checkpoints.write(
        source, tmp_path / "x", config, size=32, sorted_inputs=not desc_act
    )
    folder = save_adapter(tmp_path / "a", plain, rank=4, seed=1)
    runner = adapted_runner(coded, deterministic=False, dtype=dtype)
    load(runner, 1, folder)
    found = logits_of(runner, [1, 0, 1, 0])
    base = make_runner(plain)
    merged = make_runner(save_merged(tmp_path / "merged", plain, folder))
    for i, which in enumerate((merged, base, merged, base)):
        (expected,) = logits_of(which, [0] * 4, [i])
        assert deviation(found[i], expected) < bound
    assert deviation(found[0], logits_of(base, [0] * 4, [0])[0]) > 4 * bound


@pytest.mark.parametrize("library", ["compiled", "torch"])
def test_a_row_has_the_same_bits_alone_and_among_other_adapters(
    zoo, tmp_path, monkeypatch, library
):
    if library == "torch":
        monkeypatch.setattr(native_library, "load", lambda: None)
    runner = adapted_runner(zoo("llama"))
    for slot in (1, 2, 3):
        load(runner, slot, save_adapter(tmp_path / str(slot), zoo("llama"), rank=5, seed=slot))
    adapters = [2, 1, 0, 2]
    together = logits_of(runner, adapters)
    for i in range(4):
        (alone,) = logits_of(runner, adapters, [i])
        np.testing.assert_array_equal(together[i], alone)


def test_a_slot_can_get_another_adapter_and_none(zoo, tmp_path):
    runner = adapted_runner(zoo("llama"))
    folders = [save_adapter(tmp_path / str(i), zoo("llama"), seed=i) for i in range(2)]
    expected = []
    for slot, folder in enumerate(folders, start=1):
        load(runner, slot, folder)
        expected += logits_of(runner, [slot] * 4, [0])
    load(runner, 1, folders[1])
    (found,) = logits_of(runner, [1] * 4, [0])
    np.testing.assert_array_equal(found, expected[1])
    assert deviation(found, expected[0]) > 1e-2


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_adapters_add_to_products_of_any_format(zoo, tmp_path, weights):
    """In bfloat16, and with codes of 8 bits: the difference to the model alone is that of float32."""
    folder = save_adapter(tmp_path / "a", zoo("llama"), rank=8, seed=4, targets=("down_proj",))
    differences = []
    for options in (dict(), dict(dtype="bfloat16", deterministic=False, weights=weights)):
        runner = adapted_runner(zoo("llama"), **options)
        load(runner, 1, folder)
        (plain,), (adapted,) = logits_of(runner, [0] * 4, [0]), logits_of(runner, [1] * 4, [0])
        differences.append(adapted - plain)
    exact, found = differences
    assert deviation(found, exact) < 0.2
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.99


def test_a_model_without_slots_has_no_hooks(zoo):
    runner = make_runner(zoo("llama"))
    assert runner.adapted is None
    assert not any(module._forward_hooks for module in runner.model.modules())
    assert torch.is_tensor(runner.model.get_input_embeddings().weight)
