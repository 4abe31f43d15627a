"""anthropic: the Messages API whole and streamed, thinking, structured output, tools, counts, errors."""

from __future__ import annotations

import json

import anthropic
from checks import Target, run

QUESTION = {"role": "user", "content": "Name three colours."}
CITY = {
    "type": "object",
    "properties": {
        "country": {"enum": ["France", "Japan", "Peru"]},
        "districts": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["country", "districts"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Lima", "Lyon"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def _client(target: Target) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0)


def _options(target: Target, **options):
    """Options of a greedy answer. The newest client has no argument for `temperature`."""
    options = {"model": target.model, "max_tokens": 16, "messages": [QUESTION], **options}
    return {**options, "extra_body": {"temperature": 0, **options.get("extra_body", {})}}


def _create(target: Target, **options) -> anthropic.types.Message:
    return _client(target).messages.create(**_options(target, **options))


def message(target: Target) -> None:
    answer = _create(target)
    assert answer.id.startswith("msg_") and answer.role == "assistant"
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 16


def stream(target: Target) -> None:
    """The helper's text and final message are those of the whole answer."""
    whole = _create(target, system="Answer in French.")
    with _client(target).messages.stream(**_options(target, system="Answer in French.")) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens


def raw_stream(target: Target) -> None:
    events = list(_create(target, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def stop_sequence(target: Target) -> None:
    first = _create(target).content[0].text
    word = first[len(first) // 2 :][:4]
    answer = _create(target, stop_sequences=[word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert answer.content[0].text == first[: first.index(word)]


def last_turn_is_continued(target: Target) -> None:
    first = _create(target).content[0].text
    begun = {"role": "assistant", "content": first[: len(first) // 2].rstrip()}
    assert _create(target, messages=[QUESTION, begun]).content[0].text


def agents_options(target: Target) -> None:
    """Agents send the same options to every model: a great max_tokens, thinking, effort, cache hints."""
    cached = {"type": "ephemeral"}
    answer = _client(target).beta.messages.create(
        **_options(
            target,
            max_tokens=32000,
            stream=True,
            stop_sequences=[".", ","],
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "Answer in English.", "cache_control": cached},
            ],
            thinking={"type": "adaptive"},
            metadata={"user_id": "session_1"},
            extra_body={
                "output_config": {"effort": "high"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            },
            betas=["context-management-2025-06-27"],
        )
    )
    assert [event for event in answer][-1].type == "message_stop"


def structured_output(target: Target) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    city = json.loads(_create(target, max_tokens=64, output_config=form).content[0].text)
    assert city["country"] in ("France", "Japan", "Peru") and 1 <= city["districts"] <= 99


def count_tokens(target: Target) -> None:
    asked = {"model": target.model, "messages": [QUESTION], "system": "Be brief."}
    counted = _client(target).messages.count_tokens(**asked).input_tokens
    usage = _create(target, system="Be brief.").usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def cached_tokens(target: Target) -> None:
    """The second of two equal requests finds its prefix in the cache."""
    system = "You are patient. " * 60
    _create(target, system=system)
    usage = _create(target, system=system).usage
    assert usage.cache_read_input_tokens > usage.input_tokens


def errors(target: Target) -> None:
    for options, error, kind in (
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"odd": 1}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        try:
            _create(target, **options)
        except error as caught:
            assert caught.body["error"]["type"] == kind and caught.request_id
        else:
            raise AssertionError(f"{options} was accepted")


def tools(target: Target) -> None:
    """A call whole and streamed, its result, and the answer to it."""
    target = target.with_tools()
    choice = {"type": "any", "disable_parallel_tool_use": True}
    question = {"role": "user", "content": "How is the weather in Lima?"}
    asked = {"tools": [WEATHER], "max_tokens": 100}
    call = _create(target, **asked, messages=[question], tool_choice=choice)
    assert call.stop_reason == "tool_use"
    (used,) = (block for block in call.content if block.type == "tool_use")
    assert used.name == "weather" and used.input["city"] in ("Lima", "Lyon")
    with _client(target).messages.stream(
        **_options(target, **asked, messages=[question], tool_choice=choice)
    ) as events:
        streamed = events.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [used.input]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "Fog, 17 degrees."}
    turns = [
        question,
        {"role": "assistant", "content": [block.to_dict() for block in call.content]},
        {"role": "user", "content": [result]},
    ]
    answer = _create(target, **asked, messages=turns, tool_choice={"type": "none"})
    assert answer.content[0].text


def tools_without_a_format(target: Target) -> None:
    """A model without a format for tools refuses them and says why."""
    try:
        _create(target, tools=[WEATHER])
    except anthropic.BadRequestError as caught:
        assert "calls tools" in caught.body["error"]["message"]
    else:
        raise AssertionError("tools were accepted")


run(
    [
        message,
        stream,
        raw_stream,
        stop_sequence,
        last_turn_is_continued,
        agents_options,
        structured_output,
        count_tokens,
        cached_tokens,
        errors,
        tools,
        tools_without_a_format,
    ]
)
