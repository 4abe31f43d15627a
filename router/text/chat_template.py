"""Chat messages to prompt text by the checkpoint's own Jinja template.

The template is code from the checkpoint, the messages are data from the client. The template is
rendered in Jinja's immutable sandbox with the names that transformers offers, so that the text
equals `apply_chat_template`, and with bounds on loops and on text, so that a request cannot make
the router run out of memory.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SecurityError

from quire.protos.errors import InvalidRequest, shown
from quire.protos.field_checks import utf8_len
from quire.router.refused_fields import OF_MESSAGES, content_type, unknown
from quire.router.text.special_tokens import GUARD, SpecialTokens
from quire.router.text.template_sandbox import BoundedEnvironment, OutOfWork, Work, check_pattern
from quire.router.text.tokenizer import load_special_tokens, read_json_object

_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
_MADE_PER_OUTPUT = 16  # characters of all texts that a template may make on its way to its output
_MAX_REASON_CHARS = 1000
# What is rendered on the event loop. The way to a thread and back adds 50 to 80 us.
_QUICK_MESSAGES, _QUICK_CHARS, _QUICK_STEPS = 64, 32 * 1024, 2000
_ASCII_GUARD = re.compile(r"(?<!\\)((?:\\\\)*)\\ud800")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request asks of a chat template, beside its messages."""

    add_generation_prompt: bool = True
    # The text ends with the last message's, whose turn stays open. Not together with `add_generation_prompt`.
    continue_final_message: bool = False
    # More variables for the template, checked by `check_template_kwargs`.
    kwargs: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source
        Jinja text.
    special_tokens
        `bos_token`, `eos_token` and so on, as variables for the template.
    max_output_chars
        Bound on the rendered text.
    max_range
        Bound on the length of a `range()` in the template.
    max_steps
        Bound on the work of a rendering: see `template_sandbox.Work`. 1 to 2 us each.
    now
        The clock behind `strftime_now`.

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
    ):
        self._special_tokens = dict(special_tokens or {})
        self._max_output_chars = max_output_chars
        self._max_steps = max_steps
        self._environment = _environment(max_output_chars, max_range, now)
        try:
            written, self._template = self._environment.compile_bounded(
                source, self._work(max_steps)
            )
            self._iterates_content = _iterates_content(written)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template does not compile: {error}") from error

    @classmethod
    def load(
        cls, folder: str | Path, file: str | Path | None = None, **options: Any
    ) -> ChatTemplate | None:
        """The template of a checkpoint, or the one in `file`; None when the checkpoint has none.

        A checkpoint has it in `chat_template.jinja` or, before that was usual, in
        `tokenizer_config.json`.
        """
        source = load_source(Path(folder), None if file is None else Path(file))
        if source is None:
            return None
        return cls(source, load_special_tokens(folder), **options)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        special: SpecialTokens | None = None,
    ) -> str:
        """The prompt text; encode it without adding special tokens.

        Parameters
        ----------
        special
            Protects the texts of messages and variables: encode the result with `SpecialTokens.encode`. None: no
            protection.

        Raises
        ------
        InvalidRequest
            `messages` are not chat messages, the template refused them, or it takes too much work or text.
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
        """As `render`, or None where that would take more than about 3 ms."""
        if len(messages) > _QUICK_MESSAGES or num_chars(messages) > _QUICK_CHARS:
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
        checked = check_messages(messages)
        if special is not None:
            checked = [
                _protected(message, f"messages[{i}]", special) for i, message in enumerate(checked)
            ]
        if not self._iterates_content:
            checked = [{**m, "content": _join_parts(m["content"])} for m in checked]
        end_tag = ""
        if options.continue_final_message:
            end_tag = f"{secrets.token_hex(16)} "  # the space shows whether the template strips
            checked = [*checked[:-1], _with_end(checked[-1], end_tag)]
        own = dict(options.kwargs)
        if special is not None:
            own = _protect(own, "chat_template_kwargs", special)
        variables = {
            **self._special_tokens,
            **own,
            "messages": checked,
            "tools": None,
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
        except Exception as error:  # a template is a program: it may raise anything
            reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
            raise InvalidRequest(
                f"messages: the chat template refuses them: {reason}", field="messages"
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


def load_source(folder: Path, file: Path | None = None) -> str | None:
    """Text of the chat template, or None when there is none.

    Raises
    ------
    FileNotFoundError
        `file` is given and not there.
    ValueError
        `tokenizer_config.json` has a `chat_template` of another form.
    """
    if file is not None:
        return file.read_text(encoding="utf-8")
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of named"
            f" templates, got {type(template).__name__}"
        )
    return template


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Chat messages with nothing but role, content (text or text parts) and name, without nulls.

    Raises
    ------
    InvalidRequest
        A field is missing or of a wrong type.
    UnsupportedField
        A field or content part is not served.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest(
            f"messages must be a list of at least 1 message, got {shown(messages)}",
            field="messages",
        )
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object, got {shown(message)}", field=where)
    message = {key: value for key, value in message.items() if not _asks_for_nothing(key, value)}
    for key in message:
        if key not in _MESSAGE_FIELDS:
            field = f"{where}.{key[:64]}"
            if key not in OF_MESSAGES:
                raise unknown(field)
            raise OF_MESSAGES[key].error(field, message[key])
    for key in ("role", "name"):
        if key == "name" and key not in message:
            continue
        if not isinstance(message.get(key), str) or not message[key]:
            raise InvalidRequest(
                f"{where}.{key} must be a non-empty string, got {shown(message.get(key))}",
                field=f"{where}.{key}",
            )
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [_check_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        return {**message, "content": parts}
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of text parts, got {shown(content)}",
            field=f"{where}.content",
        )
    return message


def _asks_for_nothing(key: str, value: Any) -> bool:
    return value is None or (key in OF_MESSAGES and OF_MESSAGES[key].accepts(value))


def _check_part(part: Any, where: str) -> dict[str, str]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(
            f"{where} must be an object with a string `type`, got {shown(part)}", field=where
        )
    if part["type"] != "text":
        raise content_type(part["type"], f"{where}.type")
    others = sorted(str(key) for key in part if key not in ("type", "text"))
    if others:
        raise unknown(f"{where}.{others[0][:64]}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(
            f"{where}.text must be a string, got {shown(part.get('text'))}",
            field=f"{where}.text",
        )
    return {"type": "text", "text": part["text"]}


def _protected(message: dict[str, Any], where: str, special: SpecialTokens) -> dict[str, Any]:
    """A checked message whose texts are protected. What that inserts, no text may have of its own.

    Templates compare the role and some build a special token from it, so only whole tokens in it are protected.
    """
    content: Any = message["content"]
    if not isinstance(content, str):  # of a part its text alone: there may be thousands
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
    """A JSON value with every text in it protected. A template may write keys, too."""
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
    """A message whose text ends with a tag."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + tag}
    if not content:
        raise InvalidRequest(
            "the last message has no text to continue: with continue_final_message its content must have at least 1 "
            "part, got 0",
            field="continue_final_message",
        )
    *others, last = content
    return {**message, "content": [*others, {**last, "text": last["text"] + tag}]}


