"""Steps that give a row none or several tokens, from a real engine to the client: the answer stays the same.

The engine's runner first records the token of each position. Then it gives the recorded tokens of several positions at
once, as an oracle would. The engine computes their KV in the next step; the token that it samples there must be the
recorded one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engine_transport import EngineTransport, make_service
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protos import ragged
from quire.protos.sampling_params import Grammar
from quire.protos.wire import TokenLogprob
from quire.replica import Engine
from quire.replica.core.step_plan import NO_TOKEN, StepPlan, StepResult
from quire.replica.loop import StepRunner
from quire.router.types import GenerationRequest, OutputDelta

REGEX = "[一-龥éüß😀-😏]{12,16}"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "stop string": {"stop": ("e ", ". "), "min_tokens": 9, "max_tokens": 60},
    "scores": {"logprobs": 2, "prompt_logprobs": 1, "stop": ("the",)},
    "stop id": {"stop_token_ids": tuple(range(3, 800, 7)), "min_tokens": 11},
    "choices": {"n": 3, "logprobs": 0},
    "grammar": {"grammar": Grammar("regex", REGEX, "regex"), "max_tokens": 80, "ignore_eos": False},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bad words": {"bad_words": (" the", " of the"), "logit_bias": ((40, 2.0),)},
}


class Oracle:
    """A `StepRunner` that gives tokens of later positions too, once it has seen them."""

    def __init__(self, runner: StepRunner):
        self._runner = runner
        # (seed, choice, position) to the token and its log-probability
        self.seen: dict[tuple[int, int, int], tuple[int, TokenLogprob | None]] = {}
        self.counts: list[int] = []  # numbers of tokens for the next rows; then one each
        self.num_ahead = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        return plan, self._runner.launch(plan)

    def collect(self, launched: Any) -> StepResult:
        plan, in_flight = launched
        result = self._runner.collect(in_flight)
        tokens: list[list[int]] = []
        scores: dict[int, TokenLogprob] = {}
        sampling = plan.sampling
        columns = (
            *(sampling.columns[name].tolist() for name in ("seed", "choice")),
            sampling.position.tolist(),
        )
        at = 0
        for i, (seed, choice, position) in enumerate(zip(*columns, strict=True)):
            own = (int(result.token_ids[i]), result.logprobs.get(i))
            if own[0] == NO_TOKEN:
                raise AssertionError("a row is stuck")
            assert self.seen.setdefault((seed, choice, position), own) == own
            count = self.counts.pop() if self.counts else 1
            new = [self.seen.get((seed, choice, position + j)) for j in range(count)]
            new = new[: new.index(None)] if None in new else new
            self.num_ahead += max(0, len(new) - 1)
            scores |= {at + j: score for j, (_, score) in enumerate(new) if score is not None}
            tokens.append([token for token, _ in new])
            at += len(new)
        flat = np.array([token for of_row in tokens for token in of_row], np.int64)
        cu = ragged.cumulated([len(of_row) for of_row in tokens])
        return dataclasses.replace(result, token_ids=flat, logprobs=scores, cu=cu)


class OracleEngine(Engine):
    def _equip(self, runner: StepRunner) -> tuple[StepRunner, Callable[[], float]]:
        self.oracle = Oracle(runner)
        return self.oracle, time.monotonic  # type: ignore[return-value]


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport(engine_class=OracleEngine)
    yield transport
    transport.engine.check()
    transport.engine.close()


async def answer(transport: EngineTransport, asked: GenerationRequest) -> list[Any]:
    """What the client gets of each choice, and of the prompt."""
    stream = await make_service(transport).generate(asked)
    whole = [OutputDelta("", [], logprobs=[]) for _ in range(asked.n)]
    async for delta in stream:
        of_choice = whole[delta.choice]
        of_choice.text += delta.text
        of_choice.token_ids += delta.token_ids
        of_choice.logprobs += delta.logprobs or []
        of_choice.finish_reason, of_choice.stop_reason = delta.finish_reason, delta.stop_reason
    await stream.aclose()
    scores = stream.prompt_scores if asked.prompt_logprobs is not None else None
    return [*whole, scores, stream.usage.completion_tokens]


def ask(transport: EngineTransport, name: str, counts: list[int], **fields: Any) -> list[Any]:
    """The answer to a request whose steps give these numbers of tokens."""
    transport.engine.oracle.counts = list(counts)
    base = {"prompt": "The harbour at night, and", "max_tokens": 30, "ignore_eos": True}
    seed = list(REQUESTS).index(name)
    asked = GenerationRequest(request_id="r", seed=seed, **{**base, **REQUESTS[name], **fields})
    return asyncio.run(asyncio.wait_for(answer(transport, asked), 60))


EXPECTED: dict[str, list[Any]] = {}
COUNTS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 40]), min_size=1, max_size=12)


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=8, deadline=None)
@given(counts=COUNTS)
def test_an_answer_does_not_depend_on_how_many_tokens_a_step_gives(transport, name, counts):
    if name not in EXPECTED:
        EXPECTED[name] = ask(transport, name, [])
        assert all(choice.finish_reason for choice in EXPECTED[name][:-2])
    assert ask(transport, name, counts) == EXPECTED[name]


@pytest.mark.parametrize("lost_after", [1, 7, 16])
def test_an_answer_that_loses_its_replica_continues_after_several_tokens(transport, lost_after):
    expected = ask(transport, "greedy", [])
    transport.lose_after = [lost_after]
    assert ask(transport, "greedy", [1, 4, 2, 5, 3, 2, 4]) == expected
    assert len(transport.submits) == 2
    assert transport.submits[1].num_emitted >= lost_after


def test_the_engine_gave_several_tokens_at_once(transport):
    num_before = transport.engine.oracle.num_ahead
    ask(transport, "greedy", [])
    ask(transport, "greedy", [30])
    assert transport.engine.oracle.num_ahead == num_before + 29
