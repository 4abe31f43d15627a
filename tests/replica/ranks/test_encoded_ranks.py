"""Ranks of checkpoints in 8 and 4 bits: each reads its part of codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoded_checkpoints as encoded
import fp8_checkpoints
import model_zoo
import pytest
import torch
import w4_checkpoints
from rank_engines import engine, params, prompts, told
from safetensors.torch import load_file

from quire.kernels.rows import w4_linear
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.config import EngineArgs
from quire.replica.model.layers.linear_parts import whole_layers
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.loader import load_model
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.ranks.leading_ranks import start_process
from quire.replica.startup.rank_sizing import rank_spec

BLOCK = (16, 16)
BLOCK_CONFIG = encoded.BLOCK_CONFIG | dict(weight_block_size=list(BLOCK))
# Parts of all matrices begin and end where a block does.
SIZES = dict(intermediate_size=96, moe_intermediate_size=64, head_dim=16)
# transformers sets a dtype for the whole process while it makes a model, so that threads would disturb each other.
IN_BFLOAT16 = dict(dtype="bfloat16", start_rank=start_process)
FORMS = {
    "blocks": (BLOCK_CONFIG, encoded.fp8_blocks("_scale_inv", BLOCK)),
    "channels": (encoded.WEIGHT_ONLY_CONFIG, encoded.per_channel(torch.float8_e4m3fn)),
    "one scale": (encoded.WEIGHT_ONLY_CONFIG, encoded.per_channel(torch.float8_e4m3fn, whole=True)),
}


def answers(folder: Path, num_ranks: int, **options: Any) -> list[tuple]:
    with engine(folder, num_ranks, 2, **options) as ranks:
        return told(ranks.generate(prompts(), params()))


def test_ranks_decode_their_parts_of_mxfp4(tmp_path):
    """A bias of a sum that both ranks read is added once."""
    sizes = dict(hidden_size=96, intermediate_size=64, head_dim=24)
    source = model_zoo.build("gpt_oss", tmp_path, **sizes)
    codes, plain = encoded.write(source, tmp_path, encoded.MXFP4_CONFIG, encoded.mxfp4)
    options = dict(dtype="float32", weights="auto")
    found = answers(codes, 2, **options)
    assert found == answers(plain, 1)
    with engine(plain, 1, 1) as whole:
        outputs = whole.generate(prompts(), params())
    assert [o.token_ids for o in outputs] == [token_ids for token_ids, *_ in found]


def test_a_part_of_mxfp4_that_ends_within_a_group_is_refused(tmp_path):
    source = model_zoo.build("gpt_oss", tmp_path, hidden_size=96, intermediate_size=96)
    codes, _ = encoded.write(source, tmp_path, encoded.MXFP4_CONFIG, encoded.mxfp4)
    spec, args = ModelSpec.from_checkpoint(codes), EngineArgs(tensor_parallel=2)
    with pytest.raises(CheckpointError, match="MXFP4 has a scale for 32 numbers"):
        load_model(rank_spec(spec, args), "cpu", "float32", "auto", RankGroup(0, 2), num_splits=2)


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "blocks"), ("llama", "channels"), ("llama", "one scale"), ("qwen3_moe", "blocks")],
)
def test_ranks_decode_their_parts(tmp_path, name, form):
    source = model_zoo.build(name, tmp_path, **SIZES)
    codes, plain = encoded.write(source, tmp_path, *FORMS[form])
    assert answers(codes, 2, weights="auto") == answers(plain, 1)


def test_ranks_multiply_their_parts_of_codes(tmp_path):
    source = model_zoo.build("llama", tmp_path, **SIZES)
    codes, _ = encoded.write(source, tmp_path, encoded.INT8_CONFIG, encoded.per_channel(torch.int8))
    assert answers(codes, 2, **IN_BFLOAT16) == answers(codes, 1, **IN_BFLOAT16)


def test_ranks_convert_their_parts_to_int8(zoo):
    options = IN_BFLOAT16 | dict(weights="int8")
    assert answers(zoo("llama"), 2, **options) == answers(zoo("llama"), 1, **options)


def test_each_rank_has_its_rows_or_columns_of_codes(tmp_path):
    """Of FP8 layers, which a GPU multiplies as they are."""
    source = model_zoo.build("llama", tmp_path, **SIZES)
    folder = fp8_checkpoints.write(source, tmp_path / "fp8", fp8_checkpoints.COMPRESSED)
    spec, args = ModelSpec.from_checkpoint(folder), EngineArgs(tensor_parallel=2)
    whole = load_model(spec, "cpu", "bfloat16", "fp8").get_submodule("model.layers.0.mlp")
    parts = [
        load_model(
            rank_spec(spec, args), "cpu", "bfloat16", "fp8", RankGroup(rank, 2), num_splits=2
        ).get_submodule("model.layers.0.mlp")
        for rank in range(2)
    ]
    for field in ("weight", "weight_scale"):
        gates = torch.cat([getattr(part.gate_proj, field) for part in parts])
        assert torch.equal(gates.float(), getattr(whole.gate_proj, field).float())
    down = [part.down_proj.parts[0] for part in parts]
    codes = torch.cat([part.weight.float() for part in down], dim=1)
    assert torch.equal(codes, whole.down_proj.weight.float())
    for part in down:
        assert torch.equal(part.weight_scale, whole.down_proj.weight_scale)


def test_a_part_that_ends_within_a_block_is_refused(zoo, tmp_path):
    codes, _ = encoded.write(
        zoo("llama"), tmp_path, encoded.BLOCK_CONFIG, encoded.fp8_blocks("_scale_inv")
    )
    spec, args = ModelSpec.from_checkpoint(codes), EngineArgs(tensor_parallel=2)
    with pytest.raises(CheckpointError, match="weight_scale_inv' has a scale for"):
        load_model(rank_spec(spec, args), "cpu", "float32", "auto", RankGroup(0, 2), num_splits=2)


FOUR_BITS = [
    ("gptq", 32, False, {}),
    ("gptq", -1, True, {}),
    ("awq", 32, False, {}),
    ("compressed-tensors", 32, True, {}),
    ("compressed-tensors", 64, False, {}),
    ("compressed-tensors", -1, True, {}),
]


def in_four_bits(folder: Path, method: str, size: int, symmetric: bool, **changes: Any):
    """A checkpoint, and the same with dequantised weights."""
    source = model_zoo.build("qwen3", folder, hidden_size=128, intermediate_size=256, head_dim=32)
    config = w4_checkpoints.config_of(method, size, symmetric, **changes)
    is_sorted = not changes.get("desc_act")
    return w4_checkpoints.write(
        source, folder / "codes", config, size=size, symmetric=symmetric, sorted_inputs=is_sorted
    )


@pytest.mark.parametrize(("method", "size", "symmetric", "changes"), FOUR_BITS)
def test_each_rank_has_its_part_of_four_bits(tmp_path, method, size, symmetric, changes):
    codes, plain = in_four_bits(tmp_path, method, size, symmetric, **changes)
    weights = load_file(plain / "model.safetensors")
    spec, args = ModelSpec.from_checkpoint(codes), EngineArgs(tensor_parallel=2)
    for rank in range(2):
        group = RankGroup(rank, 2)
        model = load_model(rank_spec(spec, args), "cpu", "float32", "auto", group, num_splits=2)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, W4Linear)}
        assert len(layers) == 7 * spec.num_layers
        for name, layer in layers.items():
            whole = whole_layers(model)[name]
            part = weights[f"{whole.name}.weight"][slice(*whole.rows), slice(*whole.columns)]
            found = w4_linear.dequantise(layer.words, layer.scales, layer.zeros)
            assert torch.equal(found, part), name


def test_ranks_multiply_their_parts_of_four_bits(tmp_path):
    codes, _ = in_four_bits(tmp_path, *FOUR_BITS[0][:3])
    assert answers(codes, 2, **IN_BFLOAT16) == answers(codes, 1, **IN_BFLOAT16)


def test_columns_of_groups_in_any_order_are_refused(tmp_path):
    """With `desc_act` each rank would have columns of all groups."""
    codes, _ = in_four_bits(tmp_path, "gptq", 32, False, desc_act=True)
    spec, args = ModelSpec.from_checkpoint(codes), EngineArgs(tensor_parallel=2)
    with pytest.raises(CheckpointError, match="g_idx must"):
        load_model(rank_spec(spec, args), "cpu", "float32", "auto", RankGroup(0, 2), num_splits=2)
