"""Forbidden token sequences are found at their last token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.replica.request_table.bad_words import BadWords

WORDS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6
)


def contains(output, word):
    return any(tuple(output[i : i + len(word)]) == word for i in range(len(output) - len(word) + 1))


@given(words=WORDS, output=st.lists(st.integers(0, 3), max_size=8))
def test_an_id_is_excluded_exactly_if_it_would_complete_a_word(words, output):
    bad = BadWords(words)
    newest = output[len(output) - bad.context_len :] if bad.context_len < len(output) else output
    excluded = set(bad.excluded(newest))
    for token in range(4):
        completes = any((*output, token)[-len(word) :] == word for word in words)
        assert (token in excluded) == completes


@given(words=WORDS, choices=st.lists(st.integers(0, 3), max_size=30))
def test_an_output_that_heeds_them_contains_none(words, choices):
    bad, output = BadWords(words), []
    for token in choices:
        if token not in bad.excluded(output[max(0, len(output) - bad.context_len) :]):
            output.append(token)
    assert not any(contains(output, word) for word in words)
