"""POST /v1/messages and /v1/messages/count_tokens on a real socket, over a service with scripted output."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_app import serving
from messages_reader import PLAIN, TOOL, VALID, answer, events_of, message_of

from quire.cluster.http.messages_api.message_events import SIGNATURE
from quire.cluster.http.messages_api.messages_routes import COUNT_PATH, PATH, add_routes
from quire.cluster.http.messages_api.messages_schema import IGNORED_FIELDS, REFUSED
from quire.router.tool_types import Tool, ToolCall, ToolChoice
from quire.router.types import OutputDelta

CALL = ToolCall(0, "call_1", "weather", '{"city": "Žilina"}')
SCRIPT = [
    OutputDelta("", [1], reasoning="Let me"),
    OutputDelta("", [2], reasoning=" see."),
    OutputDelta("I ", [3]),
    OutputDelta("", [4]),
    OutputDelta("look.\n", [5]),
    OutputDelta("", [6], tool_calls=(CALL,)),
    OutputDelta("", [7], "tool_calls", tool_calls=(ToolCall(1, "call_2", "now", "{}"),)),
]


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


def test_text_is_one_block_and_its_usage_counts_cached_tokens_apart(client) -> None:
    whole = answer(client, temperature=0, messages=[{"role": "user", "content": "x" * 60}])
    assert whole["model"] == "acme/tiny" and whole["role"] == "assistant"
    (block,) = whole["content"]
    assert block == {"type": "text", "text": "".join(delta.text for delta in PLAIN)}
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["usage"] == {
        "input_tokens": 12,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 48,
        "output_tokens": 8,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_reasoning_text_and_calls_are_blocks_in_their_order(client, service) -> None:
    service.script, service.reasoning_tokens = SCRIPT, 2
    whole = answer(client, tools=[TOOL])
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE},
        {"type": "text", "text": "I look.\n"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Žilina"}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


@pytest.mark.parametrize(
    ("display", "text"),
    [("omitted", ""), ("summarized", "Let me see."), ("updates", "Let me see.")],
)
def test_reasoning_is_shown_unless_it_is_to_be_omitted(client, service, display, text) -> None:
    service.script = SCRIPT
    whole = answer(client, thinking={"type": "adaptive", "display": display})
    assert whole["content"][0] == {"type": "thinking", "thinking": text, "signature": SIGNATURE}


@pytest.mark.parametrize(
    ("last", "stop_reason", "stop_sequence"),
    [
        (OutputDelta("x", [1], "stop"), "end_turn", None),
        (OutputDelta("x", [1], "stop", 2), "end_turn", None),
        (OutputDelta("x", [1], "stop", "END"), "stop_sequence", "END"),
        (OutputDelta("x", [1], "length"), "max_tokens", None),
        (OutputDelta("", [1], "tool_calls", tool_calls=(CALL,)), "tool_use", None),
    ],
)
def test_the_stop_reason_is_anthropics(client, service, last, stop_reason, stop_sequence) -> None:
    service.script = [last]
    whole = answer(client)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, stop_sequence)


def test_an_answer_without_output_has_no_blocks(client, service) -> None:
    service.script = [OutputDelta("", [1], "stop")]
    assert answer(client)["content"] == []


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
CALLS = st.lists(st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=2), max_size=2)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=st.lists(st.tuples(TEXTS, TEXTS, CALLS), min_size=1, max_size=8))
def test_a_stream_says_the_same_as_the_whole_answer(client, service, script) -> None:
    deltas, num_calls = [], 0
    for reasoning, text, inputs in script:
        calls = tuple(
            ToolCall(num_calls + i, f"call_{num_calls + i}", "f", json.dumps(given))
            for i, given in enumerate(inputs)
        )
        num_calls += len(calls)
        deltas.append(OutputDelta(text, [1], reasoning=reasoning, tool_calls=calls))
    deltas[-1].finish_reason = "stop"
    service.script = deltas
    blocks = answer(client)["content"]
    assert "".join(b["text"] for b in blocks if b["type"] == "text") == "".join(
        text for _, text, _ in script
    )
    assert [b["input"] for b in blocks if b["type"] == "tool_use"] == [
        given for _, _, inputs in script for given in inputs
    ]


def test_the_headers_have_the_requests_id_and_the_routing(client) -> None:
    for stream in (False, True):
        response = client.post(
            PATH, json={**VALID, "stream": stream}, headers={"X-Request-Id": "mine"}
        )
        assert response.headers["request-id"] == "mine"
        assert response.headers["x-quire-replica"] == "replica-a"


def test_the_routing_of_an_answer_is_found_by_its_id(client) -> None:
    whole = client.post(PATH, json=VALID).json()
    found = client.get("/v1/router/explain", params={"request_id": whole["id"]})
    assert found.status_code == 200 and len(found.json()["data"]) == 1


def test_a_silent_stream_sends_pings(service) -> None:
    service.generate_s = 0.3
    with serving(service, apis=[add_routes], keepalive_s=0.05) as client:
        events = events_of(client.post(PATH, json={**VALID, "stream": True}).text)
    assert events[0] == {"type": "ping"}
    assert message_of(events)["stop_reason"] == "max_tokens"


def test_a_client_that_leaves_ends_its_request(client, service) -> None:
    service.script = None
    service.goes_on.clear()
    with client.stream("POST", PATH, json={**VALID, "stream": True}) as response:
        next(response.iter_lines())
    assert service.streams[0].closed.wait(30)


def test_what_ends_a_stream_is_sent_with_its_last_token(client, service) -> None:
    service.script, service.token_s = PLAIN[-3:], 0.02
    with client.stream("POST", PATH, json={**VALID, "stream": True}) as response:
        pieces = list(response.iter_raw())
    assert len(pieces) == 3
    assert b"message_start" in pieces[0] and b"message_stop" in pieces[-1]


# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------


def test_every_option_reaches_the_router(client, service) -> None:
    answer(
        client,
        max_tokens=32000,
        system="Be kind.",
        stop_sequences=["END", "STOP"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        metadata={"user_id": "user_1_session_2"},
        tools=[TOOL, {**TOOL, "name": "now", "strict": True, "type": "custom"}],
        tool_choice={"type": "tool", "name": "now", "disable_parallel_tool_use": True},
        output_config={"effort": "max"},
    )
    asked = service.requests[-1]
    assert asked.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
    )
    assert (asked.model, asked.max_tokens, asked.fit_to_model) == ("acme/tiny", 32000, True)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.9, 7)
    assert (asked.stop, asked.session) == (("END", "STOP"), "user_1_session_2")
    schema = TOOL["input_schema"]
    assert asked.tools == (
        Tool("weather", "Weather of a city.", schema),
        Tool("now", "Weather of a city.", schema, strict=True),
    )
    assert asked.tool_choice == ToolChoice("required", ("now",))
    assert not asked.parallel_tool_calls
    assert (asked.reasoning_effort, asked.grammar) == ("xhigh", None)


def test_max_tokens_is_lowered_to_what_fits(client, service) -> None:
    service.script = None
    whole = client.post(PATH, json={**VALID, "max_tokens": 32000}).json()
    assert whole["usage"]["output_tokens"] == 512 - len("hello")
    assert whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", ("weather",))),
    ],
)
def test_tool_choices(client, service, given, asked) -> None:
    answer(client, tools=[TOOL], tool_choice=given)
    assert service.requests[-1].tool_choice == asked
    assert service.requests[-1].parallel_tool_calls


def test_an_answer_can_be_sent_back_with_the_results_of_its_calls(client, service) -> None:
    service.script = SCRIPT
    first = answer(client, tools=[TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "17 degrees"}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    turns = [
        *VALID["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    service.script = PLAIN
    assert answer(client, tools=[TOOL], messages=turns)["stop_reason"] == "max_tokens"
    _, assistant, *tools = service.requests[-1].messages
    assert assistant["reasoning_content"] == "Let me see." and assistant["content"] == "I look.\n"
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert [(tool["role"], tool["tool_call_id"]) for tool in tools] == [
        ("tool", "call_1"),
        ("tool", "call_2"),
    ]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "high"),
        ({"output_config": {"effort": "max"}}, "xhigh"),
    ],
)
def test_thinking_chooses_the_effort(client, service, fields, effort) -> None:
    answer(client, **fields)
    assert service.requests[-1].reasoning_effort == effort


def test_a_schema_for_the_answer_is_a_grammar(client, service) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    answer(client, output_config={"format": form})
    grammar = service.requests[-1].grammar
    assert (grammar.kind, grammar.text) == ("json_schema", '{"type":"object"}')


def test_a_long_user_id_names_a_short_session(client, service) -> None:
    for user_id in ("é" * 200, "é" * 200, "é" * 201):
        answer(client, metadata={"user_id": user_id})
    first, _, same, _, other, _ = (asked.session for asked in service.requests)
    assert first == same != other and len(first) == 32


def test_what_changes_nothing_is_accepted(client) -> None:
    """Fields, the query and the headers of a beta."""
    ignored = {name: {"type": "ephemeral"} for name in IGNORED_FIELDS}
    neutral = {name: (*refused.accepted, None)[0] for name, refused in REFUSED.items()}
    nulls = dict.fromkeys(("system", "tools", "tool_choice", "metadata", "top_k", "thinking"))
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    response = client.post(
        f"{PATH}?beta=true",
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x-2025-01-01,y"},
        json={
            **VALID,
            **ignored,
            **neutral,
            **nulls,
            "system": [cached],
            "messages": [{"role": "user", "content": [cached]}],
            "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "input_examples": [{}]}],
        },
    )
    assert response.status_code == 200, response.text


HINT = {"type": "ephemeral"}


@pytest.mark.parametrize(
    ("fields", "retain"),
    [
        ({}, False),
        ({"cache_control": HINT}, True),
        ({"tools": [{**TOOL, "cache_control": HINT}]}, True),
        ({"system": [{"type": "text", "text": "x", "cache_control": HINT}]}, True),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x", "cache_control": HINT}],
                    }
                ]
            },
            True,
        ),
        ({"system": [{"type": "text", "text": "x", "cache_control": None}]}, False),
    ],
)
def test_cache_control_is_a_hint_to_retain_the_conversation(
    client, service, fields, retain
) -> None:
    assert client.post(PATH, json={**VALID, **fields}).status_code == 200
    assert service.requests[-1].retain == retain


def test_the_deadline_of_the_header_is_the_requests(client, service) -> None:
    client.post(PATH, json=VALID, headers={"X-Request-Timeout-Seconds": "7"})
    assert service.requests[-1].deadline_s == 7


# --------------------------------------------------------------------------------------------------
# The document
# --------------------------------------------------------------------------------------------------


def test_openapi_describes_both_endpoints(client) -> None:
    document = client.get("/openapi.json").json()
    for path, body in ((PATH, "MessagesBody"), (COUNT_PATH, "CountTokensBody")):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body}"}
    references = json.dumps(document).split('"#/components/schemas/')[1:]
    named = {reference.partition('"')[0] for reference in references}
    assert named <= document["components"]["schemas"].keys()
