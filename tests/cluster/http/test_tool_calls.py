"""Tools, calls and reasoning of chats, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from live_app import serving
from pydantic import BaseModel

from quire.cluster.http.http_answers import ChatCompletion, ChatCompletionChunk, ErrorAnswer
from quire.cluster.http.sse import ChunkEncoder
from quire.router.chat.tool_checks import EFFORTS
from quire.router.tool_types import Tool, ToolCall, ToolChoice
from quire.router.types import OutputDelta, Usage

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo and in Bergen?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS},
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
OSLO = ToolCall(0, "call_a", "weather", '{"city": "Oslo ☀", "days": [1, {"from": "mon"}]}')
BERGEN = ToolCall(1, "call_b", "weather", '{"city": "Bergen"}')
# Reasoning, then text, then two calls; one delta has text and the first call.
SCRIPT = [
    OutputDelta("", [1], reasoning="Two "),
    OutputDelta("", [2], reasoning="cities."),
    OutputDelta("", [3]),
    OutputDelta("I look ", [4]),
    OutputDelta("it up.", [5, 6], tool_calls=(OSLO,)),
    OutputDelta("", [7], tool_calls=(BERGEN,)),
    OutputDelta("", [8], finish_reason="tool_calls"),
]
ONLY_CALLS = [
    OutputDelta("", [1]),
    OutputDelta("", [2], "tool_calls", tool_calls=(OSLO, BERGEN)),
]


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with serving(service) as client:
        yield client


@pytest.fixture
def chats(http: httpx.Client) -> openai.resources.chat.Completions:
    url = f"{http.base_url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20).chat.completions


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "acme/tiny", "messages": MESSAGES, "max_tokens": 20, **fields}


def calls_of(message: Any) -> list[tuple[str, str, str, str]]:
    return [(c.id, c.type, c.function.name, c.function.arguments) for c in message.tool_calls or ()]


def wanted(*calls: ToolCall) -> list[tuple[str, str, str, str]]:
    return [(call.call_id, "function", call.name, call.arguments) for call in calls]


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


def test_a_whole_answer_has_text_calls_and_reasoning(chats, service) -> None:
    service.script, service.reasoning_tokens = SCRIPT, 3
    answer = chats.create(**asked(tools=[WEATHER]))
    ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up."
    assert choice.message.reasoning_content == "Two cities."
    assert calls_of(choice.message) == wanted(OSLO, BERGEN)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_calls_without_text_have_null_as_content(chats, service) -> None:
    service.script = ONLY_CALLS
    message = chats.create(**asked(tools=[WEATHER])).choices[0].message
    assert message.content is None and calls_of(message) == wanted(OSLO, BERGEN)
    assert "reasoning_content" not in message.model_dump(exclude_unset=True)


def test_an_answer_without_tools_has_neither_calls_nor_null(http: httpx.Client, service) -> None:
    service.script = [OutputDelta("", [1], "stop")]
    message = http.post(CHAT, json=asked()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": ""}


def accumulated(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """A message as a client without helpers collects it."""
    message: dict[str, Any] = {"role": None, "content": None, "reasoning": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            new = choice.delta
            message["role"] = new.role or message["role"]
            if new.content is not None:
                message["content"] = (message["content"] or "") + new.content
            message["reasoning"] += getattr(new, "reasoning_content", None) or ""
            for call in new.tool_calls or ():
                assert call.index == len(message["calls"])
                message["calls"].append(
                    (call.id, call.type, call.function.name, call.function.arguments)
                )
            message["finish_reason"] = choice.finish_reason
    return message


@pytest.mark.parametrize("script", [SCRIPT, ONLY_CALLS])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_the_same_message(chats, service, script, n: int) -> None:
    service.script, service.reasoning_tokens = script, 2
    fields = asked(tools=[WEATHER], n=n)
    whole = chats.create(**fields)
    chunks = list(chats.create(**fields, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
    for choice in whole.choices:
        assert accumulated(chunks, choice.index) == {
            "role": "assistant",
            "content": choice.message.content,
            "reasoning": getattr(choice.message, "reasoning_content", ""),
            "calls": calls_of(choice.message),
            "finish_reason": "tool_calls",
        }
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("script", [SCRIPT, ONLY_CALLS])
def test_openais_stream_helper_accumulates_the_same_message(chats, service, script) -> None:
    service.script = script
    whole = chats.create(**asked(tools=[WEATHER])).choices[0]
    with chats.stream(**asked(tools=[WEATHER])) as stream:
        events = list(stream)
        (choice,) = stream.get_final_completion().choices
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(e.index, e.name, e.arguments) for e in done] == [
        (call.index, call.name, call.arguments) for call in (OSLO, BERGEN)
    ]
    assert choice.finish_reason == "tool_calls" == whole.finish_reason
    assert choice.message.content == whole.message.content
    assert calls_of(choice.message) == calls_of(whole.message) == wanted(OSLO, BERGEN)
    if script is SCRIPT:
        assert choice.message.reasoning_content == whole.message.reasoning_content


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "kelvin"]


def test_parse_returns_the_arguments_as_a_model(chats, service) -> None:
    arguments = '{"city": "Oslo", "unit": "kelvin"}'
    service.script = [
        OutputDelta(
            "", [1], "tool_calls", tool_calls=(ToolCall(0, "call_a", "GetWeather", arguments),)
        )
    ]
    fields = asked(tools=[openai.pydantic_function_tool(GetWeather)], tool_choice="required")
    answer = chats.parse(**fields)
    with chats.stream(**fields) as stream:
        streamed = stream.get_final_completion()
    for message in (answer.choices[0].message, streamed.choices[0].message):
        (call,) = message.tool_calls
        assert call.function.parsed_arguments == GetWeather(city="Oslo", unit="kelvin")
    (tool,) = service.requests[0].tools
    assert (tool.name, tool.description) == ("GetWeather", "The weather of a city.")
    assert tool.strict and tool.parameters["required"] == ["city", "unit"]


def test_logprobs_usage_and_ids_come_with_calls_and_reasoning(http: httpx.Client, service) -> None:
    service.script = SCRIPT
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = asked(tools=[WEATHER], stream=True, stream_options=options, return_token_ids=True)
    events = http.post(CHAT, json=body).text.removesuffix("\n\n").split("\n\n")[:-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids", ())]
    assert ids == [1, 2, 3, 4, 5, 6, 7, 8]
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert totals == [1, 2, 3, 4, 6, 6, 7, 8, 8]


def test_with_event_ids_a_delta_is_one_event(http: httpx.Client, service) -> None:
    """A client that resumes after an event gets no call twice, and misses none."""
    service.script = ONLY_CALLS
    body = asked(tools=[WEATHER], stream=True, stream_options={"include_event_ids": True})
    role, last, done, end = http.post(CHAT, json=body).text.split("\n\n")
    assert role.startswith("id: ") and last.startswith("id: ")
    (choice,) = json.loads(last.partition("data: ")[2])["choices"]
    assert len(choice["delta"]["tool_calls"]) == 2 and choice["finish_reason"] == "tool_calls"
    assert (done, end) == ("data: [DONE]", "")


# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------


def test_tools_reach_the_router(http: httpx.Client, service) -> None:
    body = asked(tools=[WEATHER, NOW], parallel_tool_calls=False, reasoning_effort="low")
    assert http.post(CHAT, json=body).status_code == 200
    assert http.post(CHAT, json=asked(tools=[], tool_choice=None)).status_code == 200
    full, bare = service.requests
    assert full.tools == (
        Tool("weather", "The weather.", PARAMETERS),
        Tool("now", strict=True),
    )
    assert (full.parallel_tool_calls, full.reasoning_effort, full.tool_choice) == (
        False,
        "low",
        None,
    )
    assert (bare.tools, bare.parallel_tool_calls, bare.reasoning_effort) == ((), True, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "now"}}, ToolChoice("required", ("now",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}},
            None,  # `NOW` is a definition: only names are allowed here
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [
                        {"type": "function", "function": {"name": name}}
                        for name in ("now", "weather")
                    ],
                },
            },
            ToolChoice("auto", ("now", "weather")),
        ),
    ],
)
def test_every_form_of_tool_choice_reaches_the_router(http, service, given, expected) -> None:
    response = http.post(CHAT, json=asked(tools=[WEATHER, NOW], tool_choice=given))
    if expected is None:
        error = ErrorAnswer.model_validate(response.json()).error
        assert error.param == "tool_choice.allowed_tools.tools[0].function.strict"
    else:
        assert response.status_code == 200, response.text
        assert service.requests[0].tool_choice == expected
        # A named function is called exactly once.
        is_named = isinstance(given, dict) and given["type"] == "function"
        assert service.requests[0].parallel_tool_calls is not is_named


def test_a_conversation_with_calls_reaches_the_router(chats, service) -> None:
    """The client sends back the message that it got."""
    service.script = SCRIPT
    answer = chats.create(**asked(tools=[WEATHER])).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": "call_a", "content": [{"type": "text", "text": "sun"}]},
        {"role": "tool", "tool_call_id": "call_b", "content": "rain", "name": "weather"},
    ]
    conversation = [*MESSAGES, answer, *results]
    chats.create(**asked(tools=[WEATHER], messages=conversation))
    user, assistant, sun, rain = service.requests[1].messages
    assert user["content"] == MESSAGES[0]["content"]
    assert assistant["reasoning_content"] == "Two cities."
    assert assistant["content"] == "I look it up."
    assert assistant["tool_calls"] == [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": "weather", "arguments": call.arguments},
        }
        for call in (OSLO, BERGEN)
    ]
    assert (sun["role"], sun["tool_call_id"], sun["content"]) == (
        "tool",
        "call_a",
        [{"type": "text", "text": "sun"}],
    )
    assert (rain["tool_call_id"], rain["name"]) == ("call_b", "weather")


def with_call(**fields: Any) -> dict[str, Any]:
    """Messages whose last one has a call with these fields."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def test_a_call_needs_no_content_and_its_arguments_no_parser(http: httpx.Client, service) -> None:
    """Arguments are text, so their depth is not that of the messages."""
    deep = '{"a":' * 100 + "1" + "}" * 100
    body = asked(**with_call(function={"name": "f", "arguments": deep}))
    assert http.post(CHAT, json=body).status_code == 200
    assert service.requests[0].messages[1]["tool_calls"][0]["function"]["arguments"] == deep


