"""Renders chat messages to prompt text with the checkpoint's Jinja template.

The template is code from the checkpoint, and the messages are data from the client. The template runs in Jinja's
immutable sandbox, with the functions that transformers offers to templates, so the text equals that of
`apply_chat_template`. Loops and texts are bounded, so a request cannot exhaust the router's time or memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2.exceptions import SecurityError

from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import utf8_len
from quire.router.text.chat_messages import REASONING, check_messages, num_chars, with_reasoning_in
from quire.router.text.special_tokens import SpecialTokens, guarded
from quire.router.text.template_environment import iterates_content, make_environment
from quire.router.text.template_files import DEFAULT, TOOL_USE, load_sources
from quire.router.text.template_sandbox import OutOfWork, Work
from quire.router.text.tokenizer import load_special_tokens, read_json_object

# Bound on the characters of all intermediate texts, as a multiple of `max_output_chars`.
_MADE_PER_OUTPUT = 16
_MAX_REASON_CHARS = 1000
# Bounds of a rendering on the event loop. Rendering in a thread takes 50 to 80 us longer.
_QUICK_MESSAGES, _QUICK_CHARS, _QUICK_STEPS = 64, 32 * 1024, 2000


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The options of a rendering.

    Attributes
    ----------
    continue_final_message
        End the text with the last message's text and leave its turn open. Excludes `add_generation_prompt`.
    kwargs
        Further variables for the template, checked by `check_template_kwargs`.
    tools
        The tools that the model may call, in OpenAI's form; None: none.
    reasoning_field
        The name under which the template reads the reasoning of an earlier answer.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    reasoning_field: str = REASONING


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source
        The template's Jinja source.
    special_tokens
        The checkpoint's `bos_token`, `eos_token` and so on, which become variables of the template.
    max_output_chars
        Bound on the rendered text.
    max_range
        Bound on the length of a `range()` in the template.
    max_steps
        Bound on the work of a rendering (`template_sandbox.Work`). A step takes 1 to 2 us.
    now
        Clock of the template's function `strftime_now`.
    response_template
        The checkpoint's own description of the model's answers (`router/chat`); None: it has none.
    for_tools
        The template of messages with tools; None: this one.

    Attributes
    ----------
    source
        The Jinja source, with that of `for_tools`.

    Raises
    ------
    ValueError
        The template does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_output_chars: int = 4 << 20,
        max_range: int = 10_000,
        max_steps: int = 500_000,
        now: Callable[[], datetime] = datetime.now,
        response_template: Mapping[str, Any] | None = None,
        for_tools: ChatTemplate | None = None,
    ):
        self.source: str = source if for_tools is None else f"{source}\n{for_tools.source}"
        self._for_tools = for_tools
        self.response_template = response_template
        self._special_tokens = dict(special_tokens or {})
        self._max_output_chars = max_output_chars
        self._max_steps = max_steps
        self._environment = make_environment(max_output_chars, max_range, now)
        try:
            written, self._template = self._environment.compile_bounded(
                source, self._work(max_steps)
            )
            self._iterates_content = iterates_content(written)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template does not compile: {error}") from error

    @classmethod
    def load(
        cls, folder: str | Path, file: str | Path | None = None, **options: Any
    ) -> ChatTemplate | None:
        """Load the template of a checkpoint, or the one in `file`; None if the checkpoint has no default template.

        Raises
        ------
        FileNotFoundError
            `file` does not exist.
        ValueError
            A template is not a text, or does not compile.
        """
        sources = load_sources(Path(folder), None if file is None else Path(file))
        if DEFAULT not in sources:
            return None
        own = read_json_object(Path(folder) / "tokenizer_config.json").get("response_template")
        options["response_template"] = own if isinstance(own, dict) else None
        special_tokens = load_special_tokens(folder)
        if TOOL_USE in sources:
            options["for_tools"] = cls(sources[TOOL_USE], special_tokens, **options)
        return cls(sources[DEFAULT], special_tokens, **options)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        special: SpecialTokens | None = None,
    ) -> str:
        """Return the prompt text. It contains the special tokens, so encode it without adding them.

        Parameters
        ----------
        special
            Protects the texts of messages and variables from becoming special tokens; encode the result with
            `SpecialTokens.encode`. None: no protection.

        Raises
        ------
        InvalidRequest
            `messages` are not chat messages, the template refused them, or it needs too much work or text.
        UnsupportedField
            A message has a part or field that is not served.
        """
        try:
            return self._render(messages, options, special, self._max_steps)
        except OutOfWork as error:
            raise _not_allowed(error) from error

    def render_quickly(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        special: SpecialTokens | None = None,
    ) -> str | None:
        """Render as `render` does; return None if that would take more than about 3 ms."""
        if len(messages) > _QUICK_MESSAGES or num_chars(messages) > _QUICK_CHARS:
            return None
        if options.tools and len(orjson.dumps(options.tools)) > _QUICK_CHARS:
            return None
        try:
            return self._render(messages, options, special, _QUICK_STEPS)
        except OutOfWork:
            return None

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions,
        special: SpecialTokens | None,
        max_steps: int,
    ) -> str:
        if self._for_tools is not None and options.tools is not None:
            return self._for_tools._render(messages, options, special, max_steps)
        checked = check_messages(messages)
        if special is not None:
            checked = [
                _protected(message, f"messages[{i}]", special) for i, message in enumerate(checked)
            ]
        if not self._iterates_content:
            checked = [{**m, "content": _join_parts(m["content"])} for m in checked]
        if options.reasoning_field != REASONING:
            checked = [with_reasoning_in(options.reasoning_field, m) for m in checked]
        end_tag = ""
        if options.continue_final_message:
            # The space at the end shows whether the template strips the text.
            end_tag = f"{secrets.token_hex(16)} "
            checked = [*checked[:-1], _with_end(checked[-1], end_tag)]
        own, tools = dict(options.kwargs), options.tools
        if special is not None:
            own = _protect(own, "chat_template_kwargs", special)
            tools = _protect(tools, "tools", special)
        variables = {
            **self._special_tokens,
            **own,
            "messages": checked,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            with self._environment.spending(self._work(max_steps)):
                text = self._generate(variables)
        except (InvalidRequest, OutOfWork):
            raise
        except SecurityError as error:
            raise _not_allowed(error) from error
        except Exception as error:  # A template is a program and may raise anything.
            reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
            raise InvalidRequest(
                f"messages: the chat template refused them: {reason}", field="messages"
            ) from error
        return _until_end(text, end_tag) if options.continue_final_message else text

    def _generate(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        total = 0
        for piece in self._template.generate(variables):
            total += len(piece)
            if total > self._max_output_chars:
                raise _too_long(self._max_output_chars)
            pieces.append(piece)
        return "".join(pieces)

    def _work(self, max_steps: int) -> Work:
        return Work(max_steps, _MADE_PER_OUTPUT * self._max_output_chars)


def _protected(message: dict[str, Any], where: str, special: SpecialTokens) -> dict[str, Any]:
    """Return a checked message with protected texts. Refuse a text that already contains a guard character.

    Templates compare the role, and some build a special token from it. So in a role only whole special tokens are
    protected, not parts of them at its ends.
    """
    content: Any = message["content"]
    if not isinstance(content, str):  # Only the text of each part, because there may be thousands.
        content = [
            {**part, "text": _protect(part["text"], f"{where}.content[{i}].text", special)}
            for i, part in enumerate(content)
        ]
    return {
        key: content
        if key == "content" and content is not value
        else _protect(value, f"{where}.{key}", special, at_ends=key != "role")
        for key, value in message.items()
    }


def _protect(value: Any, where: str, special: SpecialTokens, at_ends: bool = True) -> Any:
    """Return a JSON value with every text in it protected, keys included: a template may write them."""
    if isinstance(value, str):
        utf8_len(value, where)
        return special.protect(value, at_ends=at_ends)
    if isinstance(value, dict):
        return {
            _protect(key, where, special): _protect(item, f"{where}.{key}", special)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_protect(item, f"{where}[{i}]", special) for i, item in enumerate(value)]
    return value


def _with_end(message: dict[str, Any], tag: str) -> dict[str, Any]:
    """Return a message with a tag after its text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": guarded(content + tag)}
    if not content:
        raise InvalidRequest(
            "the last message has no text to continue: with continue_final_message, its content must have at least 1 "
            "part, got 0",
            field="continue_final_message",
        )
    *others, last = content
    return {**message, "content": [*others, {**last, "text": guarded(last["text"] + tag)}]}


def _until_end(text: str, tag: str) -> str:
    """Return a rendered text up to the end of its last message, as transformers cuts it."""
    before, found, after = text.rpartition(tag.rstrip())
    if not found:
        raise InvalidRequest(
            "the chat template does not write the end of the last message, so it cannot be continued: "
            "continue_final_message must be false, got true",
            field="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _join_parts(content: str | list[dict[str, str]]) -> str:
    """Join text parts with line breaks, as vLLM does, for a template that accepts only strings."""
    if isinstance(content, str):
        return content
    return guarded("\n".join(part["text"] for part in content))


def _not_allowed(error: SecurityError) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the chat template is not allowed to do this: {error}", field="messages"
    )


def _too_long(max_output_chars: int) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the chat template's text is longer than {max_output_chars} characters",
        field="messages",
    )
