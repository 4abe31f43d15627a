"""Recurrent modules in Quire's kernels: which are replaced, and that they compute what the modules compute."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.kernels.cpu import native_library
from quire.kernels.recurrence import cpu_recurrence
from quire.replica.checkpoint.model_spec import ModelSpec, build_config
from quire.replica.device.state_pool import StatePool
from quire.replica.model.layers.state_layers import (
    StepCache,
    call_recurrent,
    split_state_layers,
)
from quire.replica.model.recurrence.recurrent_fusion import MixerForward, fuse_recurrences
from quire.replica.model.recurrence.recurrent_mixers import RecurrenceKernels
from quire.replica.model.text_part import auto_class
from quire.replica.proof.model_proof import tiny_entries

sys.path.insert(0, str(Path(__file__).parents[2] / "proof"))
from families import default_entries, write_config

pytestmark = pytest.mark.skipif(native_library.load() is None, reason="no compiled library")

# One type of each structure: gated delta rules with joined and with separate products, Mamba-2 with and without a
# norm and with scales, a short convolution, lightning attention.
TYPES = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "falcon_h1", "lfm2", "minimax")  # fmt: skip
# A product with the hidden states as its input, in each of them.
INPUTS = ("in_proj", "in_proj_qkvz", "in_proj_qkv", "q_proj", "qkv_proj")
KERNELS = RecurrenceKernels(cpu_recurrence.short_conv, cpu_recurrence.state_scan)
SLOTS = np.array([2, 0, 1])


def build(model_type: str, folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Tiny model of a type with random parameters; its recurrent modules are split."""
    spec = ModelSpec.from_checkpoint(write_config(folder / "config", default_entries(model_type)))
    config = build_config(tiny_entries(spec))
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=dtype).eval().requires_grad_(False)
    for module in model.modules():
        for name in ("A_log", "dt_bias", "D"):
            if hasattr(module, name):
                getattr(module, name).uniform_(-0.5, 0.5)
    return model


def run_steps(module: torch.nn.Module, layout, steps) -> tuple[list[torch.Tensor], StatePool]:
    """Outputs of random steps, and the states after them. Each step: tokens of the three rows, snapshots."""
    pool = StatePool(layout, num_rows=3, num_snapshots=2)
    pool.poison()
    random = torch.Generator().manual_seed(1)
    width = next(m for name, m in module.named_children() if name in INPUTS).in_features
    kv_len, outputs = np.zeros(3, np.int64), []
    for counts, saves in steps:
        kv_len = kv_len + counts
        rows = np.flatnonzero(counts)
        saves = np.array(saves, np.int64).reshape(-1, 3)
        cache = StepCache.of(pool, SLOTS[rows], np.array(counts)[rows], kv_len[rows], saves)
        hidden = torch.randn(1, sum(counts), width, generator=random)
        result = call_recurrent(module, hidden, cache)
        outputs.append(result[0] if isinstance(result, tuple) else result)
    return outputs, pool


@pytest.mark.parametrize("model_type", TYPES)
@torch.inference_mode()
def test_a_mixer_computes_what_the_module_computes(model_type, tmp_path):
    """Rows begin, continue in chunks and decode in ragged steps, with snapshots inside of a row."""
    model = build(model_type, tmp_path)
    layout = split_state_layers(model)
    modules = [m for m in model.modules() if getattr(m.forward, "splits_rows", False)]
    module = modules[0]
    own = [state for state in layout if state.layer == module.layer_idx]
    steps = [((9, 1, 3), [[0, 4, 4]]), ((1, 1, 1), []), ((0, 70, 1), [[0, 33, 5]]), ((2, 1, 0), [])]
    expected, other_pool = run_steps(module, own, steps)
    report = fuse_recurrences(model, layout, KERNELS)
    assert (report.fused["recurrences"], report.dropped) == (len(modules), [])
    assert isinstance(module.forward, MixerForward)
    found, pool = run_steps(module, own, steps)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.std().item())
    slots = list(range(6))
    slots.remove(pool.trash_slot)
    states = {name: view[slots] for name, view in pool.views(module.layer_idx).items()}
    states = module.forward.mixer.module_states(states)
    for name, view in other_pool.views(module.layer_idx).items():
        torch.testing.assert_close(states[name], view[slots], rtol=1e-4, atol=1e-4)
    # A second engine with the same model finds the same states, and changes nothing.
    forward = module.forward
    assert split_state_layers(model) == layout and module.forward is forward


@torch.inference_mode()
def test_a_module_that_computes_something_else_keeps_its_own_code(tmp_path):
    """Another output, or another state; modules of another kind are replaced."""
    model = build("lfm2", tmp_path)
    layout = split_state_layers(model)
    modules = [m for m in model.modules() if getattr(m.forward, "splits_rows", False)]
    splits = [m.forward for m in modules]
    modules[0].note, modules[1].note = "louder", "keeps other inputs"  # kinds of their own

    def louder(*args, **given):
        return own(*args, **given) * 1.001

    own, splits[0]._forward = splits[0]._forward, louder
    later = splits[1]._forward

    def keeps_other_inputs(**given):
        result = later(**given)
        cache = given["cache"]
        cache.states = {name: state * 1.001 for name, state in cache.states.items()}
        return result

    splits[1]._forward = keeps_other_inputs
    report = fuse_recurrences(model, layout, KERNELS)
    assert report.fused["recurrences"] == len(modules) - 2
    assert ["deviates by 0.00" in reason for reason in report.dropped] == [True, True]
    assert [m.forward for m in modules[:2]] == splits[:2]


@torch.inference_mode()
def test_states_that_the_kernels_do_not_take_keep_the_modules_code(tmp_path):
    """In bfloat16 MiniMax keeps states of bfloat16."""
    model = build("minimax", tmp_path, torch.bfloat16)
    layout = split_state_layers(model)
    report = fuse_recurrences(model, layout, KERNELS)
    assert not report.fused
    assert all("states: must be one of float32, got torch.bfloat16" in r for r in report.dropped)
