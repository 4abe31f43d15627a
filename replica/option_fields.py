"""Declares options as fields of a dataclass with bounds and descriptions, and checks values against them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, get_args


def option(
    default: Any,
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    min_length: int | None = None,
) -> Any:
    """Create a dataclass field with bounds and description as metadata, under the names of pydantic's `Field`."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "min_length": min_length}
    metadata = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={**metadata, "description": description})


def problems(options: Any, prefix: str = "") -> Iterator[str]:
    """Yield a message for each field whose value has the wrong type or is out of its bounds.

    Parameters
    ----------
    options
        An instance of a dataclass with fields from `option`. A field may be such a dataclass too.
    prefix
        Path of `options`, for the messages: `speculation.`.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        name, hint, value = prefix + field.name, hints[field.name], getattr(options, field.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if isinstance(value, hint):
                yield from problems(value, f"{name}.")
            else:
                known = ", ".join(nested.name for nested in dataclasses.fields(hint))
                yield f"{name} must be a mapping with some of {known}, got {value!r}"
        elif (expected := _expected(hint, field.metadata, value)) is not None:
            yield f"{name} must be {expected}, got {value!r}"


def _expected(hint: Any, bounds: Mapping[str, Any], value: Any) -> str | None:
    """Return a description of the allowed values; None if the value has the right type and is within its bounds."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if choices := get_args(kind):  # a Literal
        return None if value in choices else f"one of {', '.join(choices)}"
    if kind not in (int, float):
        return None if type(value) is kind else {bool: "a boolean", str: "a string"}[kind]
    noun = "an integer" if kind is int else "a number"
    is_number = type(value) is int or (kind is float and type(value) is float)
    if is_number and math.isfinite(value) and _is_within(bounds, value):
        return None
    return noun + _interval(bounds)


def _is_within(bounds: Mapping[str, Any], value: float) -> bool:
    return bool(
        bounds.get("ge", value) <= value <= bounds.get("le", value)
        and value > bounds.get("gt", -math.inf)
        and value < bounds.get("lt", math.inf)
    )


def _interval(bounds: Mapping[str, Any]) -> str:
    """The bounds in words: " in (0, 1]", " of at least 1" or " above 0"."""
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if high is None:
        return f" above {low}" if "gt" in bounds else f" of at least {low}"
    return f" in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"
