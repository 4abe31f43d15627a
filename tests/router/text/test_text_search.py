"""A search in pieces finds the same matches as a search of the whole text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.text import text_search

PATTERNS = ["<a>|<ab>|b", "(?=<a>)|(?=<ab>)", r"(?<!\\w)ab(?!\\w)", "(?<=[a-b]) (?=[a-b])", "<|b>a"]
LONGEST = 4


@pytest.fixture(autouse=True, scope="module")
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_search, "SEARCH_CHARS", 5)
        yield


@given(pattern=st.sampled_from(PATTERNS), text=st.text("<>ab ", max_size=60))
def test_matches_are_those_of_finditer(pattern, text):
    found = re.compile(pattern)
    expected = [match.span() for match in found.finditer(text)]
    assert [match.span() for match in text_search.matches(found, text, LONGEST)] == expected


@given(
    pattern=st.sampled_from(PATTERNS),
    text=st.text("<>ab ", max_size=60),
    start=st.integers(0, 70),
    end=st.integers(0, 60),
)
def test_a_search_is_that_of_re(pattern, text, start, end):
    end = min(end, len(text))
    expected = re.compile(pattern).search(text, start, end)
    found = text_search.search(re.compile(pattern), text, start, end, LONGEST)
    assert (found and found.span()) == (expected and expected.span())
