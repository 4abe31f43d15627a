"""Reads the JSON schemas of arguments: which types a value may have, with references and unions resolved."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

# Text about a schema. It is most of a typical tool, and no part of a grammar.
_NOTES = frozenset(
    {
        "$comment",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
# Keywords that constrain nothing. By JSON Schema, `format` is one of them.
ANNOTATIONS = _NOTES | {"$defs", "$id", "$schema", "definitions", "format", "nullable"}
_UNIONS = ("anyOf", "oneOf", "allOf")
# Keywords whose values are schemas, and names with schemas.
_SCHEMAS = frozenset({"anyOf", "items", "oneOf", "prefixItems"})
_MAPS_OF_SCHEMAS = frozenset({"$defs", "definitions", "properties"})
# Keywords that say which further properties an object may have.
_OPENNESS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
# Bound on the schemas of one union, with those of the references in it.
_MAX_SCHEMAS = 64
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_TYPES_OF_KEYWORDS = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "minimum": "number",
    "maximum": "number",
}


class NotSimple(Exception):
    """A schema has a form that cannot be written as a grammar. The message names the keyword."""


def count(schema: Mapping[str, Any], key: str) -> int | None:
    """Return a keyword's value, a number from 0; None if it is missing."""
    value = schema.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise NotSimple(key)
    return value


def branches(
    schema: Any, root: Mapping[str, Any], *, is_strict: bool = False
) -> list[dict[str, Any]]:
    """Return schemas of one type each, of which a value fulfils at least one.

    `type` is missing from a schema that any value fulfils. No schema has a reference or union at its top.

    Parameters
    ----------
    root
        The schema to which references refer.
    is_strict
        Refuse the forms that the branches would describe only roughly.

    Raises
    ------
    NotSimple
        The schema cannot be resolved.
    """
    found: list[dict[str, Any]] = []
    todo, num_seen = [schema], 0
    while todo:
        one, num_seen = todo.pop(), num_seen + 1
        if num_seen > _MAX_SCHEMAS:
            raise NotSimple(f"more than {_MAX_SCHEMAS} alternatives")
        if not isinstance(one, Mapping):
            if one is not True and is_strict:
                raise NotSimple("a schema that is no object")
            one = {}
        if one.get("nullable") is True:
            found.append({"type": "null"})
        rest = {key: value for key, value in one.items() if key not in ANNOTATIONS}
        inner = _inner(rest, root, is_strict)
        if inner is None:
            found += _by_type(rest)
        else:
            todo += reversed(inner)
    return found


def with_types(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments with `type` in each property.

    The parser reads an argument that is written as text by its `type`, and resolves no references and enums.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return dict(parameters)
    typed = {}
    for name, schema in properties.items():
        typed[name] = schema
        if isinstance(schema, Mapping) and "type" not in schema:
            with contextlib.suppress(NotSimple):
                types = [one.get("type", "string") for one in branches(schema, parameters)]
                typed[name] = {"type": list(dict.fromkeys(types))}
    return {**parameters, "properties": typed}


def closed(schema: Any) -> Any:
    """Return a JSON schema without notes, whose objects have only the properties that it declares.

    By JSON Schema any other property is valid too, unless the schema says otherwise. A small model may then write
    properties without end, and a function does not expect them. Parts of an `allOf` stay open: each sees the properties
    of the others.
    """
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, Mapping) or "allOf" in schema:
        return schema
    found = {key: value for key, value in schema.items() if key not in _NOTES}
    for key in _SCHEMAS & found.keys():
        found[key] = closed(found[key])
    for key in _MAPS_OF_SCHEMAS & found.keys():
        if isinstance(found[key], Mapping):
            found[key] = {name: closed(one) for name, one in found[key].items()}
    if "properties" in found and not _OPENNESS & found.keys():
        found["additionalProperties"] = False
    return found


def _inner(found: Mapping[str, Any], root: Mapping[str, Any], is_strict: bool) -> list[Any] | None:
    """Return the schemas of a reference or union; None if the schema is neither."""
    keys = [key for key in ("$ref", *_UNIONS) if key in found]
    if not keys:
        return None
    key = keys[0]
    if is_strict and (len(found) > 1 or key == "oneOf"):
        raise NotSimple(key)
    if key == "$ref":
        return [_resolved(found[key], root)]
    schemas = found[key]
    if not isinstance(schemas, list) or not schemas or (key == "allOf" and len(schemas) > 1):
        raise NotSimple(key)
    return schemas


def _by_type(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a schema without references and unions as one schema for each type."""
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise NotSimple("enum")
        of_kind: dict[str, list[Any]] = {}
        for value in values:
            of_kind.setdefault(_TYPES[type(value)], []).append(value)
        return [{"type": kind, "enum": found} for kind, found in of_kind.items()]
    given = schema.get("type") or _implied_type(schema)
    types = given if isinstance(given, list) else [given]
    if not all(isinstance(one, str) for one in types):
        raise NotSimple("a type that is no name")
    return [{**schema, "type": one} if one else {} for one in types]


def _resolved(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema at a JSON pointer such as `#/$defs/place`."""
    target: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise NotSimple("$ref")
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or name not in target:
            raise NotSimple("$ref")
        target = target[name]
    return target


def _implied_type(found: Mapping[str, Any]) -> str:
    """Return the type that a schema without `type` means; empty: any."""
    return next((kind for key, kind in _TYPES_OF_KEYWORDS.items() if key in found), "")