def _until_end(text: str, tag: str) -> str:
    """A rendered text up to the end of its last message, as transformers cuts it."""
    before, found, after = text.rpartition(tag.rstrip())
    if not found:
        raise InvalidRequest(
            "the chat template does not write the end of the last message, so that it cannot be continued: "
            "continue_final_message must be false, got true",
            field="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _join_parts(content: str | list[dict[str, str]]) -> str:
    """Text parts for a template that knows strings only; joined by a line break, as vLLM does."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def num_chars(messages: Sequence[Any]) -> int:
    """Characters in messages, also where they are not chat messages."""
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    total = 0
    for content in contents:
        for part in content if isinstance(content, (list, tuple)) else (content,):
            text = part.get("text") if isinstance(part, Mapping) else part
            total += len(text) if isinstance(text, str) else 0
    return total


def _not_allowed(error: SecurityError) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the chat template is not allowed to do this: {error}", field="messages"
    )


def _too_long(max_output_chars: int) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the chat template's text is longer than {max_output_chars} characters",
        field="messages",
    )


# ------------------------------------------------------------------------------------------------
# The sandbox
# ------------------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body counts."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, which could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _environment(
    max_output_chars: int, max_range: int, now: Callable[[], datetime]
) -> BoundedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return now().strftime(check_pattern(pattern))

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML.
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        # Spelt in ASCII the mark would be text, and what is behind it a special token.
        return _ASCII_GUARD.sub(rf"\1{GUARD}", text) if ensure_ascii else text

    def bounded_range(*args: int) -> range:
        values = range(*args)
        if len(values) > max_range:
            raise SecurityError(f"range() of {len(values)}, the bound is {max_range}")
        return values

    def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    environment = BoundedEnvironment(
        max_output_chars,
        {"tojson": to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
    )
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        range=bounded_range,
        dict=make_dict,
        namespace=_Namespace,
    )
    return environment


def _iterates_content(template: nodes.Template) -> bool:
    """Whether the template loops over the parts of a message's content, so takes a list."""
    names: set[str] = set()

    def is_content(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter):  # message.content | selectattr(...)
            return is_content(node.node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    # A macro that is given the content may loop over its parameter.
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and any(is_content(arg) for arg in call.args):
            for macro in template.find_all(nodes.Macro):
                if macro.name == call.node.name:
                    names.update(arg.name for arg in macro.args)
    return any(is_content(loop.iter) for loop in template.find_all(nodes.For))
