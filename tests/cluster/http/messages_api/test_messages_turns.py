"""Turns of the Messages API as the router's chat messages."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cluster.http.http_body import MAX_ENTRIES
from quire.cluster.http.messages_api.messages_turns import chat_messages, continues_last_turn
from quire.protos.errors import InvalidRequest, UnsupportedField

USER = {"role": "user", "content": "hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch={};"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "call_1", **fields}


def test_a_round_of_tool_calls() -> None:
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "quire"},
                {"type": "redacted_thinking", "data": "abc"},
                text("I look."),
                {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": [1, "é"]}},
                {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
            ],
        },
        user(result(content="first"), result(tool_use_id="call_2"), text("Go"), text("on.")),
    ]
    messages = chat_messages(None, turns)
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a":[1,"é"]}'},
                },
                {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "first"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "user", "content": parts("Go", "on.")},
    ]
    assert not continues_last_turn(messages)


def test_texts_between_results_keep_their_place() -> None:
    messages = chat_messages(None, [user(text("a"), result(content="r"), text("b"))])
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "a"),
        ("tool", "r"),
        ("user", "b"),
    ]


def test_an_error_of_a_tool_is_named_in_the_prompt() -> None:
    blocks = [
        result(is_error=True, content="no such file"),
        result(is_error=False, content=[text("one"), text("two")]),
        result(is_error=True),
    ]
    contents = [m["content"] for m in chat_messages(None, [user(*blocks)])]
    assert contents == ["Error: no such file", "one\ntwo", "Error: "]


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("Be kind.", "Be kind."),
        ([text("Be kind.")], "Be kind."),
        ([text("Be"), text("kind.")], parts("Be", "kind.")),
        ([text(BILLING.format("1a2b")), text("Be"), text("kind.")], parts("Be", "kind.")),
        ([text(BILLING.format("1a2b")), text("Be kind.")], "Be kind."),
    ],
)
def test_the_system_prompt_is_the_first_message(system, content) -> None:
    assert chat_messages(system, [USER]) == [{"role": "system", "content": content}, USER]


@pytest.mark.parametrize("system", [None, "", [], [text(BILLING.format(1))]])
def test_an_empty_system_prompt_is_no_message(system) -> None:
    assert chat_messages(system, [USER]) == [USER]


def test_the_block_that_always_changes_is_no_part_of_the_prompt() -> None:
    first, second = (
        chat_messages([text(BILLING.format(i)), text("Be kind.")], [USER]) for i in range(2)
    )
    assert first == second
    # In a turn of the user it is text like any other.
    assert chat_messages(None, [user(text(BILLING))])[0]["content"] == BILLING


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    prefill = {"role": "assistant", "content": [text("The answer is")]}
    messages = chat_messages(None, [USER, prefill])
    assert messages[-1] == {"role": "assistant", "content": "The answer is"}
    assert continues_last_turn(messages)
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    with pytest.raises(InvalidRequest, match="has a tool_result for each"):
        continues_last_turn(chat_messages(None, [USER, {**prefill, "content": [call]}]))


def test_a_system_turn_in_the_conversation_keeps_its_place() -> None:
    turn = {"role": "system", "content": "Now in French."}
    assert chat_messages(None, [USER, turn]) == [USER, turn]


@pytest.mark.parametrize(
    ("turn", "error", "field", "message"),
    [
        ("hi", InvalidRequest, "messages[1]", "must be an object"),
        ({"role": "user"}, InvalidRequest, "messages[1].content", "is required"),
        ({**USER, "name": "x"}, UnsupportedField, "messages[1].name", "unknown"),
        ({**USER, "content": 3}, InvalidRequest, "messages[1].content", "or a list of blocks, got 3"),
        (user({"type": "image", "source": {}}), UnsupportedField, "messages[1].content[0].type", "images"),
        (user({"type": "document"}), UnsupportedField, "messages[1].content[0].type", "files are not"),
        (user({"type": "odd"}), UnsupportedField, "messages[1].content[0].type", '"text" or "tool_result"'),
        (user({"type": "tool_use"}), UnsupportedField, "messages[1].content[0].type", '"tool_result"'),
        (user({"text": "x"}), InvalidRequest, "messages[1].content[0]", "a string `type`"),
        (user({"type": "text"}), InvalidRequest, "messages[1].content[0].text", "is required"),
        (user({**text("x"), "odd": 1}), UnsupportedField, "messages[1].content[0].odd", "unknown"),
        (
            user(result(content=[text("x"), {"type": "image"}])),
            UnsupportedField,
            "messages[1].content[0].content[1].type",
            "images are not served",
        ),
        (user(result(tool_use_id="")), InvalidRequest, "messages[1].content[0].tool_use_id", "at least 1"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_block(turn, error, field, message) -> None:
    with pytest.raises(error, match=r"messages\[1\]") as caught:
        chat_messages(None, [USER, turn])
    assert caught.value.field == field
    assert message in caught.value.message


def test_the_number_of_blocks_is_bounded_before_any_is_read() -> None:
    turns = [user(*[{"type": "odd"}] * (MAX_ENTRIES // 2 + 1))] * 2
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ENTRIES} blocks in all, got 4098"):
        chat_messages(None, turns)


def test_an_input_that_nests_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": deep}
    with pytest.raises(InvalidRequest, match="input of 'c'"):
        chat_messages(None, [USER, {"role": "assistant", "content": [call]}])
