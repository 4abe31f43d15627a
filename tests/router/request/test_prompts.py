"""Lists of prompts, prompts without an answer and the best of several answers, over real engines and a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from engine_transport import EngineTransport, make_service

from quire.cluster.http.http_answers import Completion
from quire.cluster.http.http_api import build_app
from quire.protos.errors import Overloaded
from quire.replica.builtin_model import CHECKPOINT
from quire.router.request.prompts import PromptsStream
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import TextTokenizer
from quire.router.types import OutputDelta

COMPLETIONS = "/v1/completions"
TEXTS = ["The harbour at night, and", "Once", "What is a quire? It is a set of " * 6]
IDS = [[70, 71, 72], [300], [5, 6, 7, 8] * 20]
GREEDY = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
SAMPLED = {"max_tokens": 9, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


@asynccontextmanager
async def serving(service: RouterService) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(lambda: service, max_body_bytes=1 << 20)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client
    finally:
        server.should_exit = server.force_exit = True
        await task


Run = Callable[[httpx.AsyncClient, RouterService], Coroutine[Any, Any, None]]


@pytest.fixture
def run(transport: EngineTransport) -> Callable[[Run], None]:
    """Runs a test in an event loop with a router of its own."""

    async def serve(test: Run) -> None:
        service = make_service(transport)
        async with serving(service) as client:
            await test(client, service)

    return lambda test: asyncio.run(asyncio.wait_for(serve(test), 120))


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    Completion.model_validate(response.json())
    return response.json()


async def streamed(client: httpx.AsyncClient, **body: Any) -> tuple[list[dict], dict]:
    """Choices put together from chunks, and the usage."""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    choices: dict[int, dict] = {}
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "scores": []})
            assert "finish_reason" not in choice
            choice["text"] += part["text"]
            choice["scores"] += (part["logprobs"] or {}).get("token_logprobs", [])
            if part["finish_reason"]:
                choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)], chunk["usage"]


@pytest.mark.parametrize("prompts", [TEXTS, IDS], ids=["texts", "ids"])
@pytest.mark.parametrize("options", [GREEDY, {**SAMPLED, "n": 3}], ids=["greedy", "three choices"])
def test_a_list_is_its_prompts_in_order(run, prompts, options):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        singles = [await ask(client, prompt=prompt, **options) for prompt in prompts]
        texts = [choice["text"] for single in singles for choice in single["choices"]]
        whole = await ask(client, prompt=prompts, **options)
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
        assert [choice["text"] for choice in whole["choices"]] == texts
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert whole["usage"][name] == sum(single["usage"][name] for single in singles)
        choices, usage = await streamed(client, prompt=prompts, **options)
        assert [choice["text"] for choice in choices] == texts
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        for name in ("prompt_tokens", "completion_tokens"):
            assert usage[name] == whole["usage"][name]

    run(test)


def test_equal_prompts_differ_unless_a_seed_is_given(run):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        body = {"prompt": ["Once"] * 3, "max_tokens": 60, "ignore_eos": True}
        free = [choice["text"] for choice in (await ask(client, **body))["choices"]]
        assert len(set(free)) == 3
        seeded = [choice["text"] for choice in (await ask(client, seed=1, **body))["choices"]]
        assert len(set(seeded)) == 1

    run(test)


def test_the_largest_list_is_served(run):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        prompts = [[5, i] for i in range(256)]
        whole = await ask(client, prompt=prompts, max_tokens=1, temperature=0)
        assert len(whole["choices"]) == 256 and whole["usage"]["prompt_tokens"] == 512

    run(test)


def test_requests_of_evaluation_tools_are_served(run):
    """lm-eval with a batch: the log-probabilities of each prompt in the list."""

    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        options = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
        singles = [await ask(client, prompt=ids, **options) for ids in IDS]
        whole = await ask(client, prompt=IDS, **options)
        for choice, single, ids in zip(whole["choices"], singles, IDS, strict=True):
            scores = choice["logprobs"]
            assert scores == single["choices"][0]["logprobs"]
            assert len(scores["token_logprobs"]) == len(ids) + 1
            assert scores["token_logprobs"][0] is None
        choices, _ = await streamed(client, prompt=IDS, **options)
        assert [c["scores"] for c in choices] == [
            c["logprobs"]["token_logprobs"] for c in whole["choices"]
        ]

    run(test)


@pytest.mark.parametrize("prompts", [TEXTS, IDS, "Once upon a time"], ids=["texts", "ids", "one"])
def test_max_tokens_0_is_the_prompt_alone(run, prompts):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        options = {"echo": True, "logprobs": 2, "temperature": 0}
        one = await ask(client, prompt=prompts, max_tokens=1, **options)
        none = await ask(client, prompt=prompts, max_tokens=0, **options)
        assert none["usage"]["completion_tokens"] == 0
        assert none["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        for with_token, without in zip(one["choices"], none["choices"], strict=True):
            assert without["finish_reason"] == "length" and without["stop_reason"] is None
            for name, column in without["logprobs"].items():
                assert column == with_token["logprobs"][name][:-1]
            assert with_token["text"].startswith(without["text"]) and without["text"]
        choices, usage = await streamed(client, prompt=prompts, max_tokens=0, **options)
        assert [choice["text"] for choice in choices] == [c["text"] for c in none["choices"]]
        assert usage["completion_tokens"] == 0

    run(test)


def test_max_tokens_0_without_logprobs_is_the_text(run):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        whole = await ask(client, prompt="Once", max_tokens=0, echo=True, n=2)
        assert [choice["text"] for choice in whole["choices"]] == ["Once", "Once"]
        assert whole["choices"][0]["logprobs"] is None

    run(test)


@pytest.mark.parametrize("prompts", [IDS, IDS[0]], ids=["list", "one"])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echoed_ids_are_their_text(run, prompts, max_tokens):
    """Without log-probabilities too; they are the way in which the text is found, and not in the answer."""

    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        options = {"prompt": prompts, "temperature": 0, "ignore_eos": True}
        echo = {**options, "max_tokens": max_tokens, "echo": True}
        ids = prompts if isinstance(prompts[0], list) else [prompts]
        texts = [
            TextTokenizer.load(CHECKPOINT).decode(one, skip_special_tokens=False) for one in ids
        ]
        if max_tokens:
            plain = await ask(client, **options, max_tokens=max_tokens)
            answers = [choice["text"] for choice in plain["choices"]]
            texts = [text + answer for text, answer in zip(texts, answers, strict=True)]
        whole = await ask(client, **echo)
        assert [choice["text"] for choice in whole["choices"]] == texts
        for choice in whole["choices"]:
            assert choice["logprobs"] is None and "prompt_logprobs" not in choice
        assert whole["usage"]["completion_tokens"] == max_tokens * len(ids)
        choices, usage = await streamed(client, **echo)
        assert [choice["text"] for choice in choices] == texts
        assert all(choice["scores"] == [] for choice in choices)
        assert usage["completion_tokens"] == max_tokens * len(ids)

    run(test)


def test_the_best_are_echoed(run):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        body = {"prompt": TEXTS, "max_tokens": 6, "seed": 12, "temperature": 1.4, "best_of": 4}
        plain = await ask(client, **body)
        echoed = await ask(client, **body, echo=True)
        assert [choice["text"] for choice in echoed["choices"]] == [
            text + choice["text"] for text, choice in zip(TEXTS, plain["choices"], strict=True)
        ]
        # Tokens of the answers that are not returned count too.
        assert echoed["usage"]["completion_tokens"] == 4 * 6 * len(TEXTS)

    run(test)


@pytest.mark.parametrize("prompt", ["Once", ["Once", "At night"], [70, 71]])
def test_more_tokens_than_fit_are_refused_with_the_number_that_fits(run, transport, prompt):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        length = service.model_info().max_model_len
        response = await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 10**6})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "max_tokens"
        room = int(error["message"].removeprefix("max_tokens must be <= ").split(":")[0])
        assert f"of the model's {length} tokens, got 1000000" in error["message"]
        assert not transport.submits
        first = prompt[0] if isinstance(prompt[0], str) and len(prompt) == 2 else prompt
        fits = await ask(client, prompt=first, max_tokens=room, stop=["e"], temperature=0)
        assert fits["usage"]["prompt_tokens"] + room == length

    run(test)


@pytest.mark.parametrize("prompt", ["Once", TEXTS], ids=["one", "list"])
def test_the_best_of_several_are_returned(run, prompt):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        body = {"prompt": prompt, "max_tokens": 8, "seed": 12, "temperature": 1.4}
        every = await ask(client, **body, n=5, logprobs=0)
        best = await ask(client, **body, n=2, best_of=5, logprobs=0)
        bare = await ask(client, **body, n=2, best_of=5)

        def mean(choice: dict[str, Any]) -> float:
            scores = choice["logprobs"]["token_logprobs"]
            return sum(scores) / len(scores)

        num_moved = 0
        for i in range(len(every["choices"]) // 5):
            of_prompt = sorted(every["choices"][5 * i : 5 * i + 5], key=mean, reverse=True)[:2]
            assert len({choice["text"] for choice in of_prompt}) == 2
            found = best["choices"][2 * i : 2 * i + 2]
            assert [choice["text"] for choice in found] == [c["text"] for c in of_prompt]
            num_moved += of_prompt != every["choices"][5 * i : 5 * i + 2]
        assert num_moved, "the best are not the first: another seed"
        assert [choice["index"] for choice in best["choices"]] == list(range(len(best["choices"])))
        assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
        assert [c["text"] for c in bare["choices"]] == [c["text"] for c in best["choices"]]
        assert {choice["logprobs"] for choice in bare["choices"]} == {None}
        equal = await ask(client, **body, n=2, best_of=2)
        assert len(equal["choices"]) == 2 * len(best["choices"]) // 2

    run(test)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (["a", "b" * 20_000], "prompt[1]"),
        ([[1], [2, 5000]], "prompt[1][1]"),
        ([[1], []], "prompt[1]"),
    ],
)
def test_one_wrong_prompt_refuses_the_list_by_its_place(run, transport, prompts, field):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        response = await client.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 4})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
        assert error["message"].startswith(field)
        assert not transport.submits

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_all_prompts_are_admitted_or_none(run, transport, stream, monkeypatch):
    aborted: list[int] = []
    abort = transport.engine.abort
    monkeypatch.setattr(transport.engine, "abort", lambda key: (aborted.append(key), abort(key)))

    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        enter, entered = service.gate.enter, []

        async def refuse_third(arrival: Any) -> Any:
            entered.append(arrival)
            if len(entered) == 3:
                raise Overloaded("the queue is full", retry_after_s=2.0)
            return await enter(arrival)

        service.gate.enter = refuse_third
        body = {"prompt": ["Once"] * 5, "max_tokens": 400, "ignore_eos": True, "stream": stream}
        response = await client.post(COMPLETIONS, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
        assert len(entered) == 5
        # None ran to its end: what had been sent is taken back.
        assert sorted(aborted) == sorted(submit.stream_id for submit in transport.submits)
        assert not transport._attempts

    run(test)


class Part:
    """The stream of one prompt; counts the deltas that are read."""

    request_id, model, origin = "r", "m", None

    def __init__(self, num_tokens: int, may_start: asyncio.Event | None = None):
        self.num_tokens, self.num_read = num_tokens, 0
        self.may_start, self.at_end = may_start, asyncio.Event()

    async def start(self) -> None:
        if self.may_start is not None:
            await self.may_start.wait()

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        for _ in range(self.num_tokens):
            await asyncio.sleep(0)
            self.num_read += 1
            yield OutputDelta("x", [1], "length" if self.num_read == self.num_tokens else None)
        self.at_end.set()

    async def aclose(self) -> None:
        pass


def test_a_list_waits_for_no_reader_until_all_have_begun():
    """Otherwise the first prompts would hold memory, unread, that the last ones need."""

    async def test() -> None:
        first = Part(1000)
        stream = PromptsStream([first, Part(2, first.at_end)], 1)
        async with asyncio.timeout(10):
            await stream.start()
        choices = [delta.choice async for delta in stream]
        assert (choices.count(0), choices.count(1)) == (1000, 2)

    asyncio.run(test())


def test_a_list_without_a_reader_stops():
    async def test() -> None:
        parts = [Part(1000), Part(1000)]
        stream = PromptsStream(parts, 1)
        await stream.start()
        await anext(stream)
        for _ in range(100):
            await asyncio.sleep(0)
        assert sum(part.num_read for part in parts) < 50
        assert len([delta async for delta in stream]) == 1999

    asyncio.run(test())


def test_a_client_that_leaves_ends_all_prompts(run, transport):
    async def test(client: httpx.AsyncClient, service: RouterService) -> None:
        body = {"prompt": TEXTS, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            async for _ in response.aiter_lines():
                break
        async with asyncio.timeout(20):
            while transport._attempts:
                await asyncio.sleep(0.02)

    run(test)
