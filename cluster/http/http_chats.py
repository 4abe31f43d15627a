"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.cluster.api_common.front_end import ROLES, served_role
from quire.cluster.http.http_schema import GenerationBody, Strict
from quire.protos.errors import InvalidRequest
from quire.protos.wire import MAX_LOGPROBS
from quire.router import refused_fields
from quire.router.types import GenerationRequest

# Text parts are at level 4; beyond this only what is refused anyway, and could exhaust the stack.
_MAX_MESSAGES_DEPTH = 8


class TextPart(Strict):
    """A part of a message's content; parts that are not text are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. Its further fields (`tool_calls`, ...) may be null; the router refuses others."""

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
    # Any: the router names the part at fault, and knows what the template takes.
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
        description="Who speaks, for templates that tell them apart.",
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
        None, description="The newer name of `max_tokens`; both only if they are equal."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables for the chat template, `enable_thinking` for instance; over those of the "
        "application's `chat_template_kwargs` (vLLM).",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the prompt ends with the beginning of an assistant's turn; default true, unless "
        "`continue_final_message` (vLLM).",
    )
    continue_final_message: bool | None = Field(
        None,
        description="The answer continues the last message, whose turn stays open. Not together with "
        "`add_generation_prompt` (vLLM).",
    )

    logprobs: bool | None = Field(
        None,
        description="Log-probabilities of the answer's tokens, of the model's own distribution, "
        "before any parameter shapes it.",
    )
    top_logprobs: int | None = Field(
        None, description="So many of the likeliest tokens, at most 20; only with `logprobs`."
    )

    def num_logprobs(self) -> int | None:
        """`top_logprobs` if log-probabilities are asked for."""
        top = self.top_logprobs
        if not self.logprobs:
            if top:
                raise InvalidRequest(
                    "there are no log-probabilities without logprobs true: top_logprobs must then be 0 or null, got "
                    f"{top}",
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
        """Most tokens to generate, under whichever name the client gave it."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens "
                f"({self.max_tokens}) are two names of one bound; give one of them",
                field="max_completion_tokens",
            )
        return limits.pop() if limits else None

    def router_names(self) -> dict[str, str]:
        """The router's names of fields to those in this body, where they differ."""
        names = {**super().router_names(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def to_request(self, request_id: str) -> GenerationRequest:
        """The request for the router."""
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(self.messages):
            role = served_role(message.role, f"messages[{i}].role")
            # Not dict(message): it asks for `keys`, which may be a field of the client's.
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
    """Whether lists and objects nest at most `max_depth` levels; level by level, no recursion."""
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
