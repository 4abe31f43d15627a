"""Greedy tokens equal transformers' `generate`; logits are equal bit for bit however a request is computed."""

from __future__ import annotations

import model_zoo
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_driver import Driver, make_runner

from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.core.request import Request
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.scheduler.scheduler import Scheduler

LENGTHS = (70, 1, 33, 16, 17, 100)  # longer than a chunk and a window, one token, block edges
NEW_TOKENS = 12


def prompts_of(vocab_size: int, lengths=LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab_size, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def runners(zoo):
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = make_runner(zoo(name))
        cache[name].pool.poison()
        return cache[name]

    return get


def reference_tokens(path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None  # run to max_tokens, as the driver does
    options = transformers.GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        results.append(out[0, len(prompt) :].tolist())
    return results


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_greedy_tokens_equal_generate(zoo, runners, name):
    runner = runners(name)
    driver = Driver(runner)
    prompts = prompts_of(runner.spec.vocab_size)
    sequences = [driver.add(p, NEW_TOKENS) for p in prompts]
    tokens = driver.generate(sequences, NEW_TOKENS, chunk=19)
    assert tokens == reference_tokens(zoo(name), prompts, NEW_TOKENS)
    assert len({t for row in tokens for t in row}) > 20, "the models must not repeat one token"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe"])
def test_without_deterministic_tokens_still_equal_generate(zoo, name):
    runner = make_runner(zoo(name), deterministic=False)
    driver = Driver(runner)
    prompts = prompts_of(runner.spec.vocab_size)
    sequences = [driver.add(p, NEW_TOKENS) for p in prompts]
    tokens = driver.generate(sequences, NEW_TOKENS, chunk=64)
    assert tokens == reference_tokens(zoo(name), prompts, NEW_TOKENS)


def alone(runner, prompt, max_tokens, **params) -> tuple[list[int], np.ndarray]:
    """Tokens and logits [max_tokens, vocab] of one request by itself, its prompt in one chunk."""
    runner.pool.poison()
    driver = Driver(runner, seed=3)
    sequence = driver.add(prompt, max_tokens, **params)
    (tokens,) = driver.generate([sequence], max_tokens, chunk=10_000)
    return tokens, np.stack(sequence.logits)


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_logits_are_bit_equal_alone_and_in_a_ragged_batch(runners, name):
    runner = runners(name)
    prompts = prompts_of(runner.spec.vocab_size)
    expected = [alone(runner, p, 6)[1] for p in prompts]
    runner.pool.poison()
    driver = Driver(runner)
    sequences = [driver.add(p, 6) for p in prompts]
    driver.generate(sequences, 6, chunk=13)
    for sequence, logits in zip(sequences, expected, strict=True):
        assert np.isfinite(logits).all()
        np.testing.assert_array_equal(np.stack(sequence.logits), logits)


@pytest.mark.parametrize("name", ["llama3_rope", "mistral", "gemma3", "gpt_oss"])
def test_logits_are_bit_equal_when_chunked_at_every_boundary(runners, name):
    runner = runners(name)
    (prompt,) = prompts_of(runner.spec.vocab_size, [67])
    _, expected = alone(runner, prompt, 2)
    for boundary in range(1, len(prompt)):
        runner.pool.poison()
        driver = Driver(runner, seed=boundary)
        sequence = driver.add(prompt, 2)
        driver.advance([(sequence, boundary)])
        assert not sequence.logits
        driver.generate([sequence], 2, chunk=10_000)
        np.testing.assert_array_equal(np.stack(sequence.logits), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe"])
def test_decoding_a_prompt_token_by_token_equals_prefilling_it(runners, name):
    runner = runners(name)
    (prompt,) = prompts_of(runner.spec.vocab_size, [140])
    _, expected = alone(runner, prompt, 3)
    runner.pool.poison()
    driver = Driver(runner)
    sequence = driver.add(prompt, 3)
    driver.generate([sequence], 3, chunk=1)
    np.testing.assert_array_equal(np.stack(sequence.logits), expected)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_any_schedule_gives_the_same_sampled_tokens_and_bits(runners, lengths, seed):
    runner = runners("llama")
    rng = np.random.default_rng(seed)
    prompts = prompts_of(runner.spec.vocab_size, lengths)
    params = dict(temperature=1.0, top_p=0.9, top_k=30)
    expected = [alone(runner, p, 4, seed=i, **params) for i, p in enumerate(prompts)]
    runner.pool.poison()
    driver = Driver(runner, seed=seed)
    sequences = [driver.add(p, 4, seed=i, **params) for i, p in enumerate(prompts)]
    ends = [len(p) + 4 for p in prompts]
    while running := [s for s, end in zip(sequences, ends, strict=True) if len(s.tokens) < end]:
        counts = [int(rng.integers(0, min(len(s.tokens) - s.computed, 40) + 1)) for s in running]
        if any(counts):
            driver.advance([(s, n) for s, n in zip(running, counts, strict=True) if n])
    for sequence, (tokens, logits) in zip(sequences, expected, strict=True):
        assert sequence.tokens[-4:] == tokens
        np.testing.assert_array_equal(np.stack(sequence.logits), logits)


def test_bfloat16_runs_and_is_close_to_float32(zoo, runners):
    exact = runners("llama")
    (prompt,) = prompts_of(exact.spec.vocab_size, [70])
    _, expected = alone(exact, prompt, 1)
    runner = make_runner(zoo("llama"), dtype="bfloat16", deterministic=False)
    _, logits = alone(runner, prompt, 1)
    # 8 bits of mantissa over three layers: a few per cent of the logits' spread.
    assert np.abs(logits - expected).max() < 0.1 * expected.std() * 4
    assert np.corrcoef(logits[0], expected[0])[0, 1] > 0.995


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "llama"])
def test_a_scheduled_engine_on_a_small_cache_equals_generate_cold_and_warm(zoo, name):
    """Chunks, soft resets, prefix hits and blocks out of the window; what nobody owns is NaN at every step."""
    spec = ModelSpec.from_checkpoint(zoo(name))
    # Half of what the prompts would need at once.
    num_blocks = sequence_blocks(spec.groups, max(LENGTHS) + NEW_TOKENS, 24, 8) * 3 // 2
    runner = make_runner(
        zoo(name), block_size=8, num_blocks=num_blocks, max_batch_tokens=24, prefix_caching=True
    )
    scheduler = Scheduler(runner.config)
    prompts = prompts_of(runner.spec.vocab_size)
    prompts.append(prompts[0][:64] + prompts[1] + prompts[2])
    expected = reference_tokens(zoo(name), prompts, NEW_TOKENS)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    num_cached = []
    for _ in range(2):
        outputs = {i: [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            assert scheduler.add(Request(i, prompt, params)) is None
        while (plan := scheduler.plan(0.0)) is not None:
            poison_what_nobody_may_read(scheduler, plan, runner)
            for delta in scheduler.commit(plan, runner.run(plan), 0.0):
                assert delta.facts.error is None
                outputs[delta.key] += delta.token_ids
            scheduler.check()
        assert [outputs[i] for i in range(len(prompts))] == expected
        num_cached.append(scheduler.book.counters.num_prefix_tokens_hit)
    assert num_cached[1] > num_cached[0]


def poison_what_nobody_may_read(scheduler, plan, runner):
    owned = {b for row in scheduler.snapshot()["rows"] for b in row["blocks"]}
    owned |= set((plan.slots // runner.config.block_size).ravel().tolist())
    for block in range(runner.config.num_blocks):
        if block not in owned and not scheduler.memory.blocks.has_content(block):
            runner.pool.data[block] = float("nan")
