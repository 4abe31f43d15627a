"""The events of a Response: their order, their shape, and that they say the same however the deltas are split."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from responses_reader import events_of, response_of

from quire.cluster.http.responses_api.response_events import ResponseEvents
from quire.cluster.http.responses_api.response_object import constant_part
from quire.cluster.http.responses_api.response_tools import parse_tools
from quire.cluster.http.responses_api.responses_body import ResponsesRequest
from quire.protos.errors import (
    Aborted,
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
)
from quire.router.scored_token import ScoredToken, TokenScores
from quire.router.tool_types import ToolCall
from quire.router.types import OutputDelta, Usage

USAGE = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
# What a model does: reasoning, text and calls, in any order.
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("reasoning"), TEXT),
        st.tuples(st.just("text"), TEXT),
        st.tuples(st.just("call"), st.sampled_from(["plain", "docs__find", "unknown"])),
    ),
    max_size=6,
)
TOOLS = [
    {"type": "function", "name": "plain"},
    {"type": "namespace", "name": "docs", "description": "d", "tools": [{"type": "function", "name": "find"}]},
]  # fmt: skip


def new_events() -> ResponseEvents:
    body = ResponsesRequest(input="hi", metadata={"a": "b"}, tools=TOOLS, instructions="be brief")
    tools = asyncio.run(parse_tools(TOOLS))
    constant = constant_part(body, tools, response_id="resp_1", created_s=5, model="acme/tiny")
    return ResponseEvents(constant, "1", tools.origins)


def streamed(deltas: list[OutputDelta]) -> tuple[dict, ResponseEvents]:
    """The answer as a client reads it, and the encoder."""
    events = new_events()
    sent = [events.begin(), *map(events.add, deltas), events.end(USAGE)]
    return response_of(events_of(b"".join(sent).decode())), events


def calls(parts: list[tuple[str, str]]) -> list[ToolCall]:
    """The calls among the parts; the arguments are not ASCII and not flat."""
    names = [name for kind, name in parts if kind == "call"]
    arguments = '{"a":{"b":["ü","\\n"]}}'
    return [ToolCall(i, f"call_{i}", name, arguments) for i, name in enumerate(names)]


@settings(deadline=None, max_examples=150)
@given(PARTS, st.sampled_from(["stop", "length", "tool_calls"]), st.data())
def test_every_split_of_the_deltas_gives_the_same_response(parts, finish_reason, data) -> None:
    """Compared with one delta for each character and one for each part."""
    expected_calls = iter(calls(parts))
    fine, coarse, split = [], [], []
    for kind, content in parts:
        if kind == "call":
            call = OutputDelta("", [1], tool_calls=(next(expected_calls),))
            for deltas in (fine, coarse, split):
                deltas.append(call)
            continue
        cuts = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=3)))
        pieces = [content[a:b] for a, b in itertools.pairwise([0, *cuts, len(content)])]
        for deltas, texts in ((fine, content), (coarse, [content]), (split, pieces)):
            for text in texts:
                is_text = kind == "text"
                delta = OutputDelta(text if is_text else "", [1], reasoning="" if is_text else text)
                deltas.append(delta)
    last = OutputDelta("", [2], finish_reason)
    answers = [streamed([*deltas, last]) for deltas in (fine, coarse, split)]
    (answer, events), *others = answers
    assert all(other == answer for other, _ in others)
    assert events.whole(USAGE) == answer
    assert answer["status"] == ("incomplete" if finish_reason == "length" else "completed")
    merged = [
        (kind, content)
        for kind, group in itertools.groupby(parts, lambda part: part[0])
        for content in (
            [content for _, content in group]
            if kind == "call"
            else ["".join(content for _, content in group)]
        )
    ]
    assert len(answer["output"]) == max(1, len(merged))  # an empty answer is an empty message
    for item, (kind, content) in zip(answer["output"], merged, strict=False):
        if kind == "call":
            name = f"{item['namespace']}__{item['name']}" if "namespace" in item else item["name"]
            assert (item["type"], name) == ("function_call", content)
        else:
            assert item["type"] == {"text": "message", "reasoning": "reasoning"}[kind]
            assert item["content"][0]["text"] == content


def test_the_order_of_the_events() -> None:
    events = new_events()
    call = ToolCall(0, "call_9", "docs__find", "{}")
    deltas = [
        OutputDelta("", [1], reasoning="hm"),
        OutputDelta("Yes", [2]),
        OutputDelta("", [3]),
        OutputDelta("", [4], "tool_calls", tool_calls=(call,)),
    ]
    sent = b"".join([events.begin(), *map(events.add, deltas), events.end(USAGE)])
    read = events_of(sent.decode())
    assert [event["type"].removeprefix("response.") for event in read] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    item = response_of(read)["output"][2]
    assert (item["call_id"], item["namespace"], item["name"]) == ("call_9", "docs", "find")


def test_usage_counts_cached_and_reasoning_tokens() -> None:
    answer, _ = streamed([OutputDelta("x", [1], "stop")])
    assert answer["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def test_the_item_that_is_cut_is_incomplete() -> None:
    deltas = [OutputDelta("", [1], reasoning="a"), OutputDelta("b", [2], "length")]
    answer, _ = streamed(deltas)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def scores(number: int) -> list[TokenScores]:
    text = f"t{number}"
    token = ScoredToken(number, -0.5, text, text.encode())
    return [TokenScores(token, (token,))]


def test_log_probabilities_stay_with_the_text() -> None:
    """Those of reasoning and calls are left out; those of a character's first tokens come with its text."""
    call = ToolCall(0, "call_0", "plain", "{}")
    deltas = [
        OutputDelta("", [1], reasoning="a", logprobs=scores(1)),
        OutputDelta("", [2], logprobs=scores(2)),
        OutputDelta("b", [3], logprobs=scores(3)),
        OutputDelta("", [4], logprobs=scores(4)),
        OutputDelta("c", [5], logprobs=scores(5)),
        OutputDelta("", [6], "stop", logprobs=scores(6)),
    ]
    answer, _ = streamed(deltas)
    part = answer["output"][1]["content"][0]
    assert [score["token"] for score in part["logprobs"]] == ["t2", "t3", "t4", "t5", "t6"]
    assert part["logprobs"][0]["bytes"] == list(b"t2")
    deltas[-1] = OutputDelta("", [6], "tool_calls", logprobs=scores(6), tool_calls=(call,))
    answer, _ = streamed(deltas)
    part = answer["output"][1]["content"][0]
    assert [score["token"] for score in part["logprobs"]] == ["t2", "t3", "t4", "t5"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("broken"), "server_error"),
        (Overloaded("full", retry_after_s=1.0), "rate_limit_exceeded"),
        (InvalidRequest("bad", field="input"), "invalid_prompt"),
    ],
)
def test_a_failed_response_has_what_was_done(error, code) -> None:
    events = new_events()
    call = ToolCall(0, "call_0", "plain", "{}")
    sent = [events.begin(), events.add(OutputDelta("", [1], tool_calls=(call,)))]
    sent += [events.add(OutputDelta("half", [2])), events.fail(error)]
    *_, first, last = events_of(b"".join(sent).decode())
    assert (first["type"], first["code"], first["param"]) == ("error", error.code, error.field)
    assert first["error"]["message"] == error.message
    answer = last["response"]
    assert (last["type"], answer["status"]) == ("response.failed", "failed")
    assert (answer["error"]["code"], answer["error"]["message"]) == (code, error.message)
    done, cut = answer["output"]
    assert (done["type"], done["status"]) == ("function_call", "completed")
    assert (cut["content"][0]["text"], cut["status"]) == ("half", "incomplete")


def test_a_context_that_is_too_long_keeps_its_code() -> None:
    """Agents shorten their context when they see this code."""
    sent = new_events().fail(ContextLengthExceeded("too long")).decode()
    assert '"code":"context_length_exceeded","message":"too long","param":null,"type"' in sent


def test_an_abort_and_a_missing_end_are_errors() -> None:
    with pytest.raises(Aborted):
        new_events().add(OutputDelta("", [], "abort"))
    events = new_events()
    events.add(OutputDelta("x", [1]))
    with pytest.raises(EngineError):
        events.end(USAGE)
