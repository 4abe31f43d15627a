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
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.protos.errors import UnsupportedField
from quire.protos.wire import Grammar
from quire.router.chat.family import CallFormat, ReasoningFormat
from quire.router.tool_types import Tool

# Separators that templates write, with or without a space.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Keywords of JSON Schema whose values are schemas, and names with schemas.
_SCHEMAS = frozenset({"anyOf", "items", "oneOf", "prefixItems"})
_MAPS_OF_SCHEMAS = frozenset({"$defs", "definitions", "properties"})
# Keywords that say which further properties an object may have.
_OPENNESS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_HEAD = r"""%llguidance {}
TEXT: /(.|\n)*/
SPACE: /[ \r\n\t]{0,4}/
"""


class AddedTokens:
    """The tokens that a tokenizer finds in a text before anything else.

    Parameters
    ----------
    tokens
        Text to id, and whether the token is special.
    """

    def __init__(self, tokens: Mapping[str, tuple[int, bool]]):
        self._tokens = {text: found for text, found in tokens.items() if text.strip()}
        words = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else None

    def symbols(self, text: str) -> list[str]:
        """Return the grammar's symbols for a text."""
        found: list[str] = []
        end = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            found += _quoted(text[end : match.start()])
            token_id, is_special = self._tokens[match[0]]
            by_id = f"<[{token_id}]>"
            found.append(by_id if is_special else f"({by_id} | {_quoted(match[0])[0]})")
            end = match.end()
        return found + _quoted(text[end:])

    def text_until(self, mark: str, rule: str) -> tuple[str, str]:
        """Return a symbol for any text up to a mark, and the rule that it needs.

        Parameters
        ----------
        rule
            Name for the new rule.
        """
        first, *rest = self.symbols(mark)
        if first.startswith("<["):
            return " ".join(["TEXT", first, *rest]), ""
        text = f"{rule}[lazy]: TEXT {_quoted(mark)[0]}\n"
        if first.startswith("("):
            by_id = first[1:].split(" ")[0]
            return f"(TEXT {' '.join([by_id, *rest])} | {rule})", text
        return rule, text


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
        `answer` has a form that cannot be combined with calls.
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
    return Grammar("lark", "".join(rules), "tools")


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
    for i, tool in enumerate(tools):
        start = added.symbols(begin.replace("{name}", tool.name))
        body = f"%json {json.dumps(_arguments(tool), ensure_ascii=False)}"
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
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"
    if answer.kind == "choice":
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(answer.text))
    raise UnsupportedField(
        f"a grammar of this kind cannot be combined with tools: {answer.field} must be a JSON schema or a choice while "
        f"tools may be called, got {answer.kind}",
        field=answer.field,
    )


def _arguments(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments. If the tool is not strict, unknown keywords are ignored."""
    options = _JSON_OPTIONS if tool.strict else {**_JSON_OPTIONS, "lenient": True}
    schema = {"type": "object", "properties": {}, **(tool.parameters or {})}
    return {**_closed(schema), "x-guidance": options}


def _closed(schema: Any) -> Any:
    """Return a JSON schema whose objects have only the properties that it declares, unless it says otherwise.

    By JSON Schema any other property is valid too. A small model may then write properties without end, and a function
    does not expect them. Parts of an `allOf` stay open: each sees the properties of the others.
    """
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping) or "allOf" in schema:
        return schema
    closed: dict[str, Any] = dict(schema)
    for key in _SCHEMAS & closed.keys():
        closed[key] = _closed(closed[key])
    for key in _MAPS_OF_SCHEMAS & closed.keys():
        if isinstance(closed[key], Mapping):
            closed[key] = {name: _closed(one) for name, one in closed[key].items()}
    if "properties" in closed and not _OPENNESS & closed.keys():
        closed["additionalProperties"] = False
    return closed


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
