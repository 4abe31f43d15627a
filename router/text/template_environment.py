"""Makes the Jinja environment of chat templates: the bounded sandbox with the functions and tags of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from quire.router.text.special_tokens import unescape_guards
from quire.router.text.template_sandbox import BoundedEnvironment, check_pattern


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. Here it only renders its body."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could reach Python's internals."""

    def __init__(
        *args: Any, **kwargs: Any
    ) -> None:  # No named parameter: namespace(self=...) must work.
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


def make_environment(
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
        # ASCII escapes would turn the guard character into plain text, and a guarded special token into a real one.
        return unescape_guards(text) if ensure_ascii else text

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


def iterates_content(template: nodes.Template) -> bool:
    """Return whether the template loops over the parts of a message's content, so that it accepts a list of parts."""
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
    # A macro that gets the content may loop over its parameter.
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and any(is_content(arg) for arg in call.args):
            for macro in template.find_all(nodes.Macro):
                if macro.name == call.node.name:
                    names.update(arg.name for arg in macro.args)
    return any(is_content(loop.iter) for loop in template.find_all(nodes.For))
