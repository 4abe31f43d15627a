"""One span as plain data. Times are seconds of the router's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = dict[str, AttributeValue]


class SpanEvent(NamedTuple):
    """Something that happened during a span."""

    name: str
    at_s: float
    attributes: Attributes


@dataclass(slots=True)
class Span:
    """A part of a request's time.

    Attributes
    ----------
    parent_id
        0: the span has no parent.
    links
        Ids of other spans of the trace that this one continues.
    error
        What went wrong; empty: nothing did.
    """

    name: str
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    error: str = ""