CALL = "messages[1].tool_calls[0]"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (with_call(id=""), "invalid_request", f"{CALL}.id"),
        (with_call(type="custom"), "invalid_request", f"{CALL}.type"),
        (with_call(odd=1), "unsupported_field", f"{CALL}.odd"),
        (with_call(function={"name": "f", "arguments": "{"}), "invalid_request", f"{CALL}.function.arguments"),
        (with_call(function={"name": "f", "arguments": {}}), "invalid_request", f"{CALL}.function.arguments"),
        (with_call(function=[[[[[[[]]]]]]]), "invalid_request", "messages"),
        ({"messages": [{**MESSAGES[0], "tool_call_id": "a"}]}, "invalid_request", "messages[0].tool_call_id"),
        ({"messages": [{**MESSAGES[0], "tool_calls": [1]}]}, "invalid_request", "messages[0].tool_calls"),
        # The router names `tools[1].name`.
        ({"tools": [NOW, NOW]}, "invalid_request", "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "invalid_request",
            "tools[0].function.name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "invalid_request",
            "tools[0].function.parameters.type",
        ),
        ({"tools": [{**NOW, "function": {"name": f"f{i}"}} for i in range(129)]}, "invalid_request", "tools"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"reasoning_effort": "extreme"}, "invalid_request", "reasoning_effort"),
    ],
)  # fmt: skip
def test_what_the_router_refuses_has_the_clients_name(
    http: httpx.Client, service, fields, code: str, param: str
) -> None:
    response = http.post(CHAT, json=asked(**fields))
    assert response.status_code == 400, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert (error.code, error.param) == (code, param), error
    assert param in error.message


