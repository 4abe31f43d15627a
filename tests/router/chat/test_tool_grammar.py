"""Every text that random tokens of a grammar form parses to valid calls."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from family_templates import SPECIAL
from grammar_sampler import EOS, Sampler

from quire.protos.errors import UnsupportedField
from quire.protos.sampling_params import MAX_GRAMMAR_BYTES, MAX_TOOL_GRAMMAR_BYTES, Grammar
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.grammar.compiler import SLOW
from quire.replica.grammar.grammar_check import CheckResult, GrammarChecker, Outcome
from quire.router.chat.argument_schema import with_types
from quire.router.chat.family import load_families
from quire.router.chat.reply_parser import ReplyParser, ReplyParts, load_template
from quire.router.chat.tool_checks import MAX_TOOLS, MAX_TOOLS_BYTES, openai_form
from quire.router.chat.tool_grammar import make_grammar
from quire.router.tool_types import Tool

FAMILIES = {family.name: family for family in load_families() if family.calls is not None}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "units": {"type": "array", "items": {"enum": ["°C", "°F"]}, "maxItems": 2},
        "at": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
# A tool that is not strict may have keywords that llguidance does not enforce.
LOOSE = {**NOTHING, "minProperties": 0, "x-order": [1]}
TOOLS = [
    Tool("get_weather", "Weather", SCHEMA, strict=True),
    Tool("now", None, NOTHING, strict=True),
    Tool("later", None, LOOSE),
]


def grammar_of(family: str, sampler: Sampler, tools: list[Tool] = TOOLS, **options: Any) -> Grammar:
    chosen = FAMILIES[family]
    options = {
        "is_required": True,
        "is_parallel": True,
        "in_reasoning": False,
        "answer": None,
    } | options
    options.setdefault("reasoning", None)
    return make_grammar(tools, chosen.calls, sampler.added, **options)


def parse(family: str, text: str, prompt: str = "") -> ReplyParts:
    typed = [replace(tool, parameters=with_types(tool.parameters or {})) for tool in TOOLS]
    template = load_template(FAMILIES[family].response_template)
    parser = ReplyParser(template, prompt, openai_form(typed), str)
    first, rest = parser.feed(text), parser.finish()
    return ReplyParts(
        first.text + rest.text, first.reasoning + rest.reasoning, first.calls + rest.calls
    )


def check_calls(parts: ReplyParts) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for call in parts.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_are_valid(family: str, is_special: bool):
    sampler, rng = Sampler(SPECIAL[family], is_special), random.Random(family)
    grammar = grammar_of(family, sampler)
    for text in sampler.texts(grammar, rng, 20):
        parts = parse(family, text)
        assert parts.calls and not parts.text, text
        check_calls(parts)
    one = grammar_of(family, sampler, is_parallel=False)
    for text in sampler.texts(one, rng, 5):
        assert len(parse(family, text).calls) == 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama3", "gpt_oss")])
def test_after_the_mark_only_a_valid_call_follows(family: str):
    sampler, rng = Sampler(SPECIAL[family], True), random.Random(family)
    grammar = grammar_of(family, sampler, is_required=False)
    for text in sampler.texts(grammar, rng, 10, "Hi <b> { \n" + FAMILIES[family].calls.mark):
        parts = parse(family, text)
        assert parts.calls and parts.text.startswith("Hi <b> {"), text
        check_calls(parts)
    matcher, _ = sampler.matcher(grammar, "Hi")
    assert matcher.is_accepting()
    matcher, _ = sampler.matcher(grammar, "Hi " + FAMILIES[family].calls.mark)
    assert not matcher.is_accepting()


@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_an_answer_is_text_or_a_valid_call(family: str):
    sampler, rng = Sampler(SPECIAL[family], True), random.Random(family)
    grammar = grammar_of(family, sampler, is_required=False)
    begin = {"llama3": ("{", "Hello"), "gpt_oss": ("<|channel|>commentary", "<|channel|>final")}[
        family
    ]
    for text in sampler.texts(grammar, rng, 10, begin[0]):
        parts = parse(family, text)
        assert len(parts.calls) == 1 and not parts.text, text
        check_calls(parts)
    for text in sampler.texts(grammar, rng, 5, begin[1]):
        assert not parse(family, text).calls


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.reasoning])
@pytest.mark.parametrize("is_special", [True, False], ids=["special", "text"])
def test_reasoning_may_precede_calls(family: str, is_special: bool):
    reasoning = FAMILIES[family].reasoning
    tokens = ["<think>", "</think>", *SPECIAL[family]] if is_special else SPECIAL[family]
    sampler, rng = Sampler(tokens, True), random.Random(family)
    inside = "" if family == "gpt_oss" else reasoning.open + "\n"
    for start, in_reasoning in (
        ("", False),
        (f"{reasoning.open}Hm <b>{reasoning.close}", False),
        (f"Hm{reasoning.close}", True),
    ):
        if in_reasoning and not inside:
            continue
        grammar = grammar_of(family, sampler, reasoning=reasoning, in_reasoning=in_reasoning)
        for text in sampler.texts(grammar, rng, 5, start):
            parts = parse(family, (inside if in_reasoning else "") + text)
            assert parts.calls and not parts.text, text
            assert bool(parts.reasoning) >= bool(start), text
            check_calls(parts)


def test_a_call_or_an_answer_in_the_response_format():
    sampler, rng = Sampler([], True), random.Random(0)
    form = Grammar(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        "response_format",
    )
    grammar = grammar_of("hermes", sampler, is_required=False, answer=form)
    texts = sampler.texts(grammar, rng, 20)
    kinds = set()
    for text in texts:
        parts = parse("hermes", text)
        check_calls(parts)
        kinds.add(bool(parts.calls))
        if not parts.calls:
            assert json.loads(parts.text).keys() == {"a"}
    assert kinds == {True, False}
    choice = grammar_of(
        "hermes", sampler, is_required=False, answer=Grammar("choice", '["yes"]', "x")
    )
    assert sampler.sample(choice, rng, "yes") == "yes"
    with pytest.raises(UnsupportedField) as caught:
        grammar_of("hermes", sampler, answer=Grammar("regex", "a", "guide"), is_required=False)
    assert caught.value.field == "guide"


def test_arguments_have_only_declared_properties_unless_the_schema_says_otherwise():
    """By JSON Schema any property is valid that the schema does not mention."""
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {
            "at": {"anyOf": [point, {"type": "null"}]},
            "more": {**point, "additionalProperties": True},
            "way": {"type": "array", "items": point},
        },
    }
    call = '<tool_call>\n{"name": "go", "arguments": %s}\n</tool_call>'

    def accepts(parameters: dict[str, Any] | None, arguments: str) -> bool:
        sampler = Sampler([], True)
        grammar = grammar_of("hermes", sampler, [Tool("go", None, parameters)], is_parallel=False)
        return sampler.accepts(grammar, call % arguments)

    assert accepts(schema, '{"at": {"x": 1}, "way": [{"x": 2}]}')
    assert accepts(schema, '{"more": {"x": 1, "y": 2}}')
    assert not accepts(schema, '{"at": {"x": 1, "y": 2}}')
    assert not accepts(schema, '{"way": [{"y": 2}]}')
    assert not accepts(schema, '{"where": 1}')
    assert accepts(None, "{}") and not accepts(None, '{"where": 1}')


def test_a_client_cannot_change_the_options_of_its_schema():
    schema = {**NOTHING, "x-guidance": {"whitespace_flexible": True}}
    sampler = Sampler([], True)
    grammar = grammar_of("hermes", sampler, [Tool("f", None, schema)])
    assert "true" not in grammar.text.replace('"lenient": true', "")


def large_tools() -> list[Tool]:
    """As many tools as are served, with as many bytes."""
    note = {"description": "What the function needs to know. " * 4}
    item = {**note, "type": "object", "properties": {"id": {**note, "type": "string"}}}
    properties = {
        "query": {**note, "type": "string"},
        "description": {**note, "anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
        "state": {**note, "enum": ["open", "closed", "all"]},
        "page": {**note, "type": "integer", "minimum": 1},
        "is_draft": {**note, "type": "boolean", "default": False},
        "items": {**note, "type": "array", "items": item},
        "parent": {**note, **item, "required": ["id"]},
    }
    tools = []
    for i in range(MAX_TOOLS):
        own = {f"{name}_{i}": schema for name, schema in properties.items()}
        schema = {"type": "object", "properties": {**properties, **own}, "required": ["query"]}
        tools.append(Tool(f"mcp__tool_server_{i % 9}__function_{i}", None, schema))
    num_bytes = sum(len(json.dumps(tool.parameters)) for tool in tools)
    assert 0.8 * MAX_TOOLS_BYTES < num_bytes < MAX_TOOLS_BYTES
    return tools


@pytest.mark.parametrize("family", ["hermes", "qwen3_5", "gemma4"])
def test_the_grammar_of_many_large_tools_is_compiled(family: str):
    """A replica compiles it within its bounds of time and memory."""
    grammar = grammar_of(family, Sampler([], True), large_tools())
    assert MAX_GRAMMAR_BYTES < len(grammar.text.encode()) < MAX_TOOL_GRAMMAR_BYTES / 2
    assert "needs to know" not in grammar.text and "description_7" in grammar.text
    checker = GrammarChecker(CHECKPOINT / "tokenizer.json", 1024, [EOS], "one_space", SLOW)
    try:
        assert checker.check(grammar.kind, grammar.text) == CheckResult(Outcome.GOOD)
    finally:
        checker.close()
