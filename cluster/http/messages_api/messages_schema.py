"""Request bodies of POST /v1/messages and POST /v1/messages/count_tokens, as Anthropic's client 2.14 sends them.

`messages_turns` parses `messages` and `system` block by block, so that an error names the block that is wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from quire.cluster.http.http_body import MAX_ENTRIES, refusal
from quire.cluster.http.http_schema import Strict, Texts
from quire.protos.errors import InvalidRequest, described
from quire.protos.field_checks import at_most
from quire.router import refused_fields
from quire.router.chat.tool_checks import MAX_TOOLS
from quire.router.refused_fields import Refused

# Accepted and ignored: hints, labels and billing, which do not change the answer.
IGNORED_FIELDS = frozenset({"billing_policy", "context_management", "diagnostics", "service_tier"})
REFUSED: Mapping[str, Refused] = {
    "compaction": Refused("conversations are not compacted by the server"),
    "container": Refused("code is not executed by the server"),
    "fallback_credit_token": Refused("there are no models to fall back to"),
    "fallbacks": Refused("there are no models to fall back to", ([],)),
    "inference_geo": Refused("the place of inference is not chosen by a request"),
    "mcp_servers": Refused("the server calls no tools itself", ([],)),
    "output_format": Refused("this API calls the field output_config.format"),
    "speed": Refused("there is one speed", ("standard",)),
    "thread": Refused("the server keeps no conversations"),
}
_MAX_SHOWN_CHARS = 64  # most characters of an unknown field's name in an error message


def _list_of(*models: str) -> dict[str, Any]:
    """Return the JSON schema of a list of blocks."""
    references = [{"$ref": f"#/components/schemas/{model}"} for model in models]
    return {"type": "array", "items": {"anyOf": references}}


_Body = TypeVar("_Body", bound="CountTokensBody")
_Model = TypeVar("_Model", bound=BaseModel)
# `cache_control`, of any form.
CacheControl = dict[str, Any]
RETAIN_HINT: Any = Field(
    None,
    description="Of any form: the conversation's blocks are retained (`session.retain_s`), however the answer ends. "
    "`ttl` is ignored, and every prefix is cached without it.",
)


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = RETAIN_HINT
    citations: list[Any] | None = Field(None, description="Accepted and ignored.")


class ThinkingBlock(Strict):
    """The reasoning of an earlier answer, as the answer had it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Not checked.")


class RedactedThinkingBlock(Strict):
    """Reasoning that another server has encrypted; dropped."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = RETAIN_HINT
    caller: dict[str, Any] | None = Field(None, description="Accepted and ignored.")


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Any = Field(
        None,
        json_schema_extra={
            "anyOf": [{"type": "string"}, _list_of("TextBlock"), {"type": "null"}],
        },
    )
    is_error: bool | None = Field(None, description="The prompt's text then begins with `Error: `.")
    cache_control: CacheControl | None = RETAIN_HINT


def _content(*models: str) -> Any:
    """Return the field of a turn's content: a text, or a list of blocks of these models."""
    return Field(json_schema_extra={"anyOf": [{"type": "string"}, _list_of(*models)]})


class MessageTurn(Strict):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Any


class UserTurn(MessageTurn):
    """A turn of the user: texts and results of calls."""

    role: Literal["user"]
    content: Any = _content("TextBlock", "ToolResultBlock")


class AssistantTurn(MessageTurn):
    """A turn of the model: texts, reasoning and calls."""

    role: Literal["assistant"]
    content: Any = _content("TextBlock", "ThinkingBlock", "RedactedThinkingBlock", "ToolUseBlock")


class SystemTurn(MessageTurn):
    """Instructions."""

    role: Literal["system"]
    content: Any = _content("TextBlock")


class CustomTool(Strict):
    """A tool that the client executes."""

    name: Annotated[str, Field(min_length=1)]
    input_schema: dict[str, Any] = Field(description="JSON schema of the tool's input.")
    description: str | None = None
    type: Literal["custom"] | None = Field(
        None, description="Tools that Anthropic's servers execute or define are refused."
    )
    strict: bool | None = Field(None, description="The input of every call follows the schema.")
    cache_control: CacheControl | None = RETAIN_HINT
    input_examples: list[Any] | None = Field(None, description="Accepted and ignored.")
    allowed_callers: list[Any] | None = Field(None, description="Accepted and ignored.")
    eager_input_streaming: bool | None = Field(
        None, description="Accepted and ignored: an input is sent when it is complete."
    )
    defer_loading: Literal[False] | None = Field(
        None, description="Tools are not searched: every tool is in the prompt."
    )


