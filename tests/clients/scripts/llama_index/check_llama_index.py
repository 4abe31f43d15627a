"""LlamaIndex: `OpenAILike`."""

from __future__ import annotations

from typing import Literal

from checks import Target, run
from llama_index.core.llms import ChatMessage
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


run([chat, stream_chat, complete, structured_output])
