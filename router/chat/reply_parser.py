"""Parses a model's text into text for the client, reasoning and tool calls.

transformers' `ResponseParser` finds the regions; this module converts its events. A region that is no valid call gives
its raw text back, so nothing of an answer is lost::

    model      <think>I need the weather.</think>\\n\\nLet me look.\\n<tool_call>{"name": ...}</tool_call>
    region     |  thinking               |  content      |  tool_calls                          |
    parts         reasoning                 text            a ToolCall when its region closes

White space next to a region is not part of it: the chat template writes it again when the client sends the turn back.

`transformers` takes about a second to import, so this module imports it on first use (`load_template`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.router.tool_types import ToolCall

# The state of a conversation before the last characters of a prompt is not needed to parse its answer.
MAX_PREFIX_CHARS = 64 * 1024
# The prefix of a parser that continues within an answer: some marks only count at the start of a turn.
_SOME_TEXT = "."
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
REASONING_FIELDS = frozenset({"thinking", "reasoning", "reasoning_content"})
_CALL = "tool_call"


def is_call(name: str) -> bool:
    """Whether a field of a response template holds tool calls."""
    return name.startswith(_CALL)


def load_template(spec: Mapping[str, Any]) -> Any:
    """Compile a response template for `ReplyParser`. The first call takes about a second.

    Raises
    ------
    ValueError
        `spec` is not a response template.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(spec))


