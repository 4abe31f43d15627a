"""A client's prediction through the request lifecycle on a real engine: no token changes, and the usage counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from engine_transport import EngineTransport, make_service

from quire.protos.errors import ContextLengthExceeded, InvalidRequest
from quire.router.types import GenerationRequest, OutputDelta, Usage

ASKED = {
    "request_id": "r",
    "prompt": "A quire is",
    "max_tokens": 40,
    "temperature": 0.0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module", params=["off", "suffix"])
def transport(request) -> Iterator[EngineTransport]:
    transport = EngineTransport(speculation={"method": request.param})
    yield transport
    transport.engine.check()
    transport.engine.close()


def run(transport: EngineTransport, **fields: Any) -> tuple[list[OutputDelta], Usage]:
    async def main() -> tuple[list[OutputDelta], Usage]:
        service = make_service(transport)
        stream = await service.generate(GenerationRequest(**{**ASKED, **fields}))
        return [delta async for delta in stream], stream.usage

    return asyncio.run(asyncio.wait_for(main(), 60))


def text_of(deltas: list[OutputDelta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def test_a_prediction_changes_no_token_and_is_counted(transport: EngineTransport) -> None:
    text = text_of(run(transport)[0])
    wrong = text[:20] + "#" + text[21:]
    for prediction in (text, wrong, "something else"):
        deltas, usage = run(transport, prediction=prediction)
        assert text_of(deltas) == text
        assert usage.completion_tokens == 40
        speculates = transport.engine.config.speculation.method != "off"
        assert (usage.accepted_prediction_tokens > 0) >= (
            speculates and prediction != "something else"
        )
        assert speculates or usage.rejected_prediction_tokens == 0
    if speculates:
        assert len(run(transport, prediction=text)[0]) <= 40 / 4


def test_an_answer_is_a_draft_for_the_same_prompt(transport: EngineTransport) -> None:
    asked = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 5}
    first, _ = run(transport, **asked)
    again, usage = run(transport, **asked)
    assert text_of(again) == text_of(first)
    speculates = transport.engine.config.speculation.method != "off"
    assert (usage.accepted_prediction_tokens >= 25) == speculates


def test_every_choice_and_every_attempt_gets_the_prediction(transport: EngineTransport) -> None:
    asked = {"n": 2, "seed": 3, "temperature": 1.0}
    plain, _ = run(transport, **asked)
    transport.lose_after = [10]
    deltas, _ = run(transport, **asked, prediction=text_of(plain))
    assert [text_of(deltas, i) for i in (0, 1)] == [text_of(plain, i) for i in (0, 1)]
    assert len(transport.submits) == 3
    sent = [submit.prediction_ids.tolist() for submit in transport.submits]
    assert sent[0] == sent[1] == sent[2] != []


def test_a_prediction_has_a_bound(transport: EngineTransport) -> None:
    with pytest.raises(
        ContextLengthExceeded, match=r"prediction: \d+ tokens; the model takes at most 512"
    ):
        run(transport, prediction="pages " * 600)
    with pytest.raises(InvalidRequest, match="prediction"):
        run(transport, prediction="\ud800")
    with pytest.raises(InvalidRequest, match="prediction must be a text"):
        run(transport, prediction=["a"])
