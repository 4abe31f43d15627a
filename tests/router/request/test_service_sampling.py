"""Choices, log-probabilities and constraints through the whole request lifecycle, on a real engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jsonschema
import pytest
from engine_transport import EngineTransport, make_service

from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import Grammar
from quire.router.request.service import RouterService
from quire.router.types import GenerationRequest, OutputDelta


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


def run(transport: EngineTransport, body: Callable[[RouterService], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(body(make_service(transport)), 60)

    return asyncio.run(main())


def request(**fields: Any) -> GenerationRequest:
    base = dict(
        request_id="r", prompt="A quire is a gathering of pages, and", max_tokens=24, seed=3
    )
    return GenerationRequest(**{**base, **fields})


async def answers(service: RouterService, asked: GenerationRequest) -> tuple[Any, list]:
    """The stream at its end, and for each choice its text, ids, log-probabilities and end."""
    stream = await service.generate(asked)
    whole = [OutputDelta("", [], logprobs=[]) for _ in range(asked.n)]
    async for delta in stream:
        of_choice = whole[delta.choice]
        assert of_choice.finish_reason is None, "nothing follows the end"
        of_choice.text += delta.text
        of_choice.token_ids += delta.token_ids
        of_choice.logprobs += delta.logprobs or []
        of_choice.finish_reason = delta.finish_reason
    await stream.aclose()
    return stream, whole


def test_choices_differ_by_their_noise_alone_and_come_again(transport) -> None:
    async def body(service: RouterService) -> None:
        stream, whole = await answers(service, request(n=4, temperature=1.0))
        assert len({tuple(choice.token_ids) for choice in whole}) == 4
        assert all(choice.finish_reason for choice in whole)
        assert [submit.params.choice for submit in transport.submits] == [0, 1, 2, 3]
        assert len({submit.params.seed for submit in transport.submits}) == 1
        num_prompt = len(transport.submits[0].prompt_ids)
        assert stream.usage.prompt_tokens == num_prompt
        assert stream.usage.completion_tokens == sum(len(c.token_ids) for c in whole)
        _, again = await answers(service, request(n=4, temperature=1.0))
        assert [c.token_ids for c in again] == [c.token_ids for c in whole]
        _, single = await answers(service, request(temperature=1.0))
        assert single[0].token_ids == whole[0].token_ids
        _, greedy = await answers(service, request(n=3, temperature=0.0))
        assert len({tuple(choice.token_ids) for choice in greedy}) == 1

    run(transport, body)


def test_choices_share_the_blocks_of_their_prompt(transport) -> None:
    """The prompt's last token is all of it that each choice but the first computes for itself."""
    prompt = tuple(range(100, 300))
    before = transport.engine.snapshot()["prefix"]["tokens_hit"]

    async def body(service: RouterService) -> Any:
        return await answers(service, request(prompt=prompt, n=4, max_tokens=2))

    stream, _ = run(transport, body)
    hit = transport.engine.snapshot()["prefix"]["tokens_hit"] - before
    assert hit == 3 * 199
    assert (stream.usage.prompt_tokens, stream.usage.cached_tokens) == (200, 0)


def test_choices_are_forks_of_the_first_on_its_replica(transport) -> None:
    async def body(service: RouterService) -> None:
        stream, _ = await answers(service, request(n=4))
        lead, *forks = transport.submits
        assert lead.fork_of is None
        assert [fork.fork_of for fork in forks] == [lead.stream_id] * 3
        assert {s.explain.replica for s in stream._streams} == {stream.explain.replica}
        assert stream.usage.cached_tokens == 0 or stream.explain.predicted_cached_tokens

    run(transport, body)