class ToolChoiceOption(Strict):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With `tool`: the tool's name.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")


class ThinkingOption(Strict):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(
        None, description="Chooses the effort; it is no bound on the tokens of the reasoning."
    )
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None,
        description="`omitted`: thinking blocks have no text. `updates` is served as `summarized`.",
    )


class JsonOutputFormat(Strict):
    """A JSON schema for the answer's text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None
    task_budget: dict[str, Any] | None = Field(None, description="Accepted and ignored.")


class Metadata(Strict):
    """About the client."""

    user_id: str | None = Field(
        None, description="Names the session: requests with the same value prefer the same replica."
    )


class CountTokensBody(Strict):
    """Body of POST /v1/messages/count_tokens, and the fields that it shares with POST /v1/messages."""

    model: str
    # `Any`, because `messages_turns` parses them.
    messages: Any = Field(
        description="The conversation, oldest first. A last turn of the assistant is continued.",
        json_schema_extra={**_list_of("UserTurn", "AssistantTurn", "SystemTurn"), "minItems": 1},
    )
    system: Any = Field(
        None,
        description="The system prompt. A block that begins with `x-anthropic-billing-header` is dropped, because "
        "Claude Code changes it in every request.",
        json_schema_extra={"anyOf": [{"type": "string"}, _list_of("TextBlock"), {"type": "null"}]},
    )
    tools: Any = Field(
        None, json_schema_extra={"anyOf": [_list_of("CustomTool"), {"type": "null"}]}
    )
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingOption | None = Field(
        None, description="Ignored by a model whose chat template has no switch for reasoning."
    )
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = RETAIN_HINT


class MessagesBody(CountTokensBody):
    """Body of POST /v1/messages. null means the same as an absent field."""

    max_tokens: int = Field(
        description="Most tokens to generate; lowered to what fits into the model's length.",
        json_schema_extra={"minimum": 1},
    )
    metadata: Metadata | None = None
    stop_sequences: Texts | None = Field(None, description="Strings that end the answer.")
    stream: bool | None = Field(None, description="Server-sent events instead of one JSON object.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def parse_messages_body(model: type[_Body], body: Any) -> _Body:
    """Parse a decoded JSON body as `model`.

    Raises
    ------
    UnsupportedField
        A field is unknown or not supported.
    InvalidRequest
        A field is missing or has the wrong type.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {described(body)}")
    served = {name: value for name, value in body.items() if _is_served(model, name, value)}
    for name, value in served.items():
        if isinstance(value, (dict, list)):
            at_most(name, len(value), MAX_ENTRIES, "entries")
            for inner, of_inner in value.items() if isinstance(value, dict) else ():
                if isinstance(of_inner, (dict, list)):
                    at_most(
                        f"{name}.{inner[:_MAX_SHOWN_CHARS]}", len(of_inner), MAX_ENTRIES, "entries"
                    )
    try:
        return model.model_validate(served)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from None


def parse_part(model: type[_Model], value: Any, where: str) -> _Model:
    """Parse a turn, a block or a tool, whose path in the body is `where`; raises as `parse_messages_body`."""
    for name in value if isinstance(value, dict) else ():
        # pydantic would make an error for each of a million names.
        if name not in model.model_fields:
            raise refused_fields.unknown(f"{where}.{name[:_MAX_SHOWN_CHARS]}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise refusal(
            [{**problem, "loc": (where, *problem["loc"])} for problem in problems]
        ) from None


def parse_tools(tools: Any) -> list[CustomTool]:
    """Parse the tools of a body; raises as `parse_messages_body`."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools must be a list, got {described(tools)}", field="tools")
    at_most("tools", len(tools), MAX_TOOLS, "tools")
    for i, tool in enumerate(tools):
        _check_is_custom(tool, f"tools[{i}].type")
    return [parse_part(CustomTool, tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _is_served(model: type[CountTokensBody], name: str, value: Any) -> bool:
    """Whether the model parses the field. False: the value has no effect. Raises UnsupportedField."""
    if name in model.model_fields:
        return value is not None
    if name in IGNORED_FIELDS:
        return False
    if name in REFUSED:
        if not REFUSED[name].accepts(value):
            raise REFUSED[name].error(name, value)
        return False
    name = name[:_MAX_SHOWN_CHARS]
    close = difflib.get_close_matches(name, [*model.model_fields, *IGNORED_FIELDS], n=1)
    raise refused_fields.unknown(name, f"; did you mean {close[0]!r}?" if close else "")


def _check_is_custom(tool: Any, field: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise Refused(
            "only tools that the client defines and executes are served", ("custom",)
        ).error(field, kind)
