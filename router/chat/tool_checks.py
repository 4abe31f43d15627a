"""Checks tools and the choice between them, and converts tools to OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from quire.protos.errors import InvalidRequest, shown
from quire.protos.field_checks import at_most, invalid, utf8_len
from quire.protos.sampling_params import MAX_GRAMMAR_BYTES
from quire.router.tool_types import Tool
from quire.router.types import GenerationRequest

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 * 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("auto", "none", "required")


def check_tools(request: GenerationRequest) -> None:
    """Check everything about tools and reasoning that does not depend on the model.

    Raises
    ------
    InvalidRequest
        A value has a wrong type, is out of its bounds, or does not fit to another field.
    """
    tools, choice = request.tools, request.tool_choice
    if not isinstance(tools, tuple):
        raise invalid("tools", "a list of tools", tools)
    if request.messages is None:
        given = {
            "tools": tools or None,
            "tool_choice": choice,
            "reasoning_effort": request.reasoning_effort,
        }
        for field, value in given.items():
            if value is not None:
                raise InvalidRequest(
                    f"a prompt uses no chat template: {field} must only be given with messages, got {shown(value)}",
                    field=field,
                )
    at_most("tools", len(tools), MAX_TOOLS, "tools")
    num_bytes = sum(_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    at_most("tools", num_bytes, MAX_TOOLS_BYTES, "bytes of JSON")
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise invalid(f"tools[{i}].name", "different from the names of other tools", name)
    if type(request.parallel_tool_calls) is not bool:
        raise invalid("parallel_tool_calls", "a boolean", request.parallel_tool_calls)
    if request.reasoning_effort is not None and request.reasoning_effort not in EFFORTS:
        raise invalid("reasoning_effort", f"one of {', '.join(EFFORTS)}", request.reasoning_effort)
    if choice is None:
        return
    if choice.mode not in _MODES:
        raise invalid("tool_choice", f"one of {', '.join(_MODES)}", choice.mode)
    if choice.mode == "required" and not tools:
        raise invalid("tool_choice", "none or auto without tools", choice.mode)
    for name in choice.names:
        if name not in names:
            raise invalid("tool_choice", "the name of one of the tools", name)


def allowed_tools(request: GenerationRequest) -> tuple[Tool, ...]:
    """Return the tools that the model may call."""
    choice = request.tool_choice
    if choice is None:
        return request.tools
    if choice.mode == "none":
        return ()
    return tuple(tool for tool in request.tools if not choice.names or tool.name in choice.names)


def openai_form(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as OpenAI's chat completions have them, which is the form that chat templates render."""
    found = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.parameters is not None:
            function["parameters"] = dict(tool.parameters)
        found.append({"type": "function", "function": function})
    return found


def _check_tool(tool: Tool, where: str) -> int:
    """Check one tool. Return its bytes as JSON, roughly."""
    if not isinstance(tool.name, str) or not _NAME.fullmatch(tool.name):
        raise invalid(f"{where}.name", "1 to 64 letters, digits, _ and -", tool.name)
    num_bytes = 0
    if tool.description is not None:
        num_bytes += utf8_len(tool.description, f"{where}.description")
    if type(tool.strict) is not bool:
        raise invalid(f"{where}.strict", "a boolean", tool.strict)
    if tool.parameters is not None:
        num_bytes += _check_parameters(tool.parameters, f"{where}.parameters")
    return num_bytes


def _check_parameters(parameters: Mapping[str, Any], where: str) -> int:
    if not isinstance(parameters, Mapping):
        raise invalid(where, "a JSON schema", parameters)
    if parameters.get("type", "object") != "object":
        raise invalid(f"{where}.type", '"object"', parameters["type"])
    try:
        num_bytes = len(orjson.dumps(dict(parameters)))
    except TypeError as error:  # Not JSON, half a surrogate pair, or more than 250 levels.
        raise InvalidRequest(
            f"{where} must be plain JSON with less than 250 levels: {error}", field=where
        ) from error
    at_most(where, num_bytes, MAX_GRAMMAR_BYTES, "bytes of JSON")
    return num_bytes
