"""The JSON answers and events of the Messages API. The models document them, and tests validate answers with them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OutputTokensDetails(_Answer):
    """How the output's tokens were used."""

    thinking_tokens: int = Field(description="Those of `output_tokens` that are reasoning.")


class MessageUsage(_Answer):
    """Tokens of the whole request, also if it continued on other replicas."""

    input_tokens: int = Field(description="Tokens of the prompt that were not in the cache.")
    cache_creation_input_tokens: Literal[0] = Field(description="Caching needs no request.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt found in the cache.")
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class TextContent(_Answer):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingContent(_Answer):
    """Reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Always the same: this server checks no signature.")


class ToolUseContent(_Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(_Answer):
    """Answer of POST /v1/messages; in the first event of a stream it has no content and no stop reason yet."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(_Answer):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int = Field(description="Tokens of the prompt, cached ones included.")


class MessagesErrorDetail(_Answer):
    """The error; its message names the field, its bound and the value."""

    type: Literal[
        "api_error",
        "authentication_error",
        "invalid_request_error",
        "not_found_error",
        "overloaded_error",
        "permission_error",
        "rate_limit_error",
        "request_too_large",
        "timeout_error",
    ]
    message: str


class MessagesError(_Answer):
    """Every error of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessageStart(_Answer):
    """The first event."""

    type: Literal["message_start"]
    message: MessageAnswer


class ContentBlockStart(_Answer):
    """A block begins, without its content."""

    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(_Answer):
    """Further text of a text block."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(_Answer):
    """Further text of a thinking block."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(_Answer):
    """The signature, at the end of a thinking block."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(_Answer):
    """The input of a tool_use block, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(_Answer):
    """Further content of the open block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")
    ]


class ContentBlockStop(_Answer):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class StopFields(_Answer):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_Answer):
    """The stop reason and the usage of the whole request."""

    type: Literal["message_delta"]
    delta: StopFields
    usage: MessageUsage


class MessageStop(_Answer):
    """The last event."""

    type: Literal["message_stop"]


class Ping(_Answer):
    """Keeps the connection of a silent stream."""

    type: Literal["ping"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart
            | ContentBlockStart
            | ContentBlockDelta
            | ContentBlockStop
            | MessageDelta
            | MessageStop
            | Ping
            | MessagesError,
            Field(discriminator="type"),
        ]
    ]
):
    """The data of one event of a stream."""
