"""Tools and the choice between them are checked by field and bound."""

from __future__ import annotations

import pytest

from quire.protos.errors import InvalidRequest
from quire.router.chat.tool_checks import MAX_TOOLS, allowed_tools, check_tools, openai_form
from quire.router.tool_types import Tool, ToolChoice
from quire.router.types import GenerationRequest

MESSAGES = ({"role": "user", "content": "Hi"},)
A, B = Tool("a"), Tool("b", "B", {"type": "object"}, strict=True)


def request(**fields: object) -> GenerationRequest:
    return GenerationRequest(**{"request_id": "test", "messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [A]}, "tools"),
        ({"tools": tuple(Tool(f"t{i}") for i in range(MAX_TOOLS + 1))}, "tools"),
        ({"tools": tuple(Tool(f"t{i}", "x" * 10_000) for i in range(60))}, "tools"),
        ({"tools": (A,), "messages": None, "prompt": "Hi"}, "tools"),
        ({"reasoning_effort": "low", "messages": None, "prompt": "Hi"}, "reasoning_effort"),
        ({"tools": (A, A)}, "tools[1].name"),
        *(({"tools": (Tool(name),)}, "tools[0].name") for name in ("", "a b", "ä", "x" * 65, None)),
        ({"tools": (Tool("a", 5),)}, "tools[0].description"),
        ({"tools": (Tool("a", "\ud800"),)}, "tools[0].description"),
        ({"tools": (Tool("a", strict=1),)}, "tools[0].strict"),
        *(
            ({"tools": (A, Tool("b", None, parameters))}, "tools[1].parameters")
            for parameters in ([], "{}", {"x": "\ud800"}, {"x": object()}, {"x": "y" * 65536})
        ),
        ({"tools": (Tool("a", None, {"type": "array"}),)}, "tools[0].parameters.type"),
        ({"tools": (A,), "parallel_tool_calls": None}, "parallel_tool_calls"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"tools": (A,), "tool_choice": ToolChoice("any")}, "tool_choice"),
        ({"tools": (A,), "tool_choice": ToolChoice("required", ("b",))}, "tool_choice"),
        ({"tool_choice": ToolChoice("required")}, "tool_choice"),
    ],
)
def test_bad_values_are_refused_by_field(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        check_tools(request(**fields))
    assert caught.value.field == field and field.partition("[")[0] in caught.value.message


def test_a_deep_schema_is_refused():
    schema: dict[str, object] = {}
    for _ in range(2000):
        schema = {"properties": schema}
    with pytest.raises(InvalidRequest, match="less than 250 levels"):
        check_tools(request(tools=(Tool("a", None, schema),)))


def test_the_choice_limits_the_tools():
    for fields in ({}, {"tool_choice": ToolChoice()}, {"tool_choice": ToolChoice("required")}):
        given = request(tools=(A, B), **fields)
        check_tools(given)
        assert allowed_tools(given) == (A, B)
    assert allowed_tools(request(tools=(A, B), tool_choice=ToolChoice("none"))) == ()
    assert allowed_tools(request(tools=(A, B), tool_choice=ToolChoice("auto", ("b",)))) == (B,)
    assert openai_form((A, B)) == [
        {"type": "function", "function": {"name": "a"}},
        {
            "type": "function",
            "function": {"name": "b", "description": "B", "parameters": {"type": "object"}},
        },
    ]
