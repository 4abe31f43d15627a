"""Ranks of models with latent attention or recurrent layers, with adapters, and with a draft model.

Each compares two ranks, or four, with one rank that adds the same parts of sums, bit for bit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import save_adapter, save_merged
from model_zoo import UNLIKE_NAMES, build, build_proven, build_unlike
from rank_engines import (
    FEW_BLOCKS,
    SHARED,
    adapted,
    always_draft,
    engine,
    of_one_rank,
    params,
    prompts,
    told,
)

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.replica import engine as engine_module
from quire.replica.proof.model_proof import save_random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "proof"))
from variants import tiny_of

# What their plans divide besides the MLP; the recurrent layers' own bits are fixed under `deterministic` only.
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},  # experts, not attention
    "glm4_moe_lite": {},  # heads of latent attention
    "mimo_v2_flash": {},  # sinks
    "qwen3_next": dict(deterministic=True),  # inputs of recurrent layers, gathered
}


@pytest.fixture(scope="module")
def proven(tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("proven") / name for name in KINDS}
    for name, folder in folders.items():
        (build_unlike if name in UNLIKE_NAMES else build_proven)(name, folder)
    return folders


@pytest.mark.parametrize("name", KINDS)
def test_ranks_generate_the_bits_of_one(proven, name):
    folder, options = proven[name], KINDS[name]
    expected, scored, forked = of_one_rank(folder, 2, **options)
    with engine(folder, 2, 2, **options) as ranks:
        for _ in range(2):
            outputs = ranks.generate(prompts(), params())
            assert told(outputs) == expected
        assert outputs[-1].num_cached_tokens >= SHARED
        assert told(ranks.generate(prompts(), params(prompt_logprobs=2))) == scored
        assert told(ranks.generate(prompts(), params(), n=2)) == forked
        ranks.check()


def test_states_and_blocks_are_preempted_and_restored_by_all_ranks(proven):
    """Too few blocks for all requests. Snapshots of recurrent states go to host memory and back, as blocks do."""
    options = KINDS["qwen3_next"]
    expected, *_ = of_one_rank(proven["qwen3_next"], 2, **options)
    tier = dict(node_pool_gib=0.02, restore="always", num_blocks=FEW_BLOCKS, safety_margin=0.0)
    with engine(proven["qwen3_next"], 2, 2, **options, **tier) as ranks:
        assert ranks.config.num_snapshots and ranks.config.num_host_snapshots
        for _ in range(2):
            assert told(ranks.generate(prompts(), params())) == expected
        assert ranks.load().num_preemptions > 0
        assert ranks.telemetry()["tiers"]["num_restored"] > 0
        ranks.check()


@pytest.mark.parametrize("name", ["mixtral", "mistral4"])
def test_experts_of_any_name_and_in_one_tensor_are_divided(tmp_path, name):
    """The tokens are also those of the model that is not divided: both ranks could read a wrong part alike."""
    folder = tmp_path / name
    folder.mkdir()
    save_random_model(tiny_of(name, tmp_path / "config" / name), folder)
    expected, *_ = of_one_rank(folder, 2)
    with engine(folder, 2, 2) as ranks:
        assert told(ranks.generate(prompts(), params())) == expected
    with engine(folder, 1, 1) as whole:
        found = [o.token_ids for o in whole.generate(prompts(), params())]
    assert found == [token_ids for token_ids, *_ in expected]


@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 2), ("llama", 4), ("phi3", 2)])
def test_ranks_add_their_parts_of_adapters(zoo, tmp_path, name, num_ranks):
    """One slot, so that each adapter is loaded again; its folder is gone then."""
    folder = zoo(name)
    folders = [
        save_adapter(tmp_path / "all", folder, seed=1),
        save_adapter(tmp_path / "some", folder, seed=2, rank=7, targets=("q_proj", "down_proj")),
    ]
    refs = [None, *(AdapterRef.of_folder(path.name, str(path)) for path in folders)]
    options = dict(max_loaded_adapters=1, max_adapter_rank=8)
    with engine(folder, 1, num_ranks, **options) as alone:
        expected = adapted(alone, refs)
    assert len({str(answer) for answer in expected}) == len(expected)
    merged = save_merged(tmp_path / "merged", folder, folders[0])
    with engine(folder, num_ranks, num_ranks, **options) as ranks:
        assert adapted(ranks, refs) == expected
        for path in folders:
            shutil.rmtree(path)
        assert adapted(ranks, refs) == expected
        ranks.check()
    with engine(merged, 1, 1) as whole:
        found = [o.token_ids for o in whole.generate(prompts(), params())]
    assert found == [token_ids for token_ids, *_ in expected[1]]


def test_an_adapter_that_cannot_be_applied_costs_ranks_nothing(zoo, tmp_path):
    folder = zoo("llama")
    path = save_adapter(tmp_path / "other", build("qwen3_moe", tmp_path), targets=("q_proj",))
    with engine(folder, 2, 2, max_loaded_adapters=1, max_adapter_rank=8) as ranks:
        before = told(ranks.generate(prompts(), params()))
        with pytest.raises(InvalidRequest, match="q_proj: lora_A and lora_B must be"):
            ranks.adapter(AdapterRef.of_folder("other", str(path)))
        assert told(ranks.generate(prompts(), params())) == before


def test_a_draft_model_on_the_leader_drafts_for_all_ranks(zoo, monkeypatch):
    """The draft model is the served one, so that steps give several tokens."""
    folder = zoo("llama")
    greedy = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    options = dict(speculation=dict(method="draft_model", draft_model=str(folder)))
    with engine(folder, 1, 2) as alone:
        expected = [o.token_ids for o in alone.generate(prompts(), greedy)]
        num_steps = alone.telemetry()["host"]["num_steps"]
    monkeypatch.setattr(engine_module, "open_draft_source", always_draft)
    with engine(folder, 2, 2, **options) as ranks:
        assert [o.token_ids for o in ranks.generate(prompts(), greedy)] == expected
        assert ranks.telemetry()["host"]["num_steps"] < num_steps / 1.5
        ranks.check()
