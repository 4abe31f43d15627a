"""A model's text becomes the same parts however it is cut, and nothing of it is lost."""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
import time
from functools import cache
from typing import Any

import pytest
from family_templates import SPECIAL
from grammar_sampler import Sampler
from recorded_answers import RECORDED, WRITERS, Recorded

from quire.router.chat.chat_format import call_id
from quire.router.chat.family import Family, load_families
from quire.router.chat.reply_parser import ReplyParser, ReplyParts, load_template
from quire.router.chat.tool_grammar import make_grammar
from quire.router.tool_types import Tool, ToolCall

FAMILIES = {family.name: family for family in load_families()}


@cache
def template(family: str) -> Any:
    return load_template(FAMILIES[family].response_template)


def parse(family: str, pieces: list[str], prompt: str = "", **options: Any) -> ReplyParts:
    tools = options.pop("tools", [])
    parser = ReplyParser(template(family), prompt, tools, lambda i: call_id("a", 0, i), **options)
    found = ReplyParts()
    for part in [*map(parser.feed, pieces), parser.finish()]:
        found.text += part.text
        found.reasoning += part.reasoning
        found.calls += part.calls
    return found


def expected(answer: Recorded) -> ReplyParts:
    calls = tuple(
        ToolCall(
            i,
            call_id("a", 0, i),
            name,
            json.dumps(arguments, ensure_ascii=False, separators=(",", ":")),
        )
        for i, (name, arguments) in enumerate(answer.calls)
    )
    return ReplyParts(answer.text, answer.reasoning, calls)


def types_of(calls: tuple[tuple[str, dict[str, Any]], ...]) -> list[dict[str, Any]]:
    """Tools with the types of these arguments: some families write arguments as text."""
    types = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    types |= {dict: "object", list: "array"}
    return [
        {
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {k: {"type": types[type(v)]} for k, v in arguments.items()},
                },
            }
        }
        for name, arguments in calls
    ]


@pytest.mark.parametrize("answer", RECORDED, ids=lambda a: f"{a.family}-{a.raw[:30]!r}")
def test_every_split_gives_the_same_parts(answer: Recorded):
    raw, want = answer.raw, expected(answer)
    options = {"prompt": answer.prompt, "tools": types_of(answer.calls)}
    assert parse(answer.family, [raw], **options) == want
    assert parse(answer.family, list(raw), **options) == want
    for i in range(1, len(raw)):
        assert parse(answer.family, [raw[:i], raw[i:]], **options) == want, raw[:i]


def random_value(rng: random.Random, depth: int, is_gemma: bool) -> Any:
    kind = rng.randrange(7 if depth else 5)
    alphabet = string.ascii_letters + " äß中😀.,:;/()" + ("" if is_gemma else "\"'\\{}[]<>|\n\t")
    text = "".join(rng.choices(alphabet, k=rng.randrange(1, 20))).strip() or "x"
    if kind < 5:
        return [text, rng.randrange(-(10**9), 10**9), rng.random(), rng.random() < 0.5, text][kind]
    values = [random_value(rng, depth - 1, is_gemma) for _ in range(rng.randrange(4))]
    if kind == 5:
        return values
    return {f"k{rng.randrange(10**6)}_{i}": value for i, value in enumerate(values)}


@pytest.mark.parametrize("family", WRITERS)
def test_generated_calls_have_equal_arguments(family: str):
    """Each is streamed in pieces, and is in the language of the strict grammar."""
    rng, cases = random.Random(family), []
    write, is_parallel = WRITERS[family]
    for _ in range(200):
        calls = tuple(
            (
                "".join(
                    rng.choices(string.ascii_letters + string.digits + "_-", k=rng.randrange(1, 30))
                ),
                {
                    "".join(rng.choices(string.ascii_lowercase + "_", k=8)): random_value(
                        rng, 2, family == "gemma4"
                    )
                    for _ in range(rng.randrange(5))
                },
            )
            for _ in range(rng.randrange(1, 4) if is_parallel else 1)
        )
        names = [name for name, _ in calls]
        if len(set(names)) < len(names):
            continue
        raw = write(*calls)
        cuts = sorted(rng.choices(range(len(raw)), k=rng.randrange(8)))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        tools = types_of(calls)
        found = parse(family, pieces, tools=tools)
        assert [(c.name, json.loads(c.arguments)) for c in found.calls] == list(calls), raw
        assert not found.text and not found.reasoning
        cases.append((tools, raw))
    assert len(cases) > 150
    check_strictly(family, cases)


