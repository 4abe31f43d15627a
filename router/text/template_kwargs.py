"""Checks `chat_template_kwargs`: variables for the chat template from a request or the configuration.

The variables are plain JSON within bounds. Names that the server sets itself are reserved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from quire.protos.errors import InvalidRequest

MAX_VARIABLES = 32
MAX_NAME_BYTES = 64
# Most values of all variables together, with those inside lists and objects.
MAX_VALUES = 256
# Most bytes of the names and texts of all variables, in UTF-8.
MAX_BYTES = 16 * 1024
# Most characters of the variables as the text of a JSON object.
MAX_JSON_BYTES = 64 * 1024
# Most levels of nested lists and objects.
MAX_DEPTH = 8
# Largest absolute value of an integer.
MAX_INTEGER = (1 << 63) - 1
RESERVED_NAMES = frozenset(
    {
        # Fields of the request, and further arguments of `apply_chat_template` in transformers.
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
        # The checkpoint's special tokens.
        *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        # Functions of the template's environment.
        *("raise_exception", "strftime_now", "range", "dict", "namespace"),
        *("lipsum", "cycler", "joiner"),
    }
)


def check_template_kwargs(kwargs: Any, field: str = "chat_template_kwargs") -> None:
    """Check variables for the chat template.

    Raises
    ------
    InvalidRequest
        A value is not plain JSON, a bound is exceeded, or a name is reserved. The error names the value's path.
    """
    if not isinstance(kwargs, Mapping):
        raise InvalidRequest(f"{field} must be an object, got {type(kwargs).__name__}", field=field)
    if len(kwargs) > MAX_VARIABLES:
        raise InvalidRequest(
            f"{field} must have at most {MAX_VARIABLES} variables, got {len(kwargs)}", field=field
        )
    for name in kwargs:
        _check_name(name, field)
    _check_values(kwargs, field)


def parse_template_kwargs(text: str, field: str = "chat_template_kwargs") -> dict[str, Any]:
    """Parse variables from the text of a JSON object; `check_template_kwargs` checks them.

    Raises
    ------
    InvalidRequest
        The text is too long or not a JSON object.
    """
    if len(text) > MAX_JSON_BYTES:
        raise InvalidRequest(
            f"{field} must have at most {MAX_JSON_BYTES} characters of JSON, got {len(text)}",
            field=field,
        )
    return json_object(text, field)


def json_object(text: str, field: str) -> dict[str, Any]:
    """Return the JSON object that a field holds as text.

    Raises
    ------
    InvalidRequest
        The text is not a JSON object.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"{field} must be the text of a JSON object: {error}", field=field
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{field} must be the text of a JSON object, got {type(value).__name__}", field=field
        )
    return value


def _check_name(name: Any, field: str) -> None:
    if name in RESERVED_NAMES:
        raise InvalidRequest(
            f"the server sets this variable itself: {field}.{name} must not be given",
            field=f"{field}.{name}",
        )
    is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
    if not is_name or name.startswith("_") or len(name) > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"names of {field} must be at most {MAX_NAME_BYTES} ASCII letters, digits and underscores, and begin with "
            f"a letter, got {str(name)[:32]!r}",
            field=field,
        )


def _check_values(kwargs: Mapping[str, Any], field: str) -> None:
    """Check values level by level, so that the work is bounded by `MAX_DEPTH` and `MAX_VALUES`."""
    num_values = num_bytes = 0
    level: list[tuple[str, Any]] = [(field, kwargs)]
    for depth in range(MAX_DEPTH + 2):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, str):
                num_bytes += _num_bytes(value, path)
            elif isinstance(value, (Mapping, list, tuple)):
                if depth > MAX_DEPTH:
                    raise InvalidRequest(
                        f"{field} must not nest deeper than {MAX_DEPTH} levels", field=field
                    )
                num_values += len(value)
                if num_values > MAX_VALUES:
                    raise InvalidRequest(
                        f"{field} must have at most {MAX_VALUES} values, got {num_values} or more",
                        field=field,
                    )
                if isinstance(value, Mapping):
                    num_bytes += sum(_num_bytes(key, path) for key in value)
                below += _children(path, value)
            else:
                _check_scalar(value, path)
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(
                f"{field} must have at most {MAX_BYTES} bytes of text, got {num_bytes} or more",
                field=field,
            )
        level = below


def _children(path: str, value: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{path}.{_label(key)}", child) for key, child in value.items()]
    return [(f"{path}[{i}]", child) for i, child in enumerate(value)]


def _label(key: str) -> str:
    """Return a key as part of a path. Replace unprintable keys, since the path may become part of an HTTP header."""
    return key[:64] if key.isascii() and key.isprintable() else "?"


def _check_scalar(value: Any, path: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) <= MAX_INTEGER:
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    raise InvalidRequest(
        f"{path} must be plain JSON: null, a boolean, a finite number, a string, a list or an object, "
        f"got {type(value).__name__} {str(value)[:32]}",
        field=path,
    )


def _num_bytes(text: Any, path: str) -> int:
    if not isinstance(text, str):
        raise InvalidRequest(
            f"keys of {path} must be strings, got {type(text).__name__}", field=path
        )
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{path} is not valid Unicode: lone surrogate at character {error.start}", field=path
        ) from None