def test_a_choice_whose_replica_is_lost_continues_alone(transport) -> None:
    async def body(service: RouterService) -> None:
        transport.lose_after = []
        _, expected = await answers(service, request(n=3, temperature=1.0))
        transport.submits.clear()
        transport.lose_after = [0, 6, 4]
        _, moved = await answers(service, request(n=3, temperature=1.0))
        assert [c.token_ids for c in moved] == [c.token_ids for c in expected]
        assert len(transport.submits) == 6
        assert [submit.fork_of for submit in transport.submits[3:]] == [None] * 3

    run(transport, body)


@pytest.mark.parametrize("n", [1, 3])
def test_prompt_scores_are_complete_with_the_first_token_also_after_a_loss(transport, n) -> None:
    prompt = tuple(range(100, 180))

    async def body(service: RouterService) -> None:
        asked = request(prompt=prompt, n=n, prompt_logprobs=2, max_tokens=8)
        transport.lose_after = []
        stream = await service.generate(asked)
        expected = stream.prompt_scores
        await stream.aclose()
        assert [scores.token.token_id for scores in expected] == list(prompt)
        assert (expected[0].token.logprob, expected[0].top, expected[0].rank) == (None, (), None)
        assert all(len(s.top) == 2 and s.rank >= 1 > s.token.logprob for s in expected[1:])
        asked_of = [submit.params.prompt_logprobs for submit in transport.submits]
        assert asked_of == [2] + [None] * (n - 1)
        for tokens in (0, 3):  # Lost when the prompt has been sent, and later.
            transport.submits.clear()
            transport.lose_after = [tokens]
            stream, _ = await answers(service, asked)
            assert stream.prompt_scores == expected
            again = [
                s for s in transport.submits if s.stream_id > transport.submits[n - 1].stream_id
            ]
            assert len(again) == 1
            assert again[0].params.prompt_logprobs is None
        stream, _ = await answers(service, request(prompt=prompt, n=n))
        assert stream.prompt_scores is None

    run(transport, body)


def test_a_refusal_of_one_choice_refuses_the_request_and_ends_the_others(transport) -> None:
    corner = dict(allowed_token_ids=(50,), bad_words=("x",))

    async def body(service: RouterService) -> None:
        service._prompt_encoder._tokenizer.tokenizer.bad_word_ids = lambda words: ((50, 50),)
        with pytest.raises(InvalidRequest, match="no token to choose"):
            await answers(service, request(n=3, **corner))
        # The engine's thread takes the aborts in between two steps.
        async with asyncio.timeout(30):
            while transport.engine.load().num_running:
                await asyncio.sleep(0.01)

    run(transport, body)


def test_closing_ends_all_choices(transport) -> None:
    async def body(service: RouterService) -> None:
        stream = await service.generate(request(n=3, max_tokens=400, ignore_eos=True))
        await anext(aiter(stream))
        await stream.aclose()
        async with asyncio.timeout(30):
            while transport.engine.load().num_running:
                await asyncio.sleep(0.01)

    run(transport, body)


@pytest.mark.parametrize(
    "asked",
    [
        dict(temperature=0.0, logprobs=3),
        dict(temperature=1.0, logprobs=0, repetition_penalty=1.3, presence_penalty=0.5),
        dict(temperature=1.0, logprobs=20, n=2, frequency_penalty=1.0, bad_words=("the",)),
    ],
)
def test_a_migrated_stream_is_the_same_token_by_token_and_score_by_score(transport, asked) -> None:
    async def body(service: RouterService) -> None:
        transport.lose_after = []
        whole = request(**asked, skip_special_tokens=False)  # as the log-probabilities tell it
        _, expected = await answers(service, whole)
        transport.submits.clear()
        transport.lose_after = [5, 9, 14]
        _, moved = await answers(service, whole)
        assert len(transport.submits) == asked.get("n", 1) + 3
        assert max(submit.num_emitted for submit in transport.submits) >= 9
        assert moved == expected
        for choice in moved:
            assert len(choice.logprobs) == len(choice.token_ids)
            for token_id, scores in zip(choice.token_ids, choice.logprobs, strict=True):
                assert scores.token.token_id == token_id
                assert len(scores.top) == asked["logprobs"]
            shown = b"".join(scores.token.utf8 for scores in choice.logprobs).decode()
            assert shown.startswith(choice.text)

    run(transport, body)


