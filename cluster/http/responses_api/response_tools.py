"""The tools of a request, and the client's choice between them, as the router takes them.

A namespace groups functions. Models know only functions, so a function `search` in the namespace `docs` is
`docs__search` for the model; its call has the name and the namespace again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from quire.cluster.http.http_body import MAX_ENTRIES, refusal
from quire.cluster.http.http_schema import Strict
from quire.protos.errors import InvalidRequest, UnsupportedField, described
from quire.protos.field_checks import at_most
from quire.router.tool_types import Tool, ToolChoice

# Types of tools that begin so are ignored: web search is never run, and the model is not told of it.
WEB_SEARCH = "web_search"
# Items, or functions, that are parsed in one turn of the event loop: about 3 ms.
PARSED_AT_ONCE = 512
_SEPARATOR = "__"

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_Model = TypeVar("_Model", bound=Strict)


class ResponsesFunction(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        None,
        description="Each call follows `parameters` by construction. Default: false, unlike OpenAI.",
    )
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = None
    defer_loading: Literal[False] | None = None


class ResponsesNamespace(Strict):
    """A group of functions."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = Field(None, description="Not shown to the model.")
    tools: Objects = Field(description="Functions.")


class ResponsesAllowedTools(Strict):
    """The choice between some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Objects


class ResponsesFunctionChoice(Strict):
    """One function."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The functions of a request.

    Attributes
    ----------
    tools
        The functions, by the names that the model knows.
    origins
        Namespace (None: none) and name of each function, by the name that the model knows.
    described
        The tools as the answer repeats them: without those that are ignored.
    """

    tools: tuple[Tool, ...]
    origins: Mapping[str, tuple[str | None, str]]
    described: list[dict[str, Any]]

    def choice(self, given: Any) -> ToolChoice | None:
        """Parse `tool_choice`; None: it was not given, or there is nothing to choose.

        Raises
        ------
        InvalidRequest, UnsupportedField
            The choice is unknown, or names a tool that the request does not have.
        """
        choice = self._parse_choice(given)
        if choice is not None and choice.mode == "required" and not self.tools:
            raise InvalidRequest(
                f"a call needs a function: with tool_choice {described(given)} tools must have at least 1 function, "
                "got 0",
                field="tool_choice",
            )
        return choice if self.tools else None

    def _parse_choice(self, given: Any) -> ToolChoice | None:
        if given is None:
            return None
        if given in ("auto", "none", "required"):
            return ToolChoice(given)
        if not isinstance(given, dict) or given.get("type") not in ("function", "allowed_tools"):
            kind = given.get("type") if isinstance(given, dict) else given
            raise UnsupportedField(
                "tool_choice must be auto, none, required, or an object whose type is function or allowed_tools, got "
                f"{described(kind)}",
                field="tool_choice",
            )
        if given["type"] == "function":
            return ToolChoice("required", (self._known(given, "tool_choice"),))
        allowed = parsed(ResponsesAllowedTools, given, "tool_choice")
        at_most("tool_choice.tools", len(allowed.tools), MAX_ENTRIES, "entries")
        names = [
            self._known(tool, f"tool_choice.tools[{i}]")
            for i, tool in enumerate(allowed.tools)
            if not _is_web_search(tool)
        ]
        if not names:
            raise InvalidRequest(
                "tool_choice.tools must have at least 1 function, got 0", field="tool_choice.tools"
            )
        return ToolChoice(allowed.mode, tuple(names))

    def _known(self, given: dict[str, Any], where: str) -> str:
        """The model's name of a function that the client has named."""
        function = parsed(ResponsesFunctionChoice, given, where)
        name = model_name(function.namespace, function.name)
        if name not in self.origins:
            raise InvalidRequest(
                f"{where}.name must be the name of a function in tools, got {described(function.name)}",
                field=f"{where}.name",
            )
        return name


def model_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


async def parse_tools(given: list[dict[str, Any]]) -> RequestTools:
    """Parse the field `tools`; other tasks run meanwhile.

    Raises
    ------
    UnsupportedField
        A tool is neither a function nor a namespace nor web search.
    InvalidRequest
        A field is missing or has the wrong type, or two functions have the same name.
    """
    tools: list[Tool] = []
    origins: dict[str, tuple[str | None, str]] = {}
    repeated: list[dict[str, Any]] = []

    async def add(raw: dict[str, Any], where: str, namespace: str | None) -> None:
        function = parsed(ResponsesFunction, raw, where)
        name = model_name(namespace, function.name)
        if name in origins:
            raise InvalidRequest(
                f"two tools have one name: {where}.name must be different from the others, got {described(name)}",
                field=f"{where}.name",
            )
        origins[name] = (namespace, function.name)
        tools.append(
            Tool(name, function.description, function.parameters, strict=bool(function.strict))
        )
        if not len(tools) % PARSED_AT_ONCE:
            await asyncio.sleep(0)

    for i, raw in enumerate(given):
        where = f"tools[{i}]"
        if _is_web_search(raw):
            continue
        if raw.get("type") == "namespace":
            group = parsed(ResponsesNamespace, raw, where)
            at_most("tools", len(tools) + len(group.tools), MAX_ENTRIES, "functions")
            for j, function in enumerate(group.tools):
                place = f"{where}.tools[{j}]"
                _check_type(function, place, ("function",))
                await add(function, place, group.name)
        else:
            _check_type(raw, where, ("function", "namespace"))
            await add(raw, where, None)
        repeated.append(raw)
    return RequestTools(tuple(tools), origins, repeated)


def _is_web_search(raw: dict[str, Any]) -> bool:
    kind = raw.get("type")
    return isinstance(kind, str) and kind.startswith(WEB_SEARCH)


def _check_type(raw: dict[str, Any], where: str, served: tuple[str, ...]) -> None:
    kind = raw.get("type")
    if kind not in served:
        raise UnsupportedField(
            f"the server runs no tools: {where}.type must be {' or '.join(served)}, got {described(kind)}",
            field=f"{where}.type",
        )


def parsed(model: type[_Model], value: Any, where: str) -> _Model:
    """Parse a part of the body; `where` is its path.

    Raises
    ------
    InvalidRequest, UnsupportedField
        A field is missing, unknown or has the wrong type; the error has its path in the body.
    """
    _check_size(value, where)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False), where) from None


def _check_size(value: Any, where: str) -> None:
    """Refuse objects with thousands of keys, each of which could be an error, at the two levels that are parsed."""
    if not isinstance(value, dict):
        return
    at_most(where, len(value), MAX_ENTRIES, "fields")
    for inner in value.values():
        for child in inner if isinstance(inner, list) else (inner,):
            if isinstance(child, dict):
                at_most(where, len(child), MAX_ENTRIES, "fields in an object")
