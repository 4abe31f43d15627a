"""LlamaIndex: `OpenAILike`.

`FunctionTool` needs annotations that are types, so they are not postponed.
"""

from typing import Literal

from checks import Target, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

QUESTION = [ChatMessage(role="user", content="Name three colours.")]


class City(BaseModel):
    """A city."""

    country: Literal["France", "Japan", "Peru"]
    districts: int = Field(ge=1, le=99)


def _llm(target: Target, **options) -> OpenAILike:
    options = {"is_chat_model": True, "max_tokens": 16, "temperature": 0.0, **options}
    return OpenAILike(
        model=target.model,
        api_base=target.api,
        api_key="none",
        context_window=8192,
        max_retries=0,
        **options,
    )


def chat(target: Target) -> None:
    assert _llm(target).chat(QUESTION).message.content


def stream_chat(target: Target) -> None:
    chunks = list(_llm(target).stream_chat(QUESTION))
    assert len(chunks) > 2
    assert (
        "".join(chunk.delta or "" for chunk in chunks)
        == _llm(target).chat(QUESTION).message.content
    )


def complete(target: Target) -> None:
    assert _llm(target, is_chat_model=False).complete("One, two,").text


def structured_output(target: Target) -> None:
    llm = _llm(target, should_use_structured_outputs=True, max_tokens=64)
    answer = llm.as_structured_llm(City).chat(QUESTION)
    assert isinstance(answer.raw, City)


def city(country: Literal["France", "Japan", "Peru"], size: Literal["large", "small"]) -> str:
    """Remember a city."""
    return f"A {size} city in {country}"


def _tool(target: Target) -> tuple[OpenAILike, FunctionTool]:
    llm = _llm(target.with_tools(), is_function_calling_model=True, max_tokens=100)
    return llm, FunctionTool.from_defaults(city)


def tools(target: Target) -> None:
    """A call whole and streamed."""
    llm, tool = _tool(target)
    answer = llm.chat_with_tools([tool], "A city?", tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "city" and call.tool_kwargs.keys() == {"country", "size"}
    *_, last = llm.stream_chat_with_tools([tool], "A city?", tool_required=True)
    (again, *_) = llm.get_tool_calls_from_response(last)
    assert again.tool_kwargs == call.tool_kwargs


def tool_is_run(target: Target) -> None:
    """`predict_and_call` runs the tool that the model calls."""
    llm, tool = _tool(target)
    answer = llm.predict_and_call([tool], "A city?", tool_required=True)
    assert " city in " in answer.response


def structured_output_by_a_tool(target: Target) -> None:
    """The default for structured output with a model that calls functions."""
    llm, _ = _tool(target)
    assert isinstance(llm.as_structured_llm(City).chat(QUESTION).raw, City)


run(
    [
        chat,
        stream_chat,
        complete,
        structured_output,
        tools,
        tool_is_run,
        structured_output_by_a_tool,
    ]
)
