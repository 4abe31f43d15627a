"""The HTTP front end, through real sockets and popular clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.http.http_answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DecisionList,
    ErrorAnswer,
    ModelList,
)
from quire.cluster.http.http_api import build_app
from quire.cluster.http.http_body import BODIES
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_schema import IGNORED_FIELDS
from quire.protos.errors import EngineError, Overloaded, Unavailable

MAX_BODY_BYTES = 64 * 1024
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello there"}]
PATIENCE_S = 30.0  # a machine may stand still for some seconds


@pytest.fixture(scope="module")
def app() -> tuple[FastAPI, dict[str, object]]:
    """One application for all tests, and the service that it calls."""
    current: dict[str, object] = {}
    built = build_app(
        lambda: current["service"], max_body_bytes=MAX_BODY_BYTES, echo_request_id=True
    )
    return built, current


@pytest.fixture(scope="module")
def server(app: tuple[FastAPI, dict[str, object]]) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(app[0], log_level="critical", lifespan="off"))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    uvicorn_server.should_exit = uvicorn_server.force_exit = True
    thread.join()


@pytest.fixture
def base_url(server: str, app: tuple[FastAPI, dict[str, object]], service) -> str:
    app[1]["service"] = service
    return server


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60)


def data_of(event: str) -> str:
    """The data that a client sees of an event; the event has nothing else."""
    (data,) = event.splitlines()
    assert data.startswith("data: ")
    return data.removeprefix("data: ")


def check_error(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    assert response.status_code == status, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert (error.code, error.param) == (code, param), error
    return error.message


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


def test_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {"model": "acme/tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == whole.choices[0].message.content != ""
    assert [chunk.choices[0].finish_reason for chunk in deltas][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in deltas[:-1])
    assert last.choices == [] and last.usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 40
    assert whole.usage.prompt_tokens_details.cached_tokens == len("hello there")
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}
    assert whole.id.startswith("chatcmpl-")
    assert whole.system_fingerprint == last.system_fingerprint


def test_completion_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {"model": "acme/tiny", "prompt": "once upon", "seed": 1, "max_tokens": 30}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    for chunk in chunks:
        Completion.model_validate(chunk.model_dump(exclude_unset=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.id.startswith("cmpl-")


def test_whole_answers_have_the_documented_shape(http: httpx.Client) -> None:
    chat = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2})
    ChatCompletion.model_validate(chat.json())
    completion = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    Completion.model_validate(completion.json())
    ModelList.model_validate(http.get("/v1/models").json())


def test_events_are_openais(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    response = http.post(COMPLETIONS, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("data: [DONE]\n\n")
    events = response.text.removesuffix("\n\n").split("\n\n")
    *events, done = events
    assert all(re.fullmatch(r"data: \{.*\}", event) for event in events) and done == "data: [DONE]"
    assert "usage" not in json.loads(data_of(events[0]))


def test_every_chunk_has_the_usage_so_far_when_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "stream_options": options}
    events = http.post(COMPLETIONS, json=body).text.removesuffix("\n\n").split("\n\n")[:-1]
    usages = [json.loads(data_of(event))["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 3]


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_ends_a_stream_is_sent_with_its_last_token(app, service, num_tokens, num_choices):
    """A stream sends few messages, because each passes a dozen layers on its way to the socket."""
    body = {"prompt": "hello", "max_tokens": num_tokens, "n": num_choices, "stream": True}
    unread = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict] = []

    async def receive() -> dict:
        if unread:
            return unread.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
    asyncio.run(app[0](scope, receive, send))
    bodies = [m["body"] for m in sent if m["type"] == "http.response.body" and m["body"]]
    tokens = [piece.count(b'"text":') for piece in bodies]
    assert tokens == [1] * (num_tokens * num_choices)
    assert bodies[-1].endswith(b"data: [DONE]\n\n") and b"[DONE]" not in b"".join(bodies[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_on_request(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": [5, 6], "max_tokens": 6, "seed": 3, "return_token_ids": True}
    response = http.post(COMPLETIONS, json={**body, "stream": stream})
    if stream:
        events = response.text.removesuffix("\n\n").split("\n\n")[:-1]
        choices = [json.loads(data_of(event))["choices"][0] for event in events]
        ids = [i for choice in choices for i in choice["token_ids"]]
        assert len(choices) == 6
    else:
        ids = response.json()["choices"][0]["token_ids"]
    assert len(ids) == 6
    stopped = http.post(COMPLETIONS, json={**body, "stop_token_ids": [ids[2]]}).json()
    choice = stopped["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[2] == choice["token_ids"][-1]


def test_stop_string_ends_the_answer_and_is_the_stop_reason(http: httpx.Client) -> None:
    body = {"prompt": "x", "seed": 4, "max_tokens": 8}
    words = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"].split()
    choice = http.post(COMPLETIONS, json={**body, "stop": words[3]}).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == words[3]
    assert choice["text"].split() == words[:3]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "Once ", "seed": 4, "max_tokens": 3, "stream": stream}
    response = http.post(COMPLETIONS, json={**body, "echo": True})
    plain = http.post(COMPLETIONS, json={**body, "stream": False}).json()["choices"][0]["text"]
    if stream:
        events = response.text.removesuffix("\n\n").split("\n\n")[:-1]
        chunks = [json.loads(data_of(event)) for event in events]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        text = response.json()["choices"][0]["text"]
    assert text == "Once " + plain


def events_of(response: httpx.Response) -> list[dict]:
    events = response.text.removesuffix("\n\n").split("\n\n")[:-1]
    return [json.loads(data_of(event)) for event in events]


def test_several_choices_are_one_answer(client: openai.OpenAI) -> None:
    asked = {"model": "acme/tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 9, "n": 3}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3 and {c.finish_reason for c in whole.choices} == {"length"}
    assert whole.usage.prompt_tokens == len("hello there")
    assert whole.usage.completion_tokens == 27
    single = client.chat.completions.create(**{**asked, "n": 1})
    assert single.choices[0].message.content == texts[0]

    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
    *chunks, last = chunks
    assert last.usage == whole.usage
    deltas = [chunk.choices[0] for chunk in chunks]
    for i in range(3):
        mine = [delta for delta in deltas if delta.index == i]
        assert [delta.delta.role for delta in mine].count("assistant") == 1
        assert mine[0].delta.role == "assistant"
        assert "".join(delta.delta.content or "" for delta in mine) == texts[i]
        assert [delta.finish_reason for delta in mine].count("length") == 1


def test_logprobs_of_a_chat_are_openais(client: openai.OpenAI) -> None:
    asked = {"model": "acme/tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 6}
    asked |= {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == choice.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob < 0 for token in content)
    assert bytes(content[0].top_logprobs[0].bytes) == b"\xe6"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
    streamed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [token for tokens in streamed for token in tokens] == content
    plain = client.chat.completions.create(**{**asked, "top_logprobs": 0}).choices[0].logprobs
    assert all(token.top_logprobs == [] for token in plain.content)
    del asked["logprobs"], asked["top_logprobs"]
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def test_logprobs_of_a_completion_are_openais(http: httpx.Client) -> None:
    body = {"prompt": "x", "seed": 4, "max_tokens": 6, "logprobs": 2}
    answer = http.post(COMPLETIONS, json=body).json()
    Completion.model_validate(answer)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    starts = [
        choice["text"].find(t, o)
        for t, o in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    ]
    assert starts == logprobs["text_offset"] and starts[-1] > 0
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob and top["bytes:\\xe6"] == -0.5 and len(top) in (2, 3)
    streamed = [
        e["choices"][0] for e in events_of(http.post(COMPLETIONS, json={**body, "stream": True}))
    ]
    for name in logprobs:
        parts = [part for chunk in streamed for part in chunk["logprobs"][name]]
        assert parts == logprobs[name]


@pytest.mark.parametrize("prompt", ["Once ", [5, 6, 7]])
def test_echo_with_logprobs_scores_the_prompt_first(http: httpx.Client, service, prompt) -> None:
    body = {"prompt": prompt, "seed": 4, "max_tokens": 3, "n": 2, "logprobs": 2, "echo": True}
    answer = http.post(COMPLETIONS, json=body).json()
    Completion.model_validate(answer)
    assert service.requests[0].prompt_logprobs == 2
    plain = http.post(COMPLETIONS, json={**body, "prompt": "x" * len(prompt), "echo": False}).json()
    streamed = [
        e["choices"][0] for e in events_of(http.post(COMPLETIONS, json={**body, "stream": True}))
    ]
    for choice, own in zip(answer["choices"], plain["choices"], strict=True):
        logprobs, index = choice["logprobs"], choice["index"]
        echoed = "".join(f"word{i} " for i in range(3)) if prompt != "Once " else "Once "
        assert choice["text"] == echoed + own["text"]
        assert "prompt_logprobs" not in choice
        assert logprobs["tokens"][: len(prompt)] == [f"word{i} " for i in range(len(prompt))]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(prompt)] == [
            -1.5 - i for i in range(1, len(prompt))
        ]
        assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
        assert logprobs["tokens"][len(prompt) :] == own["logprobs"]["tokens"]
        for name in logprobs:
            mine = [chunk["logprobs"][name] for chunk in streamed if chunk["index"] == index]
            assert len(mine[0]) == len(prompt), "the prompt comes before the first token"
            assert [part for parts in mine for part in parts] == logprobs[name]
        assert "".join(c["text"] for c in streamed if c["index"] == index) == choice["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_are_vllms(http: httpx.Client, service, path) -> None:
    asked = {"prompt": "abcd", "logprobs": 4, "echo": True} if path == COMPLETIONS else {}
    asked = asked or {"messages": [{"role": "user", "content": "abcd"}]}
    body = {**asked, "max_tokens": 2, "seed": 1, "prompt_logprobs": 1}
    answer = http.post(path, json=body).json()
    (Completion if path == COMPLETIONS else ChatCompletion).model_validate(answer)
    assert service.requests[0].prompt_logprobs == (4 if path == COMPLETIONS else 1)
    told = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_logprobs"]
    assert told[0] is None and len(told) == 4
    assert told[2] == {
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"},
        "2": {"logprob": -3.5, "rank": 4, "decoded_token": "word2 "},
    }
    events = events_of(http.post(path, json={**body, "stream": True}))
    if path == CHAT:
        for event in events:
            ChatCompletionChunk.model_validate(event)
    holders = [event["choices"][0] if path == COMPLETIONS else event for event in events]
    assert [holder.get("prompt_logprobs") for holder in holders] == [told] + [None] * (
        len(events) - 1
    )


def test_every_served_field_reaches_the_router(http: httpx.Client, service) -> None:
    body = {
        "model": "acme/tiny",
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
            {"role": "assistant", "content": "yes", "tool_calls": None, "keys": None},
        ],
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "12": 1.5},
        "allowed_token_ids": [5, 7, 12],
        "bad_words": ["x", "y"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 4,
        "prompt_logprobs": 3,
        "seed": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "cache_salt": "tenant",
        "prompt_cache_key": "session",
        "priority": -2,
    }
    assert http.post(CHAT, json=body, headers={"x-request-id": "r1"}).status_code == 200
    request = service.requests[0]
    assert [m["role"] for m in request.messages] == ["system", "user", "assistant"]
    assert request.messages[1]["name"] == "ann"
    names = ("model", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    names += ("repetition_penalty", "presence_penalty", "frequency_penalty")
    served = {name: getattr(request, name) for name in names}
    assert (request.n, request.logprobs, request.prompt_logprobs) == (2, 4, 3)
    assert request.logit_bias == ((7, -100.0), (12, 1.5))
    assert (request.allowed_token_ids, request.bad_words) == ((5, 7, 12), ("x", "y"))
    assert served == {name: body[name] for name in served}
    assert request.max_tokens == 7 and request.request_id == "r1"
    assert request.stop == ("a", "b") and request.stop_token_ids == (1,)
    assert request.ignore_eos and request.include_stop_str_in_output
    assert not request.skip_special_tokens
    assert (request.tenant, request.session, request.priority) == ("tenant", "session", -2)
    # The body takes precedence over the header.
    headers = {"x-session-id": "header"}
    assert http.post(CHAT, json=body, headers=headers).status_code == 200
    del body["prompt_cache_key"]
    assert http.post(CHAT, json=body, headers=headers).status_code == 200
    assert [r.session for r in service.requests[1:]] == ["session", "header"]


@pytest.mark.parametrize(
    ("retention", "retain"), [("24h", True), ("in_memory", False), ("in-memory", False)]
)
def test_prompt_cache_retention_is_a_hint_to_retain_the_conversation(
    http: httpx.Client, service, retention: str, retain: bool
) -> None:
    for path, asked in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})):
        body = {**asked, "max_tokens": 1, "prompt_cache_retention": retention}
        assert http.post(path, json=body).status_code == 200
        assert service.requests[-1].retain == retain
        body["prompt_cache_retention"] = "1h"
        refused = http.post(path, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_cache_retention"


@pytest.mark.parametrize(
    ("body", "kind", "text", "field"),
    [
        ({"response_format": {"type": "text"}}, None, None, None),
        (
            {"response_format": {"type": "json_object"}},
            "json_schema",
            '{"type":"object"}',
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"type": "array"}},
                }
            },
            "json_schema",
            '{"type":"array"}',
            "response_format.json_schema.schema",
        ),
        (
            {"structured_outputs": {"json": {"type": "array"}}},
            "json_schema",
            '{"type":"array"}',
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": '{ "type": "array"}', "regex": None}},
            "json_schema",
            '{"type":"array"}',
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "é"]}},
            "choice",
            '["a", "é"]',
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": "start: A"}},
            "lark",
            "start: A",
            "structured_outputs.grammar",
        ),
    ],
)
def test_structured_outputs_reach_the_router(http, service, body, kind, text, field) -> None:
    response = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    expected = None if kind is None else (kind, text, field)
    assert service.requests[0].grammar == expected


def test_a_schema_that_nests_deeply_is_refused(http: httpx.Client) -> None:
    nested = b'{"a":' * 900 + b"1" + b"}" * 900
    body = b'{"prompt": "x", "structured_outputs": {"json": %s}}' % nested
    headers = {"content-type": "application/json"}
    response = http.post(COMPLETIONS, content=body, headers=headers)
    check_error(response, 400, "invalid_request", "structured_outputs.json")


def test_null_is_the_same_as_absent_for_every_field(http: httpx.Client, service) -> None:
    names = {name for body in BODIES for name in (*body.model_fields, *body.refused)} - {"messages"}
    body = dict.fromkeys([*names, *IGNORED_FIELDS]) | {"max_tokens": 1}
    response = http.post(CHAT, json={**body, "messages": MESSAGES})
    assert response.status_code == 200, response.text
    assert service.requests[0].stop == () and service.requests[0].skip_special_tokens


@pytest.mark.parametrize("content", ["abcd", [{"type": "text", "text": t} for t in ("ab", "cd")]])
@pytest.mark.parametrize(
    ("path", "given"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})]
)
def test_a_prediction_reaches_the_router_and_the_usage_counts_drafts(
    http: httpx.Client, service, content, path, given
) -> None:
    body = {**given, "max_tokens": 2, "prediction": {"type": "content", "content": content}}
    answer = http.post(path, json=body).raise_for_status().json()
    assert service.requests[0].prediction == "abcd"
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 4
    assert details["rejected_prediction_tokens"] == 2


def test_ignored_fields_are_accepted(http: httpx.Client) -> None:
    ignored = {name: {"any": ["thing"]} for name in IGNORED_FIELDS}
    response = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **ignored})
    assert response.status_code == 200, response.text


def test_a_list_with_one_prompt_is_that_prompt(http: httpx.Client, service) -> None:
    for prompt in ("ab", ["ab"], [5, 6], [[5, 6]]):
        http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
    assert [r.prompt for r in service.requests] == ["ab", "ab", (5, 6), (5, 6)]


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------

REFUSED = [
    (COMPLETIONS, {}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "invalid_request", "prompt"),
    (
        COMPLETIONS,
        {"prompt": "x", "add_special_tokens": 1},
        "invalid_request",
        "add_special_tokens",
    ),
    (
        COMPLETIONS,
        {"prompt": "x", "chat_template_kwargs": {"a": 1}},
        "unsupported_field",
        "chat_template_kwargs",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": [1]},
        "invalid_request",
        "chat_template_kwargs",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": {"tools": [1]}},
        "invalid_request",
        "chat_template_kwargs.tools",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
        "invalid_request",
        "continue_final_message",
    ),
    (COMPLETIONS, {"prompt": []}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": 5}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 129, "n": 2}, "invalid_request", "prompt"),
    (
        COMPLETIONS,
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_event_ids": True}},
        "unsupported_field",
        "prompt",
    ),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "invalid_request", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "echo": False}, "invalid_request", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "best_of": 0}, "invalid_request", "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 33}, "invalid_request", "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 3}, "invalid_request", "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, "invalid_request", "best_of"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "unsupported_field", "suffix"),
    (COMPLETIONS, {"prompt": [100]}, "invalid_request", "prompt[0]"),
    (COMPLETIONS, {"prompt": [-1]}, "invalid_request", "prompt[0]"),
    (COMPLETIONS, {"prompt": [1 << 63]}, "invalid_request", "prompt[0]"),
    (COMPLETIONS, {"prompt": "x" * 512}, "context_length_exceeded", "prompt"),
    (COMPLETIONS, {"prompt": "x", "messages": []}, "unsupported_field", "messages"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "invalid_request", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 512}, "context_length_exceeded", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "1"}, "invalid_request", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "invalid_request", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "invalid_request", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "invalid_request", "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "invalid_request", "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "invalid_request", "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, "invalid_request", "top_k"),
    (COMPLETIONS, {"prompt": "x", "seed": 1 << 64}, "invalid_request", "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, "invalid_request", "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "invalid_request", "stop[0]"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "invalid_request", "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [100]}, "invalid_request", "stop_token_ids[0]"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": ["1"]}, "invalid_request", "stop_token_ids[0]"),
    (COMPLETIONS, {"prompt": "x", "min_p": 1.5}, "invalid_request", "min_p"),
    (
        COMPLETIONS,
        {"prompt": "x", "repetition_penalty": 0},
        "invalid_request",
        "repetition_penalty",
    ),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, "invalid_request", "presence_penalty"),
    (
        COMPLETIONS,
        {"prompt": "x", "frequency_penalty": "1"},
        "invalid_request",
        "frequency_penalty",
    ),
    (COMPLETIONS, {"prompt": "x", "logit_bias": [1]}, "invalid_request", "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "invalid_request", "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"100": 1}}, "invalid_request", "logit_bias[0]"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, "invalid_request", "logit_bias[0]"),
    (
        COMPLETIONS,
        {"prompt": "x", "logit_bias": {"1": 1, "01": 1}},
        "invalid_request",
        "logit_bias",
    ),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, "invalid_request", "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "bad_words": [""]}, "invalid_request", "bad_words[0]"),
    (COMPLETIONS, {"prompt": "x", "prediction": "y"}, "invalid_request", "prediction"),
    (
        COMPLETIONS,
        {"prompt": "x", "prediction": {"type": "text", "content": "y"}},
        "invalid_request",
        "prediction.type",
    ),
    *(
        (CHAT, {"messages": MESSAGES, "response_format": value}, code, f"response_format{rest}")
        for value, code, rest in [
            ("json", "invalid_request", ""),
            ({}, "invalid_request", ".type"),
            ({"type": "xml"}, "invalid_request", ".type"),
            ({"type": "json_object", "schema": {}}, "unsupported_field", ".schema"),
            ({"type": "json_schema"}, "invalid_request", ".json_schema.schema"),
            (
                {"type": "json_schema", "json_schema": {"schema": []}},
                "invalid_request",
                ".json_schema.schema",
            ),
        ]
    ),
    *(
        (
            COMPLETIONS,
            {"prompt": "x", "structured_outputs": value},
            code,
            f"structured_outputs{rest}",
        )
        for value, code, rest in [
            ({}, "invalid_request", ""),
            ({"regex": "a", "json_object": True}, "invalid_request", ""),
            ({"json": "{"}, "invalid_request", ".json"),
            ({"json": "[]"}, "invalid_request", ".json"),
            ({"choice": []}, "invalid_request", ".choice"),
            ({"choice": ["a", ""]}, "invalid_request", ".choice"),
            ({"odd": 1}, "unsupported_field", ".odd"),
        ]
    ),
    (
        COMPLETIONS,
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "min_tokens": 2},
        "invalid_request",
        "min_tokens",
    ),
    (
        COMPLETIONS,
        {
            "prompt": "x",
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "invalid_request",
        "structured_outputs",
    ),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "invalid_request", "stream"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "invalid_request", "stream_options"),
    (
        COMPLETIONS,
        {"prompt": "x", "stream": True, "stream_options": {"usage": True}},
        "unsupported_field",
        "stream_options.usage",
    ),
    (COMPLETIONS, {"prompt": "x", "max_token": 5}, "unsupported_field", "max_token"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "invalid_request", "n"),
    (COMPLETIONS, {"prompt": "x", "n": 33}, "invalid_request", "n"),
    (COMPLETIONS, {"prompt": "x", "n": True}, "invalid_request", "n"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "invalid_request", "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, "invalid_request", "logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "invalid_request", "prompt_logprobs"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": -1}, "invalid_request", "prompt_logprobs"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": True}, "invalid_request", "prompt_logprobs"),
    (
        COMPLETIONS,
        {"prompt": "x", "logprobs": 3, "echo": True, "prompt_logprobs": -1},
        "invalid_request",
        "prompt_logprobs",
    ),
    (COMPLETIONS, {"prompt": "x", "top_logprobs": 2}, "unsupported_field", "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": 1}, "invalid_request", "logprobs"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "invalid_request", "top_logprobs"),
    (
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21},
        "invalid_request",
        "top_logprobs",
    ),
    (COMPLETIONS, [], "invalid_request", None),
    (COMPLETIONS, "prompt", "invalid_request", None),
    (CHAT, {}, "invalid_request", "messages"),
    (CHAT, {"messages": []}, "invalid_request", "messages"),
    (CHAT, {"messages": "hi"}, "invalid_request", "messages"),
    (CHAT, {"messages": ["hi"]}, "invalid_request", "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "invalid_request", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "pirate", "content": ""}]},
        "invalid_request",
        "messages[0].role",
    ),
    (
        CHAT,
        {"messages": [{"role": "function", "content": ""}]},
        "unsupported_field",
        "messages[0].role",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported_field",
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "invalid_request",
        "messages[0].tool_calls[0].id",
    ),
    # Names that Python looks up in objects are ordinary fields in a body.
    *(
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi", name: 1}]},
            "unsupported_field",
            f"messages[0].{name}",
        )
        for name in ("keys", "__iter__", "model_extra", "__dict__")
    ),
    (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6},
        "invalid_request",
        "max_completion_tokens",
    ),
    (CHAT, {"messages": MESSAGES, "prompt": "x"}, "unsupported_field", "prompt"),
]


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED)
def test_bad_field_is_named(http: httpx.Client, path: str, body, code: str, param) -> None:
    message = check_error(http.post(path, json=body), 400, code, param)
    assert param is None or param.split("[")[0] in message


def test_a_typo_gets_the_name_that_was_meant(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "x", "temperatur": 1})
    assert "did you mean 'temperature'?" in check_error(
        response, 400, "unsupported_field", "temperatur"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_00 + b"]" * 100_00,
        b'{"metadata":' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
)
def test_what_is_not_json_is_refused(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    check_error(http.post(COMPLETIONS, content=body, headers=headers), 400, "invalid_request", None)


@pytest.mark.parametrize("field", ["prompt", "messages", "stop", "tools", "odd", "stream_options"])
@pytest.mark.parametrize("depth", [900, 1000])
def test_deep_nesting_is_refused_in_any_field(http: httpx.Client, field: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    deep = {
        "messages": b'[{"role":"user","content":' + nested + b"}]",
        "stream_options": b'{"include_usage":' + nested + b"}",
    }.get(field, nested)
    body = b'{"stream":true,"%s":%s}' % (field.encode(), deep)
    headers = {"content-type": "application/json"}
    for path in (CHAT, COMPLETIONS):
        assert http.post(path, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_must_say_that_it_is_json(http: httpx.Client, content_type) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    check_error(response, 400, "invalid_request", "content-type")


def test_body_is_limited_with_and_without_a_length(http: httpx.Client, service) -> None:
    headers = {"content-type": "application/json"}
    largest = b'{"max_tokens": 1, "prompt": "x"' + b" " * (MAX_BODY_BYTES - 32) + b"}"
    assert len(largest) == MAX_BODY_BYTES
    assert http.post(COMPLETIONS, content=largest, headers=headers).status_code == 200
    for content in (largest + b" ", iter([largest, b" " * 8192]), largest * 6):
        response = http.post(COMPLETIONS, content=content, headers=headers)
        message = check_error(response, 413, "body_too_large", None)
        assert str(MAX_BODY_BYTES) in message
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/completions"),
        ("GET", "/v1/completions/"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("GET", "/"),
        ("GET", "/v1/" + "x" * 2000),
    ],
)
def test_an_unknown_route_is_answered_with_those_that_there_are(
    http: httpx.Client, method: str, path: str
) -> None:
    message = check_error(http.request(method, path), 404, "not_found", None)
    assert message.startswith(
        f"{method} {path[:256]} is not served; served are POST {COMPLETIONS}, "
    )
    for route in (CHAT, "GET /v1/models, ", "GET /v1/models/{model_id}", "/health", "/docs"):
        assert route in message
    assert len(message) < 1024


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", COMPLETIONS, "POST"), ("DELETE", CHAT, "POST"), ("PUT", "/v1/models", "GET")],
)
def test_an_unknown_method_is_answered_with_those_that_there_are(
    http: httpx.Client, method: str, path: str, allowed: str
) -> None:
    response = http.request(method, path)
    message = check_error(response, 405, "method_not_allowed", None)
    assert message.startswith(f"{method} {path} is not served; served are ")
    assert f"{allowed} {path}, " in message
    assert response.headers["allow"] == allowed


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.chat.completions.create(model="acme/other", messages=MESSAGES),
        lambda: client.models.retrieve("acme/other"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
        assert "model must be one of 'acme/tiny', got 'acme/other'" in caught.value.message


def test_overload_says_when_to_come_back(http: httpx.Client, service) -> None:
    for seconds, header, milliseconds in ((0.25, "1", "250"), (2.001, "3", "2001")):
        service.refusal = Overloaded("the queue is full", retry_after_s=seconds)
        response = http.post(CHAT, json={"messages": MESSAGES, "stream": True})
        check_error(response, 429, "overloaded", None)
        assert response.headers["retry-after"] == header
        assert response.headers["retry-after-ms"] == milliseconds


def test_openai_client_retries_after_an_overload(base_url: str, service) -> None:
    service.refusals = [Overloaded("the queue is full", retry_after_s=0.05)]
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=3)
    answer = client.chat.completions.create(model="acme/tiny", messages=MESSAGES, max_tokens=1)
    assert answer.choices[0].finish_reason == "length" and len(service.requests) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": MESSAGES}), (CHAT, {"messages": MESSAGES, "stream": True})],
)
def test_a_defect_tells_only_its_number(http: httpx.Client, service, caplog, path, body) -> None:
    service.refusal = RuntimeError("secret detail")
    message = check_error(http.post(path, json=body), 500, "internal_error", None)
    assert "secret" not in message
    number = message.partition("id=")[2]
    assert number and any(number in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("failure", [EngineError("step failed"), RuntimeError("secret detail")])
def test_failure_in_a_stream_is_its_last_event(client, http, service, failure) -> None:
    service.fail_at, service.failure = 3, failure
    body = {"prompt": "x", "max_tokens": 8, "stream": True}
    response = http.post(COMPLETIONS, json=body)
    assert response.status_code == 200 and "[DONE]" not in response.text
    *chunks, last = response.text.removesuffix("\n\n").split("\n\n")
    assert len(chunks) == 3
    error = ErrorAnswer.model_validate_json(data_of(last)).error
    assert (
        error.code == getattr(failure, "code", "internal_error") and "secret" not in error.message
    )
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="acme/tiny", **body))
    assert all(stream.closed.wait(10) for stream in service.streams)


def test_failure_of_a_whole_answer_has_its_status(http: httpx.Client, service) -> None:
    service.fail_at, service.failure = 3, Unavailable("replica lost", retry_after_s=1)
    response = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 8})
    check_error(response, 503, "unavailable", None)
    assert response.headers["retry-after"] == "1" and service.streams[0].closed.is_set()


@pytest.mark.parametrize(("reason", "code"), [("abort", "aborted"), (None, "engine_error")])
def test_an_answer_that_was_cut_off_does_not_look_complete(http, service, reason, code) -> None:
    service.last_reason = reason
    body = {"prompt": "x", "max_tokens": 3}
    whole = http.post(COMPLETIONS, json=body)
    assert whole.status_code >= 400 and whole.json()["error"]["code"] == code
    events = http.post(COMPLETIONS, json={**body, "stream": True}).text
    assert "[DONE]" not in events and f'"code":"{code}"' in events


# --------------------------------------------------------------------------------------------------
# Headers, probes and pages
# --------------------------------------------------------------------------------------------------


def test_request_id_is_echoed_and_checked(http: httpx.Client, service) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    response = http.post(COMPLETIONS, json=body, headers={"x-request-id": "my label"})
    assert response.headers.get_list("x-request-id") == ["my label"]
    assert service.requests[0].request_id == "my label"
    made = http.post(COMPLETIONS, json=body).headers["x-request-id"]
    assert made == service.requests[1].request_id and len(made) == 32
    for bad in (b"x" * 129, b"tab\there", "é".encode("latin-1")):
        response = http.post(COMPLETIONS, json=body, headers={"x-request-id": bad})
        assert response.status_code == 200
        assert response.headers["x-request-id"] == service.requests[-1].request_id
        assert len(service.requests[-1].request_id) == 32


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip", "zstd"])
def test_a_compressed_body_is_refused_by_name(http: httpx.Client, encoding: str) -> None:
    raw = gzip.compress(json.dumps({"prompt": "x"}).encode())
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    response = http.post(COMPLETIONS, content=raw, headers=headers)
    check_error(response, 415, "unsupported_encoding", "content-encoding")
    plain = {**headers, "content-encoding": "identity"}
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    assert http.post(COMPLETIONS, content=body, headers=plain).status_code == 200


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_an_empty_body_lacks_its_input(http: httpx.Client, path: str, param: str) -> None:
    message = check_error(http.post(path, json={}), 400, "invalid_request", param)
    assert message == f"{param} is required"


@pytest.mark.parametrize(
    ("path", "fields", "headers", "param"),
    [
        (CHAT, {"max_completion_tokens": 0}, {}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 0}, {}, "max_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, {}, "top_logprobs"),
        (CHAT, {"cache_salt": "x" * 300}, {}, "cache_salt"),
        (CHAT, {"prompt_cache_key": "x" * 300}, {}, "prompt_cache_key"),
        (CHAT, {}, {"x-session-id": "x" * 300}, "x-session-id"),
        (CHAT, {"messages": []}, {}, "messages"),
        (COMPLETIONS, {"max_tokens": 0}, {}, "max_tokens"),
        (COMPLETIONS, {"logprobs": 21}, {}, "logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, {}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": "x" * 300}, {}, "cache_salt"),
        (COMPLETIONS, {"prompt": []}, {}, "prompt"),
    ],
)
def test_errors_name_the_field_that_the_client_gave(
    http: httpx.Client, path: str, fields: dict, headers: dict, param: str
) -> None:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    response = http.post(path, json={**prompt, **fields}, headers=headers)
    assert check_error(response, 400, "invalid_request", param).startswith(param)


def test_a_timeout_that_has_passed_is_named_as_it_was_given(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for fields, headers, param in (
        ({"timeout": -1}, {}, "timeout"),
        ({}, {"x-request-timeout-seconds": "nan"}, "x-request-timeout-seconds"),
    ):
        response = http.post(COMPLETIONS, json={**body, **fields}, headers=headers)
        assert response.json()["error"]["param"] == param


def test_a_prompt_that_is_too_long_is_named_as_it_was_given(http: httpx.Client) -> None:
    for path, prompt, param in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 600}, "prompt"),
    ):
        check_error(http.post(path, json=prompt), 400, "context_length_exceeded", param)


def test_headers_say_why_this_replica(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    whole = http.post(COMPLETIONS, json=body).headers
    stream = http.post(COMPLETIONS, json={**body, "stream": True}).headers
    decided = {
        "x-quire-router": "router-1",
        "x-quire-replica": "replica-a",
        "x-quire-runner-up": "replica-b",
        "x-quire-predicted-cached-tokens": "64",
        "x-quire-cached-tokens": "1",
        "x-quire-queue-ms": "2.0",
    }
    attempts = {"x-quire-attempts": "1"}
    assert {k: v for k, v in whole.items() if k.startswith("x-quire")} == decided | attempts
    # Headers are sent with the first token, when the request may still continue on another replica.
    assert {k: v for k, v in stream.items() if k.startswith("x-quire")} == decided


def test_explain_finds_a_request_by_its_id_or_that_of_its_answer(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    http.post(COMPLETIONS, json=body, headers={"x-request-id": "my label"})
    answer = http.post(COMPLETIONS, json=body)
    for asked, request_id in (
        ("my label", "my label"),
        (answer.headers["x-request-id"], answer.headers["x-request-id"]),
        (answer.json()["id"], answer.headers["x-request-id"]),
    ):
        told = http.get("/v1/router/explain", params={"request_id": asked})
        assert told.status_code == 200
        (decision,) = DecisionList.model_validate(told.json()).data
        assert decision.request_id == request_id
        best, other = decision.ranking
        assert (best.replica, best.cost_s, other.cost_s) == ("replica-a", 0.75, 1.125)
        assert best.terms == {"wait_s": 0.25, "prefill_s": 0.5}
        assert decision.outcome.cached_tokens == 1
    newest = DecisionList.model_validate(http.get("/v1/router/explain?limit=1").json())
    assert [d.request_id for d in newest.data] == [answer.headers["x-request-id"]]
    assert newest.routers == ["router-0", "router-1"]


def test_explain_of_an_unknown_request_says_who_was_asked(http: httpx.Client) -> None:
    response = http.get("/v1/router/explain?request_id=never")
    check_error(response, 404, "decision_not_found", "request_id")
    assert "none of the 2 routers remembers 'never'" in response.json()["error"]["message"]
    for query, field in (
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("request_id=", "request_id"),
    ):
        check_error(http.get(f"/v1/router/explain?{query}"), 400, "invalid_request", field)


def test_probes(http: httpx.Client, service) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    ready = http.get("/ready")
    assert ready.status_code == 200 and ready.json()["startup"] == {"load_weights": 1.5}
    service.ready = False
    service.refusal = Unavailable("no replica is ready", retry_after_s=1)
    ready = http.get("/ready")
    assert ready.status_code == 503 and ready.json()["reason"] == "no replica is attached yet"
    assert http.get("/health").status_code == 200
    check_error(http.get("/v1/models"), 503, "unavailable", None)
    assert http.get("/version").json()["version"]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "acme/tiny" and model.max_model_len == 512
    assert client.models.retrieve("acme/tiny") == model


def test_documentation_knows_every_field(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for model in (CompletionRequest, ChatCompletionRequest):
        assert set(schemas[model.__name__]["properties"]) == set(model.model_fields)
        assert all("description" in p for p in schemas[model.__name__]["properties"].values())
    text = json.dumps(document)
    for path, model in ((COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)):
        description = document["paths"][path]["post"]["description"]
        assert all(f in description for f in (*IGNORED_FIELDS, *model.refused))
    references = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= schemas.keys()
    assert http.get("/docs").status_code == 200


# --------------------------------------------------------------------------------------------------
# Clients that disconnect
# --------------------------------------------------------------------------------------------------


def _leave(base_url: str, service, body: dict, bytes_to_read: int) -> None:
    """Send a request, read some bytes or wait until the service has it, close the socket."""
    host, port = base_url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        if bytes_to_read:
            assert connection.recv(bytes_to_read)
        else:
            _wait_for(lambda: service.requests)


def _wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_closes_the_stream(base_url: str, service, stream: bool) -> None:
    service.token_s = 0.02
    body = {"prompt": "x", "max_tokens": 500, "stream": stream}
    _leave(base_url, service, body, bytes_to_read=64 if stream else 0)
    _wait_for(lambda: service.streams)
    assert service.streams[0].closed.wait(PATIENCE_S)
    tokens = service.streams[0].usage.completion_tokens
    time.sleep(0.1)
    assert service.streams[0].usage.completion_tokens == tokens < 100


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_cancels_the_request(base_url, service, stream) -> None:
    service.generate_s = 30
    _leave(base_url, service, {"prompt": "x", "stream": stream}, bytes_to_read=0)
    assert service.cancelled_in_generate.wait(PATIENCE_S)


def test_finished_streams_are_closed(http: httpx.Client, service) -> None:
    for stream in (False, True):
        http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": stream})
    assert len(service.streams) == 2
    assert all(stream.closed.wait(PATIENCE_S) for stream in service.streams)


def test_first_token_does_not_wait_for_the_second(http: httpx.Client, service) -> None:
    """The service makes the second token only after the client has read the first one."""
    service.goes_on.clear()
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "seed": 1}
    with http.stream("POST", CHAT, json=body) as response:
        chunks, seen = response.iter_raw(), b""
        while b"word" not in seen:
            seen += next(chunks)
        assert b'"role":"assistant"' in seen and b"[DONE]" not in seen
        service.goes_on.set()
        seen += b"".join(chunks)
    assert seen.count(b"word") >= 3 and seen.endswith(b"data: [DONE]\n\n")


# --------------------------------------------------------------------------------------------------
# Arbitrary bodies
# --------------------------------------------------------------------------------------------------

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "user"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
_FIELDS = sorted({name for body in BODIES for name in (*body.model_fields, *body.refused)})
_BODIES = st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=6), _JSON, max_size=3)
_VALID = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2}),
    (COMPLETIONS, {"prompt": [1, 2], "max_tokens": 2, "stream": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "stream": True, "stop": ["a"]}),
]


@settings(max_examples=300)
@given(valid=st.sampled_from(_VALID), change=_BODIES, replace=st.booleans())
def test_any_body_is_answered_or_refused_in_shape(
    app: tuple[FastAPI, dict],
    service_class: type,
    valid: tuple[str, dict],
    change: dict,
    replace: bool,
) -> None:
    path, body = valid
    app[1]["service"] = service = service_class()

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app[0])
        async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
            return await client.post(path, json=change if replace else {**body, **change})

    response = asyncio.run(post())
    if response.status_code == 200:
        assert '"error"' not in response.text
        assert all(stream.closed.is_set() for stream in service.streams) and service.streams
    else:
        assert 400 <= response.status_code < 500, response.text
        ErrorAnswer.model_validate(response.json())
        assert not service.streams
