"""The proof accepts what the engine computes exactly, and refuses everything else by name."""

from __future__ import annotations

import functools
import json
import re

import pytest
from families import MODEL_TYPES, default_entries, write_config
from variants import TESTED_TYPES, sample_changes, tiny_of, variants_of

from quire.replica import Engine
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.proof import verdicts
from quire.replica.proof.model_proof import find_difference, tiny_entries

start = functools.partial(Engine, prove=False, num_threads=1)

# Global layers with heads of another size and number whose values are their keys, experts.
_GEMMA4 = dict(
    attention_k_eq_v=True,
    per_layer_config={
        layer: dict(head_dim=512, num_key_value_heads=1) for layer in (5, 11, 17, 23, 29)
    },
    num_kv_shared_layers=8,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)


def spec_of(tmp_path, model_type: str, **changes: object) -> ModelSpec:
    entries = {**default_entries(model_type), **changes}
    return ModelSpec.from_checkpoint(write_config(tmp_path / model_type, entries))


@pytest.mark.parametrize("model_type", TESTED_TYPES)
def test_a_class_that_the_engine_computes_exactly_is_served(tmp_path, model_type):
    tiny = tiny_of(model_type, tmp_path / model_type)
    assert find_difference({**tiny, **sample_changes(model_type, tiny)}, "cpu", start) is None


