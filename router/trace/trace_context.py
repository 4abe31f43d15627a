"""The trace that a client's request belongs to: the headers `traceparent` and `tracestate` of W3C Trace Context."""

from __future__ import annotations

import re
from typing import NamedTuple

# version - trace id - id of the client's span - flags; later versions may append fields.
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_IS_SAMPLED = 1
# Bytes of `tracestate` to pass on; W3C asks for at least 512. A longer one is left out.
MAX_STATE_BYTES = 512


class TraceContext(NamedTuple):
    """The client's span, the parent of the request's.

    Attributes
    ----------
    trace_id
        128 bits.
    span_id
        64 bits.
    sampled
        Whether the client records its span.
    state
        The header `tracestate`, passed on unchanged.
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    @classmethod
    def parse(cls, parent: str, state: str = "") -> TraceContext | None:
        """Return the context; None if `parent` is malformed, which W3C treats as no header."""
        match = _PARENT.fullmatch(parent.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more is not None):
            return None
        context = cls(
            int(trace_id, 16),
            int(span_id, 16),
            bool(int(flags, 16) & _IS_SAMPLED),
            state if len(state) <= MAX_STATE_BYTES else "",
        )
        return context if context.trace_id and context.span_id else None
