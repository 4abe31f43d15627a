"""instructor: structured output through a JSON schema."""

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
        model=target.model, messages=QUESTION, response_model=City, max_tokens=64, max_retries=0
    )


def json_schema(target: Target) -> None:
    assert isinstance(_create(target, instructor.Mode.JSON_SCHEMA), City)


def tools(target: Target) -> None:
    """The default."""
    assert isinstance(_create(target, instructor.Mode.TOOLS), City)


run([json_schema], not_served=[tools])