def test_the_variants_change_what_they_name(tmp_path):
    """A change that has no effect would prove the plain type again."""
    tiny = tiny_of("llama", tmp_path / "llama")
    changes = dict(variants_of("llama", tiny))
    assert len(changes) > 15
    assert not [name for name, entries in changes.items() if entries.items() <= tiny.items()]
    spec = ModelSpec.from_checkpoint(
        write_config(tmp_path / "changed", {**tiny, **sample_changes("llama", tiny)})
    )
    assert (spec.num_heads // spec.num_kv_heads, spec.head_dim) == (3, 32)
    assert spec.hidden_size != spec.num_heads * spec.head_dim


def test_layers_of_unequal_heads_that_share_keys_are_served(tmp_path):
    spec = spec_of(tmp_path, "gemma4_text", **_GEMMA4)
    entries = tiny_entries(spec)
    assert entries["num_kv_shared_layers"] and entries["per_layer_config"]
    assert find_difference(entries, "cpu", start) is None


def test_latents_without_a_low_rank_query_and_with_halves_rotated_are_served(tmp_path):
    spec = spec_of(tmp_path, "deepseek_v3", q_lora_rank=None, rope_interleave=False)
    assert {kind.token_elements for kind in spec.kinds} == {512 + 64}
    assert find_difference(tiny_entries(spec), "cpu", start) is None


@pytest.mark.parametrize(
    "model_type, changes, named",
    [
        # transformers' Llama ignores a window of 24 tokens, and its spec believes it.
        (
            "llama",
            dict(sliding_window=64, layer_types=["full_attention"] + ["sliding_attention"] * 31),
            r"model\.layers\.1\.self_attn \(LlamaAttention, sliding_attention\).*token 25\)",
        ),
        # Subtracts two attentions from each other.
        ("diffllama", {}, r"model\.layers\.0\.self_attn \(DiffLlamaAttention\)"),
    ],
)
def test_a_class_that_computes_something_else_is_refused(tmp_path, model_type, changes, named):
    spec = spec_of(tmp_path, model_type, **changes)
    difference = find_difference(tiny_entries(spec), "cpu", start)
    assert difference is not None and "log-probability of token" in difference
    assert re.search(f"the output of {named}", difference)


def test_a_module_that_reads_all_tokens_of_a_call_is_named(tmp_path, monkeypatch):
    """Fused layers do not hide it, and its own modules are right."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(product) - x.mean(1, keepdim=True)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    difference = find_difference(tiny_entries(spec_of(tmp_path, "llama")), "cpu", start)
    assert "the output of model.layers.0.mlp (LlamaMLP) differs" in str(difference)


def test_a_difference_in_the_output_head_is_named(tmp_path, monkeypatch):
    """Logits that depend on all tokens of a call."""
    from transformers import LlamaForCausalLM

    own = LlamaForCausalLM.forward

    def forward(self, *args, **options):
        output = own(self, *args, **options)
        output.logits = output.logits * output.logits.abs().mean()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    difference = find_difference(tiny_entries(spec_of(tmp_path, "llama")), "cpu", start)
    assert "so the output head does" in str(difference)


def test_a_class_with_an_attention_of_its_own_is_refused_by_this_reason(tmp_path):
    """RemBERT's is not causal without an entry for it; the first GPT keeps no keys and values."""
    reason = "does not compute all its attention through transformers' attention interface"
    difference = find_difference(tiny_entries(spec_of(tmp_path, "rembert")), "cpu", start)
    assert reason in str(difference) and "attention.self (RemBertSelfAttention)" in str(difference)
    with pytest.raises(CheckpointError, match=reason):
        find_difference(tiny_entries(spec_of(tmp_path, "openai-gpt")), "cpu", start)


@pytest.mark.parametrize(
    "model_type, changes",
    [
        # A bias by position; keys repeated for all heads before they are cached.
        ("falcon", dict(alibi=True, new_decoder_architecture=False, multi_query=False)),
        ("falcon", dict(new_decoder_architecture=True, num_kv_heads=8)),
    ],
)
def test_a_class_that_attends_itself_runs_row_by_row(tmp_path, model_type, changes):
    spec = spec_of(tmp_path, model_type, **changes)
    assert find_difference(tiny_entries(spec), "cpu", start) is None


def test_layers_with_query_heads_of_their_own_number_are_served(tmp_path):
    types = ["full_attention"] + ["sliding_attention"] * 3
    counts = dict(num_attention_heads_per_layer=[48, 64, 64, 64] * 10, sliding_window=512)
    entries = tiny_entries(spec_of(tmp_path, "laguna", layer_types=types * 10, **counts))
    assert len(set(entries["num_attention_heads_per_layer"])) == 2
    assert find_difference(entries, "cpu", start) is None


def test_cached_prompts_forks_and_preemption_are_part_of_the_proof(tmp_path):
    """The tiny engine must really do what the proof claims to compare."""
    seen = {}

    class Watched(Engine):
        def close(self):
            state = self.snapshot()
            seen["counters"] = self.call(lambda scheduler: scheduler.book.counters).result()
            seen["copied"] = state["steps"]["tiers"]
            super().close()

    spec = spec_of(tmp_path, "llama")
    run = functools.partial(Watched, prove=False, num_threads=1)
    assert find_difference(tiny_entries(spec), "cpu", run) is None
    assert seen["counters"].num_prefix_tokens_hit > 0
    assert seen["counters"].num_preemptions > 0


def test_a_recurrent_model_is_preempted_forked_and_restarted_from_snapshots_in_its_proof(tmp_path):
    seen = {}

    class Watched(Engine):
        def close(self):
            seen["counters"] = self.call(lambda scheduler: scheduler.book.counters).result()
            seen["events"] = self.call(lambda scheduler: scheduler.events.num_held).result()
            seen["num_slots"] = len(self._runner.states.data)
            seen["num_snapshots"] = self.config.num_snapshots
            super().close()

    types = ["conv", "full_attention"] * 8
    spec = spec_of(tmp_path, "lfm2", num_hidden_layers=16, layer_types=types)
    run = functools.partial(Watched, prove=False, num_threads=1)
    assert find_difference(tiny_entries(spec), "cpu", run) is None
    assert seen["counters"].num_preemptions > 0
    assert seen["counters"].num_prefix_tokens_hit > 0 and seen["events"] > 0
    assert (seen["num_slots"], seen["num_snapshots"]) == (17 + 64, 64)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """A function that checks a spec and returns how many engines that started."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    started = []

    def run(spec: ModelSpec, device: str = "cpu", with_ranks: bool = False) -> int:
        def count(**options):
            started.append(options)
            return start(**options)

        before = len(started)
        verdicts.check_model(spec, device, count, with_ranks)
        return len(started) - before

    return run


def test_a_verdict_is_kept_and_belongs_to_the_flags_of_the_configuration(checked, tmp_path):
    spec = spec_of(tmp_path, "qwen3")
    assert checked(spec) == 1
    assert checked(spec) == 0
    # Another size gives the same tiny model, another flag does not.
    sizes = dict(
        hidden_size=8192, num_attention_heads=64, num_key_value_heads=64, num_hidden_layers=64
    )
    assert checked(spec_of(tmp_path / "wide", "qwen3", **sizes, layer_types=None)) == 0
    assert checked(spec_of(tmp_path / "bias", "qwen3", attention_bias=True)) == 1


def test_a_refusal_is_kept_too_and_names_class_and_difference(checked, tmp_path):
    spec = spec_of(tmp_path, "diffllama")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"DiffLlamaForCausalLM.*log-probability of token"
        ):
            checked(spec)
    (file,) = (tmp_path / "cache" / "proofs").iterdir()
    assert "log-probability" in json.loads(file.read_text())["difference"]


def test_a_plan_that_divides_what_a_class_computes_over_all_features_is_refused(checked, tmp_path):
    """Gemma 3n keeps the largest inner features of its MLP, as many as mean and deviation of all say."""
    spec = spec_of(tmp_path, "gemma3n_text")
    assert checked(spec) == 1
    with pytest.raises(CheckpointError, match="other results on two ranks than transformers"):
        checked(spec, with_ranks=True)


def test_ranks_are_proven_once_and_apart(checked, tmp_path):
    spec = spec_of(tmp_path, "qwen3")
    assert checked(spec, with_ranks=True) == 2
    assert checked(spec, with_ranks=True) == 0
    assert checked(spec) == 0


def test_a_class_that_cannot_run_is_refused_by_the_module_that_fails(
    checked, tmp_path, monkeypatch
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        raise KeyError("of this class")

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(
        CheckpointError, match=r"KeyError: 'of this class' \(in LlamaMLP, layers\.0\.mlp\)"
    ):
        checked(spec_of(tmp_path, "llama"))


def test_a_folder_that_cannot_be_written_costs_only_the_next_proof(checked, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    spec = spec_of(tmp_path, "llama")
    assert checked(spec) == 1
    assert checked(spec) == 1


def test_a_broken_verdict_is_proven_again(checked, tmp_path):
    spec = spec_of(tmp_path, "llama")
    assert checked(spec) == 1
    (file,) = (tmp_path / "cache" / "proofs").iterdir()
    file.write_text("{")
    assert checked(spec) == 1
    assert json.loads(file.read_text())["difference"] is None


def test_the_built_in_model_needs_no_proof(checked):
    assert checked(ModelSpec.from_checkpoint(CHECKPOINT)) == 0


def test_an_engine_refuses_before_it_reads_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = write_config(tmp_path / "doge", default_entries("doge"))
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(CheckpointError, match="DogeForCausalLM"):
        Engine(model=str(folder), device="cpu")


def test_types_of_this_version_are_known():
    assert set(TESTED_TYPES) <= set(MODEL_TYPES) and len(set(TESTED_TYPES)) >= 25
