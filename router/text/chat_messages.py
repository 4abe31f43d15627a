"""Checks the chat messages of clients' requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.protos.errors import InvalidRequest, shown
from quire.router.refused_fields import OF_MESSAGES, content_type, unknown

_MESSAGE_FIELDS = frozenset({"role", "content", "name"})


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check chat messages. Return them with their role, content (text or text parts) and name only, without nulls.

    Raises
    ------
    InvalidRequest
        A field is missing or has a wrong type.
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
    checked: dict[str, Any] = {
        key: value for key, value in message.items() if not _asks_for_nothing(key, value)
    }
    for key in checked:
        if key not in _MESSAGE_FIELDS:
            field = f"{where}.{key[:64]}"
            if key not in OF_MESSAGES:
                raise unknown(field)
            raise OF_MESSAGES[key].error(field, checked[key])
    for key in ("role", "name"):
        if key == "name" and key not in checked:
            continue
        if not isinstance(checked.get(key), str) or not checked[key]:
            raise InvalidRequest(
                f"{where}.{key} must be a non-empty string, got {shown(checked.get(key))}",
                field=f"{where}.{key}",
            )
    content = checked.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [_check_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        return {**checked, "content": parts}
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of text parts, got {shown(content)}",
            field=f"{where}.content",
        )
    return checked


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


def num_chars(messages: Sequence[Any]) -> int:
    """Count the characters of messages, which need not be checked yet."""
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    total = 0
    for content in contents:
        for part in content if isinstance(content, (list, tuple)) else (content,):
            text = part.get("text") if isinstance(part, Mapping) else part
            total += len(text) if isinstance(text, str) else 0
    return total
