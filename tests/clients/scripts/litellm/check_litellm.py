"""LiteLLM: the SDK with its providers `openai/` and `hosted_vllm/`, and its bridge from Anthropic's messages."""

from __future__ import annotations

import asyncio
import json

import litellm
from checks import Target, run

QUESTION = [{"role": "user", "content": "Name three colours."}]


CITY = {
    "type": "object",
    "properties": {"country": {"enum": ["France", "Japan", "Peru"]}},
    "required": ["country"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "city", "parameters": CITY}}


def _chat(target: Target, provider: str, **options):
    options = {"messages": QUESTION, "max_tokens": 16, "temperature": 0, **options}
    return litellm.completion(
        model=f"{provider}/{target.model}",
        api_base=target.api,
        api_key="none",
        num_retries=0,
        **options,
    )


def _check_chat(target: Target, provider: str) -> None:
    whole = _chat(target, provider)
    chunks = list(_chat(target, provider, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens == 16


def openai_chat(target: Target) -> None:
    _check_chat(target, "openai")


def hosted_vllm_chat(target: Target) -> None:
    _check_chat(target, "hosted_vllm")


def text_completion(target: Target) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{target.model}",
        prompt="One, two,",
        api_base=target.api,
        api_key="none",
        max_tokens=8,
    )
    assert answer.choices[0].text


def anthropic_messages(target: Target) -> None:
    """Anthropic's API at the caller's side, OpenAI's at the server's."""
    answer = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"hosted_vllm/{target.model}",
            messages=QUESTION,
            max_tokens=16,
            api_base=target.api,
            api_key="none",
        )
    )
    assert answer["content"][0]["text"]
    assert answer["stop_reason"] == "max_tokens"


def _check_tools(target: Target, provider: str) -> None:
    """A call whole and streamed, its result, and the answer to it."""
    target = target.with_tools()
    chosen = {"tool_choice": "required", "parallel_tool_calls": False}
    asked = {"tools": [TOOL], "max_tokens": 100}
    message = _chat(target, provider, **asked, **chosen).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["country"] in CITY["properties"]["country"]["enum"]
    chunks = list(_chat(target, provider, **asked, **chosen, stream=True))
    (again,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is far."}
    turns = [*QUESTION, message.model_dump(exclude_none=True), result]
    answer = _chat(target, provider, **asked, messages=turns, tool_choice="none")
    assert answer.choices[0].message.content


def openai_tools(target: Target) -> None:
    _check_tools(target, "openai")


def hosted_vllm_tools(target: Target) -> None:
    _check_tools(target, "hosted_vllm")


def anthropic_tools(target: Target) -> None:
    """Anthropic's API at both sides."""
    target = target.with_tools()
    answer = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"anthropic/{target.model}",
            messages=QUESTION,
            tools=[{"name": "city", "input_schema": CITY}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=100,
            api_base=target.url,
            api_key="none",
        )
    )
    assert answer["stop_reason"] == "tool_use"
    assert {"city"} == {block["name"] for block in answer["content"] if block["type"] == "tool_use"}


def responses(target: Target) -> None:
    """`litellm.responses` with a tool."""
    target = target.with_tools()
    answer = litellm.responses(
        model=f"openai/{target.model}",
        input="A city?",
        tools=[{"type": "function", **TOOL["function"]}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
        api_base=target.api,
        api_key="none",
    )
    assert any(item.type == "function_call" for item in answer.output)


run(
    [
        openai_chat,
        hosted_vllm_chat,
        text_completion,
        anthropic_messages,
        openai_tools,
        hosted_vllm_tools,
        anthropic_tools,
        responses,
    ]
)
