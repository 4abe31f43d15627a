"""A client that lost its router continues at another router with the next token, over HTTP and gRPC.

One engine, and a new router for every connection: only the event ids remain of the first router.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from engine_transport import EngineTransport, make_service
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.grpc.grpc_api import GrpcApi
from quire.cluster.http.http_api import build_app
from quire.protos import generation_pb2 as pb
from quire.protos.errors import InvalidRequest
from quire.router.request.resume import EventIds, checksum_of, parse
from quire.router.types import Mark, Origin, OutputDelta

FIELD = "Last-Event-ID"
MULTI_BYTE = "[一-龥éüß😀-😏]{12,16}"
PROMPT = {"prompt": "The harbour at night, and"}
CHAT = {"messages": [{"role": "user", "content": "What is a quire?"}]}
FREE = {"max_tokens": 14, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "x-guidance": {"whitespace_flexible": False},
}
BODIES = {  # Without seeds.
    "sampled": {**PROMPT, **FREE},
    "chat": {**CHAT, "max_tokens": 14},
    "greedy, token ids": {**PROMPT, **FREE, "temperature": 0, "return_token_ids": True},
    "two choices": {**PROMPT, **FREE, "n": 2},
    "chat with two choices and scores": {
        **CHAT,
        **FREE,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "scores and echo": {**PROMPT, **FREE, "logprobs": 2, "echo": True},
    "scores of the prompt": {**PROMPT, **FREE, "prompt_logprobs": 1},
    "multi-byte": {**PROMPT, "max_tokens": 80, "structured_outputs": {"regex": MULTI_BYTE}},
    "stop": {**PROMPT, "max_tokens": 40, "ignore_eos": True, "stop": ["e ", ". "], "min_tokens": 9},
    "schema": {
        **PROMPT,
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        },
    },
    "penalties": {**PROMPT, **FREE, "repetition_penalty": 1.3, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


# -- ids -------------------------------------------------------------------------------------------------

ORIGIN = Origin(2**64 - 1, b"\x00\xffprint.", "0123456789abcdef" * 2, 1_800_000_000)


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2**31 - 1), max_size=3), st.booleans())
    ),
)
def test_an_id_holds_the_tokens_that_were_sent(n, steps):
    ids = EventIds(ORIGIN, [Mark()] * n)
    sent: dict[int, list[int]] = {}
    finished: set[int] = set()
    for choice, token_ids, ends in steps:
        choice %= n
        if choice in finished:
            continue
        if choice not in sent:
            ids.begin(choice)
        sent.setdefault(choice, []).extend(token_ids)
        finished |= {choice} if ends else set()
        event_id = ids.after(OutputDelta("", token_ids, "stop" if ends else None, choice=choice))
        point = parse(event_id, FIELD)
        assert point.origin == ORIGIN and point.field == FIELD
        assert list(point.marks) == [
            Mark(len(sent[i]), checksum_of(sent[i]), True, i in finished) if i in sent else Mark()
            for i in range(n)
        ]
        assert EventIds(ORIGIN, point.marks)._id() == event_id


def test_a_choice_that_has_begun_is_known_before_its_first_token():
    ids = EventIds(ORIGIN, [Mark()] * 2)
    point = parse(ids.begin(1), FIELD)
    assert point.marks == (Mark(), Mark(begun=True))


@given(st.text(max_size=80) | st.from_regex(r"q1\.[A-Za-z0-9_-]{46,49}\.[0-9a-f!,-]*"))
def test_any_text_is_an_id_or_refused(text):
    try:
        point = parse(text, FIELD)
    except InvalidRequest as error:
        assert error.field == FIELD and "must be the id of an event" in error.message
    else:
        assert EventIds(point.origin, point.marks)._head == text[: text.rindex(".") + 1]


# -- HTTP ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def router(transport: EngineTransport) -> AsyncIterator[httpx.AsyncClient]:
    """A router of its own behind a real socket, in this event loop, and its client."""
    service = make_service(transport)
    app = build_app(lambda: service, max_body_bytes=1 << 20)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield client
    finally:
        server.should_exit = server.force_exit = True
        await serving


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], last_id: str = ""
) -> list[tuple[str, dict]]:
    """Ids and data of all events; an id stays that of the last one that had one. The header asks for ids."""
    response = await client.post(path_of(body), json=body, headers={FIELD: last_id})
    assert response.status_code == 200, response.text
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    told = []
    for event in events:
        lines = dict(line.split(": ", 1) for line in event.splitlines())
        last_id = lines.get("id", last_id)
        told.append((last_id, json.loads(lines["data"])))
    return told


def by_choice(events: list[tuple[str, dict]]) -> dict[Any, list[dict]]:
    """Group events by choice, without cached tokens: they, and the order of choices, may differ in a second run."""
    told: dict[Any, list[dict]] = {}
    for _, data in events:
        if data.get("usage"):
            data = {**data, "usage": {**data["usage"], "prompt_tokens_details": None}}
        key = data["choices"][0]["index"] if data["choices"] else "usage"
        told.setdefault(key, []).append(data)
    return told


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_goes_on_after_any_event_as_if_nothing_had_happened(transport, kind):
    body = {**BODIES[kind], "stream": True, "stream_options": {"include_usage": True}}

    async def run() -> None:
        async with router(transport) as client:
            whole = await ask(client, body)
        assert len(whole) > 8
        n = body.get("n", 1)
        # First events, the middle, and the last ones, beyond the last token.
        cuts = [0, 1, 2, len(whole) // 2, len(whole) - 3, len(whole) - 2]
        async with router(transport) as other:
            for cut in cuts:
                rest = await ask(other, body, whole[cut][0])
                assert by_choice(rest) == by_choice(whole[cut + 1 :]), (kind, cut)
                if n == 1:
                    assert [i for i, _ in rest] == [i for i, _ in whole[cut + 1 :]]
        async with router(transport) as third:  # twice in a row
            rest = await ask(third, body, whole[3][0])
            rest = await ask(third, body, rest[1][0])
            assert by_choice(rest)["usage"] == by_choice(whole)["usage"]

    asyncio.run(asyncio.wait_for(run(), 120))


def damaged(event_id: str) -> dict[str, tuple[str, str]]:
    """Ids that must be refused, and what the message says."""
    head, origin, marks = event_id.split(".")
    tokens, checksum = marks.split("-")
    flipped = ("B" if origin[0] == "A" else "A") + origin[1:]
    other = f"{int(checksum, 16) ^ 1:x}"
    beyond = f"{int(tokens, 16) + 60:x}"
    return {
        "nonsense": ("7", "must be the id of an event"),
        "truncated": (event_id[:40], "must be the id of an event"),
        "other version": (f"q2.{origin}.{marks}", "must be the id of an event"),
        "other seed": (f"{head}.{flipped}.{marks}", "belongs to another request"),
        "too many choices": (f"{event_id},{marks}", "must have 1 marks"),
        "other tokens": (f"{head}.{origin}.{tokens}-{other}", "generated again, differ"),
        "beyond": (f"{head}.{origin}.{beyond}-{checksum}", "must be at most 14 tokens"),
    }


@pytest.mark.parametrize("kind", list(damaged("q1.A.1-1")))
def test_an_id_that_does_not_fit_is_a_clear_400(transport, kind):
    body = {**BODIES["sampled"], "stream": True}

    async def run() -> None:
        async with router(transport) as client:
            whole = await ask(client, body)
            event_id, message = damaged(whole[4][0])[kind]
            response = await client.post(path_of(body), json=body, headers={FIELD: event_id})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, FIELD)
            assert message in error["message"], error

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "The harbour at night, but"},
        {"temperature": 0.9},
        {"seed": 5},
        {"max_tokens": 15},
        {"n": 2},
        {"stop": ["x"]},
        {"cache_salt": "other", "prompt": "The harbour at night, and " * 12},
        {"structured_outputs": {"regex": "[a-z]+"}, "ignore_eos": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_id_of_another_request_is_a_clear_400(transport, change):
    body = {**BODIES["sampled"], "stream": True}
    if "cache_salt" in change:
        body["prompt"] = change["prompt"]

    async def run() -> None:
        async with router(transport) as client:
            whole = await ask(client, body)
            headers = {FIELD: whole[4][0]}
            response = await client.post(path_of(body), json={**body, **change}, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, FIELD), error
            assert "belongs to another request" in error["message"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_answer_shorter_than_the_id_says_is_a_clear_400(transport):
    # It ends long before max_tokens with any seed: beyond max_tokens an id is refused for another reason.
    body = {
        **PROMPT,
        "max_tokens": 80,
        "structured_outputs": {"regex": "[a-z]{1,12}"},
        "stream": True,
    }

    async def run() -> None:
        async with router(transport) as client:
            whole = await ask(client, body)
            head, origin, marks = whole[-1][0].split(".")
            tokens = int(re.match("[0-9a-f]+", marks)[0], 16)
            headers = {FIELD: f"{head}.{origin}.{tokens + 1:x}-0"}
            response = await client.post(path_of(body), json=body, headers=headers)
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert f"the answer has {tokens} tokens" in message, message

    asyncio.run(asyncio.wait_for(run(), 60))


def test_only_streams_are_resumed(transport):
    async def run() -> None:
        async with router(transport) as client:
            ((event_id, _), *_) = await ask(client, {**BODIES["sampled"], "stream": True})
            headers = {FIELD: event_id}
            response = await client.post("/v1/completions", json=BODIES["sampled"], headers=headers)
            assert response.status_code == 400
            assert "stream must be true" in response.json()["error"]["message"]
            # An empty id is none: so do browsers say that they have seen no event.
            response = await client.post(
                "/v1/completions", json=BODIES["sampled"], headers={FIELD: ""}
            )
            assert response.status_code == 200

    asyncio.run(asyncio.wait_for(run(), 60))


# -- gRPC ------------------------------------------------------------------------------------------------


class Context:
    """The part of Serve's context that `GrpcApi` uses."""

    def __init__(self) -> None:
        self.code = self.details = None
        self.metadata: list[tuple[str, str]] = []

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> tuple:
        return ()