def test_no_logprobs_unless_asked_for(transport) -> None:
    async def body(service: RouterService) -> None:
        stream = await service.generate(request(max_tokens=3))
        assert [delta.logprobs async for delta in stream] == [None] * 3

    run(transport, body)


def test_bad_words_do_not_appear(transport) -> None:
    """In the token sequences that the tokenizer gives them; the characters may come otherwise."""

    def contains(ids: list[int], sequences) -> bool:
        return any(
            tuple(ids[i : i + len(word)]) == word for word in sequences for i in range(len(ids))
        )

    async def body(service: RouterService) -> None:
        _, (free,) = await answers(service, request(temperature=0.0))
        tokenizer = service._prompt_encoder._tokenizer.tokenizer
        words = [
            w for w in free.text.split() if contains(free.token_ids, tokenizer.bad_word_ids((w,)))
        ]
        assert words
        for word in words[:3]:
            _, (choice,) = await answers(service, request(temperature=0.0, bad_words=(word,)))
            assert not contains(choice.token_ids, tokenizer.bad_word_ids((word,)))

    run(transport, body)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "pages": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["quire", "codex"]},
    },
    "required": ["name", "pages", "kind"],
    "additionalProperties": False,
    "x-guidance": {
        "whitespace_flexible": False
    },  # A small model may write white space without end.
}
LARK = 'start: item ("," item)*\nitem: /[a-f]{2}/'
GRAMMARS = {
    "schema": (Grammar("json_schema", json.dumps(SCHEMA), "f"), None),
    "regex": (Grammar("regex", "(one|two) [0-9]{3,5}!", "f"), "(one|two) [0-9]{3,5}!"),
    "choice": (Grammar("choice", json.dumps(["yes", 'n"o\\', "peut-être"]), "f"), None),
    "lark": (Grammar("lark", LARK, "f"), "[a-f]{2}(,[a-f]{2})*"),
}


def check_language(name: str, text: str) -> None:
    pattern = GRAMMARS[name][1]
    if pattern is not None:
        assert re.fullmatch(pattern, text), text
    elif name == "choice":
        assert text in ("yes", 'n"o\\', "peut-être")
    else:
        value = json.loads(text)
        jsonschema.validate(value, SCHEMA)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_the_answer_is_in_the_language_for_any_model(
    transport, name: str, temperature: float
) -> None:
    """Also among strangers, over migrations, and cut off by max_tokens only."""
    asked = dict(grammar=GRAMMARS[name][0], temperature=temperature, max_tokens=150, n=3)

    async def body(service: RouterService) -> None:
        transport.lose_after = []
        _, whole = await answers(service, request(**asked))
        ended = [choice for choice in whole if choice.finish_reason == "stop"]
        assert ended or name == "lark"
        for choice in ended:
            check_language(name, choice.text)
        free = asyncio.create_task(answers(service, request(max_tokens=60, temperature=1.0)))
        await asyncio.sleep(0.01)
        transport.lose_after = [1, 3, 2, 6]
        _, moved = await answers(service, request(**asked))
        assert moved == whole
        await free

    run(transport, body)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", '{"type": "nope"}', "a.b"), "nope"),
        (Grammar("json_schema", '{"if": {}}', "a.b"), "if"),
        (Grammar("regex", "(", "a.b"), "unclosed"),
        (Grammar("lark", "strt: A", "a.b"), "start"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_its_field(transport, grammar, words) -> None:
    async def body(service: RouterService) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await service.generate(request(grammar=grammar))
        assert caught.value.field == "a.b" and words in caught.value.message

    run(transport, body)
    assert not transport.engine._compiling
