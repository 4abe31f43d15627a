"""`POST /v1/responses` with openai's own client: whole, streamed, parsed, with tools, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field
from responses_reader import check_response, events_of, response_of

from quire.cluster.http.http_api import build_app
from quire.cluster.http.messages_api import messages_routes
from quire.cluster.http.responses_api.responses_routes import add_routes
from quire.protos.errors import ContextLengthExceeded, Unavailable
from quire.router.tool_types import ToolCall
from quire.router.types import OutputDelta

ASKED = {"model": "acme/tiny", "input": "hello there"}
SEEDED = {**ASKED, "extra_body": {"seed": 5}, "max_output_tokens": 12}
WEATHER = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLING = [
    OutputDelta("", [1], reasoning="Which "),
    OutputDelta("", [2], reasoning="city?"),
    OutputDelta("I look.", [3]),
    OutputDelta("", [4], tool_calls=(ToolCall(0, "call_a", "weather", '{"city":"Łódź"}'),)),
    OutputDelta("", [5], "tool_calls", tool_calls=(ToolCall(1, "call_b", "weather", "{}"),)),
]


class City(BaseModel):
    country: Literal["France", "Japan", "Peru"]
    districts: int = Field(ge=1, le=99)


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(**SEEDED)
    assert whole.output_text and whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 12 and whole.usage.input_tokens == len("hello there")
    assert whole.usage.input_tokens_details.cached_tokens == len("hello there")
    events = list(client.responses.create(**SEEDED, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == 12 and "".join(deltas) == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


def test_answers_and_events_have_openais_types(ask) -> None:
    assert check_response(ask(max_output_tokens=3).json())["status"] == "incomplete"
    answer = response_of(events_of(ask(stream=True, max_output_tokens=3).text))
    assert answer["id"].startswith("resp_")


def test_the_streaming_helper_puts_reasoning_text_and_calls_together(client, service) -> None:
    service.script, service.reasoning_tokens = CALLING, 2
    with client.responses.stream(**ASKED, tools=[WEATHER]) as stream:
        types = {event.type for event in stream}
        answer = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= types
    reasoning, message, *calls = answer.output
    assert reasoning.content[0].text == "Which city?"
    assert message.content[0].text == "I look." == answer.output_text
    assert [(call.call_id, call.parsed_arguments) for call in calls] == [
        ("call_a", {"city": "Łódź"}),
        ("call_b", {}),
    ]
    assert answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens == 2


def test_a_call_is_answered_in_the_next_turn(client, service) -> None:
    service.script = CALLING
    conversation = [{"role": "user", "content": "Is it cold?"}]
    answer = client.responses.create(model="acme/tiny", input=conversation, tools=[WEATHER])
    calls = [item for item in answer.output if item.type == "function_call"]
    conversation += answer.output
    for call in calls:
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}
        conversation.append(output)
    service.script = [OutputDelta("Yes, ", [1]), OutputDelta("it is.", [2], "stop")]
    answer = client.responses.create(
        model="acme/tiny", input=conversation, tools=[WEATHER], tool_choice="none"
    )
    assert answer.output_text == "Yes, it is." and answer.status == "completed"
    asked = service.requests[-1]
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "tool", "tool"]
    assert asked.tools[0].strict and asked.tool_choice.mode == "none"


def test_parse_reads_a_pydantic_model(client, service) -> None:
    text = '{"country": "Peru", "districts": 4}'
    service.script = [OutputDelta(text[:9], [1]), OutputDelta(text[9:], [2], "stop")]
    answer = client.responses.parse(**ASKED, text_format=City)
    assert answer.output_parsed == City(country="Peru", districts=4)
    grammar = service.requests[-1].grammar
    assert set(json.loads(grammar.text)["required"]) == {"country", "districts"}


def test_log_probabilities(client) -> None:
    answer = client.responses.create(
        **SEEDED, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == 12 and all(len(token.top_logprobs) == 2 for token in logprobs)
    assert "".join(token.token for token in logprobs) == answer.output_text
    events = client.responses.create(**SEEDED, top_logprobs=2, stream=True)
    streamed = [
        token.token
        for event in events
        if event.type == "response.output_text.delta"
        for token in event.logprobs
    ]
    assert streamed == [token.token for token in logprobs]


def test_the_answers_id_explains_its_routing(client, http) -> None:
    answer = client.responses.create(**SEEDED)
    found = http.get("/v1/router/explain", params={"request_id": answer.id}).json()
    assert [decision["answer_id"] for decision in found["data"]] == [answer.id[len("resp_") :]]


def test_explain_headers_say_where_the_answer_comes_from(ask) -> None:
    for stream in (False, True):
        headers = ask(stream=stream, max_output_tokens=2).headers
        assert headers["x-quire-replica"] == "replica-a"


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


def test_a_refusal_is_the_clients_bad_request(client) -> None:
    with pytest.raises(openai.BadRequestError, match="answers are not stored: store must be false"):
        client.responses.create(**ASKED, store=True)
    with pytest.raises(openai.NotFoundError, match="does not serve the model"):
        client.responses.create(**{**ASKED, "model": "other"})


def test_refusals_are_counted(client, service) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASKED, previous_response_id="resp_1")
    assert service.refused_by_front_end == ["unsupported_field"]


def test_a_failure_in_a_stream_is_the_clients_error(client, ask, service) -> None:
    service.fail_at = 2
    with pytest.raises(openai.APIError, match="internal error, id="):
        list(client.responses.create(**SEEDED, stream=True))
    *_, first, last = events_of(ask(stream=True, max_output_tokens=9).text)
    assert first["type"] == "error" and "secret" not in json.dumps([first, last])
    answer = last["response"]
    assert (last["type"], answer["error"]["code"]) == ("response.failed", "server_error")
    assert answer["output"][0]["status"] == "incomplete"
    assert ask(max_output_tokens=9).status_code == 500


def test_a_refusal_after_comments_is_a_failed_response(ask, service) -> None:
    """The status has been sent with the first comment."""
    service.generate_s = 0.35
    assert ask(stream=True, max_output_tokens=2).text.startswith(": keep-alive\n\n")
    refusal = Unavailable("no replica is attached")

    async def refuse(request):
        await asyncio.sleep(0.35)
        raise refusal

    service.generate = refuse
    response = ask(stream=True)
    assert response.status_code == 200
    assert response.text.startswith(": keep-alive\n\n")
    _, _, events = response.text.rpartition(": keep-alive\n\n")
    first, last = events_of(events)
    assert (first["code"], first["message"]) == ("unavailable", refusal.message)
    assert last["response"]["status"] == "failed" and last["response"]["output"] == []
    refusal = ContextLengthExceeded("max_tokens must be <= 3", field="max_tokens")
    text = ask(stream=True).text
    assert '"message":"max_output_tokens must be <= 3","param":"max_output_tokens"' in text


def test_a_client_that_leaves_ends_its_request(http, service) -> None:
    service.goes_on.clear()
    body = {"input": "hello", "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as response:
        next(response.iter_text())
    assert service.streams[0].closed.wait(10)
    service.goes_on.set()


# --------------------------------------------------------------------------------------------------
# The application
# --------------------------------------------------------------------------------------------------


def test_the_document_describes_the_route(service) -> None:
    """Together with the other APIs, whose models could have the same names."""
    apis = [messages_routes.add_routes, add_routes]
    app = build_app(lambda: service, max_body_bytes=1 << 16, apis=apis)
    document = TestClient(app).get("/openapi.json").json()
    operation = document["paths"]["/v1/responses"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ResponsesRequest"}
    schemas = document["components"]["schemas"]
    for name in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert name.partition('"')[0] in schemas
    assert not [name for name in schemas if name.startswith("quire__")]  # two models of one name
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ResponseAnswer"}
    assert content["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/ResponseEvent"}


def test_without_the_api_its_path_is_unknown(service) -> None:
    app = build_app(lambda: service, max_body_bytes=1 << 16)
    response = TestClient(app).post("/v1/responses", json=ASKED)
    assert response.status_code == 404 and "/v1/chat/completions" in response.text
