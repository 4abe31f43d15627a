"""What a request of the Responses API asks of the router, and what it may not ask."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire.cluster.http.http_answers import ErrorAnswer
from quire.cluster.http.responses_api.input_items import to_messages
from quire.cluster.http.responses_api.response_tools import parse_tools
from quire.cluster.http.responses_api.responses_body import REFUSED
from quire.protos.errors import InvalidRequest
from quire.router.tool_types import Tool, ToolCall, ToolChoice
from quire.router.types import OutputDelta

CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
GROUP = {
    "type": "namespace",
    "name": "docs",
    "description": "The library.",
    "tools": [{"type": "function", "name": "find", "strict": True}],
}


def messages_of(given, instructions) -> list[dict]:
    return asyncio.run(to_messages(given, instructions))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def refused(response, param: str) -> str:
    assert response.status_code == 400, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert error.param == param, error
    return error.message


# --------------------------------------------------------------------------------------------------
# Items
# --------------------------------------------------------------------------------------------------


def test_a_text_is_the_users() -> None:
    assert messages_of("hello", None) == [user("hello")]
    assert messages_of("hello", "be brief") == [
        {"role": "system", "content": "be brief"},
        user("hello"),
    ]


def test_system_messages_at_the_beginning_become_one() -> None:
    """As Codex sends them: instructions, developer messages with several parts, users in a row."""
    parts = [{"type": "input_text", "text": "two"}, {"type": "input_text", "text": "three"}]
    items = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": parts},
        {"role": "system", "content": "four"},
        user("five"),
        user("six"),
        {"role": "developer", "content": "seven"},
    ]
    assert messages_of(items, "one") == [
        {"role": "system", "content": "one\n\ntwo\nthree\n\nfour"},
        user("five"),
        user("six"),
        {"role": "system", "content": "seven"},
    ]


def test_the_items_of_an_assistants_turn_become_one_message() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": None,
    }
    said = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    }
    second = {**CALL, "call_id": "call_2", "namespace": "docs", "name": "find", "id": "fc_2"}
    answers = [
        OUTPUT,
        {**OUTPUT, "call_id": "call_2", "output": [{"type": "input_text", "text": "x"}]},
    ]
    messages = messages_of([user("q"), reasoning, said, CALL, second, *answers, said, said], None)
    calls = [("call_1", "look"), ("call_2", "docs__find")]
    assert messages == [
        user("q"),
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "a",
            "tool_calls": [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"a":1}'}}
                for call_id, name in calls
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        {"role": "tool", "tool_call_id": "call_2", "content": "x"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]  # fmt: skip


def test_reasoning_that_is_not_readable_is_left_out() -> None:
    """Another server's encrypted reasoning; a summary counts where there is nothing else."""
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    assert messages_of([user("q"), sealed, CALL], None)[1].keys() == {"role", "tool_calls"}
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    messages = messages_of([user("q"), {**sealed, "summary": summary}, CALL], None)
    assert messages[1]["reasoning_content"] == "a\n\nb"


def test_an_answers_output_can_be_sent_back(client, service) -> None:
    """`input += response.output`, as OpenAI's documentation does it."""
    call = ToolCall(0, "call_7", "look", "{}")
    service.script = [
        OutputDelta("", [1], reasoning="hm"),
        OutputDelta("let me look", [2]),
        OutputDelta("", [3], "tool_calls", tool_calls=(call,)),
    ]
    conversation = [user("what is there?")]
    answer = client.responses.create(model="acme/tiny", input=conversation, tools=[TOOL])
    conversation += answer.output
    conversation.append({**OUTPUT, "call_id": "call_7"})
    client.responses.create(model="acme/tiny", input=conversation, tools=[TOOL])
    _, turn, output = service.requests[-1].messages
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "let me look")
    assert turn["tool_calls"][0]["id"] == output["tool_call_id"] == "call_7"


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        ({"role": "tool", "content": "x"}, "input[0].role", "'user' or 'assistant', got 'tool'"),
        ({"role": "user"}, "input[0].content", "is required"),
        ({"role": "user", "content": 5}, "input[0].content", "a list, got 5"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].type",
            "images are not served",
        ),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "x"}]},
            "input[0].content[0].type",
            "'output_text', got 'refusal'",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text", "is required"),
        ({"role": "user", "content": "x", "mood": 1}, "input[0].mood", "unknown"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type", "no items are stored"),
        ({"id": "msg_1"}, "input[0].type", "no items are stored"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0].type", "this item is not served"),
        ({"type": ["message"]}, "input[0].type", "this item is not served"),
        (OUTPUT, "input[0].call_id", "an earlier function_call, got 'call_1'"),
        (
            {**OUTPUT, "output": [{"type": "input_file", "file_id": "x"}]},
            "input[0].output[0].type",
            "files are not served",
        ),
        ({**CALL, "arguments": {}}, "input[0].arguments", "a string, got an object"),
        ({**CALL, "arguments": "[1]"}, "input[0].arguments", "the JSON text of an object, got '[1]'"),
        ({**CALL, "arguments": '{"a'}, "input[0].arguments", "the JSON text of an object"),
        ({**CALL, "caller": {"type": "program", "caller_id": "x"}}, "input[0].caller.type", "'direct', got 'program'"),
        (
            {"type": "reasoning", "summary": [{"type": "text", "text": ""}]},
            "input[0].summary[0].type",
            "'summary_text', got 'text'",
        ),
    ],
)  # fmt: skip
def test_a_wrong_item_is_refused_by_its_path(ask, item, param, words) -> None:
    assert words in refused(ask(input=[item]), param)


