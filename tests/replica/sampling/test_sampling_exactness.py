"""What a request asks of its sampling holds for its whole history, however the request is computed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from step_driver import engine_config

from quire.protos.sampling_params import SamplingParams
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.core.request import Request
from quire.replica.runner.runner import Runner
from quire.replica.scheduler.scheduler import Scheduler

NAME = "llama"
MAX_TOKENS = 40
PENALTIES = dict(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3)
CASES = {
    "penalties": PENALTIES,
    "few ids": dict(**PENALTIES, allowed_token_ids=tuple(range(3, 40)), min_tokens=9),
    "bias": dict(logit_bias=tuple((i, 1.5) for i in range(50, 90)), min_p=0.02),
    "everything": dict(
        **PENALTIES,
        min_p=0.01,
        top_p=0.95,
        top_k=50,
        logit_bias=((5, 3.0), (9, -4.0)),
        bad_words=((7,), (5, 5), (5, 11)),
    ),
}


@pytest.fixture(scope="module")
def runner(zoo) -> Runner:
    spec = ModelSpec.from_checkpoint(zoo(NAME))
    return Runner.from_config(engine_config(spec, max_running_requests=16), spec)


def run(runner: Runner, requests: list[Request], **changes) -> dict:
    """Tokens of every request, in one engine with a fresh cache."""
    runner.pool.poison()
    config = dataclasses.replace(runner.config, **{"prefix_caching": True, **changes})
    scheduler = Scheduler(config)
    tokens = {request.key: [] for request in requests}
    for request in requests:
        assert scheduler.add(request) is None
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            assert delta.facts.error is None, delta.facts.error
            tokens[delta.key] += delta.token_ids
        scheduler.check()
    run.num_preemptions = scheduler.book.counters.num_preemptions
    return tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


def params(case: str, **changes) -> SamplingParams:
    base = dict(max_tokens=MAX_TOKENS, temperature=1.0, seed=11, ignore_eos=True)
    return SamplingParams(**{**base, **CASES[case], **changes})


def strangers(count: int) -> list[Request]:
    """Requests that ask for all kinds of sampling, and for none."""
    kinds = [dict(temperature=0.0), dict(temperature=1.3), *CASES.values()]
    return [
        Request(
            ("stranger", i),
            prompt(5 + 7 * i, seed=i + 1),
            SamplingParams(max_tokens=9 + 3 * i, seed=i, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


def run_with_logprobs(runner: Runner, requests: list[Request], **changes) -> list[tuple]:
    """(token, its log-probability, likeliest ids, theirs) of the request "a", bit for bit."""
    runner.pool.poison()
    scheduler = Scheduler(dataclasses.replace(runner.config, prefix_caching=True, **changes))
    told = []
    for request in requests:
        assert scheduler.add(request) is None
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            if delta.key == "a":
                assert len(delta.facts.logprobs) == len(delta.token_ids) == 1
                told.append((delta.token_ids[0], *delta.facts.logprobs[0]))
            elif delta.key[0] == "stranger":
                assert delta.facts.logprobs is None
    run_with_logprobs.num_preemptions = scheduler.book.counters.num_preemptions
    return told


@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_logprobs_are_the_models_own_bit_for_bit_however_computed(runner, zoo, num_top):
    ids, asked = prompt(45), params("everything", logprobs=num_top)
    expected = run_with_logprobs(runner, [Request("a", ids, asked)])
    neighbours = [*strangers(5), Request(("other", 1), prompt(8), params("bias", logprobs=20))]
    assert run_with_logprobs(runner, [*neighbours, Request("a", ids, asked)]) == expected
    assert run_with_logprobs(runner, [Request("a", ids, asked)], max_batch_tokens=7) == expected
    moved = Request("a", ids + [t for t, *_ in expected[:17]], asked, num_emitted=17)
    assert run_with_logprobs(runner, [moved]) == expected[17:]
    small = dict(num_blocks=8, safety_margin=0.0)
    assert run_with_logprobs(runner, [*strangers(3), Request("a", ids, asked)], **small) == expected
    assert run_with_logprobs.num_preemptions > 0

    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo(NAME), dtype=torch.float32, attn_implementation="eager"
    )
    output = [token for token, *_ in expected]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1].double()
    for row, (token, logprob, top_ids, top) in zip(logits.log_softmax(-1), expected, strict=True):
        assert abs(float(row[token]) - logprob) < 1e-4
        assert top_ids == row.argsort(descending=True)[:num_top].tolist()
        np.testing.assert_allclose(top, row[top_ids].numpy(), atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same_however_they_are_computed(runner, case):
    ids = prompt(45)
    expected = run(runner, [Request("a", ids, params(case))])["a"]
    assert len(expected) == MAX_TOKENS

    batched = run(runner, [*strangers(6), Request("a", ids, params(case)), *strangers(0)])
    assert batched["a"] == expected, "among strangers"

    for budget in (2, 7, 16):
        chunked = run(runner, [Request("a", ids, params(case))], max_batch_tokens=budget)
        assert chunked["a"] == expected, f"in chunks of {budget}"

    pair = [Request(key, ids, params(case)) for key in "ab"]
    shared = run(runner, pair)
    assert shared["a"] == shared["b"] == expected, "with a prefix hit"

    for emitted in (1, 16, MAX_TOKENS - 1):
        moved = Request("a", ids + expected[:emitted], params(case), num_emitted=emitted)
        assert run(runner, [moved])["a"] == expected[emitted:], f"migrated after {emitted}"

    small = run(
        runner, [*strangers(3), Request("a", ids, params(case))], num_blocks=8, safety_margin=0.0
    )
    assert run.num_preemptions > 0
    assert small["a"] == expected, "after soft resets"


def test_seeds_and_choices_are_other_streams_and_come_again(runner):
    def of(**changes):
        return run(runner, [Request("a", prompt(20), params("penalties", **changes))])["a"]

    assert of() == of()
    assert of() != of(seed=12)
    assert of() != of(choice=1)


def test_penalties_weigh_the_true_history(runner, zoo):
    """Greedy tokens equal those of a naive loop over the whole history and transformers' own logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo(NAME), dtype=torch.float32, attn_implementation="eager"
    )
    ids = prompt(30)
    greedy = params("penalties", temperature=0.0)
    output = run(runner, [*strangers(3), Request("a", ids, greedy)])["a"]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1].double()
    logits = logits.clone()
    for n, row in enumerate(logits):
        for token in set(ids) | set(output[:n]):
            row[token] = row[token] / 1.4 if row[token] > 0 else row[token] * 1.4
        for token in set(output[:n]):
            row[token] -= 0.6 + 0.3 * output[:n].count(token)
        assert int(row.argmax()) == output[n]
    plain = run(runner, [Request("a", ids, SamplingParams(max_tokens=40, temperature=0.0))])["a"]
    assert plain != output


