"""Every refusal names what is not supported, the field, its allowed values and the value that it had."""

from __future__ import annotations

import re

import httpx
import pytest
from live_app import serving

from quire.cluster.http.http_answers import ErrorAnswer
from quire.cluster.http.http_body import BODIES
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.router import refused_fields

CHAT, COMPLETIONS = ChatCompletionRequest.path, CompletionRequest.path
VALID = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 1},
}


@pytest.fixture
def client(service):
    with serving(service) as client:
        yield client


def refusal(client: httpx.Client, path: str, fields: dict, param: str) -> str:
    response = client.post(path, json={**VALID[path], **fields})
    assert response.status_code == 400, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert error.param == param, error
    return error.message


def test_each_endpoint_refuses_by_a_sentence_and_takes_what_asks_for_nothing(client) -> None:
    for body in BODIES:
        valid = VALID[body.path]
        for name, refused in body.refused.items():
            assert name not in body.model_fields, f"{body.path} serves {name}"
            for value in (None, *refused.accepted):
                response = client.post(body.path, json={**valid, name: value})
                assert response.status_code == 200, response.text
            message = refusal(client, body.path, {name: {"odd": 1}}, name)
            assert message.startswith(f"{refused.sentence}: {name} must be "), message
            assert message.endswith("null, got an object with 1 field"), message


def test_the_sentence_is_one_that_users_understand(client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert refusal(client, CHAT, {"tools": tools}, "tools") == (
        "tool calls are not served: tools must be [] or null, got a list of 1"
    )
    assert refusal(client, CHAT, {"tool_choice": "auto"}, "tool_choice") == (
        "tool calls are not served: tool_choice must be \"none\" or null, got 'auto'"
    )
    assert refusal(client, COMPLETIONS, {"suffix": "x"}, "suffix") == (
        "text is not filled in before a suffix: suffix must be \"\" or null, got 'x'"
    )


def test_no_field_is_refused_without_words() -> None:
    tables = (
        refused_fields.OF_COMPLETIONS,
        refused_fields.OF_CHATS,
        refused_fields.OF_MESSAGES,
    )
    sentences = [refused.sentence for table in tables for refused in table.values()]
    for sentence in [*sentences, *refused_fields.CONTENT_TYPES.values()]:
        assert re.fullmatch(r"[a-z].* .*[a-z0-9]", sentence), sentence


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, {"messages": []}, f"{COMPLETIONS} has no such field, but {CHAT}: messages must"),
        (CHAT, {"prompt": "x"}, f"{CHAT} has no such field, but {COMPLETIONS}: prompt must be null"),
        (COMPLETIONS, {"tools": [{}]}, f"{COMPLETIONS} has no such field, but {CHAT}: tools must be"),
        (COMPLETIONS, {"temprature": 1}, "this field is unknown: temprature; did you mean 'temp"),
        (CHAT, {"max_token": 1}, "this field is unknown: max_token; did you mean 'max_tokens'?"),
    ],
)  # fmt: skip
def test_a_field_of_another_endpoint_and_an_unknown_one_are_told_apart(
    client, path: str, fields: dict, message: str
) -> None:
    (name,) = fields
    assert refusal(client, path, fields, name).startswith(message)


def test_what_asks_for_nothing_on_one_endpoint_asks_for_nothing_on_the_other(client) -> None:
    for body in BODIES:
        for other in BODIES:
            for name, refused in other.refused.items():
                if name in body.model_fields or name in body.refused:
                    continue
                for value in (None, *refused.accepted):
                    response = client.post(body.path, json={**VALID[body.path], name: value})
                    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", sorted(refused_fields.OF_MESSAGES))
def test_fields_of_messages_are_refused_by_a_sentence(client, name: str) -> None:
    refused = refused_fields.OF_MESSAGES[name]
    for value in (None, *refused.accepted):
        messages = [{"role": "user", "content": "hello", name: value}]
        assert client.post(CHAT, json={"messages": messages, "max_tokens": 1}).status_code == 200
    messages = [{"role": "user", "content": "hello", name: [{}]}]
    field = f"messages[0].{name}"
    message = refusal(client, CHAT, {"messages": messages}, field)
    assert message.startswith(f"{refused.sentence}: {field} must be "), message


@pytest.mark.parametrize("kind", [*sorted(refused_fields.CONTENT_TYPES), "hologram"])
def test_parts_that_are_not_text_are_refused_by_a_sentence(client, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind: {}}]}]
    field = "messages[0].content[0].type"
    sentence = refused_fields.CONTENT_TYPES.get(kind, "only text is served")
    assert refusal(client, CHAT, {"messages": messages}, field) == (
        f"{sentence}: {field} must be \"text\", got '{kind}'"
    )


def test_the_role_of_functions_is_refused_by_a_sentence(client) -> None:
    messages = [{"role": "function", "content": "21 degrees"}]
    assert refusal(client, CHAT, {"messages": messages}, "messages[0].role") == (
        "functions are served as tools only: messages[0].role must be one of system, developer, user, assistant, tool, "
        "got 'function'"
    )
