"""Families of chat formats: data files that describe how models write reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.router.text.chat_messages import REASONING

FOLDER = Path(__file__).parent / "families"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentFormat:
    """The text of arguments that are not one JSON object.

    The arguments are `begin`, then properties with `between` after each but the last, then `end`. A property is `key`,
    its value and `value_end`.

    Attributes
    ----------
    key
        `{key}` stands for the property's name.
    key_pattern
        Regular expression of the names that can be written so. Others are written as JSON strings if `is_nested`.
    excluded
        Texts that a string cannot contain, because the parser would end it there.
    quote
        Mark before and after a string. Empty: a string ends at `value_end`, and its text shows its type.
    is_nested
        Objects and lists within arguments have this format too. Otherwise they are JSON.
    is_sorted
        Properties have the order of their names, without regard to case. Otherwise they have the order of the schema.
    """

    key: str
    key_pattern: str
    excluded: tuple[str, ...]
    value_end: str = ""
    quote: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    is_nested: bool = False
    is_sorted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The text of tool calls, from which grammars are made.

    The calls of an answer are `before`, then calls with `between` after each but the last, then `after`. A call is
    `begin`, its arguments, and `end`. Special tokens are written by their names.

    Attributes
    ----------
    mark
        The beginning of `before`, or of `begin` if `before` is empty. Text may precede it. Empty: a call is the whole
        answer.
    begin
        `{name}` stands for the tool's name.
    is_single
        The model ends its answer after one call.
    is_last
        Calls have no closing mark, so no text follows them.
    text
        Mark before an answer without calls.
    arguments
        None: the arguments are one JSON object.
    """

    mark: str
    begin: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    is_single: bool = False
    is_last: bool = False
    text: str = ""
    arguments: ArgumentFormat | None = None

    @classmethod
    def of(cls, data: dict[str, Any]) -> CallFormat:
        """Read the object `calls` of a family file."""
        arguments = data.pop("arguments", None)
        if arguments is None:
            return cls(**data)
        arguments["excluded"] = tuple(arguments["excluded"])
        return cls(**data, arguments=ArgumentFormat(**arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning, and the template's variable that controls it.

    Attributes
    ----------
    close
        Text after the reasoning, up to the first character of the answer or of a call.
    variable
        Name of the template's variable; None: there is none.
    levels
        OpenAI's reasoning effort to the variable's value. Levels that are missing are refused.
    message_field
        The field of an assistant's message in which the template reads its reasoning.
    """

    open: str
    close: str
    variable: str | None = None
    levels: Mapping[str, Any] = field(default_factory=dict)
    message_field: str = REASONING


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of chat formats.

    Attributes
    ----------
    recognised_by
        Texts that the chat template of each checkpoint of the family contains.
    response_template
        For `transformers.utils.chat_parsing.ResponseParser`. Fields with names that begin with `tool_call` are calls,
        `thinking` is reasoning, all others are text. It uses only content parsers of the oldest supported version.
    calls
        None: the format of calls cannot be written as a grammar, so they are not constrained.
    reasoning
        None: the models write no reasoning.
    """

    name: str
    models: str
    recognised_by: tuple[str, ...]
    response_template: Mapping[str, Any]
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def load(cls, path: Path) -> Family:
        """Load a family file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        calls, reasoning = data.pop("calls", None), data.pop("reasoning", None)
        return cls(
            name=path.stem,
            recognised_by=tuple(data.pop("recognised_by")),
            calls=None if calls is None else CallFormat.of(calls),
            reasoning=None if reasoning is None else ReasoningFormat(**reasoning),
            **data,
        )


def load_families() -> list[Family]:
    """Load all families, sorted by name."""
    return [Family.load(path) for path in sorted(FOLDER.glob("*.json"))]


def recognise(source: str, families: Iterable[Family]) -> Family | None:
    """Return the family of a chat template: of those with all texts in it, the one with the most texts.

    Parameters
    ----------
    source
        The template's Jinja source.
    """
    found = [one for one in families if all(text in source for text in one.recognised_by)]
    return max(found, key=lambda one: len(one.recognised_by), default=None)
