"""Request body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.cluster.api_common.front_end import ROLES, served_role
from quire.cluster.http.http_schema import GenerationBody, Strict
from quire.protos.errors import InvalidRequest
from quire.protos.wire import MAX_LOGPROBS
from quire.router import refused_fields
from quire.router.types import GenerationRequest

# Most nesting levels of `messages`. Text parts are at level 4. Deeper values are not supported, and checking very deep
# ones could exhaust the stack.
_MAX_MESSAGES_DEPTH = 8


class TextPart(Strict):
    """A text part of a message's content; other parts are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Other fields (`tool_calls`, ...) must be null; the router refuses other values."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "required": ["role", "content"],
            "additionalProperties": {"type": "null"},
        },
    )

    role: str = Field(
        description="system, developer (served as system), user or assistant.",
        json_schema_extra={"enum": list(ROLES)},
    )
    # `Any`, because the router checks the content. It can name the part that is wrong, and it knows what the chat
    # template supports.
    content: Any = Field(
        None,
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
            ]
        },
    )
    name: str | None = Field(
        None,
        description="Name of the author, for templates that distinguish authors.",
        json_schema_extra={"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
    )


class ChatCompletionRequest(GenerationBody):
    """Body of POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    refused = refused_fields.OF_CHATS

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        description="The conversation, oldest first.", json_schema_extra={"minItems": 1}
    )
    max_completion_tokens: int | None = Field(
        None, description="The newer name of `max_tokens`. If both are given they must be equal."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables for the chat template, for example `enable_thinking`. They override the application's "
        "`chat_template_kwargs` (vLLM).",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the prompt ends with the beginning of an assistant message. Default: true, false with "
        "`continue_final_message` (vLLM).",
    )
    continue_final_message: bool | None = Field(
        None,
        description="Continue the last message instead of starting a new one. Not together with "
        "`add_generation_prompt` (vLLM).",
    )

    logprobs: bool | None = Field(
        None,
        description="Return log-probabilities of the answer's tokens, from the model's own distribution "
        "before sampling parameters are applied.",
    )
    top_logprobs: int | None = Field(
        None,
        description="Number of most likely tokens to return at each position, at most 20. Needs `logprobs`.",
    )

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token; None if `logprobs` is not true."""
        top = self.top_logprobs
        if not self.logprobs:
            if top:
                raise InvalidRequest(
                    f"top_logprobs needs logprobs true: without it top_logprobs must be 0 or null, got {top}",
                    field="top_logprobs",
                )
            return None
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be an integer in [0, {MAX_LOGPROBS}], got {top}",
                field="top_logprobs",
            )
        return top or 0

    def output_limit_tokens(self) -> int | None:
        """Most tokens to generate, from either of the two fields."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens "
                f"({self.max_tokens}) are two names of one bound and must be equal; give one of the two",
                field="max_completion_tokens",
            )
        return limits.pop() if limits else None

    def router_names(self) -> dict[str, str]:
        """Map from the router's names of fields to those of this body, where they differ."""
        names = {**super().router_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def to_request(self, request_id: str) -> GenerationRequest:
        """Make the router's request."""
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(self.messages):
            role = served_role(message.role, f"messages[{i}].role")
            # Not dict(message): that calls `keys`, and a client may send a field with this name.
            messages.append({**message.__dict__, **(message.model_extra or {}), "role": role})
        if not _is_shallow(messages, _MAX_MESSAGES_DEPTH):
            raise InvalidRequest(
                f"messages must not nest deeper than {_MAX_MESSAGES_DEPTH} levels", field="messages"
            )
        return self.generation_request(
            request_id,
            messages=tuple(messages),
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
        )


def _is_shallow(value: Any, max_depth: int) -> bool:
    """Whether lists and objects nest at most `max_depth` levels. Works level by level, without recursion."""
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return True
    return False