@pytest.mark.parametrize("effort", [*EFFORTS, "max"])
def test_every_documented_effort_is_served(http: httpx.Client, service, effort: str) -> None:
    assert http.post(CHAT, json=asked(reasoning_effort=effort)).status_code == 200
    assert service.requests[0].reasoning_effort == effort.replace("max", "xhigh")


FUNCTION = {"type": "function"}
BAD_FIELDS = [
    ({"tools": {}}, "invalid_request", "tools"),
    ({"tools": [1]}, "invalid_request", "tools[0]"),
    ({"tools": [{}]}, "unsupported_field", "tools[0].type"),
    (
        {"tools": [WEATHER, {"type": "custom", "custom": {"name": "x"}}]},
        "unsupported_field",
        "tools[1].type",
    ),
    ({"tools": [FUNCTION]}, "invalid_request", "tools[0].function"),
    ({"tools": [{**NOW, "cost": 1}]}, "unsupported_field", "tools[0].cost"),
    *(
        ({"tools": [{**FUNCTION, "function": function}]}, code, f"tools[0].function.{field}")
        for function, code, field in [
            ({}, "invalid_request", "name"),
            ({"name": 5}, "invalid_request", "name"),
            ({"name": "f", "odd": 1}, "unsupported_field", "odd"),
            ({"name": "f", "strict": 1}, "invalid_request", "strict"),
            ({"name": "f", "description": [1]}, "invalid_request", "description"),
            ({"name": "f", "parameters": "{}"}, "invalid_request", "parameters"),
        ]
    ),
    *(
        ({"tools": [NOW], "tool_choice": choice}, code, f"tool_choice{field}")
        for choice, code, field in [
            ("any", "invalid_request", ""),
            (5, "invalid_request", ""),
            ({}, "unsupported_field", ".type"),
            ({"type": "custom", "custom": {"name": "x"}}, "unsupported_field", ".type"),
            ({**FUNCTION, "name": "now"}, "unsupported_field", ".name"),
            ({**FUNCTION, "function": {}}, "invalid_request", ".function.name"),
            ({"type": "allowed_tools"}, "invalid_request", ".allowed_tools"),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NOW]}},
                "invalid_request",
                ".allowed_tools.mode",
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
                "invalid_request",
                ".allowed_tools.tools",
            ),
        ]
    ),
    ({"tools": [1] * 4097}, "invalid_request", "tools"),
    ({"parallel_tool_calls": "no"}, "invalid_request", "parallel_tool_calls"),
    ({"reasoning_effort": 5}, "invalid_request", "reasoning_effort"),
    ({"functions": [{"name": "now"}]}, "unsupported_field", "functions"),
    ({"function_call": "auto"}, "unsupported_field", "function_call"),
    ({"include_reasoning": False}, "unsupported_field", "include_reasoning"),
    ({"thinking_token_budget": 64}, "unsupported_field", "thinking_token_budget"),
    ({"moderation": {"model": "x"}}, "unsupported_field", "moderation"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD_FIELDS)
def test_a_wrong_field_is_named(http: httpx.Client, service, fields, code: str, param: str) -> None:
    response = http.post(CHAT, json=asked(**fields))
    assert response.status_code == 400, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert (error.code, error.param) == (code, param), error
    assert param in error.message and not service.requests


# --------------------------------------------------------------------------------------------------
# Encoding
# --------------------------------------------------------------------------------------------------


def test_text_alone_is_encoded_as_every_other_output() -> None:
    """For a delta with text alone the bytes around the text are encoded once."""
    encoder = ChunkEncoder({"id": "x"}, chat=True)
    short = encoder.delta(OutputDelta("café", [1]), Usage())
    long = encoder.whole_delta(OutputDelta("café", [1]), Usage())
    assert json.loads(short.removeprefix(b"data: ")) == json.loads(long.removeprefix(b"data: "))
    assert encoder.delta(OutputDelta("", [1]), Usage()) == b""
