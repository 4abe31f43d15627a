"""Drafts, from a real engine to the client: the answer stays the same.

The source of drafts keeps the answers of earlier requests. It proposes what came next in the answer that begins alike,
and spoils some of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_transport import EngineTransport, make_service
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protos.sampling_params import Grammar
from quire.replica import Engine
from quire.replica.core.draft_source import Reserve
from quire.replica.core.request import Request
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


class Memory:
    """A `DraftSource` that remembers whole sequences. The next drafts have `counts` tokens, then there are none."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.counts: list[int] = []
        self.wrong_at = -1  # index of a token in each draft to spoil
        self.num_drafted = self.num_accepted = 0

    def attach(self, reserve: Reserve) -> None:
        """Does nothing: this source needs no blocks."""

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> np.ndarray:
        known = tuple(request.token_ids.tolist())
        count = self.counts.pop() if self.counts else 0
        alike = (ids for ids in self.seen if ids[: len(known)] == known)
        draft = np.array(max(alike, key=len, default=known)[len(known) :][:count], np.int32)
        if 0 <= self.wrong_at < len(draft):
            draft[self.wrong_at] += 1
        return draft

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        pass

    def end(self, request: Request) -> None:
        self.seen.add(tuple(request.token_ids.tolist()))


class DraftingEngine(Engine):
    def _open_draft_source(self) -> Memory:
        self.memory = Memory()
        return self.memory


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport(engine_class=DraftingEngine)
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


def ask(transport: EngineTransport, name: str, counts: list[int], wrong_at: int = -1) -> list[Any]:
    """The answer to a request with drafts of these numbers of tokens."""
    memory = transport.engine.memory
    memory.counts, memory.wrong_at = list(counts), wrong_at
    base = {"prompt": "The harbour at night, and", "max_tokens": 30, "ignore_eos": True}
    seed = list(REQUESTS).index(name)
    asked = GenerationRequest(request_id="r", seed=seed, **{**base, **REQUESTS[name]})
    return asyncio.run(asyncio.wait_for(answer(transport, asked), 60))


EXPECTED: dict[str, list[Any]] = {}
COUNTS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 31]), min_size=1, max_size=12)


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=6, deadline=None)
@given(counts=COUNTS, wrong_at=st.integers(-1, 4))
def test_an_answer_does_not_depend_on_drafts(transport, name, counts, wrong_at):
    if name not in EXPECTED:
        EXPECTED[name] = ask(transport, name, [])
        assert all(choice.finish_reason for choice in EXPECTED[name][:-2])
    assert ask(transport, name, counts, wrong_at) == EXPECTED[name]


@pytest.mark.parametrize("name", REQUESTS)
def test_the_drafts_of_a_known_answer_are_accepted(transport, name):
    if name not in EXPECTED:
        EXPECTED[name] = ask(transport, name, [])
    memory = transport.engine.memory
    memory.num_drafted = memory.num_accepted = 0
    assert ask(transport, name, [5] * 60) == EXPECTED[name]
    # Another answer may begin alike.
    assert memory.num_accepted >= max(4, memory.num_drafted // 2)


@pytest.mark.parametrize("lost_after", [1, 7, 16])
def test_an_answer_that_loses_its_replica_continues_with_drafts(transport, lost_after):
    expected = ask(transport, "greedy", [])
    transport.lose_after = [lost_after]
    assert ask(transport, "greedy", [1, 4, 2, 5, 3, 2, 4], wrong_at=2) == expected
    assert len(transport.submits) == 2
    assert transport.submits[1].num_emitted >= lost_after
