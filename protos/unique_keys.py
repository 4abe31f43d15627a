"""Parses JSON and YAML text in which no key of an object is given twice.

Two readers of one file may otherwise see different values: most parsers keep the last value of a repeated key, some the
first one.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import yaml


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises
    ------
    ValueError
        `text` is not JSON, or an object has a key twice; the message names the key, never a value.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {name[:64]!r} is given twice in one object")
    return found


class _UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice: YAML forbids this, but PyYAML silently keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in first_line:
                message = (
                    f"key {key_node.value!r} was given in line {first_line[key_node.value]} already"
                )
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            first_line[key_node.value] = line
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse one YAML document: plain data only.

    Raises
    ------
    yaml.YAMLError
        `text` is not YAML, or a mapping has a key twice.
    """
    loader = _UniqueKeyLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
