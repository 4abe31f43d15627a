"""Ranks of checkpoints in 8 bits: each reads its part of codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoded_checkpoints as encoded
import fp8_checkpoints
import model_zoo
import pytest
import torch
from rank_engines import engine, params, prompts, told

from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.config import EngineArgs
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
