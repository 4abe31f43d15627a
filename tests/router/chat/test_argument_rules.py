"""Arguments that are no JSON object: each text of their grammar parses to arguments that follow the schema."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from family_templates import SPECIAL
from grammar_sampler import Sampler

from quire.protos.errors import UnsupportedField
from quire.protos.sampling_params import Grammar
from quire.router.chat.argument_schema import with_types
from quire.router.chat.family import load_families
from quire.router.chat.reply_parser import ReplyParser, load_template
from quire.router.chat.tool_checks import openai_form
from quire.router.chat.tool_grammar import make_grammar
from quire.router.tool_types import Tool
from tests.cpu_time import least_cpu_s

FAMILIES = {one.name: one for one in load_families() if one.calls and one.calls.arguments}
TREE = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}},
    "required": ["node"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["a", "", "true", 'x"y']},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "next"],
            "additionalProperties": False,
        }
    },
}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def grammar_of(family: str, sampler: Sampler, parameters: Any, is_strict: bool = True) -> Grammar:
    return make_grammar(
        [Tool("f", None, parameters, strict=is_strict)],
        FAMILIES[family].calls,
        sampler.added,
        is_required=True,
        is_parallel=False,
        reasoning=None,
        in_reasoning=False,
        answer=None,
    )


def arguments_of(family: str, text: str, parameters: Any) -> Any:
    tools = openai_form([Tool("f", None, with_types(parameters))])
    template = load_template(FAMILIES[family].response_template)
    parser = ReplyParser(template, "", tools, str)
    calls = parser.feed(text).calls + parser.finish().calls
    assert len(calls) == 1, text
    return json.loads(calls[0].arguments)


def call(family: str, **values: str) -> str:
    if family == "gemma4":
        body = ",".join(f"{key}:{value}" for key, value in values.items())
        return f"<|tool_call>call:f{{{body}}}<tool_call|>"
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.randrange(11 if depth else 8)
    if kind == 8:
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": 1,
            "maxItems": 3,
        }
    if kind == 9:
        return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
    if kind == 10:
        names = [f"k{i}" for i in range(rng.randrange(4))]
        schema = object_of(**{name: random_schema(rng, depth - 1) for name in names})
        return {**schema, "required": [name for name in names if rng.random() < 0.5]}
    return [
        {"type": "string", "maxLength": rng.randrange(6)},
        {"type": "string", "pattern": "^[a-c/]{1,3}$"},
        {"type": "string", "enum": ["red", "no <b>", "3"]},
        {"type": "integer", "minimum": -5, "maximum": 90},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 4},
        {"enum": [1, "one", None, True]},
        {"const": 2.5},
    ][kind]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_the_grammar_of_any_schema_follow_the_schema(family: str):
    rng, sampler = random.Random(1), Sampler(SPECIAL[family], True)
    schemas = [random_schema(rng) for _ in range(20)]
    for schema in [TREE, *({**object_of(v=one), "required": ["v"]} for one in schemas)]:
        grammar = grammar_of(family, sampler, schema)
        for text in sampler.texts(grammar, rng, 3):
            jsonschema.validate(arguments_of(family, text, schema), schema)


@pytest.mark.parametrize("family", FAMILIES)
def test_properties_have_one_order_and_may_be_left_out(family: str):
    """The order of the schema, or of the names where the family's template sorts them."""
    sampler = Sampler(SPECIAL[family], True)
    number = {"type": "integer"}
    names = "cab" if family == "gemma4" else "abc"
    schema = {**object_of(**dict.fromkeys(names, number)), "required": ["b"]}
    grammar = grammar_of(family, sampler, schema)
    for names in ("b", "ab", "bc", "abc"):
        assert sampler.accepts(grammar, call(family, **dict.fromkeys(names, "1"))), names
    for names in ("", "a", "ac", "ba", "cb", "bd", "abcc"):
        text = call(family, **dict.fromkeys(names, "1"))
        if names == "abcc":
            text = call(family, a="1", b="1", c="1").replace("c", "b")
        assert not sampler.accepts(grammar, text), names


