"""Asks the Messages API, and refuses everything in its answers and streams that the API does not specify."""

from __future__ import annotations

import json
from typing import Any

import httpx

from quire.cluster.http.messages_api.messages_answers import (
    MessageAnswer,
    MessageEvent,
    MessagesError,
)
from quire.cluster.http.messages_api.messages_routes import PATH
from quire.router.types import OutputDelta

VALID: dict[str, Any] = {
    "model": "acme/tiny",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hello"}],
}
COUNTED = {name: value for name, value in VALID.items() if name != "max_tokens"}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PLAIN = [*(OutputDelta(f"word{i} ", [i]) for i in range(7)), OutputDelta("end", [7], "length")]
DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of the events, each with its type in both lines."""
    assert text.endswith("\n\n")
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        kind, data = event.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        MessageEvent.model_validate_json(data.removeprefix("data: "))
        assert kind == f"event: {parsed['type']}" and data.startswith("data: ")
        events.append(parsed)
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
    events = [event for event in events if event["type"] != "ping"]
    start, *middle, delta, stop = events
    assert start["type"] == "message_start" and stop["type"] == "message_stop"
    assert delta["type"] == "message_delta"
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is message["stop_sequence"] is None
    message["content"] = _blocks(middle)
    message |= delta["delta"]
    assert message["usage"].keys() == delta["usage"].keys()
    message["usage"] = delta["usage"]
    MessageAnswer.model_validate(message)
    return message


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    is_open, last_delta, json_text = False, "", ""
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open, last_delta, json_text = True, "", ""
            blocks.append(event["content_block"])
            empty = {"text": "", "thinking": "", "input": {}, "signature": ""}
            assert all(value == empty[name] for name, value in blocks[-1].items() if name in empty)
            continue
        block = blocks[-1]
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(json_text)
            assert block["type"] != "thinking" or last_delta == "signature_delta"
            continue
        assert event["type"] == "content_block_delta"
        delta = event["delta"]
        last_delta = delta["type"]
        assert last_delta in DELTAS[block["type"]]
        match delta:
            case {"partial_json": text}:
                json_text += text
            case {"signature": text}:
                block["signature"] = text
            case {"text": text}:
                assert text
                block["text"] += text
            case {"thinking": text}:
                assert text
                block["thinking"] += text
    assert not is_open
    return blocks


def answer(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The whole answer, of which the streamed one is the same but for its id."""
    response = client.post(PATH, json={**VALID, **fields})
    assert response.status_code == 200, response.text
    whole = response.json()
    MessageAnswer.model_validate(whole)
    streamed = client.post(PATH, json={**VALID, **fields, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    message = message_of(events_of(streamed.text))
    assert message.pop("id") != whole.pop("id")
    assert message == whole
    return whole


def refused(client: httpx.Client, fields: dict[str, Any], path: str = PATH) -> str:
    """The message of the refusal."""
    valid = VALID if path == PATH else COUNTED
    response = client.post(path, json={**valid, **fields})
    assert response.status_code == 400, response.text
    return error_of(response, "invalid_request_error")


def error_of(response: httpx.Response, kind: str) -> str:
    error = MessagesError.model_validate(response.json())
    assert error.error.type == kind
    assert error.request_id == response.headers["request-id"] != ""
    return error.error.message
