"""The JSON answers of the HTTP API: OpenAI's shapes, with a few extensions that vLLM has, too.

The models are what the documentation pages show and what the tests hold the answers to. The
functions build the same shapes as plain dictionaries: validating what we made ourselves costs time
and finds nothing.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from quire.cluster.front_end import retry_after_ms
from quire.protos.errors import QuireError
from quire.router.types import ModelInfo, Usage


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the replica's cache, not computed again.")


class UsageAnswer(_Answer):
    """Tokens of the whole request, however often it moved between replicas."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length"] | None
    logprobs: None
    stop_reason: str | int | None = Field(
        None, description="The stop string or stop token id that ended the answer; null for EOS."
    )
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


class CompletionChoice(_Choice):
    """The continuation."""

    text: str


class AssistantMessage(_Answer):
    """The turn that was generated."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    """The answer."""

    message: AssistantMessage


class ChatDelta(_Answer):
    """What is new: the role in the first chunk, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    """One delta of the answer."""

    delta: ChatDelta


class _Envelope(_Answer):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Names model, revision and number format.")


class Completion(_Envelope):
    """Answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


class ChatCompletion(_Envelope):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatCompletionChunk(_Envelope):
    """One server-sent event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None


class ModelCard(_Answer):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Most tokens of prompt and answer together.")


class ModelList(_Answer):
    """The models of this application: one."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(_Answer):
    """What is wrong: the field, its bound and the value."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Answer):
    """Every answer that is not 2xx, and the last event of a stream that failed."""

    error: ErrorDetail


class ReadyAnswer(_Answer):
    """Whether a request sent now would be served."""

    ready: bool
    reason: str
    replicas: int = Field(description="Attached replicas.")
    startup: dict[str, float] = Field(
        description="Seconds by phase of start-up, of the slowest replica."
    )


# --------------------------------------------------------------------------------------------------
# Building them
# --------------------------------------------------------------------------------------------------


def usage_answer(usage: Usage) -> dict[str, Any]:
    """A `UsageAnswer`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_card(info: ModelInfo) -> dict[str, Any]:
    """A `ModelCard`."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "quire",
        "max_model_len": info.max_model_len,
    }


def error_answer(error: QuireError) -> dict[str, Any]:
    """An `ErrorAnswer`."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field,
            "code": error.code,
        }
    }


def error_headers(error: QuireError) -> dict[str, str]:
    """When to try again: whole seconds for everyone, milliseconds for OpenAI's client."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(retry_after_ms(error.retry_after_s)),
    }


def json_response(
    content: Any, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """`content`, encoded by orjson."""
    return Response(
        orjson.dumps(content),
        status_code=status_code,
        headers=headers,
        media_type="application/json",
    )
