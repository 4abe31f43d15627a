"""Request body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from quire.cluster.api_common.front_end import served_role
from quire.cluster.http.http_schema import GenerationBody, Strict, TextPart
from quire.cluster.http.http_tools import (
    TOOL_CHOICE_SCHEMA,
    TOOL_NAMES,
    TOOLS_SCHEMA,
    AllowedToolChoice,
    ChatTool,
    NamedTool,
    ToolCallAnswer,
    allows_parallel_calls,
    tool_choice_of,
    tools_of,
)
from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import MAX_LOGPROBS
from quire.router import refused_fields
from quire.router.chat.tool_checks import EFFORTS
from quire.router.types import GenerationRequest

# Most nesting levels of `messages`. Text parts are at level 4, functions of calls at level 5; arguments are text.
# Deeper values are not supported, and checking very deep ones could exhaust the stack.
_MAX_MESSAGES_DEPTH = 8


_Content = str | list[TextPart]
_Name = Annotated[
    str | None,
    Field(description="Name of the author, for templates that distinguish authors.", min_length=1),
]


class ChatMessage(BaseModel):
    """One message. The router checks the fields of each role and refuses others that are not null."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    # `Any`, because the router checks the content. It can name the part that is wrong, and it knows what the chat
    # template supports.
    content: Any = None
    name: str | None = None


class _Message(Strict):
    """Base class of the models that document messages; other fields may be null."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})


class TextMessage(_Message):
    """A message of the system (developer is served as system) or the user."""

    role: Literal["system", "developer", "user"]
    content: _Content
    name: _Name = None


class EarlierAnswer(_Message):
    """An earlier answer: text, calls or both."""

    role: Literal["assistant"]
    content: _Content | None = None
    name: _Name = None
    reasoning_content: str | None = Field(
        None, description="Its reasoning, for chat templates that keep it."
    )
    tool_calls: list[ToolCallAnswer] | None = None


class ToolResult(_Message):
    """The result of a call."""

    role: Literal["tool"]
    content: _Content
    name: _Name = None
    tool_call_id: str = Field(description="Id of the call in an earlier message.", min_length=1)


_MESSAGES = (TextMessage, EarlierAnswer, ToolResult)
# Models that the OpenAPI document of the body refers to by name only.
DOCUMENTED = (*_MESSAGES, ChatTool, NamedTool, AllowedToolChoice)
_MESSAGE_SCHEMA = {"oneOf": [{"$ref": f"#/components/schemas/{m.__name__}"} for m in _MESSAGES]}
ChatMessages = Annotated[
    list[Annotated[ChatMessage, WithJsonSchema(_MESSAGE_SCHEMA)]], Field(fail_fast=True)
]


class ChatCompletionRequest(GenerationBody):
    """Body of POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    refused = refused_fields.OF_CHATS

    messages: ChatMessages = Field(
        description="The conversation, oldest first: messages of system, developer, user, assistant and tool.",
        json_schema_extra={"minItems": 1},
    )
    tools: list[dict[str, Any]] | None = Field(
        None,
        description="Functions that the model may call. An answer has its calls in `tool_calls`; a message of role "
        "`tool` answers each one.",
        json_schema_extra=TOOLS_SCHEMA,
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="`auto` (default): text, calls or both; `none`: no call; `required`: at least one call; "
        '`{"type": "function", "function": {"name": ...}}`: a call of this function; `allowed_tools`: as '
        "`auto` or `required`, with these tools only.",
        json_schema_extra=TOOL_CHOICE_SCHEMA,
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; default true."
    )
    reasoning_effort: str | None = Field(
        None,
        description="How long the model reasons before its answer, as far as its chat template distinguishes levels; "
        "`none`: no reasoning; `max` is served as `xhigh`. Default: that of the chat template.",
        json_schema_extra={"anyOf": [{"enum": [*EFFORTS, "max"]}, {"type": "null"}]},
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
        names |= TOOL_NAMES
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def to_request(self, request_id: str) -> GenerationRequest:
        """Make the router's request."""
        return self.generation_request(
            request_id,
            messages=router_messages(self.messages),
            tools=tools_of(self.tools),
            tool_choice=tool_choice_of(self.tool_choice),
            parallel_tool_calls=allows_parallel_calls(self.parallel_tool_calls, self.tool_choice),
            reasoning_effort="xhigh" if self.reasoning_effort == "max" else self.reasoning_effort,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
        )


def router_messages(messages: list[ChatMessage]) -> tuple[dict[str, Any], ...]:
    """Convert the messages of a body to the router's.

    Raises
    ------
    InvalidRequest, UnsupportedField
        A role is not served, or the messages nest too deeply.
    """
    converted: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role = served_role(message.role, f"messages[{i}].role")
        # Not dict(message): that calls `keys`, and a client may send a field with this name.
        converted.append({**message.__dict__, **(message.model_extra or {}), "role": role})
    if not _is_shallow(converted, _MAX_MESSAGES_DEPTH):
        raise InvalidRequest(
            f"messages must not nest deeper than {_MAX_MESSAGES_DEPTH} levels", field="messages"
        )
    return tuple(converted)


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