def test_items_parts_and_functions_are_bounded(ask) -> None:
    assert "at most 4096 entries, got 4097" in refused(ask(input=[{}] * 4097), "input")
    part = {"type": "input_text", "text": ""}
    with pytest.raises(InvalidRequest, match="input must have at most 4096 parts in all, got 4500"):
        messages_of([{"role": "user", "content": [part] * 1500}] * 3, None)
    with pytest.raises(InvalidRequest, match="tools must have at most 4096 functions, got 4098"):
        asyncio.run(parse_tools([TOOL, {**GROUP, "tools": [TOOL] * 4097}]))


# --------------------------------------------------------------------------------------------------
# Tools
# --------------------------------------------------------------------------------------------------


def test_tools_and_namespaces_are_functions_for_the_router(ask, service) -> None:
    search = {"type": "web_search", "external_web_access": False}
    answer = ask(tools=[TOOL, search, GROUP], parallel_tool_calls=False).json()
    request = service.requests[-1]
    assert request.tools == (
        Tool("look", None, {"type": "object"}),
        Tool("docs__find", None, None, strict=True),
    )
    assert request.tool_choice is None and request.parallel_tool_calls is False
    assert answer["tools"] == [TOOL, GROUP] and answer["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "look"}, ToolChoice("required", ("look",))),
        ({"type": "function", "name": "find", "namespace": "docs"}, ToolChoice("required", ("docs__find",))),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}],
            },
            ToolChoice("auto", ("look",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
            ToolChoice("required", ("look",)),
        ),
    ],
)  # fmt: skip
def test_the_choice_of_tools(ask, service, given, choice) -> None:
    response = ask(tools=[TOOL, GROUP], tool_choice=given)
    assert response.status_code == 200, response.text
    request = service.requests[-1]
    assert request.tool_choice == choice
    # A named function is called exactly once.
    is_named = isinstance(given, dict) and given["type"] == "function"
    assert request.parallel_tool_calls is not is_named
    assert response.json()["tool_choice"] == given


def test_a_choice_without_functions_is_none(ask, service) -> None:
    """Web search alone is nothing that the model could call."""
    assert ask(tools=[{"type": "web_search_preview"}], tool_choice="auto").status_code == 200
    assert service.requests[-1].tools == () and service.requests[-1].tool_choice is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "the server runs no tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "function or namespace, got 'mcp'"),
        ({"tools": [{"name": "x"}]}, "tools[0].type", "got null"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "must be False, got true"),
        (
            {"tools": [{**GROUP, "tools": [{"type": "custom", "name": "x"}]}]},
            "tools[0].tools[0].type",
            "must be function",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "two tools have one name"),
        ({"tools": [GROUP, {**TOOL, "name": "docs__find"}]}, "tools[1].name", "got 'docs__find'"),
        ({"tools": "look"}, "tools", "a list, got 'look'"),
        ({"tool_choice": "required"}, "tool_choice", "a call needs a function"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "got 'always'"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "got 'web_search'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "got 'x'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
            "at least 1 function",
        ),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_by_their_path(ask, fields, param, words) -> None:
    assert words in refused(ask(**fields), param)


# --------------------------------------------------------------------------------------------------
# Other fields
# --------------------------------------------------------------------------------------------------


