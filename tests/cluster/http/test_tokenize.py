"""Routes that show the tokens of a prompt; nothing is generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_app import serving

from quire.cluster.http.http_answers import ErrorAnswer
from quire.cluster.http.http_tokenize import (
    RENDER_PATH,
    DetokenizeAnswer,
    DetokenizeRequest,
    RenderAnswer,
    TokenizeAnswer,
    TokenizeRequest,
)
from quire.protos.errors import ContextLengthExceeded
from quire.router import refused_fields

TOKENIZE, DETOKENIZE = TokenizeRequest.path, DetokenizeRequest.path
MESSAGES = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi é"}]
TEXT = "be briefhi é"
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with serving(service, echo_request_id=True) as client:
        yield client


def test_a_text_becomes_tokens_in_vllms_shape(http: httpx.Client, service) -> None:
    response = http.post(TOKENIZE, json={"model": "acme/tiny", "prompt": "ab"})
    assert response.json() == {
        "count": 2,
        "max_model_len": 512,
        "tokens": [97, 98],
        "token_strs": None,
    }
    TokenizeAnswer.model_validate(response.json())
    body = {"prompt": "ab", "return_token_strs": True, "add_special_tokens": False}
    answer = http.post(TOKENIZE, json=body).json()
    assert answer["token_strs"] == ["<97>", "<98>"]
    assert [request.add_special_tokens for request in service.requests] == [None, False]
    assert service.streams == []


def test_messages_become_tokens_as_the_chat_template_writes_them(
    http: httpx.Client, service
) -> None:
    body = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = http.post(TOKENIZE, json=body).json()
    assert bytes(answer["tokens"]).decode() == TEXT and answer["count"] == len(TEXT.encode())
    (request,) = service.requests
    assert [message["role"] for message in request.messages] == ["system", "user"]
    assert request.tools[0].name == "now" and request.add_generation_prompt is False
    assert request.chat_template_kwargs == {"enable_thinking": False}
    http.post(TOKENIZE, json={"messages": MESSAGES, "continue_final_message": True})
    assert service.requests[1].continue_final_message


def test_tokens_become_a_text(http: httpx.Client) -> None:
    response = http.post(DETOKENIZE, json={"model": "acme/tiny", "tokens": [5, 97, 98]})
    assert response.json() == {"prompt": "word5 naïve 日本 "}
    DetokenizeAnswer.model_validate(response.json())
    many = http.post(DETOKENIZE, json={"tokens": [5] * 5000, "skip_special_tokens": True})
    assert many.json() == {"prompt": "word5 " * 5000}
    assert http.post(DETOKENIZE, json={"tokens": []}).json() == {"prompt": ""}


def test_render_shows_the_prompt_of_a_chat(http: httpx.Client, service) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "temperature": 0.5, "n": 2}
    response = http.post(RENDER_PATH, json=body, headers={"x-request-id": "r1"})
    assert response.json() == {
        "request_id": "r1",
        "model": "acme/tiny",
        "prompt": TEXT,
        "token_ids": list(TEXT.encode()),
        "count": len(TEXT.encode()),
        "max_model_len": 512,
    }
    RenderAnswer.model_validate(response.json())
    (request,) = service.requests
    assert request.tools[0].name == "now" and service.streams == []


REFUSED: list[tuple[str, Any, int, str, str | None]] = [
    (TOKENIZE, {}, 400, "invalid_request", "prompt"),
    (TOKENIZE, {"prompt": "a", "messages": MESSAGES}, 400, "invalid_request", "prompt"),
    (TOKENIZE, {"prompt": ["a"]}, 400, "invalid_request", "prompt"),
    (TOKENIZE, {"prompt": [1]}, 400, "invalid_request", "prompt"),
    (TOKENIZE, {"prompt": "a", "chat_template": "x"}, 400, "unsupported_field", "chat_template"),
    (TOKENIZE, {"prompt": "a", "temperature": 1}, 400, "unsupported_field", "temperature"),
    (TOKENIZE, {"prompt": "a", "odd": 1}, 400, "unsupported_field", "odd"),
    (TOKENIZE, {"prompt": "a", "return_token_strs": 1}, 400, "invalid_request", "return_token_strs"),
    (TOKENIZE, {"messages": []}, 400, "invalid_request", "messages"),
    (TOKENIZE, {"messages": [{"role": "user"}]}, 400, "invalid_request", "messages[0].content"),
    (TOKENIZE, {"messages": MESSAGES, "tools": [{}]}, 400, "unsupported_field", "tools[0].type"),
    (TOKENIZE, [], 400, "invalid_request", None),
    (DETOKENIZE, {}, 400, "invalid_request", "tokens"),
    (DETOKENIZE, {"tokens": "1"}, 400, "invalid_request", "tokens"),
    (DETOKENIZE, {"tokens": [1, "1"]}, 400, "invalid_request", "tokens[1]"),
    (DETOKENIZE, {"tokens": [5, 100]}, 400, "invalid_request", "tokens[1]"),
    (DETOKENIZE, {"tokens": [-1]}, 400, "invalid_request", "tokens[0]"),
    (DETOKENIZE, {"tokens": [1], "model": "x"}, 404, "model_not_found", "model"),
    (RENDER_PATH, {}, 400, "invalid_request", "messages"),
    (RENDER_PATH, {"messages": MESSAGES, "prompt": "x"}, 400, "unsupported_field", "prompt"),
    (RENDER_PATH, {"messages": MESSAGES, "max_tokens": 0}, 400, "invalid_request", "max_tokens"),
    (
        RENDER_PATH,
        {"messages": MESSAGES, "max_completion_tokens": 0},
        400,
        "invalid_request",
        "max_completion_tokens",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), REFUSED)
def test_a_wrong_field_is_named(http: httpx.Client, path, body, status, code, param) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert (error.code, error.param) == (code, param), error


@pytest.mark.parametrize("path", [TOKENIZE, RENDER_PATH])
def test_messages_that_are_too_long_are_named_as_they_were_given(http, service, path) -> None:
    service.refusal = ContextLengthExceeded("prompt has 600 tokens", field="prompt")
    error = http.post(path, json={"messages": MESSAGES}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("body", "valid"),
    [(TokenizeRequest, {"prompt": "a"}), (DetokenizeRequest, {"tokens": [1]})],
)
def test_what_asks_for_nothing_is_accepted(http: httpx.Client, body, valid: dict) -> None:
    nulls = dict.fromkeys({*body.model_fields, *body.refused} - valid.keys())
    assert http.post(body.path, json={**nulls, **valid}).status_code == 200
    for name, refused in body.refused.items():
        for value in refused.accepted:
            assert http.post(body.path, json={**valid, name: value}).status_code == 200


def test_the_document_describes_every_field(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for model in (TokenizeRequest, DetokenizeRequest):
        properties = schemas[model.__name__]["properties"]
        assert set(properties) == set(model.model_fields)
        assert all("description" in field for field in properties.values())
        assert not model.refused.keys() & properties.keys()
        assert document["paths"][model.path]["post"]["requestBody"]["required"]
    assert set(TokenizeRequest.refused) <= set(refused_fields.OF_CHATS)
    assert RENDER_PATH in document["paths"]
