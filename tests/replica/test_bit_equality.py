"""One request, bit for bit the same tokens and log-probabilities, of output and prompt, however it is computed.

Under `deterministic: true`: alone, among 64 strangers, chunked at every boundary, cold and warm, after soft resets,
and as the fork of another request; greedy and sampled.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from step_driver import make_runner

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.runner.runner import Runner
from quire.replica.scheduler.scheduler import Scheduler

MAX_TOKENS = 10
LENGTH = 43
SAMPLING = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=1.0, top_p=0.9, seed=77),
}
Told = tuple[list[tuple], list[tuple]]


@pytest.fixture(scope="module")
def runners(zoo):
    made: dict[str, Runner] = {}

    def get(name: str) -> Runner:
        if name not in made:
            made[name] = make_runner(
                zoo(name), max_running_requests=80, max_waiting_requests=128, max_batch_tokens=128
            )
        return made[name]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


def asked(kind: str, **changes) -> Request:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2, **SAMPLING[kind]
    )
    return Request("a", prompt(LENGTH), dataclasses.replace(params, **changes))


def strangers(count: int, first: int = 0) -> list[Request]:
    return [
        Request(
            ("stranger", i),
            prompt(3 + 5 * i % 61, seed=100 + i),
            SamplingParams(max_tokens=4 + i % 9, temperature=i % 3 / 2, top_p=0.8, seed=i),
        )
        for i in range(first, first + count)
    ]


def run(scheduler: Scheduler, runner: Runner, requests: list[Request]) -> Told:
    """(token, log-probability, likeliest ids, theirs) of "a"'s output, and the same with ranks of its prompt."""
    output, of_prompt = [], []
    request_a = next(request for request in requests if request.key == "a")
    for request in requests:
        assert scheduler.add(request) is None
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.commit(plan, runner.run(plan), 0.0):
            assert delta.facts.error is None, delta.facts.error
            if delta.key != "a":
                continue
            if (part := delta.facts.prompt_logprobs) is not None:
                assert not output, "the prompt is told before the first token"
                assert part.start == len(of_prompt) + request_a.params.prompt_logprobs_start
                tops = zip(part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
                columns = (part.token_ids, part.logprobs, part.ranks)
                of_prompt += zip(*(column.tolist() for column in columns), tops, strict=True)
            if delta.token_ids:
                output.append((*delta.token_ids, *delta.facts.logprobs[0]))
        scheduler.check()
    return output, of_prompt


def fresh(runner: Runner, **changes) -> Scheduler:
    runner.pool.poison()
    return Scheduler(dataclasses.replace(runner.config, **{"prefix_caching": True, **changes}))


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_bits_are_equal_in_any_company_and_on_any_way(runners, name, kind):
    runner = runners(name)
    expected = run(fresh(runner), runner, [asked(kind)])
    assert len(expected[0]) == MAX_TOKENS and len(expected[1]) == LENGTH - 1

    among = [*strangers(40), asked(kind), *strangers(24, first=40)]
    assert run(fresh(runner), runner, among) == expected, "among 64 strangers"

    scheduler = fresh(runner)
    for attempt in ("cold", "warm"):
        assert run(scheduler, runner, [asked(kind)]) == expected, attempt
        unscored = asked(kind, prompt_logprobs=None)
        assert run(scheduler, runner, [unscored]) == (expected[0], []), f"{attempt}, a prefix hit"
    assert scheduler.book.counters.num_prefix_tokens_hit == 2 * (LENGTH - LENGTH % 16)

    scheduler = fresh(runner, num_blocks=6 * len(runner.config.groups), safety_margin=0.0)
    growing = SamplingParams(max_tokens=30, ignore_eos=True)
    crowd = [Request(("stranger", i), prompt(14, seed=i), growing) for i in range(3)]
    assert run(scheduler, runner, [*crowd, asked(kind)]) == expected, "after soft resets"
    assert scheduler.book.counters.num_preemptions > 0

    for caching in (True, False):
        scheduler = fresh(runner, prefix_caching=caching)
        parent = asked(kind, prompt_logprobs=None, choice=1)
        parent.key = "parent"
        fork = asked(kind, prompt_logprobs=None)
        fork.fork_of = "parent"
        assert run(scheduler, runner, [parent, *strangers(5), fork]) == (expected[0], []), "forked"
        scored = asked(kind)  # computes its prompt for itself
        parent = asked(kind, prompt_logprobs=None, choice=1)
        parent.key = scored.fork_of = "parent"
        assert run(scheduler, runner, [parent, scored]) == expected, "a fork that is scored"


@pytest.mark.parametrize("start", [2, 17, 33, 34, LENGTH - 1])
def test_scores_from_a_start_position_are_those_of_the_whole_prompt(runners, monkeypatch, start):
    """Cold and warm, alone and in company, chunked and preempted. Blocks before the start come from the cache."""
    runner = runners("gemma3")  # sliding windows and full attention
    output, whole = run(fresh(runner), runner, [asked("greedy")])
    expected = output, whole[start - 1 :]
    changes = dict(prompt_logprobs_start=start)
    counts: list[int] = []
    real = runner._forward.logits
    monkeypatch.setattr(
        runner._forward, "logits", lambda hidden: (counts.append(len(hidden)), real(hidden))[1]
    )
    scheduler = fresh(runner)
    for cached in (0, (start - 1) // 16 * 16):
        counts.clear()
        hits = scheduler.book.counters.num_prefix_tokens_hit
        assert run(scheduler, runner, [asked("greedy", **changes)]) == expected
        assert scheduler.book.counters.num_prefix_tokens_hit - hits == cached
        assert sum(counts) == LENGTH - start + MAX_TOKENS, "no logits before the start"

    among = [*strangers(20), asked("greedy", **changes), *strangers(9, first=20)]
    assert run(scheduler, runner, among) == expected, "warm, among 29 strangers"
    for budget in (1, 7, 16):
        chunked = fresh(runner, max_batch_tokens=budget)
        assert run(chunked, runner, [asked("greedy", **changes)]) == expected, f"chunks of {budget}"
    scheduler = fresh(runner, num_blocks=6 * len(runner.config.groups), safety_margin=0.0)
    growing = SamplingParams(max_tokens=30, ignore_eos=True)
    crowd = [Request(("stranger", i), prompt(14, seed=i), growing) for i in range(3)]
    assert run(scheduler, runner, [*crowd, asked("greedy", **changes)]) == expected, "preempted"
    assert scheduler.book.counters.num_preemptions > 0


def test_a_start_after_the_prompt_has_nothing_to_tell(runners):
    runner = runners("llama")
    for start in (LENGTH, LENGTH + 1, 2**31 - 1):
        assert run(fresh(runner), runner, [asked("greedy", prompt_logprobs_start=start)])[1] == []


@pytest.mark.parametrize(("name", "kind"), [("llama", "sampled"), ("gpt_oss", "greedy")])
def test_bits_are_equal_when_the_prompt_is_cut_at_every_boundary(runners, name, kind):
    runner = runners(name)
    expected = run(fresh(runner), runner, [asked(kind)])
    for budget in range(1, LENGTH):
        told = run(fresh(runner, max_batch_tokens=budget), runner, [asked(kind)])
        assert told == expected, f"chunks of {budget}"


def test_bits_are_equal_when_a_soft_reset_cuts_the_prompt(runners):
    """A prompt that goes back to the queue half scored is told once, without gaps."""
    runner = runners("llama")
    expected = run(fresh(runner), runner, [asked("sampled")])
    for steps in (1, 2, 4):
        scheduler = fresh(runner, max_batch_tokens=9)
        request = asked("sampled")
        scheduler.add(request)
        parts = []
        for _ in range(steps):
            plan = scheduler.plan(0.0)
            parts += scheduler.commit(plan, runner.run(plan), 0.0)
        scheduler.book.preempt(request)
        told = []
        while (plan := scheduler.plan(0.0)) is not None:
            told += scheduler.commit(plan, runner.run(plan), 0.0)
        scores = [
            d.facts.prompt_logprobs for d in parts + told if d.facts.prompt_logprobs is not None
        ]
        assert [s.start for s in scores[1:]] == [s.start + len(s) for s in scores[:-1]]
        assert np.concatenate([s.logprobs for s in scores]).tolist() == [p[1] for p in expected[1]]
        output = [d.token_ids[0] for d in parts + told if d.token_ids]
        assert output == [o[0] for o in expected[0]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt_oss"])
def test_prompt_log_probabilities_are_those_of_a_full_forward(zoo, runners, name):
    """Soft-capped and scaled logits included, in slices of 5 rows of logits."""
    runner = runners(name)
    runner._forward._max_logits_rows = 5
    try:
        _, told = run(fresh(runner), runner, [asked("greedy")])
    finally:
        runner._forward._max_logits_rows = runner.config.max_running_requests
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo(name), dtype=torch.float32, attn_implementation="eager"
    )
    ids = prompt(LENGTH)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for position, (token, logprob, rank, (top_ids, top)) in enumerate(told):
        row = expected[position]
        assert token == ids[position + 1]
        assert abs(float(row[token]) - logprob) < 1e-4
        assert rank == int((row > row[token]).sum()) + 1
        assert top_ids == row.argsort(descending=True)[:2].tolist()
        np.testing.assert_allclose(top, row[top_ids].numpy(), atol=1e-4)


def test_no_more_rows_of_logits_exist_at_once_than_samples_may_take(runners, monkeypatch):
    runner = runners("llama")
    counts = []
    real = runner._forward.logits

    def counted(hidden):
        counts.append(len(hidden))
        return real(hidden)

    monkeypatch.setattr(runner._forward, "logits", counted)
    monkeypatch.setattr(runner._forward, "_max_logits_rows", 4)
    run(fresh(runner), runner, [asked("greedy")])
    assert max(counts) == 4
    assert sum(counts) == LENGTH - 1 + MAX_TOKENS


@pytest.mark.parametrize(
    ("field", "values"),
    [("prompt_logprobs", [-1, 21, True, 1.5]), ("prompt_logprobs_start", [0, 2**31, True, 1.5])],
)
def test_a_number_out_of_bounds_is_refused(runners, field, values):
    scheduler = fresh(runners("llama"))
    for value in values:
        error = scheduler.add(asked("greedy", **{field: value})).facts.error
        assert (error.code, error.field) == ("invalid_request", field)
        assert str(value) in error.message


def test_a_prompt_of_one_token_has_nothing_to_tell(runners):
    runner = runners("llama")
    request = Request("a", [5], SamplingParams(max_tokens=2, prompt_logprobs=3, logprobs=0))
    output, of_prompt = run(fresh(runner), runner, [request])
    assert (len(output), of_prompt) == (2, [])
