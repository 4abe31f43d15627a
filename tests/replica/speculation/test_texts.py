"""Lookups of a request's last tokens: what is found is there, is the newest, and belongs to the tenant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.speculation.gram_table import MAX_SIZE, SIZES, hashes_at_end
from quire.replica.speculation.request_drafts import RequestDrafts
from quire.replica.speculation.texts import (
    IN_OWN_TEXT,
    IN_PREDICTION,
    PREDICTED,
    Answers,
    Match,
    OwnText,
    PredictedText,
    RecentAnswers,
)

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def ids(tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def newest_place(tokens: list[int], n: int) -> int | None:
    """The token after the newest earlier occurrence of the last n tokens."""
    places = (e for e in range(len(tokens) - 1, n - 1, -1) if tokens[e - n : e] == tokens[-n:])
    return next(places, None)


def find(text: OwnText, tokens: list[int]) -> tuple[int, Match] | None:
    """The longest match, and the size of its gram."""
    text.advance(ids(tokens))
    for i, n in enumerate(SIZES):
        if (found := text.find(ids(tokens), ids(tokens[-MAX_SIZE:]).tobytes(), i)) is not None:
            return n, found
    return None


@given(TOKENS)
def test_a_match_is_the_newest_earlier_place_of_the_longest_gram(tokens: list[int]):
    found = find(OwnText(), tokens)
    places = [newest_place(tokens, n) for n in SIZES]
    if found is None:
        assert len(tokens) <= MAX_SIZE or places == [None, None]
    else:
        n, match = found
        assert match.follows.tolist() == tokens[places[SIZES.index(n)] :]
        assert n == SIZES[0] or places[0] is None
        assert match.kind == IN_OWN_TEXT + SIZES.index(n)


@given(TOKENS, st.lists(st.integers(1, 40), max_size=20))
def test_a_text_that_grows_in_any_steps_gives_the_same_matches(tokens: list[int], steps: list[int]):
    text, end = OwnText(), 0
    for step in steps:
        end = min(end + step, len(tokens))
        text.advance(ids(tokens[:end]))
    grown, at_once = find(text, tokens), find(OwnText(), tokens)
    assert (grown is None) == (at_once is None)
    if grown is not None:
        assert grown[0] == at_once[0]
        assert grown[1].follows.tolist() == at_once[1].follows.tolist()


def test_a_long_text_loses_few_matches():
    """A table forgets grams whose slot another gram takes."""
    rng = np.random.default_rng(0)
    once = rng.integers(0, 50_000, 20_000)
    tokens = np.concatenate([once, once]).astype(np.int32)
    text, lost = OwnText(), 0
    for end in range(len(once) + MAX_SIZE, len(tokens), 7):
        text.advance(tokens[:end])
        tail = tokens[end - MAX_SIZE : end].tobytes()
        lost += all(text.find(tokens[:end], tail, i) is None for i in range(len(SIZES)))
    assert lost < 0.15 * (len(once) / 7)


def test_a_draft_from_the_newest_tokens_repeats_them():
    _, match = find(OwnText(), [9, 8, 7, *[1, 2, 3] * 4])
    assert match.draft(7).tolist() == [1, 2, 3, 1, 2, 3, 1]


def request(prompt, output=(), prediction=None, tenant: str = "") -> Request:
    made = Request(0, [*prompt, *output], SamplingParams(max_tokens=500), tenant=tenant)
    made.num_prompt_tokens = len(prompt)
    made.prediction_ids = None if prediction is None else ids(prediction)
    return made


def test_a_prediction_is_followed_from_its_first_token_and_found_again_after_a_difference():
    prompt, prediction = list(range(100, 120)), list(range(200, 240))
    answer = [*range(200, 210), 7, 8, *range(212, 240)]
    drafts = RequestDrafts(request(prompt, prediction=prediction))
    seen = {}
    for count in range(1, len(answer)):
        match = drafts.look(ids(prompt + answer[:count]))
        seen[count] = None if match is None else (match.kind, match.draft(3).tolist())
    assert seen[1] == (PREDICTED, [201, 202, 203])
    assert seen[10] == (PREDICTED, [210, 211, 212])
    assert seen[11] is None  # 7 is not in the prediction
    assert seen[14] is None
    assert seen[15] == (IN_PREDICTION + 1, [215, 216, 217])  # after 3 equal tokens
    assert seen[16] == (PREDICTED, [216, 217, 218])
    assert seen[38] == (PREDICTED, [238, 239])


def test_a_prediction_is_preferred_to_the_prompt():
    drafts = RequestDrafts(request(list(range(50)), prediction=[3, 4, 5, 77]))
    match = drafts.look(ids([*range(50), 3, 4, 5]))
    assert match.draft(4).tolist() == [77]


def test_a_prediction_shorter_than_a_gram_is_followed():
    text = PredictedText(ids([5, 6]))
    text.advance(ids([5]))
    assert text.following().draft(8).tolist() == [6]
    text.advance(ids([6]))
    assert text.following() is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=70), min_size=1, max_size=12))
def test_answers_are_found_with_what_followed_them(answers: list[list[int]]):
    held, whole = Answers(64), []
    for answer in answers:
        held.add(ids(answer))
        whole += answer
        assert held.newest().tolist() == whole[-64:]
        tail = ids(whole[-MAX_SIZE:])
        if len(whole) < MAX_SIZE:
            continue
        for i in range(len(SIZES)):
            match = held.find(hashes_at_end(tail), tail.tobytes(), i)
            if match is not None:
                gram, follows = whole[-SIZES[i] :], match.follows.tolist()
                joined = "".join(map(str, whole[-64:]))
                assert "".join(map(str, gram + follows)) in joined


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), min_size=1, max_size=400)),
        max_size=15,
    ),
    st.integers(2**16, 2**18),
)
def test_tenants_never_share_answers_and_the_bytes_are_bounded(added, max_bytes: int):
    """Each tenant has tokens of its own, so a token tells whose answer it comes from."""
    recent = RecentAnswers(max_bytes)
    for tenant, answer in added:
        own = ids([100 * tenant + token for token in answer])
        recent.add(str(tenant), own)
        assert recent.num_bytes <= max_bytes
        for other in range(5):
            answers = recent.of(str(other))
            if answers is not None:
                assert (answers.newest() // 100 == other).all()
            # Looks up another tenant's tokens: only the owner finds them.
            if answers is not None and other != tenant and len(own) >= MAX_SIZE:
                tail = own[-MAX_SIZE:].tobytes()
                for i in range(len(SIZES)):
                    assert answers.find(hashes_at_end(own), tail, i) is None


@pytest.mark.parametrize("max_bytes", [2**16, 2**20])
def test_a_busy_tenant_keeps_its_newest_answers(max_bytes: int):
    recent, rng = RecentAnswers(max_bytes), np.random.default_rng(0)
    for _ in range(300):
        answer = rng.integers(0, 1000, 200).astype(np.int32)
        recent.add("a", answer)
    assert recent.num_bytes <= max_bytes
    answers = recent.of("a")
    head = answer[:50]
    match = answers.find(hashes_at_end(head), head[-MAX_SIZE:].tobytes(), 0)
    assert match.draft(8).tolist() == answer[50:58].tolist()
