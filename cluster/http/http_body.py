"""Parses the JSON body of a request into the model of its endpoint.

Unknown fields, and known fields that are not supported, are refused by name. Then pydantic checks types strictly: "1"
and true are not integers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from quire.cluster.http.http_answers import ErrorAnswer
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_schema import IGNORED_FIELDS, GenerationBody, RequestBody
from quire.protos.errors import InvalidRequest, UnsupportedField, described
from quire.protos.field_checks import at_most
from quire.router import refused_fields

BODIES: tuple[type[GenerationBody], ...] = (CompletionRequest, ChatCompletionRequest)
# Most entries of a list or an object in the body, lists of token ids aside. pydantic takes at most 20 ms for this many,
# even if each has an error. The router has smaller bounds for most fields.
MAX_ENTRIES = 4096
# Fields that may be lists of token ids, with bounds of their own.
_ID_FIELDS = ("input", "prompt", "tokens")
_MAX_SHOWN_CHARS = 64  # most characters of an unknown field's name in an error message

_Body = TypeVar("_Body", bound=RequestBody)


def parse_body(model: type[_Body], body: Any) -> _Body:
    """Parse a decoded JSON body as `model`.

    Raises
    ------
    UnsupportedField
        A field is not supported or unknown; the message has the closest known name.
    InvalidRequest
        A field is missing or has the wrong type.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {described(body)}")
    served = {name: value for name, value in body.items() if _is_served(model, name, value)}
    for name, value in served.items():
        is_prompt_ids = (
            name in _ID_FIELDS and isinstance(value, list) and value[:1] and type(value[0]) is int
        )
        if isinstance(value, (dict, list)) and not is_prompt_ids:
            at_most(name, len(value), MAX_ENTRIES, "entries")
    try:
        parsed = model.model_validate(served)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from None
    if served.get("stream_options") is not None and not served.get("stream"):
        raise InvalidRequest(
            "only a stream has options: stream_options must be null without stream true, got an object",
            field="stream_options",
        )
    return parsed


def _is_served(model: type[RequestBody], name: str, value: Any) -> bool:
    """Whether the model parses the field. False: the value has no effect, so the field is dropped.

    Raises UnsupportedField if the endpoint does not support the field or its value.
    """
    if name in model.model_fields:
        return value is not None
    if name in model.refused:
        refused = model.refused[name]
        if not refused.accepts(value):
            raise refused.error(name, value)
        return False
    if name in IGNORED_FIELDS:
        return False
    for other in BODIES:
        if name in other.model_fields or name in other.refused:
            _check_field_of_another(model, other, name, value)
            return False
    name = name[:_MAX_SHOWN_CHARS]
    raise refused_fields.unknown(name, _hint(model, name))


def _check_field_of_another(
    model: type[RequestBody], other: type[RequestBody], name: str, value: Any
) -> None:
    """Refuse a field that only another endpoint has, unless its value would have no effect there."""
    if value is None or (name in other.refused and other.refused[name].accepts(value)):
        return
    raise UnsupportedField(
        f"{model.path} has no such field, but {other.path}: {name} must be null, got {described(value)}",
        field=name,
    )


def _hint(model: type[RequestBody], name: str) -> str:
    known = [*model.model_fields, *model.refused, *IGNORED_FIELDS]
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def refusal(errors: Sequence[ErrorDetails], where: str = "") -> InvalidRequest:
    """Make the error for the first problem, with its path in the body: ``messages[0].role``.

    Parameters
    ----------
    where
        Path of the parsed object in the body; empty: the body itself.
    """
    first = errors[0]
    name, *rest = (where, *first["loc"]) if where else first["loc"]
    if name in _UNIONS and first["type"] != "missing":
        return InvalidRequest(
            f"{name} must be {_UNIONS[name]}, got {described(first['input'])}", field=str(name)
        )
    path = str(name) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_SHOWN_CHARS]}" for part in rest
    )
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is required", field=path)
    if first["type"] == "extra_forbidden":
        return refused_fields.unknown(path)
    expected = _TYPES.get(first["type"], first["msg"])
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"]
    return InvalidRequest(f"{path} must be {expected}, got {described(first['input'])}", field=path)


# pydantic reports one error for each member of a union; these texts replace them.
_UNIONS = {
    "tool_choice": "auto, none, required or an object",
    "prompt": "a string, a list of token ids, or a list of either",
    "stop": "a string or a list of strings",
    "input": "a string or a list of objects",
}
_TYPES = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


def describe_route(
    body: type[BaseModel],
    answer: type[BaseModel],
    purpose: str = "",
    *,
    events: type[BaseModel] | None = None,
    ignored: Iterable[str] = IGNORED_FIELDS,
    refused: Iterable[str] = (),
    error: type[BaseModel] = ErrorAnswer,
) -> dict[str, Any]:
    """Return arguments for FastAPI that describe a route which reads its body itself.

    Parameters
    ----------
    purpose
        First sentence of the description; empty: the route's docstring is the description.
    events
        Model of the events of a streamed answer; None: the answer is never streamed.
    ignored, refused
        Fields that are accepted without effect, and fields that must be null or neutral.
    """
    arguments: dict[str, Any] = {
        "response_model": answer,
        "responses": {"4XX": {"model": error}, "5XX": {"model": error}},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": _reference(body)}}
        },
    }
    if events is not None:
        arguments["responses"][200] = {"content": {"text/event-stream": _reference(events)}}
    if purpose:
        arguments["description"] = (
            f"{purpose}\n\nAccepted and ignored: {', '.join(sorted(ignored))}. "
            f"Refused unless null or neutral: {', '.join(sorted(refused))}. Any other field is refused."
        )
    return arguments


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
