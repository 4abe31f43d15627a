"""pydantic-ai: an agent with text, a stream and structured output."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import Target, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

RUNS = 8


class City(BaseModel):
    """A city."""

    country: Literal["France", "Japan", "Peru"]
    districts: int = Field(ge=1, le=99)


def _agent(target: Target, output_type=str, model_class=OpenAIChatModel) -> Agent:
    provider = OpenAIProvider(base_url=target.api, api_key="none")
    model = model_class(target.model, provider=provider)
    settings = ModelSettings(max_tokens=100, temperature=0, parallel_tool_calls=False)
    return Agent(model, output_type=output_type, model_settings=settings, retries=0)


def text(target: Target) -> None:
    result = _agent(target).run_sync("Name a city.")
    assert result.output
    assert 1 <= result.usage.output_tokens <= 100


def stream(target: Target) -> None:
    async def streamed() -> str:
        async with _agent(target).run_stream("Name a city.") as result:
            return "".join([delta async for delta in result.stream_text(delta=True)])

    assert asyncio.run(streamed()) == _agent(target).run_sync("Name a city.").output


def native_output(target: Target) -> None:
    assert isinstance(_agent(target, NativeOutput(City)).run_sync("Name a city.").output, City)


def tool_output(target: Target) -> None:
    """The default for structured output: a tool."""
    assert isinstance(_agent(target.with_tools(), City).run_sync("Name a city.").output, City)


def responses_tool_output(target: Target) -> None:
    """The same over the Responses API."""
    agent = _agent(target.with_tools(), City, model_class=OpenAIResponsesModel)
    assert isinstance(agent.run_sync("Name a city.").output, City)


def tool(target: Target) -> None:
    """The model calls a function or the tool for its answer: each run ends, some call the function."""
    agent = _agent(target.with_tools(), City)
    seen = []

    @agent.tool_plain
    def weather(country: Literal["France", "Japan", "Peru"]) -> str:
        """The weather in a country."""
        seen.append(country)
        return "Fog."

    for seed in range(RUNS):
        settings = ModelSettings(temperature=1, seed=seed)
        assert isinstance(agent.run_sync("Name a city.", model_settings=settings).output, City)
    assert seen


run([text, stream, native_output, tool_output, responses_tool_output, tool])