def test_the_other_fields_reach_the_router(ask, service) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = ask(
        model="acme/tiny",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}},
        prompt_cache_key="session-1",
        cache_salt="tenant-1",
        seed=3,
        priority=2,
        timeout=9.0,
        metadata={"topic": "x"},
        client_metadata={"turn": {"id": 1}},
        store=False,
        truncation="disabled",
        background=False,
        service_tier="auto",
        safety_identifier="someone",
        user="someone",
        include=["reasoning.encrypted_content"],
    )
    assert response.status_code == 200, response.text
    request = service.requests[-1]
    assert (request.max_tokens, request.temperature, request.top_p) == (7, 0.5, 0.9)
    assert (request.session, request.tenant) == ("session-1", "tenant-1")
    assert (request.seed, request.priority, request.deadline_s) == (3, 2, 9.0)
    assert (request.reasoning_effort, request.logprobs) == ("low", None)
    assert request.grammar.kind == "json_schema" and json.loads(request.grammar.text) == schema
    answer = response.json()
    assert answer["metadata"] == {"topic": "x"} and answer["prompt_cache_key"] == "session-1"
    assert answer["text"]["format"]["schema"] == schema


@pytest.mark.parametrize(
    ("given", "effort"), [("none", "none"), ("xhigh", "xhigh"), ("max", "xhigh")]
)
def test_the_effort_of_the_reasoning(ask, service, given, effort) -> None:
    assert ask(reasoning={"effort": given}).json()["reasoning"]["effort"] == given
    assert service.requests[-1].reasoning_effort == effort
    message = refused(ask(reasoning={"effort": "some"}), "reasoning.effort")
    assert message.endswith("'xhigh' or 'max', got 'some'")


def test_more_tokens_than_fit_are_lowered_to_what_fits(ask, service) -> None:
    """Agents send one number to every model."""
    assert ask(max_output_tokens=100_000).json()["usage"]["output_tokens"] == 512 - len("hello")
    assert "max_output_tokens must be" in refused(ask(max_output_tokens=0), "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
    ],
)
def test_log_probabilities_come_if_either_field_asks(ask, service, fields, num) -> None:
    answer = ask(max_output_tokens=2, **fields).json()
    assert service.requests[-1].logprobs == num
    found = answer["output"][0]["content"][0]["logprobs"]
    assert len(found) == (0 if num is None else 2)
    assert all(len(token["top_logprobs"]) == num for token in found)


def test_stored_state_and_hosted_features_are_refused_by_name(ask) -> None:
    for name, refusal in REFUSED.items():
        for value in (None, *refusal.accepted):
            response = ask(**{name: value})
            assert response.status_code == 200, response.text
        message = refused(ask(**{name: {"odd": 1}}), name)
        assert message.startswith(f"{refusal.sentence}: {name} must be "), message
    assert "answers are not stored: store must be false or null, got true" == refused(
        ask(store=True), "store"
    )
    assert "answers are not stored: previous_response_id" in refused(
        ask(previous_response_id="resp_1"), "previous_response_id"
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": 5}, "input", "input must be a string or a list of objects, got 5"),
        ({"input": ["x"]}, "input", "a list of objects"),
        ({"input": None}, "input", "is required"),
        ({"input": []}, "input", "input must be a list of at least 1 message"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_logprobs": 21}, "top_logprobs", "[0, 20], got 21"),
        ({"max_tokens": 5}, "max_tokens", "/v1/responses has no such field, but /v1/"),
        ({"instruction": "x"}, "instruction", "did you mean 'instructions'?"),
        ({"stream_options": {}}, "stream_options", "only a stream has options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "unknown"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema', got 'xml'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "must be 'medium', got 'low'"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "must be 'auto'"),
        ({"text": {"format": {str(i): 0 for i in range(4097)}}}, "text.format", "at most 4096 fields, got 4097"),
        ({"include": ["everything"]}, "include[0]", "got 'everything'"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 pairs, got 17"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "at most 64 characters in a key"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "at most 512 characters in a value"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key", "prompt_cache_key must have at most 256"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(ask, fields, param, words) -> None:
    assert words in refused(ask(**fields), param)


def test_the_timeout_header_is_named_in_its_error(http, service) -> None:
    response = http.post(
        "/v1/responses", json={"input": "x"}, headers={"x-request-timeout-seconds": "soon"}
    )
    assert "number of seconds" in refused(response, "x-request-timeout-seconds")
    http.post("/v1/responses", json={"input": "x"}, headers={"x-request-timeout-seconds": "8"})
    assert service.requests[-1].deadline_s == 8.0
