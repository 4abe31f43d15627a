"""Rules of a grammar for the arguments of calls that are not one JSON object.

```
 Qwen 3.5   <parameter=city>\\nZürich\\n</parameter>\\n<parameter=days>\\n3\\n</parameter>\\n
 Gemma 4    {city:<|"|>Zürich<|"|>,at:{x:true},days:3}
```

A string is text up to a mark. Numbers, booleans and null are JSON. Objects and lists are JSON too, unless the family
writes them in its own form (`ArgumentFormat.is_nested`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.protos.errors import UnsupportedField
from quire.router.chat.added_tokens import AddedTokens, quoted
from quire.router.chat.argument_schema import ANNOTATIONS, NotSimple, branches, closed, count
from quire.router.chat.family import ArgumentFormat
from quire.router.tool_types import Tool

# Separators that templates write, with or without a space.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Text that a parser reads as another type where a value may be a string or something else.
_NO_STRING = r"/\s*([-+.\p{Nd}{\[][\s\S]*|(?i:true|false|null|none|nan|inf|infinity)\s*)/"
_IN_PATTERN = re.compile(r"\\[\s\S]|/|\n")
_SCALARS = ("integer", "number", "boolean", "null")
# Keywords that the rules follow.
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
}
_MAX_DEPTH = 32


class ArgumentRules:
    """Makes the rules for the arguments of tools. Equal values share a rule.

    Parameters
    ----------
    rules
        The grammar's rules; new ones are appended.
    """

    def __init__(self, form: ArgumentFormat, added: AddedTokens, rules: list[str]):
        self._form = form
        self._added = added
        self._rules = rules
        self._key_pattern = re.compile(form.key_pattern)
        self._between = " ".join(added.symbols(form.between))
        self._value_end = " ".join(added.symbols(form.value_end))
        # A rule's text to its name, and (scope, schema) of a value to its rule.
        self._by_text: dict[str, str] = {}
        self._by_schema: dict[tuple[str, str], str] = {}
        marks = "|".join(re.escape(mark).replace("/", r"\/") for mark in form.excluded)
        # The parser would end a string with one of these texts too early.
        self._exclusion = self._shared("TEXT", rf"/[\s\S]*({marks})[\s\S]*/")
        # Of the current tool: everything outside of a value's schema that its rule depends on.
        self._root: Mapping[str, Any] = {}
        self._is_strict = False
        self._scope = ""
        self._depth = 0

    def arguments(self, tool: Tool) -> str:
        """Return the symbol for a tool's arguments.

        Raises
        ------
        UnsupportedField
            The tool's schema cannot be written as a grammar.
        """
        root = tool.parameters or {}
        self._root, self._is_strict, self._depth = root, tool.strict, 0
        self._scope = json.dumps([tool.strict, root.get("$defs"), root.get("definitions")])
        begin, end = self._added.symbols(self._form.begin), self._added.symbols(self._form.end)
        try:
            self._check({**root, "type": "object"})
            # The arguments of a tool without properties are empty.
            closed_root = {"additionalProperties": False, **root}
            return self._shared("arguments", self._object(closed_root, begin, end))
        except NotSimple as error:
            raise UnsupportedField(
                f"calls of this model cannot be constrained to every schema: {error} must not be used in the "
                f"parameters of the tool {tool.name} with strict, tool_choice or a response format",
                field="tools",
            ) from error

    def _shared(self, kind: str, text: str) -> str:
        """Return the name of the rule with this text; add it if it is new."""
        if text not in self._by_text:
            self._by_text[text] = f"{kind}_{len(self._by_text)}"
            self._rules.append(f"{self._by_text[text]}: {text}\n")
        return self._by_text[text]

    def _value(self, schema: Any) -> str:
        """Return the rule of a value, with its end."""
        key = (self._scope, json.dumps(schema))
        if key not in self._by_schema:
            # Named before it is made: a schema may refer to itself.
            name = self._by_schema[key] = f"value_{len(self._by_schema)}"
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise NotSimple(f"a schema of more than {_MAX_DEPTH} levels")
            self._rules.append(f"{name}: {self._alternatives(schema)}\n")
            self._depth -= 1
        return self._by_schema[key]

    def _alternatives(self, schema: Any) -> str:
        found = branches(schema, self._root, is_strict=self._is_strict)
        texts = [one for one in found if one.get("type", "string") == "string"]
        others = [one for one in found if one.get("type", "string") != "string"]
        if {} in texts and self._form.is_nested:
            others += [{"type": kind} for kind in (*_SCALARS, *_KEYWORDS) if kind != "string"]
        made = []
        if texts:
            made.append(self._text(texts, bool(others) and not self._form.quote))
        if others and not self._form.is_nested:
            made.append(f"{self._json(others)} {self._value_end}")
        elif others:
            scalars = [one for one in others if one["type"] in _SCALARS]
            made += [self._json(scalars)] if scalars else []
            made += [self._container(one) for one in others if one["type"] not in _SCALARS]
        if not made:
            raise NotSimple("an empty enum")
        return " | ".join(made)

    def _object(self, schema: Mapping[str, Any], begin: list[str], end: list[str]) -> str:
        """Return the symbols of an object: each property that is required, and any of the others."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise NotSimple("properties or required of another type")
        if self._is_strict and any(name not in properties for name in required):
            raise NotSimple("required without a property of the name")
        if not properties:
            more = schema.get("additionalProperties", True)
            return " ".join([*begin, *([] if more is False else [self._pairs(more)]), *end])
        # From the last property to the first. `rest`: everything that may follow a property, with separators.
        heads: list[str] = []
        rest = ""
        names = sorted(properties, key=str.lower) if self._form.is_sorted else list(properties)
        for name in reversed(names):
            value = properties[name]
            one = f"{self._key(name)} {self._value(value)}"
            head, after = f"{one} {rest}", f"{self._between} {one} {rest}"
            if name in required:
                heads, rest = [head], self._shared("rest", after)
            else:
                heads.append(head)
                rest = self._shared("rest", f"{after} | {rest}" if rest else f"({after})?")
        is_optional = not any(name in required for name in properties)
        body = f"({' | '.join(reversed(heads))}){'?' if is_optional else ''}"
        return " ".join([*begin, body, *end])

    def _pairs(self, values: Any) -> str:
        """Return the symbols of any properties with such values."""
        key = " ".join(quoted(self._form.key.removeprefix("{key}")))
        pair = self._shared("pair", f"/[A-Za-z0-9_]+/ {key} {self._value(values)}")
        return f"({pair} ({self._between} {pair})*)?"

    def _key(self, name: str) -> str:
        if any(mark in name for mark in self._form.excluded):
            raise NotSimple("a property with a mark of the format in its name")
        if self._key_pattern.fullmatch(name) is None:
            if not self._form.is_nested:
                raise NotSimple("a property with > or a line break in its name")
            name = json.dumps(name, ensure_ascii=False)
        return " ".join(self._added.symbols(self._form.key.replace("{key}", name)))

    def _container(self, schema: Mapping[str, Any]) -> str:
        """Return the symbols of an object or a list in the family's form."""
        if schema["type"] not in _KEYWORDS:
            raise NotSimple(f"the type {schema['type']}")
        if "enum" in schema:
            return " | ".join(" ".join(self._literal(one)) for one in schema["enum"])
        self._check(schema)
        if schema["type"] == "object":
            return self._object(schema, ['"{"'], ['"}"'])
        low, high = count(schema, "minItems") or 0, count(schema, "maxItems")
        if high == 0:
            return '"[" "]"'
        item = self._value(schema.get("items", True))
        times = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        body = f"{item} ({self._between} {item}){times}"
        return f'"[" {body if low else f"({body})?"} "]"'

    def _literal(self, value: Any) -> list[str]:
        """Return the symbols of one value in the family's form."""
        if isinstance(value, str):
            return self._added.symbols(f"{self._form.quote}{value}{self._form.quote}")
        if not isinstance(value, (dict, list)):
            return quoted(json.dumps(value))
        is_object = isinstance(value, dict)
        symbols = ['"{"' if is_object else '"["']
        for i, item in enumerate(value):
            symbols += [self._between] if i else []
            symbols += [self._key(item)] if is_object else []
            symbols += self._literal(value[item] if is_object else item)
        return [*symbols, '"}"' if is_object else '"]"']

    def _json(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        schema: dict[str, Any] = {"anyOf": list(schemas)} if len(schemas) > 1 else {**schemas[0]}
        if '"$ref"' in json.dumps(schema):
            schema |= {k: self._root[k] for k in ("$defs", "definitions") if k in self._root}
        options = JSON_OPTIONS if self._is_strict else {**JSON_OPTIONS, "lenient": True}
        return f"%json {json.dumps({**closed(schema), 'x-guidance': options}, ensure_ascii=False)}"

    def _text(self, schemas: Sequence[Mapping[str, Any]], is_mixed: bool) -> str:
        """Return the symbols of a string and its end."""
        body = " | ".join(map(self._body, schemas))
        no_string = f" & ~{_NO_STRING}" if is_mixed else ""
        text = self._shared("TEXT", f"({body}) & ~{self._exclusion}{no_string}")
        mark = self._form.quote or self._form.value_end
        begin = " ".join(self._added.symbols(self._form.quote))
        first, *rest = self._added.symbols(mark)
        if first.startswith("<["):
            return " ".join([begin, text, first, *rest])
        whole = self._shared("TEXT", f"{text} {quoted(mark)[0]}")
        if first.startswith("("):
            by_id = first[1:].split(" ")[0]
            return f"{begin} ({' '.join([text, by_id, *rest])} | {whole})"
        return f"{begin} {whole}"

    def _body(self, schema: Mapping[str, Any]) -> str:
        """Return the regular expression of a string's text."""
        if "enum" in schema:
            return f"({' | '.join(json.dumps(one, ensure_ascii=False) for one in schema['enum'])})"
        self._check(schema)
        low, high = count(schema, "minLength") or 0, count(schema, "maxLength")
        times = f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"
        body, pattern = f"/[\\s\\S]{times}/", schema.get("pattern") or ""
        return f"({body} & /{_whole(pattern)}/)" if pattern else body

    def _check(self, schema: Mapping[str, Any]) -> None:
        """Refuse a strict schema with a keyword that the rules would ignore."""
        known = _KEYWORDS[schema.get("type", "string")] | ANNOTATIONS | {"type"}
        if self._is_strict and schema.keys() - known:
            raise NotSimple(min(schema.keys() - known))


def _whole(pattern: Any) -> str:
    """Return a regular expression for the texts in which a JSON schema's `pattern` is found."""
    if not isinstance(pattern, str):
        raise NotSimple("a pattern of another type")
    starts, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    inner = pattern[1 if starts else 0 : -1 if ends else None]
    if re.search(r"(?<!\\)(\\\\)*\\\Z", inner):
        raise NotSimple("a pattern that ends with a backslash")
    escaped = _IN_PATTERN.sub(lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), inner)
    anything = r"[\s\S]*"
    return f"{'' if starts else anything}({escaped}){'' if ends else anything}"
