"""The text of an answer: the fast path equals the general one, gaps are found, repeated output is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.wire import Hello, PromptLogprobs, SamplingParams, TokenDelta
from quire.replica.builtin_model import CHECKPOINT
from quire.router.request.answer_text import AnswerText
from quire.router.request.token_scores import PromptParts, TokenScorer
from quire.router.text.detokenizer import DetokenizerFactory
from quire.router.text.tokenizer import TextTokenizer
from quire.router.transport.transport import OutputGap
from quire.router.types import GenerationRequest, Mark

TOKENIZER = TextTokenizer.load(CHECKPOINT)
DETOKENIZERS = DetokenizerFactory(TOKENIZER.backend)
IDS = st.lists(st.integers(3, TOKENIZER.vocab_size - 1), min_size=2, max_size=40)
# Start and length of the parts that replicas send; they may repeat or leave gaps.
SPANS = st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40)), max_size=8)


def answer(**fields: object) -> AnswerText:
    request = GenerationRequest(request_id="test", prompt=(5, 6, 7), **fields)
    hello = Hello("r", "e", "m", "", "float32", TOKENIZER.vocab_size, 64, 64, 16, [], {})
    prompt_ids = np.array([5, 6, 7], np.int32)
    detokenizer, scorer = DETOKENIZERS.new(), TokenScorer(DETOKENIZERS)
    return AnswerText(request, prompt_ids, SamplingParams(), hello, detokenizer, scorer, Mark(), {})


def take(text: AnswerText, index: int, token_ids: list[int], finish_reason: str | None = None):
    event = TokenDelta(1, index, token_ids, finish_reason)
    return text.take(event, text.new_ids(event))


@given(IDS)
def test_the_fast_path_gives_the_deltas_of_the_general_one(ids):
    fast, general = answer(), answer()
    assert fast.is_plain
    assert take(fast, 0, ids[:1]) == take(general, 0, ids[:1])
    for index, token_id in enumerate(ids[1:], start=1):
        delta = fast.next_token(TokenDelta(1, index, [token_id]))
        assert delta == take(general, index, [token_id])
    end = len(ids)
    assert take(fast, end, [], "length") == take(general, end, [], "length")
    assert fast.token_ids == general.token_ids == ids


@pytest.mark.parametrize(
    "event",
    [
        TokenDelta(1, 0, [9]),
        TokenDelta(1, 2, [9]),
        TokenDelta(1, 1, [9, 10]),
        TokenDelta(1, 1, []),
        TokenDelta(1, 1, [9], "stop"),
        TokenDelta(1, 1, [9], logprobs=[]),
    ],
)
def test_the_fast_path_takes_nothing_but_the_next_token(event):
    text = answer()
    take(text, 0, [8])
    assert text.next_token(event) is None and text.token_ids == [8]


def test_answers_with_stop_strings_are_not_plain():
    assert not answer(stop=("end",)).is_plain


@given(IDS, SPANS)
def test_repeated_tokens_are_dropped_and_missing_ones_found(ids, spans):
    text = answer()
    for start, length in [*spans, (0, len(ids))]:
        part, num_taken = ids[start : start + length], len(text.token_ids)
        event = TokenDelta(1, start, part)
        if start > num_taken:
            with pytest.raises(OutputGap, match=f"tokens {num_taken} to {start - 1} of the stream"):
                text.new_ids(event)
            continue
        new_ids = text.new_ids(event)
        if new_ids:
            text.take(event, new_ids)
        assert text.token_ids == ids[: max(num_taken, start + len(part))]
    assert text.prompt_ids().tolist() == [5, 6, 7, *ids]


@given(SPANS)
def test_each_prompt_position_is_kept_once(spans):
    num_tokens = 40
    parts = PromptParts(num_tokens)
    for first, length in [*spans, (0, num_tokens)]:
        start = first + 1
        positions = np.arange(start, min(start + length, num_tokens + 1), dtype=np.int32)
        part = PromptLogprobs(
            start, positions, positions, positions, positions[:, None], positions[:, None]
        )
        num_kept = sum(map(len, parts.parts))
        if start > num_kept + 1:
            with pytest.raises(OutputGap, match=f"prompt tokens {num_kept + 1} to {start - 1} are"):
                parts.take(part)
        else:
            parts.take(part)
        if not parts.is_complete:
            with pytest.raises(OutputGap, match=f"of {num_tokens} prompt tokens came before"):
                parts.check_complete()
    parts.check_complete()
    kept = np.concatenate([part.token_ids for part in parts.parts])
    assert kept.tolist() == list(range(1, num_tokens + 1))
