"""Embeddings equal transformers' hidden states, bit for bit the same however a prompt is computed.

Under `deterministic: true`: alone, among strangers that generate, chunked, on prefix hits, and after preemption.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from step_driver import make_runner

from quire.protos.errors import ContextLengthExceeded, InvalidRequest
from quire.protos.sampling_params import POOLINGS, SamplingParams
from quire.protos.wire import TokenDelta
from quire.replica import Engine
from quire.replica.core.request import FinishReason, Request, validate
from quire.replica.runner.runner import Runner
from quire.replica.sampling.pooling import sum_exactly
from quire.replica.scheduler.scheduler import Scheduler

LENGTH = 43
BLOCK = 16


@pytest.fixture(scope="module")
def runners(zoo):
    made: dict[str, Runner] = {}

    def get(name: str) -> Runner:
        if name not in made:
            made[name] = make_runner(
                zoo(name), max_running_requests=40, max_waiting_requests=64, max_batch_tokens=128
            )
        return made[name]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


def asked(pooling: str, length: int = LENGTH) -> Request:
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    return Request("a", prompt(length), params)


def strangers(count: int, first: int = 0) -> list[Request]:
    return [
        Request(
            ("stranger", i),
            prompt(3 + 5 * i % 61, seed=100 + i),
            SamplingParams(max_tokens=4 + i % 9, temperature=i % 3 / 2, seed=i),
        )
        for i in range(first, first + count)
    ]


def run(scheduler: Scheduler, runner: Runner, requests: list[Request]) -> list[TokenDelta]:
    """The deltas of all requests; after each step the scheduler's records agree."""
    deltas: list[TokenDelta] = []
    for request in requests:
        assert scheduler.add(request) is None
    while (plan := scheduler.plan(0.0)) is not None:
        deltas += scheduler.commit(plan, runner.run(plan), 0.0)
        scheduler.check()
    scheduler.check_idle()
    assert not any(delta.facts.error for delta in deltas)
    return deltas


def embedding(scheduler: Scheduler, runner: Runner, requests: list[Request]) -> np.ndarray:
    """The embedding of "a", [hidden size] float32."""
    (delta,) = (delta for delta in run(scheduler, runner, requests) if delta.key == "a")
    assert (delta.index, delta.token_ids) == (0, [])
    assert delta.finish_reason == FinishReason.STOP and delta.facts.num_output_tokens == 0
    assert delta.facts.embedding is not None and delta.facts.embedding.dtype == np.float32
    return delta.facts.embedding


def fresh(runner: Runner, **changes: object) -> Scheduler:
    runner.pool.poison()
    return Scheduler(dataclasses.replace(runner.config, **{"prefix_caching": True, **changes}))


