"""instructor: structured output by a JSON schema and by a tool, whole and streamed."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import Target, run
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "Name a city."}]


class City(BaseModel):
    """A city."""

    country: Literal["France", "Japan", "Peru"]
    districts: int = Field(ge=1, le=99)


def _create(target: Target, mode: instructor.Mode) -> City:
    client = openai.OpenAI(base_url=target.api, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=target.model, messages=QUESTION, response_model=City, max_tokens=100, max_retries=0
    )


def json_schema(target: Target) -> None:
    assert isinstance(_create(target, instructor.Mode.JSON_SCHEMA), City)


def tools(target: Target) -> None:
    """The default."""
    assert isinstance(_create(target.with_tools(), instructor.Mode.TOOLS), City)


def tools_streamed(target: Target) -> None:
    """`create_partial` reads the arguments as they come; the last object is complete."""
    served = target.with_tools()
    client = openai.OpenAI(base_url=served.api, api_key="none", max_retries=0)
    *_, last = instructor.from_openai(client).chat.completions.create_partial(
        model=served.model, messages=QUESTION, response_model=City, max_tokens=100, max_retries=0
    )
    assert City.model_validate(last.model_dump())


run([json_schema, tools, tools_streamed])
