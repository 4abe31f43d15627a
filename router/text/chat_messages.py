"""Checks the chat messages of clients' requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from quire.protos.errors import InvalidRequest, shown
from quire.protos.field_checks import at_most
from quire.router.refused_fields import OF_MESSAGES, content_type, unknown

MAX_CALLS = 128
# The field of a checked message with the reasoning of an answer.
REASONING = "reasoning_content"
_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
# Further fields of two roles. `reasoning` is another name of `reasoning_content`.
_ROLE_FIELDS = {
    "assistant": frozenset({"tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"tool_call_id"}),
}


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check chat messages. Return them as chat templates expect them, with served fields only and without nulls.

    The content is text or text parts. The arguments of tool calls are objects, as transformers' templates expect, not
    the JSON text of OpenAI's API.

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


def with_reasoning_in(field: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message with its reasoning in another field.

    Templates with a field of their own take the text before a call as reasoning too, and refuse to get both.
    """
    if REASONING not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != REASONING}
    reasoning, content = message[REASONING], message["content"]
    if "tool_calls" in message and isinstance(content, str) and content:
        return {**renamed, field: f"{reasoning}\n{content}", "content": ""}
    return {**renamed, field: reasoning}


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object, got {shown(message)}", field=where)
    checked: dict[str, Any] = {
        key: value for key, value in message.items() if not _asks_for_nothing(key, value)
    }
    role = checked.get("role")
    further = _ROLE_FIELDS.get(role, frozenset()) if isinstance(role, str) else frozenset()
    for key in checked:
        if key not in _MESSAGE_FIELDS and key not in further:
            raise _refused(key, checked[key], where)
    for key in ("role", "name", "tool_call_id"):
        if key == "role" or key in checked:
            _check_text(checked.get(key), f"{where}.{key}")
    if role == "assistant":
        _check_assistant(checked, where)
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


def _refused(key: str, value: Any, where: str) -> InvalidRequest:
    field = f"{where}.{key[:64]}"
    if key in OF_MESSAGES:
        return OF_MESSAGES[key].error(field, value)
    for role, fields in _ROLE_FIELDS.items():
        if key in fields:
            return InvalidRequest(
                f"{field} must only be given with the role {role}, got {shown(value)}", field=field
            )
    return unknown(field)


def _check_assistant(checked: dict[str, Any], where: str) -> None:
    """Check the calls and the reasoning of an assistant's message, and give it a content."""
    reasoning = [checked.pop(key, None) for key in (REASONING, "reasoning")]
    for key, text in zip((REASONING, "reasoning"), reasoning, strict=True):
        if text is not None and not isinstance(text, str):
            field = f"{where}.{key}"
            raise InvalidRequest(f"{field} must be a string, got {shown(text)}", field=field)
    if found := reasoning[0] or reasoning[1]:
        checked[REASONING] = found
    calls = checked.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, (list, tuple)):
            field = f"{where}.tool_calls"
            raise InvalidRequest(
                f"{field} must be a list of calls, got {shown(calls)}", field=field
            )
        at_most(f"{where}.tool_calls", len(calls), MAX_CALLS, "calls")
        if calls:
            checked["tool_calls"] = [
                _check_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        else:
            del checked["tool_calls"]
    if "tool_calls" in checked or found:
        # Many templates concatenate the content, so it must be a text.
        checked.setdefault("content", "")


def _check_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{where} must be an object, got {shown(call)}", field=where)
    _check_keys(call, ("id", "type", "function", "index"), where)
    if call.get("type", "function") != "function":
        field = f"{where}.type"
        raise InvalidRequest(f'{field} must be "function", got {shown(call["type"])}', field=field)
    _check_text(call.get("id"), f"{where}.id")
    function = call.get("function")
    if not isinstance(function, Mapping):
        field = f"{where}.function"
        raise InvalidRequest(f"{field} must be an object, got {shown(function)}", field=field)
    _check_keys(function, ("name", "arguments"), f"{where}.function")
    _check_text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _arguments(text: Any, field: str) -> dict[str, Any]:
    """Parse the arguments of a call."""
    if text is None or text == "":
        return {}
    if isinstance(text, str):
        try:
            arguments = orjson.loads(text)
            # It refuses more than 254 levels, which the functions that read the arguments could not descend.
            orjson.dumps(arguments)
        except (ValueError, TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"{field} must be the JSON text of an object with less than 250 levels, got {shown(text)}: {error}",
                field=field,
            ) from error
        if isinstance(arguments, dict):
            return arguments
    raise InvalidRequest(
        f"{field} must be the JSON text of an object, got {shown(text)}", field=field
    )


def _check_keys(value: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key, item in value.items():
        if key not in keys and item is not None:
            raise unknown(f"{where}.{str(key)[:64]}")


def _check_text(value: Any, field: str) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field} must be a non-empty string, got {shown(value)}", field=field)


def _asks_for_nothing(key: str, value: Any) -> bool:
    if value is None or (key == "tool_calls" and value == []):
        return True
    return key in OF_MESSAGES and OF_MESSAGES[key].accepts(value)


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
    """Count the characters of messages, which need not be checked yet: content, reasoning and arguments of calls."""
    total = 0
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else (content,):
            total += _len(part.get("text") if isinstance(part, Mapping) else part)
        for key in ("reasoning_content", "reasoning"):
            total += _len(message.get(key))
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, (list, tuple)) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            total += _len(function.get("arguments")) if isinstance(function, Mapping) else 0
    return total


def _len(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0