@dataclass(slots=True)
class ReplyParts:
    """The parts of an answer that became final."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class _Trimmed:
    """Text without the white space next to marks. White space between two pieces of text stays."""

    def __init__(self) -> None:
        self._space = ""
        self._is_after_mark = False

    def add(self, text: str) -> str:
        """Add text and return its final part."""
        if self._is_after_mark:
            text = text.lstrip()
        if not text:
            return ""
        self._is_after_mark = False
        text = self._space + text
        final = text.rstrip()
        self._space = text[len(final) :]
        return final

    def mark(self, space: str | None = None) -> None:
        """Note that a mark follows; `space` replaces the white space before it."""
        self._is_after_mark = True
        if space is not None:
            self._space = space

    def finish(self) -> str:
        """Return the white space at the end, unless it is next to a mark."""
        return "" if self._is_after_mark else self._space


class ReplyParser:
    """Parses the text of one choice. The parts do not depend on how the text is cut into pieces.

    Parameters
    ----------
    template
        From `load_template`.
    prompt
        The rendered prompt. A template may open a region at its end.
    tools
        The request's tools in OpenAI's form; their schemas give the types of arguments that are written as text.
    call_id
        Makes the id of a call from its index.
    markers
        Special tokens that are part of the format. They do not belong into the client's text.
    max_calls
        Calls after this number are dropped; None: no bound.
    """

    def __init__(
        self,
        template: Any,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        call_id: Callable[[int], str],
        markers: Sequence[str] = (),
        max_calls: int | None = None,
    ):
        self._template = template
        self._tools = list(tools)
        self._call_id = call_id
        self._markers = markers
        self._max_calls = max_calls
        self.num_calls = 0
        # The explicit region that is open.
        self._region: str | None = None
        # Fed, and in no region yet: it may still become a mark.
        self._tail = ""
        # The text of the open call, with its mark.
        self._raw_call = ""
        self._text, self._reasoning = _Trimmed(), _Trimmed()
        self._has_reasoning = False
        # The parser is made again from `_prefix` and `_fed` when it has refused a piece.
        self._prefix = _assistant_prefix(template, prompt)
        self._fed: list[str] = []
        self._parts = ReplyParts()
        self._parser = self._new_parser(self._prefix)
        self._tail = self._prefix
        self._take(self._parser.initial_events)
        # The end of the prompt may be the beginning of a mark. Those characters are not part of the answer.
        self._num_prompt_chars = len(self._tail)
        self._parts = ReplyParts()
        self._text, self._reasoning = _Trimmed(), _Trimmed()
        self._reasoning.mark()
        self._has_reasoning = False
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._region in REASONING_FIELDS

    @property
    def is_full(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def feed(self, text: str) -> ReplyParts:
        """Add text and return the parts that became final."""
        self._parts = ReplyParts()
        self._feed(text)
        return self._parts

    def finish(self) -> ReplyParts:
        """End the text and return the rest. An incomplete call is returned as text."""
        self._parts = ReplyParts()
        try:
            if self._is_cut():
                raise ValueError("the call is incomplete")
            self._take(self._parser.finalize()[1])
        except (
            Exception
        ):  # No valid call, or a required field of the checkpoint's template is missing.
            self._give_back(self._raw_call + self._tail)
        self._parts.text += self._text.finish()
        return self._parts

    def _new_parser(self, prefix: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=prefix, tools=self._tools)

    def _feed(self, text: str) -> None:
        if self._is_in_call():
            # One character at a time: if the call is invalid, it ends with the character that raised.
            for i, char in enumerate(text):
                if not self._feed_piece(char):
                    self._end_invalid_call()
                if not self._is_in_call():
                    self._feed(text[i + 1 :])
                    return
        elif not self._feed_piece(text):
            # A call opened, closed and was invalid within one piece.
            self._replay()
            for char in text:
                if not self._feed_piece(char):
                    self._end_invalid_call()

    def _feed_piece(self, text: str) -> bool:
        """Feed text; return False, without effect on the parts, if the parser raised."""
        try:
            events = self._parser.feed(text)
        except (
            Exception
        ):  # The content of a region is invalid: of several types, from several libraries.
            if len(text) == 1:
                self._tail += text
            return False
        self._fed.append(text)
        self._tail += text
        self._take(events)
        if not self._tail and self._region is None:
            self._fed.clear()
            self._prefix = _SOME_TEXT
        return True

    def _replay(self) -> None:
        """Make the parser again as it was before the piece that it refused."""
        self._parser = self._new_parser(self._prefix)
        self._parser.feed("".join(self._fed))

    def _end_invalid_call(self) -> None:
        """Return the open call as text, and continue behind it."""
        close = self._template.fields[self._region].close_re
        found = None if close is None else close.search(self._tail)
        end = found.end() if found else len(self._tail)
        rest = self._tail[end:]
        self._give_back(self._raw_call + self._tail[:end])
        self._prefix = _SOME_TEXT
        self._fed.clear()
        self._parser = self._new_parser(_SOME_TEXT)
        self._feed(rest)

    def _give_back(self, raw: str) -> None:
        is_reasoning = self.is_reasoning
        self._region, self._raw_call, self._tail = None, "", ""
        if is_reasoning:
            self._parts.reasoning += self._reasoning.add(raw)
        else:
            self._parts.text += self._text.add(raw)

    def _is_in_call(self) -> bool:
        return self._region is not None and is_call(self._region)

    def _is_cut(self) -> bool:
        """Whether the answer ends within a call. Complete JSON needs no mark at its end; other formats do."""
        if self._region is None or not self._is_in_call():
            return False
        field = self._template.fields[self._region]
        is_closed = field.close_re is not None and field.close_re.fullmatch(self._tail)
        return field.content != "json" and not is_closed

    def _take(self, events: list[dict[str, Any]]) -> None:
        for i, event in enumerate(events):
            kind, name = event["type"], event["field"]
            if kind == "region_chunk":
                chunk = event["text"]
                self._tail = self._tail[len(chunk) :]
                if self._is_in_call():
                    self._raw_call += chunk
                else:
                    self._add_chunk(chunk)
            elif kind == "region_open":
                self._open(name)
            else:
                is_cut = i + 1 < len(events) and events[i + 1]["type"] == "region_open"
                self._close(
                    name, event["value"], by_next=is_cut and name == self._template.implicit
                )

    def _open(self, name: str) -> None:
        field = self._template.fields[name]
        if field.open_re is None:
            # Text without a mark.
            return
        mark = self._take_mark(field.open_re)
        self._region = name
        if is_call(name):
            self._raw_call = mark
        elif self.is_reasoning:
            self._reasoning.mark("\n" if self._has_reasoning else "")
        else:
            self._text.mark()

    def _close(self, name: str, value: Any, by_next: bool) -> None:
        field = self._template.fields[name]
        mark = "" if by_next or field.close_re is None else self._take_mark(field.close_re)
        if name == self._template.implicit:
            return
        self._region = None
        if is_call(name):
            raw, self._raw_call = self._raw_call + mark, ""
            try:
                calls = _calls_of(value)
            except ValueError:
                self._parts.text += self._text.add(raw)
                return
            self._add_calls(calls)
        self._text.mark()

    def _take_mark(self, pattern: Any) -> str:
        # Text before the mark belongs to no region, which only a checkpoint's own template allows.
        found = pattern.search(self._tail)
        mark = found[0] if found else ""
        self._tail = self._tail[found.end() :] if found else self._tail
        self._num_prompt_chars = 0
        return mark

    def _add_calls(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            if self.is_full:
                return
            call = ToolCall(self.num_calls, self._call_id(self.num_calls), name, arguments)
            self._parts.calls += (call,)
            self.num_calls += 1

    def _add_chunk(self, text: str) -> None:
        """Add text or reasoning without the white space next to marks."""
        skipped = min(self._num_prompt_chars, len(text))
        self._num_prompt_chars -= skipped
        text = text[skipped:]
        for marker in self._markers:
            text = text.replace(marker, "")
        if self.is_reasoning:
            text = self._reasoning.add(text)
            self._has_reasoning = self._has_reasoning or bool(text)
            self._parts.reasoning += text
        else:
            self._parts.text += self._text.add(text)


def _assistant_prefix(template: Any, prompt: str) -> str:
    """Return the part of the prompt that belongs to the answer's turn; empty if no turn of the assistant begins."""
    end = prompt[-MAX_PREFIX_CHARS:]
    if template.start_anchor_re.search(end) is None:
        return ""
    return str(template.truncate_past_last_anchor(end))


def _calls_of(value: Any) -> list[tuple[str, str]]:
    """Return the names and arguments (compact JSON) of one or several calls, as response templates give them.

    Raises
    ------
    ValueError
        `value` is no call.
    """
    if isinstance(value, list):
        return [call for item in value for call in _calls_of(item)]
    if not isinstance(value, dict):
        raise ValueError(f"a call must be an object, got {type(value).__name__}")
    if "function" in value:
        return _calls_of(value["function"])
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"the name of a call must be a name, got {name!r}")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, got {type(arguments).__name__}")
    return [(name, _compact_json(arguments))]


def _compact_json(arguments: dict[str, Any]) -> str:
    options: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False}
    text = json.dumps(arguments, ensure_ascii=False, **options)
    try:
        text.encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, written as an escape.
        return json.dumps(arguments, **options)
    return text