def test_a_string_or_another_type_is_read_as_written():
    """The text of a string must not look like the other type."""
    sampler = Sampler([], True)
    schema = object_of(v={"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 5}]})
    grammar = grammar_of("qwen3_5", sampler, schema)
    for value, expected in (("x7", "x7"), ("5", 5), ("nullable", "nullable")):
        text = call("qwen3_5", v=value)
        assert sampler.accepts(grammar, text)
        assert arguments_of("qwen3_5", text, schema) == {"v": expected}
    for value in ("7", "7.5", "null", " NaN", "</parameter>"):
        assert not sampler.accepts(grammar, call("qwen3_5", v=value)), value


def test_strings_keep_line_breaks_and_tags():
    sampler, schema = Sampler([], True), object_of(v={"type": "string"})
    for value in ("", "\n", "a\n\n", "<b>\n</b>", "</parameters>", '"\\"'):
        text = call("qwen3_5", v=value)
        assert sampler.accepts(grammar_of("qwen3_5", sampler, schema), text), value
        assert arguments_of("qwen3_5", text, schema) == {"v": value}


def test_an_object_with_any_properties_in_gemmas_form():
    sampler = Sampler(SPECIAL["gemma4"], True)
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}
    schema = object_of(**{"by-name": counts, "any": {}})
    grammar = grammar_of("gemma4", sampler, schema)
    text = call("gemma4", **{"any": '{x:[<|"|>é<|"|>,null,{}]}', '"by-name"': "{a:1,b:2}"})
    assert sampler.accepts(grammar, text)
    found = arguments_of("gemma4", text, schema)
    assert found == {"by-name": {"a": 1, "b": 2}, "any": {"x": ["é", None, {}]}}
    assert not sampler.accepts(grammar, text.replace("a:1", "a:null"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({**object_of(), "minProperties": 1}, "minProperties"),
        ({**object_of(), "required": ["x"]}, "required"),
        (object_of(v={"type": "string", "contentEncoding": "base64"}), "contentEncoding"),
        (object_of(v={"type": "string", "maxLength": "1}/"}), "maxLength"),
        (object_of(v={"type": "string", "pattern": "a\\"}), "pattern"),
        (object_of(v={"$ref": "#/nowhere"}), "$ref"),
        (object_of(v={"$ref": "#/properties/v"}), "alternatives"),
        (object_of(v={"allOf": [{"type": "string"}, {"maxLength": 2}]}), "allOf"),
        (object_of(v={"enum": []}), "enum"),
    ],
)
def test_a_strict_schema_that_cannot_be_followed_is_refused(family: str, schema: Any, keyword: str):
    with pytest.raises(UnsupportedField) as caught:
        grammar_of(family, Sampler(SPECIAL[family], True), schema)
    assert caught.value.field == "tools" and keyword in caught.value.message


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_schemas_end_soon(family: str):
    wide = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(20)}
    sampler = Sampler([], True)
    values: list[Any] = [1, None, [], {"type": {"a": 1}}, {"type": []}, {"anyOf": 1}, {"enum": 1}]
    values += [{"properties": 1}, {"required": 1}, {"items": 1, "minItems": -1}, DEEP]
    values += [{"$ref": "#/$defs/d0"}, {"type": "object", "properties": {">\n": 1, "": {}}}]
    for value in values:
        for parameters in ({**object_of(v=value), "$defs": wide}, {"properties": value}):
            tool = Tool("f", None, parameters)

            def make(tool: Tool = tool) -> None:
                with_types(tool.parameters)
                try:
                    make_grammar(
                        [tool, replace(tool, name="g")],
                        FAMILIES[family].calls,
                        sampler.added,
                        is_required=True,
                        is_parallel=True,
                        reasoning=None,
                        in_reasoning=False,
                        answer=None,
                    )
                except UnsupportedField as error:
                    assert error.field == "tools"

            assert least_cpu_s(make, 0.1) < 0.1
