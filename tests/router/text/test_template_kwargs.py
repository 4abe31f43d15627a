"""Variables for the chat template: plain JSON within bounds, and none of the server's own names."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.errors import InvalidRequest
from quire.router.text.template_kwargs import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_VALUES,
    MAX_VARIABLES,
    RESERVED_NAMES,
    check_template_kwargs,
)


def nested(depth: int):
    value = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"enable_thinking": False, "date_string": "1 May", "x": None, "y": 1.5},
        {"x": nested(MAX_DEPTH)},
        {f"v{i}": i for i in range(MAX_VARIABLES)},
        {"x": [0] * (MAX_VALUES - 1)},
        {"x": "a" * (MAX_BYTES - 1)},
        {"x": MAX_INTEGER, "X" * 64: -MAX_INTEGER},
    ],
    ids=lambda kwargs: str(kwargs)[:32],
)
def test_values_within_the_bounds_are_accepted(kwargs):
    check_template_kwargs(kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words", "field"),
    [
        ([], "must be an object, got list", "k"),
        ({"x": nested(MAX_DEPTH + 1)}, f"deeper than {MAX_DEPTH} levels", "k"),
        ({"x": nested(100_000)}, f"deeper than {MAX_DEPTH} levels", "k"),
        ({f"v{i}": i for i in range(MAX_VARIABLES + 1)}, "at most 32 variables, got 33", "k"),
        ({"x": [0] * MAX_VALUES}, "at most 256 values, got 257", "k"),
        ({"x": [[0] * 64] * 64}, "at most 256 values", "k"),
        ({"x": "a" * MAX_BYTES}, "at most 16384 bytes of text", "k"),
        ({"x": {"a" * MAX_BYTES: 1}}, "at most 16384 bytes of text", "k"),
        ({"x": [1, math.nan]}, "plain JSON", "k.x[1]"),
        ({"x": {"y": math.inf}}, "plain JSON", "k.x.y"),
        ({"x": MAX_INTEGER + 1}, "plain JSON", "k.x"),
        ({"x": print}, "plain JSON", "k.x"),
        ({"x": {"a\nb": 1 << 63, "c": 1}}, "plain JSON", "k.x.?"),
        ({"x": {1: 2}}, "must be strings, got int", "k.x"),
        ({"x": "\ud800"}, "not valid Unicode", "k.x"),
        ({"x": {"\ud800": 1}}, "not valid Unicode", "k.x"),
        ({1: 2}, "names of k must be", "k"),
        *(
            ({name: 1}, "names of k must be", "k")
            for name in ["", "_x", "a b", "é", "a.b", "x" * 65]
        ),
        *(
            ({name: 1}, "the server sets this variable itself", f"k.{name}")
            for name in sorted(RESERVED_NAMES)
        ),
    ],
)
def test_values_outside_the_bounds_are_refused_by_name(kwargs, words, field):
    with pytest.raises(InvalidRequest) as caught:
        check_template_kwargs(kwargs, "k")
    assert words in caught.value.message and caught.value.field == field


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_json_is_served_or_refused(value):
    try:
        check_template_kwargs({"x": value})
    except InvalidRequest:
        assert len(json.dumps(value)) > 16