def test_allowed_ids_and_bad_words_are_kept(runner):
    words = ((3,), (4, 5), (5, 4), (4, 4, 4), (6, 4, 6))
    constrained = params(
        "penalties", allowed_token_ids=(3, 4, 5, 6), bad_words=words, repetition_penalty=1.0
    )
    output = run(runner, [*strangers(3), Request("a", prompt(20), constrained)])["a"]
    assert set(output) == {4, 5, 6}
    for word in words:
        cuts = [tuple(output[i : i + len(word)]) for i in range(len(output))]
        assert word not in cuts


def test_a_request_that_talks_itself_into_a_corner_ends_alone(runner):
    """After 5 only 5 is allowed, and 5 5 is not: nobody else is harmed, and its blocks come back."""
    runner.pool.poison()
    scheduler = Scheduler(runner.config)
    cornered = SamplingParams(max_tokens=9, allowed_token_ids=(5,), bad_words=((5, 5),))
    for request in (*strangers(3), Request("a", prompt(9), cornered)):
        assert scheduler.add(request) is None
    last = {}
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            last[delta.key] = delta
        scheduler.check()
    error = last.pop("a").facts.error
    assert (error.code, error.field) == ("invalid_request", "allowed_token_ids")
    assert "output index 1" in error.message
    assert {delta.finish_reason for delta in last.values()} <= {"length", "stop"}
    assert scheduler.num_running == 0
