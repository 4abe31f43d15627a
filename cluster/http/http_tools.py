"""Tools in OpenAI's chat form: the fields of a request, and the calls in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from quire.protos.errors import InvalidRequest, UnsupportedField, described
from quire.protos.field_checks import invalid
from quire.router.refused_fields import unknown
from quire.router.tool_types import Tool, ToolCall, ToolChoice

_MAX_SHOWN_CHARS = 64  # most characters of an unknown field's name in an error message


class _Documented(BaseModel):
    model_config = ConfigDict(extra="forbid")


# --------------------------------------------------------------------------------------------------
# Requests: these models document the fields; the functions below check and convert them
# --------------------------------------------------------------------------------------------------


class FunctionTool(_Documented):
    """A function that the model may call."""

    name: str = Field(description="Letters, digits, _ and -; at most 64 characters.")
    description: str | None = Field(None, description="When and how to call it, for the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments, an object. Default: any object."
    )
    strict: bool | None = Field(
        None, description="The arguments of each call are guaranteed to follow `parameters`."
    )


class ChatTool(_Documented):
    """A tool of a chat. Custom tools are refused."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(_Documented):
    """Names one of the tools."""

    name: str


class NamedTool(_Documented):
    """As `tool_choice`: the model must call this function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(_Documented):
    """A part of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(_Documented):
    """As `tool_choice`: the model may, or must, call these tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


# The router's names of fields and those of this form.
TOOL_NAMES = {
    f"tools[].{name}": f"tools[].function.{name}"
    for name in ("name", "description", "parameters", "parameters.type", "strict")
}
TOOLS_SCHEMA: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "array", "items": {"$ref": "#/components/schemas/ChatTool"}},
        {"type": "null"},
    ]
}
TOOL_CHOICE_SCHEMA: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "string", "enum": ["auto", "none", "required"]},
        {"$ref": "#/components/schemas/NamedTool"},
        {"$ref": "#/components/schemas/AllowedToolChoice"},
        {"type": "null"},
    ]
}


def tools_of(given: list[dict[str, Any]] | None) -> tuple[Tool, ...]:
    """Convert the field `tools`. The router checks names and schemas.

    Raises
    ------
    InvalidRequest, UnsupportedField
        A value has a wrong type, or a tool is not a function.
    """
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given or ()))


def _tool(tool: dict[str, Any], where: str) -> Tool:
    function = _object(
        _function(tool, where), f"{where}.function", FunctionTool.model_fields.keys()
    )
    where = f"{where}.function"
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{where}.description", "a string", description)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.parameters", "a JSON schema: an object", parameters)
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{where}.strict", "a boolean", strict)
    return Tool(_name(function, where), description, parameters, bool(strict))


def tool_choice_of(given: str | dict[str, Any] | None) -> ToolChoice | None:
    """Convert the field `tool_choice`. The router checks that the tools exist.

    Raises
    ------
    InvalidRequest, UnsupportedField
        The value has none of the forms that OpenAI's API has for functions.
    """
    if given is None:
        return None
    if given in ("auto", "none", "required"):
        return ToolChoice(given)  # type: ignore[arg-type]
    if isinstance(given, str):
        raise invalid("tool_choice", "auto, none, required or an object", given)
    if given.get("type") != "allowed_tools":
        return ToolChoice("required", (_function_name(given, "tool_choice"),))
    where = "tool_choice.allowed_tools"
    _object(given, "tool_choice", {"type", "allowed_tools"})
    allowed = _object(given.get("allowed_tools"), where, {"mode", "tools"})
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{where}.mode", "auto or required", mode)
    if not isinstance(tools, list) or not tools:
        raise invalid(f"{where}.tools", "a list of at least 1 function", tools)
    names = tuple(_function_name(tool, f"{where}.tools[{i}]") for i, tool in enumerate(tools))
    return ToolChoice(mode, names)


def allows_parallel_calls(parallel_tool_calls: bool | None, tool_choice: Any) -> bool:
    """Return whether an answer may have several calls: by OpenAI's rule a named function is called exactly once."""
    is_named = isinstance(tool_choice, dict) and tool_choice.get("type") == "function"
    return parallel_tool_calls is not False and not is_named


def _function_name(value: Any, where: str) -> str:
    function = _object(_function(value, where), f"{where}.function", {"name"})
    return _name(function, f"{where}.function")


def _function(value: Any, where: str) -> Any:
    """Return the field `function` of an object of type function."""
    if not isinstance(value, dict):
        raise invalid(where, "an object", value)
    if value.get("type") != "function":
        raise UnsupportedField(
            f'only functions are served as tools: {where}.type must be "function", got {described(value.get("type"))}',
            field=f"{where}.type",
        )
    return _object(value, where, {"type", "function"}).get("function")


def _object(value: Any, where: str, known: Set[str]) -> dict[str, Any]:
    """Check that a value is an object with known fields only."""
    if not isinstance(value, dict):
        raise invalid(where, "an object", value)
    for name in value:
        if name not in known:
            raise unknown(f"{where}.{name[:_MAX_SHOWN_CHARS]}")
    return value


def _name(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{where}.name must be a non-empty string, got {described(name)}", field=f"{where}.name"
        )
    return name


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


class CalledFunction(_Documented):
    """The function of a call."""

    name: str
    arguments: str = Field(description="JSON text of an object.")


class ToolCallAnswer(_Documented):
    """A call of a tool. A message of role `tool` with its id answers it."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCallAnswer):
    """A call in a stream; always complete."""

    index: int = Field(description="Number of the call in its message, from 0.")


def call_answer(call: ToolCall) -> dict[str, Any]:
    """Build a `ToolCallAnswer`."""
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
