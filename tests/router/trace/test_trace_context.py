"""The header `traceparent`: what W3C Trace Context calls valid is read, everything else starts a new trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.trace.trace_context import MAX_STATE_BYTES, TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_valid_header_is_read(trace_id: int, span_id: int, flags: int) -> None:
    context = TraceContext.parse(f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}", "a=b")
    assert context == TraceContext(trace_id, span_id, bool(flags & 1), "a=b")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0\u0661",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_malformed_header_counts_as_none(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_later_version_may_have_more_fields() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") is not None
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01") is not None


@given(st.text(max_size=80))
def test_no_header_raises(header: str) -> None:
    TraceContext.parse(header, header)


def test_a_long_state_is_left_out() -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    for state in ("a=" + "b" * (MAX_STATE_BYTES - 2), "a=" + "b" * (MAX_STATE_BYTES - 1)):
        context = TraceContext.parse(header, state)
        assert context is not None
        assert context.state == (state if len(state) == MAX_STATE_BYTES else "")
