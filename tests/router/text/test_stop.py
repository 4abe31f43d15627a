"""Stop strings: any chunking gives the result of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.router.text.stop import StopMatcher

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def expected(text, stops, include_stop):
    """Grow the text by a character until it ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.booleans(), st.lists(st.integers(0, 6)))
@example("abcd", ["abcd", "bc"], False, [1, 1, 1, 1])
@example("abc", ["c", "bc"], False, [3])
@example("aab", ["ab"], False, [1, 1, 1])
def test_any_chunking_equals_the_whole_text(text, stops, include_stop, sizes):
    matcher = StopMatcher(stops, include_stop)
    emitted, found, position = "", None, 0
    for size in [*sizes, len(text)]:
        piece, matched = matcher.feed(text[position : position + size])
        assert found is None or (piece == "" and matched == found)
        position += size
        emitted, found = emitted + piece, matched
        seen = text[:position]
        if found is None:  # exactly the longest suffix that may become a stop string is held back
            prefixes = [s[:k] for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])]
            assert seen == emitted + max(prefixes, key=len, default="")
    emitted += matcher.flush()
    assert (emitted, found) == expected(text, stops, include_stop)


def test_no_stop_strings_hold_nothing_back():
    matcher = StopMatcher(())
    assert matcher.feed("abc") == ("abc", None) and matcher.flush() == ""


def test_flush_gives_the_held_text_once():
    matcher = StopMatcher(["END"])
    assert matcher.feed("the EN") == ("the ", None)
    assert matcher.flush() == "EN" and matcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_long_repetitive_stop_strings_are_cheap():
    stops = ["a" * 255 + chr(ord("b") + i) for i in range(16)]
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed("aaaa")[0] for _ in range(2000)) + matcher.flush()
    assert text == "a" * 8000
