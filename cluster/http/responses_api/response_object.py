"""The Response object and its items, in OpenAI's form.

The models document the answer (OpenAPI), and tests validate answers with them. At run time functions build the same
shapes as plain dictionaries.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.cluster.http.http_answers import ContentLogprob
from quire.cluster.http.responses_api.response_tools import RequestTools
from quire.cluster.http.responses_api.responses_body import ResponsesRequest
from quire.protos.errors import ContextLengthExceeded, InvalidRequest, Overloaded, QuireError
from quire.router.types import Usage

RESPONSE_ID_PREFIX = "resp_"
Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OutputText(_Shape):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[ContentLogprob]


class OutputMessage(_Shape):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(_Shape):
    """A call of a function."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str = Field(
        description="Names the call in the `function_call_output` that answers it."
    )
    name: str
    namespace: str | None = Field(None, description="Of a function in a namespace.")
    arguments: str = Field(description="JSON text of an object.")


class OutputReasoningText(_Shape):
    """The text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Shape):
    """The reasoning before a message or a call."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any] = Field(description="Always empty: the reasoning itself is in `content`.")
    content: list[OutputReasoningText]


class ResponsesInputDetails(_Shape):
    """How the input's tokens were computed."""

    cached_tokens: int = Field(
        description="Tokens found in the replica's cache, not computed again."
    )
    cache_write_tokens: int = Field(description="Always 0: writing to the cache costs nothing.")


class ResponsesOutputDetails(_Shape):
    """Parts of the output."""

    reasoning_tokens: int


class ResponsesUsage(_Shape):
    """Tokens of the whole request, also if it continued on other replicas."""

    input_tokens: int
    input_tokens_details: ResponsesInputDetails
    output_tokens: int
    output_tokens_details: ResponsesOutputDetails
    total_tokens: int


class IncompleteDetails(_Shape):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(_Shape):
    """Why the answer failed after it had begun."""

    code: str
    message: str
    param: str | None
    type: str


class ResponseAnswer(_Shape):
    """Answer of /v1/responses, and a part of some events of its stream."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Seconds since 1970.")
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    usage: ResponsesUsage | None = Field(description="null until the end.")
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float | None = Field(description="null: the checkpoint's default.")
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None = Field(description="null: the checkpoint's default.")
    truncation: Literal["disabled"]


class ResponseEvent(BaseModel):
    """One server-sent event; other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int = Field(description="0 for the first event.")


# --------------------------------------------------------------------------------------------------
# Building them
# --------------------------------------------------------------------------------------------------


def constant_part(
    body: ResponsesRequest, tools: RequestTools, *, response_id: str, created_s: int, model: str
) -> dict[str, Any]:
    """Build the fields of a `ResponseAnswer` that stay the same from the first event to the last."""
    form, reasoning = body.text and body.text.format, body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {
            "format": form or {"type": "text"},
            "verbosity": "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": tools.described,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def changing_part(
    status: Status,
    output: list[dict[str, Any]],
    *,
    usage: Usage | None = None,
    error: QuireError | None = None,
) -> dict[str, Any]:
    """Build the other fields of a `ResponseAnswer`."""
    return {
        "status": status,
        "error": None if error is None else _failure(error),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": None if usage is None else _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _failure(error: QuireError) -> dict[str, Any]:
    """Build a `ResponseFailure`: OpenAI has few codes for it, and clients decide by them whether to retry."""
    code = "server_error"
    if isinstance(error, ContextLengthExceeded):
        code = error.code
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    elif isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    return {
        "code": code,
        "message": error.message,
        "param": error.field,
        "type": error.openai_type,
    }


def message_item(item_id: str, status: ItemStatus, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Build an `OutputMessage`."""
    return {
        "type": "message",
        "id": item_id,
        "status": status,
        "role": "assistant",
        "content": content,
    }


def reasoning_item(
    item_id: str, status: ItemStatus, content: list[dict[str, Any]]
) -> dict[str, Any]:
    """Build an `OutputReasoning`."""
    return {
        "type": "reasoning",
        "id": item_id,
        "status": status,
        "summary": [],
        "content": content,
    }
