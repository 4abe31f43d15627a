"""Reads a stream of the Responses API and refuses everything that openai's types or the order of events forbid."""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

from quire.cluster.http.responses_api.response_object import ResponseAnswer

_UNION = get_args(ResponseStreamEvent)[0]
EVENTS = {get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(_UNION)}
# Parts of an item, by the type of the event with their text.
TEXTS = {"response.output_text": "output_text", "response.reasoning_text": "reasoning_text"}


def check_response(answer: dict[str, Any]) -> dict[str, Any]:
    """Validate a Response with openai's types and with the documented ones."""
    Response.model_validate(answer, strict=True)
    ResponseAnswer.model_validate(answer, strict=True)
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of the events; each is valid, has its type in both lines and the next number."""
    assert text.endswith("\n\n")
    events = []
    for number, event in enumerate(text.removesuffix("\n\n").split("\n\n")):
        kind, data = event.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {parsed['type']}" and data.startswith("data: ")
        assert parsed["sequence_number"] == number
        EVENTS[parsed["type"]].model_validate(parsed, strict=True)
        if "response" in parsed:
            check_response(parsed["response"])
        events.append(parsed)
    return events


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The Response that a client puts together from the events, which is that of the last event."""
    created, in_progress, *between, last = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert created["response"] == in_progress["response"]
    output: list[dict[str, Any]] = []
    while between:
        output.append(_item(between, len(output)))
    answer = last["response"]
    assert last["type"] == f"response.{answer['status']}"
    assert answer["output"] == output
    changing = ("status", "output", "usage", "incomplete_details", "error")
    for name in answer.keys() - changing:
        assert answer[name] == created["response"][name]
    return answer


def _item(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Take the events of one item from the beginning of the list."""
    added = events.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    if item["type"] == "function_call":
        arguments = _pieces(events, "response.function_call_arguments", "arguments", item["id"])
        expected = {**item, "arguments": arguments}
    else:
        part = events.pop(0)
        assert part["type"] == "response.content_part.added" and part["part"]["text"] == ""
        prefix = f"response.{part['part']['type']}"
        assert prefix in TEXTS and item["content"] == []
        text = _pieces(events, prefix, "text", item["id"])
        done = events.pop(0)
        assert done["type"] == "response.content_part.done"
        assert done["part"]["text"] == text and done["item_id"] == item["id"]
        expected = {**item, "content": [done["part"]]}
    done = events.pop(0)
    assert (done["type"], done["output_index"]) == ("response.output_item.done", index)
    assert done["item"]["status"] in ("completed", "incomplete")
    assert done["item"] == {**expected, "status": done["item"]["status"]}
    return done["item"]


def _pieces(events: list[dict[str, Any]], prefix: str, field: str, item_id: str) -> str:
    """Take the deltas of a text, and the event that repeats the whole text."""
    pieces = []
    while events[0]["type"] == f"{prefix}.delta":
        delta = events.pop(0)
        assert delta["item_id"] == item_id and delta["delta"]
        pieces.append(delta["delta"])
    done = events.pop(0)
    assert done["type"] == f"{prefix}.done" and done["item_id"] == item_id
    assert done[field] == "".join(pieces)
    return done[field]
