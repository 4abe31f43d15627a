"""Converts the structured-output fields of HTTP and gRPC requests to the router's `Grammar`."""

from __future__ import annotations

import json
from typing import Any

import orjson

from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import Grammar
from quire.router.refused_fields import unknown

MAX_CHOICES = 1024
_ANY_OBJECT = '{"type":"object"}'


def json_schema(schema: Any, field: str) -> Grammar:
    """Make the grammar of a JSON schema, given as an object or as JSON text.

    Raises
    ------
    InvalidRequest
        The schema is neither an object nor the text of one.
    """
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{field} must be a JSON schema: an object, got {type(schema).__name__}", field=field
        )
    try:
        text = orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as error:
        # The schema is nested too deeply.
        raise InvalidRequest(f"{field}: {error}", field=field) from None
    return Grammar("json_schema", text, field)


def json_object(field: str) -> Grammar:
    """Make the grammar of any JSON object."""
    return Grammar("json_schema", _ANY_OBJECT, field)


def choice(texts: list[str], field: str) -> Grammar:
    """Make the grammar of exactly one of these texts.

    Raises
    ------
    InvalidRequest
        There are no texts, too many, or an empty one.
    """
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise InvalidRequest(
            f"{field} must have 1 to {MAX_CHOICES} texts, none of them empty, got {len(texts)}",
            field=field,
        )
    return Grammar("choice", json.dumps(texts, ensure_ascii=False), field)


def of_response_format(value: dict[str, Any]) -> Grammar | None:
    """Make the grammar of OpenAI's `response_format`; None for plain text.

    Raises
    ------
    InvalidRequest, UnsupportedField
        The type or a field is unknown, or the schema is missing or not valid.
    """
    kind = value.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    for name in value.keys() - known:
        raise unknown(f"response_format.{name[:64]}")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object("response_format")
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type must be one of text, json_object, json_schema, got "
            f"{str(kind)[:64]!r}",
            field="response_format.type",
        )
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, dict) or not isinstance(wrapper.get("schema"), dict):
        raise InvalidRequest(
            "response_format.json_schema.schema is required, a JSON schema",
            field="response_format.json_schema.schema",
        )
    return json_schema(wrapper["schema"], "response_format.json_schema.schema")