def check_strictly(family: str, cases: list[tuple[list[dict[str, Any]], str]]) -> None:
    """Check that strict grammars accept the texts; several cases share a grammar, which saves time."""
    sampler = Sampler(SPECIAL[family], True)
    while cases:
        batch, tools = [], {}
        while cases and len(batch) < 20 and not tools.keys() & names_of(cases[-1][0]):
            of_case, raw = cases.pop()
            tools |= {one["function"]["name"]: one["function"] for one in of_case}
            batch.append(raw)
        grammar = make_grammar(
            [Tool(**one, strict=True) for one in tools.values()],
            FAMILIES[family].calls,
            sampler.added,
            is_required=True,
            is_parallel=True,
            reasoning=None,
            in_reasoning=False,
            answer=None,
        )
        assert sampler.refused(grammar, batch) == []


def names_of(tools: list[dict[str, Any]]) -> set[str]:
    return {one["function"]["name"] for one in tools}


def test_calls_after_the_bound_are_dropped():
    write, _ = WRITERS["smollm2"]
    parts = parse("smollm2", [write(("a", {}), ("b", {}))], max_calls=1)
    assert [call.name for call in parts.calls] == ["a"]


def test_special_tokens_of_the_format_do_not_reach_the_text():
    raw = "<|channel|>final<|message|>Hello<|constrain|> you<|end|>"
    markers = ("<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
    assert parse("gpt_oss", [raw], markers=markers).text == "Hello you"


def test_half_a_surrogate_pair_stays_an_escape():
    (call,) = parse(
        "hermes", ['<tool_call>{"name":"f","arguments":{"a":"\\ud800"}}</tool_call>']
    ).calls
    assert call.arguments.encode() == b'{"a":"\\ud800"}'


def test_deeply_nested_arguments_are_no_call():
    raw = '<tool_call>{"name":"f","arguments":' + '{"a":' * 3_000 + "</tool_call>"
    assert parse("hermes", [raw[i : i + 9] for i in range(0, len(raw), 9)]).text == raw


def test_arguments_that_are_text_get_the_types_of_the_schema():
    raw = WRITERS["qwen3_5"][0](("f", {"n": "3", "s": "3"}))
    tools = types_of((("f", {"n": 1, "s": ""}),))
    assert json.loads(parse("qwen3_5", [raw], tools=tools).calls[0].arguments) == {"n": 3, "s": "3"}


def test_a_long_answer_takes_little_time_for_each_token():
    """The time of a token must not grow without bound with the answer's length."""
    pieces = ["word "] * 20_000
    started_s = time.process_time()
    assert parse("qwen3", ["<think>", *pieces]).reasoning.count("word") == 20_000
    assert (time.process_time() - started_s) / len(pieces) < 200e-6


LOADING = """
import asyncio, sys, time
from quire.replica.builtin_model import CHECKPOINT
from quire.router.request.prompt_encoder import PromptEncoder
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.tool_types import Tool
from quire.router.types import GenerationRequest

async def main():
    tokenizer = AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1)
    encoder = PromptEncoder(tokenizer, ChatTemplate.load(CHECKPOINT))
    assert "transformers" not in sys.modules
    loading, turns_s, began_s = asyncio.create_task(encoder.load_parser()), [], time.monotonic()
    while not loading.done():
        turn_s = time.monotonic()
        await asyncio.sleep(0)
        turns_s.append(time.monotonic() - turn_s)
    await loading
    loaded_s = time.monotonic()
    chat = GenerationRequest(request_id="r", messages=({},), tools=(Tool("f"),))
    answer = await encoder.answer_format(chat, "")
    assert answer is not None and answer.new_parser("a", 0).feed("Hi").text == "Hi"
    print(max(turns_s) / (loaded_s - began_s), (time.monotonic() - loaded_s) / (loaded_s - began_s))

asyncio.run(main())
"""


def test_the_parser_loads_before_the_first_chat_and_beside_the_event_loop():
    """Both are shares of the time that loading takes, because the machine may be busy."""
    command = [sys.executable, "-c", LOADING]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    longest_turn, first_chat = map(float, ran.stdout.split())
    assert longest_turn < 0.3 and first_chat < 0.3


def test_a_checkpoints_own_template_is_used():
    """It may drop text that belongs to no region."""
    spec = {
        "start_anchor": "<a>",
        "fields": {
            "thinking": {"open": "<r>", "close": "</r>"},
            "content": {"open": "<c>", "close": "</c>"},
            "tool_calls": {"open": "<t>", "close": "</t>", "content": "json", "repeats": True},
        },
    }
    parser = ReplyParser(load_template(spec), "<a>", [], str)
    parts = [*map(parser.feed, "x<r>why</r>y<c>Hi</c>"), *map(parser.feed, "z<t>{]</t>")]
    parts.append(parser.finish())
    assert "".join(part.text for part in parts) == "Hi<t>{]</t>"
    assert "".join(part.reasoning for part in parts) == "why"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_uses_only_parsers_of_the_oldest_transformers(family: Family):
    known = {"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"}
    assert {
        field.get("content", "text") for field in family.response_template["fields"].values()
    } <= known
    load_template(family.response_template)
    if family.calls is not None:
        assert (family.calls.before or family.calls.begin).startswith(family.calls.mark)