def api(transport: EngineTransport) -> GrpcApi:
    front = GrpcApi()
    front.service = make_service(transport)
    return front


def without_first(message: pb.GenerateResponse) -> pb.GenerateResponse:
    """Without what the first message of a call has."""
    rest = pb.GenerateResponse.FromString(message.SerializeToString())
    for name in ("seed", "request_id", "model"):
        rest.ClearField(name)
    rest.usage.ClearField("cached_tokens")
    return rest


@pytest.mark.parametrize("n", [1, 2])
def test_a_grpc_stream_goes_on_after_any_message(transport, n):
    sampling = pb.SamplingOptions(max_tokens=12)
    request = pb.GenerateRequest(
        prompt="The harbour", sampling=sampling, ignore_eos=True, n=n, logprobs=1
    )

    async def ask(resume_from: str = "") -> list[pb.GenerateResponse]:
        asked = pb.GenerateRequest.FromString(request.SerializeToString())
        asked.resume_from = resume_from
        context = Context()
        return [m async for m in api(transport).Generate(asked, context)]

    async def run() -> None:
        whole = await ask()
        assert len(whole) >= 12 * n
        for cut in (0, 1, len(whole) // 2, len(whole) - 2, len(whole) - 1):
            rest = await ask(whole[cut].event_id)
            for choice in range(n):
                expected = [without_first(m) for m in whole[cut + 1 :] if m.choice == choice]
                got = [without_first(m) for m in rest if m.choice == choice]
                for message in (*expected, *got):
                    if n > 1:  # which choice ends last, and has the usage, is chance
                        message.ClearField("usage")
                        message.ClearField("event_id")
                assert got == expected, (cut, choice)
            if rest:
                assert rest[0].seed == whole[0].seed

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_bad_resume_from_is_an_invalid_argument(transport):
    async def run() -> None:
        request = pb.GenerateRequest(prompt="The harbour", resume_from="nonsense")
        context = Context()
        with pytest.raises(Exception, match="resume_from must be the id of an event"):
            async for _ in api(transport).Generate(request, context):
                pass
        assert context.code.name == "INVALID_ARGUMENT"
        context = Context()
        await api(transport).GenerateOnce(request, context)
        assert "only Generate can resume a stream" in context.details

    asyncio.run(asyncio.wait_for(run(), 60))
