"""LangChain: `ChatOpenAI` and `OpenAI`."""

from __future__ import annotations

from typing import Literal

from checks import Count, Target, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

PROMPTS = ["Name a colour.", "Name a city.", "Name a fish."]


class City(BaseModel):
    """A city."""

    country: Literal["France", "Japan", "Peru"]
    districts: int = Field(ge=1, le=99)


def _chat(target: Target, **options) -> ChatOpenAI:
    options = {"max_tokens": 16, "max_retries": 0, **options}
    return ChatOpenAI(base_url=target.api, api_key="none", model=target.model, **options)


def invoke(target: Target) -> None:
    answer = _chat(target).invoke("Hello")
    assert answer.content
    assert 1 <= answer.usage_metadata["output_tokens"] <= 16


def stream(target: Target) -> None:
    chunks = list(_chat(target, temperature=0).stream("Hello"))
    assert len(chunks) > 2
    whole = _chat(target, temperature=0).invoke("Hello").content
    assert "".join(chunk.content for chunk in chunks) == whole


def batch(target: Target) -> Count:
    answers = _chat(target).batch(PROMPTS)
    return Count(sum(bool(answer.content) for answer in answers), len(PROMPTS), "answers")


def completion_batch(target: Target) -> Count:
    """`OpenAI().batch` sends its prompts as one request with a list."""
    llm = OpenAI(base_url=target.api, api_key="none", model=target.model, max_tokens=8)
    return Count(sum(bool(text) for text in llm.batch(PROMPTS)), len(PROMPTS), "answers")


def structured_output(target: Target) -> None:
    llm = _chat(target, max_tokens=64).with_structured_output(City)
    assert isinstance(llm.invoke("A city?"), City)


def logprobs(target: Target) -> None:
    content = _chat(target, logprobs=True).invoke("Hello").response_metadata["logprobs"]["content"]
    assert content and all(token["logprob"] <= 0 for token in content)


def responses_api(target: Target) -> None:
    """`use_responses_api`, whole and streamed, with a structured output."""
    llm = _chat(target, use_responses_api=True, temperature=0)
    whole = llm.invoke("Hello")
    assert whole.text and 1 <= whole.usage_metadata["output_tokens"] <= 16
    assert "".join(chunk.text for chunk in llm.stream("Hello")) == whole.text
    llm = _chat(target, use_responses_api=True, max_tokens=64)
    assert isinstance(llm.with_structured_output(City).invoke("A city?"), City)


def bind_tools(target: Target) -> None:
    """A call whole and streamed, its result, and the answer to it."""
    llm = _chat(target.with_tools(), max_tokens=100, temperature=0)
    bound = llm.bind_tools([City], tool_choice="City", parallel_tool_calls=False)
    called = bound.invoke("A city?")
    (call,) = called.tool_calls
    assert City(**call["args"])
    chunks = list(bound.stream("A city?"))
    streamed = sum(chunks[1:], chunks[0])
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]
    turns = [HumanMessage("A city?"), called, ToolMessage("Far.", tool_call_id=call["id"])]
    assert llm.bind_tools([City], tool_choice="none").invoke(turns).content


def structured_output_by_a_tool(target: Target) -> None:
    llm = _chat(target.with_tools(), max_tokens=100)
    by_tool = llm.with_structured_output(City, method="function_calling")
    assert isinstance(by_tool.invoke("A city?"), City)


def responses_tools(target: Target) -> None:
    llm = _chat(target.with_tools(), max_tokens=100, use_responses_api=True)
    answer = llm.bind_tools([City], tool_choice="City").invoke("A city?")
    assert answer.tool_calls and all(City(**call["args"]) for call in answer.tool_calls)


run(
    [
        invoke,
        stream,
        batch,
        completion_batch,
        structured_output,
        logprobs,
        responses_api,
        bind_tools,
        structured_output_by_a_tool,
        responses_tools,
    ]
)
