"""Converts tools and calls between gRPC messages and the router's types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from quire.protos import generation_pb2 as generation
from quire.protos.field_checks import at_most
from quire.router.chat.tool_checks import MAX_TOOLS, MAX_TOOLS_BYTES
from quire.router.text.template_kwargs import json_object
from quire.router.tool_types import Tool, ToolCall, ToolChoice

# Values in the schemas of all tools together. Parsing takes at most 0.4 us for each.
MAX_SCHEMA_VALUES = 64 * 1024

# Any other value is read as UNSPECIFIED: auto.
_MODES: dict[int, Literal["auto", "none", "required"]] = {
    generation.TOOL_CHOICE_MODE_NONE: "none",
    generation.TOOL_CHOICE_MODE_REQUIRED: "required",
}
# The router's names of fields and those of this API.
TOOL_NAMES = {"tokens[]": "token_ids[]"} | {
    f"messages[].{name}": f"messages[].{own}"
    for name, own in (
        ("tool_calls[].function.name", "tool_calls[].name"),
        ("tool_calls[].function.arguments", "tool_calls[].arguments"),
        ("reasoning_content", "reasoning"),
    )
}


def tool_fields(chat: generation.ChatMessages) -> dict[str, Any]:
    """Return the fields of the router's request about tools and reasoning.

    Raises
    ------
    InvalidRequest
        There are too many tools, or a schema is not the text of a JSON object.
    """
    return {
        "tools": _tools(chat.tools),
        "tool_choice": _tool_choice(chat),
        "parallel_tool_calls": (
            chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
        ),
        "reasoning_effort": chat.reasoning_effort or None,
    }


def _tools(tools: Sequence[generation.Tool]) -> tuple[Tool, ...]:
    at_most("tools", len(tools), MAX_TOOLS, "tools")
    schemas = [tool.parameters for tool in tools]
    at_most("tools", sum(map(len, schemas)), MAX_TOOLS_BYTES, "characters of JSON schemas")
    num_values = sum(schema.count(mark) for schema in schemas for mark in ",[{")
    at_most("tools", num_values, MAX_SCHEMA_VALUES, "values in their JSON schemas")
    return tuple(
        Tool(
            tool.name,
            tool.description or None,
            json_object(tool.parameters, f"tools[{i}].parameters") if tool.parameters else None,
            tool.strict,
        )
        for i, tool in enumerate(tools)
    )


def _tool_choice(chat: generation.ChatMessages) -> ToolChoice | None:
    if not chat.HasField("tool_choice"):
        return None
    at_most("tool_choice.names", len(chat.tool_choice.names), MAX_TOOLS, "names")
    mode = _MODES.get(chat.tool_choice.mode, "auto")
    return ToolChoice(mode, tuple(chat.tool_choice.names))


def turn_calls(message: generation.ChatMessage) -> list[dict[str, Any]]:
    """Return the calls of a turn in OpenAI's form, as the router's messages have them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]


def calls_of(calls: Iterable[ToolCall]) -> list[generation.ToolCall]:
    """Convert the calls of an answer."""
    return [
        generation.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments)
        for call in calls
    ]