def reference(path, pooling: str, length: int) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        out = model(torch.tensor([prompt(length)]), output_hidden_states=True)
    hidden = out.hidden_states[-1][0]
    return (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# One call for all layers and the output head, windows, sinks, experts.
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_is_that_of_transformers(zoo, runners, name, pooling):
    runner = runners(name)
    for length in (1, BLOCK, LENGTH):
        found = embedding(fresh(runner), runner, [asked(pooling, length)])
        expected = reference(zoo(name), pooling, length)
        assert cosine(found, expected) >= 0.999999
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_recurrent_model_has_embeddings(tmp_path, pooling):
    config = transformers.Lfm2Config(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], vocab_size=128,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    expected = reference(tmp_path, pooling, LENGTH)
    options = dict(dtype="float32", num_threads=1, num_blocks=64, max_batch_tokens=24)
    with Engine(model=str(tmp_path), device="cpu", prove=False, **options) as engine:
        cold, warm = (
            *engine.generate([prompt(LENGTH)], SamplingParams(pooling=pooling)),
            *engine.generate([prompt(LENGTH)], SamplingParams(pooling=pooling)),
        )
    assert cosine(cold.embedding, expected) >= 0.999999
    assert warm.embedding.tobytes() == cold.embedding.tobytes()
    # A prefix comes with the states at its end.
    assert cold.num_cached_tokens == 0 and (warm.num_cached_tokens > 0) == (pooling == "last")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bits_are_equal_in_any_company_and_on_any_way(runners, name, pooling):
    runner = runners(name)
    expected = embedding(fresh(runner), runner, [asked(pooling)]).tobytes()

    def bits(scheduler: Scheduler, *others: Request) -> bytes:
        return embedding(scheduler, runner, [*others, asked(pooling)]).tobytes()

    assert bits(fresh(runner), *strangers(24)) == expected, "among strangers that generate"
    for budget in (1, 7, 16, LENGTH - 1):
        assert bits(fresh(runner, max_batch_tokens=budget)) == expected, f"chunks of {budget}"

    scheduler = fresh(runner)
    assert bits(scheduler) == expected, "cold"
    hits = {"last": LENGTH - LENGTH % BLOCK, "mean": 0}[pooling]
    assert bits(scheduler) == expected, "warm"
    assert scheduler.book.counters.num_prefix_tokens_hit == hits

    scheduler = fresh(runner, num_blocks=6 * len(runner.config.groups), safety_margin=0.0)
    growing = SamplingParams(max_tokens=30, ignore_eos=True)
    crowd = [Request(("stranger", i), prompt(14, seed=i), growing) for i in range(3)]
    assert bits(scheduler, *crowd) == expected, "among requests that are preempted"
    assert scheduler.book.counters.num_preemptions > 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_prompt_is_pooled_once(runners, pooling):
    runner = runners("llama")
    expected = embedding(fresh(runner), runner, [asked(pooling)]).tobytes()
    for caching in (True, False):
        for steps in (1, 2, 4):
            scheduler = fresh(runner, max_batch_tokens=9, prefix_caching=caching)
            request = asked(pooling)
            scheduler.add(request)
            for _ in range(steps):
                plan = scheduler.plan(0.0)
                assert not len(scheduler.commit(plan, runner.run(plan), 0.0))
            scheduler.book.preempt(request)
            assert embedding(scheduler, runner, []).tobytes() == expected


@pytest.mark.parametrize("pooling", POOLINGS)
def test_steps_ahead_give_the_same_bits_and_sample_nothing(runners, pooling):
    runner = runners("llama")
    expected = embedding(fresh(runner), runner, [asked(pooling)]).tobytes()
    scheduler = fresh(runner, max_batch_tokens=9)
    for request in [*strangers(3), asked(pooling)]:
        scheduler.add(request)
    found, in_flight = [], []
    while True:
        plan = scheduler.plan(0.0)
        if plan is not None:
            in_flight.append((plan, runner.launch(plan)))
        if not in_flight:
            break
        if plan is None or len(in_flight) == 2:
            plan, launched = in_flight.pop(0)
            for delta in scheduler.commit(plan, runner.collect(launched), 0.0):
                if delta.key == "a":
                    found.append(delta.facts.embedding.tobytes())
    assert found == [expected]
    scheduler.check_idle()

    scheduler = fresh(runner)
    scheduler.add(asked(pooling))
    plan = scheduler.plan(0.0)
    assert len(plan.sampling.token_index) == 0
    assert [(t.is_last, t.num_computed) for t in plan.pooling] == [(True, LENGTH)]


def test_a_request_that_runs_alone_and_one_that_leaves(runners):
    runner = runners("llama")
    expected = embedding(fresh(runner), runner, [asked("mean")]).tobytes()
    alone = asked("mean")
    alone.alone = True
    scheduler = fresh(runner, max_batch_tokens=9)
    assert embedding(scheduler, runner, [*strangers(2), alone]).tobytes() == expected

    scheduler = fresh(runner)
    scheduler.add(asked("mean"))
    plan = scheduler.plan(0.0)
    result = runner.run(plan)
    ended = scheduler.abort("a")
    assert ended.finish_reason == FinishReason.ABORT and ended.facts.embedding is None
    assert not len(scheduler.commit(plan, result, 0.0))
    scheduler.check_idle()


def test_a_prompt_may_fill_the_whole_context(runners):
    config = runners("llama").config
    bound = config.max_model_len
    validate(asked("last", bound), config)
    with pytest.raises(
        ContextLengthExceeded, match=f"prompt: {bound + 1} tokens .* bound is {bound}"
    ):
        validate(asked("last", bound + 1), config)
    for params, message in (
        (SamplingParams(pooling="max"), "pooling must be one of last, mean, or empty, got 'max'"),
        (SamplingParams(pooling="mean", prompt_logprobs=1), "prompt_logprobs must be None with"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            validate(Request("a", [5], params), config)


def test_a_sum_does_not_depend_on_its_parts():
    rows = torch.randn(700, 33, generator=torch.Generator().manual_seed(0)) * 50
    whole = sum_exactly(rows, lambda part: part)
    for at in (1, 299, 699):
        parts = [sum_exactly(part, lambda part: part) for part in (rows[:at], rows[at:])]
        assert torch.equal(parts[0] + parts[1], whole)
    torch.testing.assert_close(whole, rows.double().sum(0), rtol=0, atol=700 * 2.0**-29)
