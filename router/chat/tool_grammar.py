"""Makes grammars for answers with tool calls: a call that cannot be malformed.

```
 tool_choice   strict tools   grammar of the answer
 auto          none           none: the model writes what it wants, and the parser reads it
 auto          some           [reasoning] text with calls; after the mark of a call only a valid call follows
 auto, response_format        [reasoning] calls, or an answer in the response format
 required                     [reasoning] calls
```

The text is a Lark grammar for llguidance, which the replica compiles. A special token is written by its id: the
tokenizer's text for it would not be that token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.protos.errors import UnsupportedField
from quire.protos.sampling_params import TOOLS_FIELD, Grammar
from quire.router.chat.added_tokens import AddedTokens
from quire.router.chat.argument_rules import JSON_OPTIONS, ArgumentRules
from quire.router.chat.argument_schema import closed
from quire.router.chat.family import CallFormat, ReasoningFormat
from quire.router.tool_types import Tool

_HEAD = r"""%llguidance {}
TEXT: /(.|\n)*/
SPACE: /[ \r\n\t]{0,4}/
"""


def make_grammar(
    tools: Sequence[Tool],
    calls: CallFormat,
    added: AddedTokens,
    *,
    is_required: bool,
    is_parallel: bool,
    reasoning: ReasoningFormat | None,
    in_reasoning: bool,
    answer: Grammar | None,
) -> Grammar:
    """Make the grammar of an answer.

    Parameters
    ----------
    tools
        The tools that may be called, at least one.
    is_required
        The answer has at least one call.
    is_parallel
        It may have more than one.
    reasoning
        The marks of reasoning before the answer; None: no reasoning.
    in_reasoning
        The prompt ends within reasoning.
    answer
        The grammar of an answer without calls; None: any text.

    Raises
    ------
    UnsupportedField
        `answer` has a form that cannot be combined with calls, or a tool's schema cannot be written in this family.
    """
    rules = [_HEAD]
    start = _reasoning_symbols(reasoning, in_reasoning, added, rules)
    is_list = is_parallel and not calls.is_single
    _add_calls(tools, calls, added, is_list, rules)
    if is_required:
        start.append("calls")
    elif answer is not None:
        body = f"({_answer_symbols(answer)})"
        rules.append(f"answer: {' '.join([*added.symbols(calls.text), body])}\n")
        start.append("(calls | answer)")
    elif calls.text:
        rules.append(f"answer: {' '.join([*added.symbols(calls.text), 'TEXT'])}\n")
        start.append("(calls | answer)")
    elif calls.mark:
        text, rule = added.text_until(calls.mark, "text_before_call")
        rules.append(f"{rule}marked: {text} after_mark\n")
        start.append("marked* TEXT" if is_list and not calls.is_last else "(marked | TEXT)")
    else:
        # A call is the whole answer, and other text must not begin as a call does.
        start.append(r"(calls | /([^{\s](.|\n)*)?/)")
    rules.append(f"start: {' '.join(start)}\n")
    return Grammar("lark", "".join(rules), TOOLS_FIELD)


def _add_calls(
    tools: Sequence[Tool], calls: CallFormat, added: AddedTokens, is_list: bool, rules: list[str]
) -> None:
    """Add the rules `calls`, for all calls of an answer, and `after_mark`, for the part after the first mark."""
    before, begin = calls.before, calls.begin
    mark = " ".join(added.symbols(calls.mark))
    if before:
        before = before.removeprefix(calls.mark)
    else:
        begin = begin.removeprefix(calls.mark)
    form = calls.arguments
    arguments = None if form is None else ArgumentRules(form, added, rules).arguments
    for i, tool in enumerate(tools):
        start = added.symbols(begin.replace("{name}", tool.name))
        body = _json_arguments(tool) if arguments is None else arguments(tool)
        rules.append(f"call_{i}: {' '.join([*start, body, *added.symbols(calls.end)])}\n")
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n")
    between = " ".join(added.symbols(calls.between))
    if before or calls.before:
        more = f"({between} call)*" if is_list else ""
        parts = [*added.symbols(before), "call", more, *added.symbols(calls.after)]
        rules.append(f"after_mark: {' '.join(parts)}\n")
        rules.append(f"calls: {mark} after_mark\n")
    else:
        more = f"({between} {mark} call)*" if is_list else ""
        rules.append(f"after_mark: call {more if calls.is_last else ''}\n")
        rules.append(f"calls: {mark} call {more}\n")


def _reasoning_symbols(
    reasoning: ReasoningFormat | None, in_reasoning: bool, added: AddedTokens, rules: list[str]
) -> list[str]:
    if reasoning is None:
        return []
    rest, rule = added.text_until(reasoning.close, "reasoning_end")
    rules.append(rule)
    if in_reasoning:
        return [rest, "SPACE"]
    rules.append(f"reasoning: {' '.join([*added.symbols(reasoning.open), rest])} SPACE\n")
    return ["reasoning?"]


def _answer_symbols(answer: Grammar) -> str:
    if answer.kind == "json_schema":
        schema = json.loads(answer.text)
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"
    if answer.kind == "choice":
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(answer.text))
    raise UnsupportedField(
        f"a grammar of this kind cannot be combined with tools: {answer.field} must be a JSON schema or a choice while "
        f"tools may be called, got {answer.kind}",
        field=answer.field,
    )


def _json_arguments(tool: Tool) -> str:
    """Return the symbol of a tool's arguments as JSON. If the tool is not strict, unknown keywords are ignored."""
    options = JSON_OPTIONS if tool.strict else {**JSON_OPTIONS, "lenient": True}
    schema: dict[str, Any] = {"type": "object", "properties": {}, **(tool.parameters or {})}
    return f"%json {json.dumps({**closed(schema), 'x-guidance': options}, ensure_ascii=False)}"
