"""Refusals and errors of the Messages API, and the tokens of a prompt."""

from __future__ import annotations

import pytest
from messages_reader import COUNTED, TOOL, VALID, error_of, events_of, refused

from quire.cluster.http.messages_api.messages_answers import TokenCount
from quire.cluster.http.messages_api.messages_routes import COUNT_PATH, PATH
from quire.cluster.http.messages_api.messages_schema import REFUSED
from quire.protos.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    Unavailable,
)
from quire.router.types import OutputDelta

# --------------------------------------------------------------------------------------------------
# Refusals and errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modle": "x"}, "this field is unknown: modle; did you mean 'model'?"),
        ({"mcp_servers": [{}]}, "the server calls no tools itself: mcp_servers must be [] or null"),
        ({"model": None}, "model is required"),
        ({"messages": []}, "messages must be a list of at least 1 message, got a list of 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type must"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{**TOOL, "colour": 1}]}, "this field is unknown: tools[0].colour"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading must be"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must be"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be given with type"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name must be given with"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type must be"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 1}}}, "output_config.form"),
        ({"system": 1}, "system must be a string or a list of blocks, got 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be"),
    ],
)
def test_a_refusal_names_the_field(client, path, fields, message) -> None:
    assert message in refused(client, fields, path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences[1] must be a non-empty string"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences must have at most 16 strings, got 17"),
        ({"temperature": -1}, "temperature must be a number in [0, 100], got -1"),
        ({"metadata": {"age": 3}}, "this field is unknown: metadata.age"),
    ],
)
def test_a_refusal_names_the_field_of_a_generation(client, fields, message) -> None:
    assert message in refused(client, fields)


def test_every_unserved_field_is_refused_by_a_sentence(client) -> None:
    for name, field in REFUSED.items():
        assert refused(client, {name: {"odd": 1}}).startswith(f"{field.sentence}: {name} must be ")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("the queue is full", retry_after_s=2.5), 529, "overloaded_error"),
        (Unavailable("no replica", retry_after_s=1), 529, "overloaded_error"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (EngineError("broken"), 500, "api_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
def test_errors_have_anthropics_form(client, service, path, error, status, kind) -> None:
    service.refusal = error
    response = client.post(path, json=VALID if path == PATH else COUNTED)
    assert response.status_code == status
    message = error_of(response, kind)
    assert "secret" not in message
    if retry_after_s := getattr(error, "retry_after_s", None):
        assert response.headers["retry-after-ms"] == str(int(retry_after_s * 1000))


def test_a_prompt_that_is_too_long_is_named_so_that_agents_compact_it(client, service) -> None:
    service.refusal = ContextLengthExceeded("prompt has 9 tokens; at most 8", field="prompt")
    for path in (PATH, COUNT_PATH):
        message = refused(client, {}, path)
        assert message == "prompt is too long: prompt has 9 tokens; at most 8"


def test_an_unknown_model_and_route_are_not_found(client) -> None:
    response = client.post(PATH, json={**VALID, "model": "other"})
    assert response.status_code == 404
    assert "'acme/tiny'" in error_of(response, "not_found_error")
    response = client.post(f"{PATH}/batches", json={})
    assert response.status_code == 404
    assert f"POST {PATH}" in error_of(response, "not_found_error")
    response = client.get(PATH)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    error_of(response, "invalid_request_error")
    # Other paths keep OpenAI's form.
    assert client.get("/v1/messages_of_another").json()["error"]["code"] == "not_found"


def test_a_large_body_and_a_broken_one(client) -> None:
    large = client.post(PATH, json={**VALID, "system": "x" * (1 << 16)})
    assert large.status_code == 413
    error_of(large, "request_too_large")
    broken = client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    error_of(broken, "invalid_request_error")


@pytest.mark.parametrize("failure", [EngineError("broken"), RuntimeError("secret")])
def test_an_error_after_the_first_token_is_an_event(client, service, failure) -> None:
    service.script, service.fail_at, service.failure = None, 2, failure
    text = client.post(PATH, json={**VALID, "stream": True}).text
    *events, last = events_of(text)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
    ]
    assert last["error"]["type"] == "api_error" and "secret" not in text
    assert client.post(PATH, json=VALID).status_code == 500


def test_an_aborted_answer_is_an_error(client, service) -> None:
    service.script = [OutputDelta("x", [1]), OutputDelta("", [2], "abort")]
    assert client.post(PATH, json=VALID).status_code == 499
    text = client.post(PATH, json={**VALID, "stream": True}).text
    assert events_of(text)[-1]["type"] == "error"


def test_a_refused_request_is_counted(client, service) -> None:
    refused(client, {"speed": "fast"})
    assert service.refused_by_front_end == ["unsupported_field"]


# --------------------------------------------------------------------------------------------------
# Tokens of a prompt
# --------------------------------------------------------------------------------------------------


def test_tokens_are_counted_without_generating(client, service) -> None:
    response = client.post(COUNT_PATH, json={**COUNTED, "system": "Be kind.", "tools": [TOOL]})
    assert TokenCount.model_validate(response.json()).input_tokens == len("Be kind.hello")
    assert service.streams == [] and service.requests[-1].tools[0].name == "weather"


def test_a_count_takes_no_options_of_a_generation(client) -> None:
    message = refused(client, {"max_tokens": 5}, COUNT_PATH)
    assert message.startswith("this field is unknown: max_tokens")
