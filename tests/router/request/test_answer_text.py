"""The text of an answer: the fast path equals the general one, gaps are found, repeated output is dropped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Facts, Hello, PromptLogprobs, TokenDelta
from quire.replica.builtin_model import CHECKPOINT
from quire.router.chat.family import load_families
from quire.router.chat.reply_parser import ReplyParser, load_template
from quire.router.request.answer_text import AnswerText
from quire.router.request.resume import checksum_of
from quire.router.request.token_scores import PromptParts, TokenScorer
from quire.router.text.detokenizer import DetokenizerFactory
from quire.router.text.tokenizer import TextTokenizer
from quire.router.tool_types import ToolCall
from quire.router.transport.transport import OutputGap
from quire.router.types import GenerationRequest, Mark, Origin, OutputDelta, ResumePoint

TOKENIZER = TextTokenizer.load(CHECKPOINT)
DETOKENIZERS = DetokenizerFactory(TOKENIZER.backend)
IDS = st.lists(st.integers(3, TOKENIZER.vocab_size - 1), min_size=2, max_size=40)
# Numbers of tokens of the deltas of an answer.
SPLITS = st.lists(st.integers(1, 5), min_size=1, max_size=8)
# Start and length of the parts that replicas send; they may repeat or leave gaps.
SPANS = st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40)), max_size=8)


def answer(
    parser: ReplyParser | None = None, mark: Mark | None = None, **fields: object
) -> AnswerText:
    mark = mark or Mark()
    if mark.num_tokens:
        fields["resume_from"] = ResumePoint(Origin(0, b"", "", 0), (mark,), "resume_from")
    request = GenerationRequest(request_id="test", prompt=(5, 6, 7), **fields)
    hello = Hello("r", "e", "m", "", "float32", TOKENIZER.vocab_size, 64, 64, 16, [], {})
    prompt_ids = np.array([5, 6, 7], np.int32)
    detokenizer, scorer = DETOKENIZERS.new(), TokenScorer(DETOKENIZERS)
    return AnswerText(
        request, prompt_ids, SamplingParams(), hello, detokenizer, scorer, mark, {}, parser
    )


def parts_of(ids: list[int], splits: list[int], start: int = 0) -> Iterator[tuple[int, list[int]]]:
    """The ids from `start` on, cut into deltas of these lengths; the last length goes on to the end."""
    for size in itertools.chain(splits, itertools.repeat(splits[-1])):
        if start >= len(ids):
            return
        yield start, ids[start : start + size]
        start += size


def take(text: AnswerText, index: int, token_ids: list[int], finish_reason: str | None = None):
    event = TokenDelta(1, index, token_ids, Facts(finish_reason))
    return text.take(event, text.new_ids(event))


@given(IDS, SPLITS)
def test_the_fast_path_gives_the_deltas_of_the_general_one(ids, splits):
    fast, general = answer(), answer()
    assert fast.is_plain
    assert take(fast, 0, ids[:1]) == take(general, 0, ids[:1])
    for index, token_ids in parts_of(ids, splits, start=1):
        delta = fast.next_tokens(TokenDelta(1, index, token_ids))
        assert delta == take(general, index, token_ids)
    end = len(ids)
    assert take(fast, end, [], "length") == take(general, end, [], "length")
    assert fast.token_ids == general.token_ids == ids


@pytest.mark.parametrize(
    "event",
    [
        TokenDelta(1, 0, [9]),
        TokenDelta(1, 2, [9]),
        TokenDelta(1, 0, [8, 9]),
        TokenDelta(1, 1, []),
        TokenDelta(1, 1, [9], Facts("stop")),
        TokenDelta(1, 1, [9], Facts(logprobs=[])),
    ],
)
def test_the_fast_path_takes_nothing_but_the_next_tokens(event):
    text = answer()
    take(text, 0, [8])
    assert text.next_tokens(event) is None and text.token_ids == [8]


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
    parts = PromptParts(1, num_tokens)
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


# ------------------------------------------------------------------------------------------------
# Answers with regions
# ------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ä😀"}}\n</tool_call>'
REPLY = f"<think>\nWhy not.\n</think>\n\nI look it up.\n{CALL}\n{CALL}"
REPLY_IDS = TOKENIZER.backend.encode(REPLY, add_special_tokens=False).ids
QWEN3 = load_template(next(one for one in load_families() if one.name == "qwen3").response_template)


def parser(max_calls: int | None = None) -> ReplyParser:
    return ReplyParser(QWEN3, "", [], str, (), max_calls)


def deltas_of(text: AnswerText, size: int = 1) -> list[OutputDelta]:
    """Feed the reply in deltas of some tokens, then the end."""
    found = []
    for start in range(0, len(REPLY_IDS), size):
        delta = take(text, start, REPLY_IDS[start : start + size])
        found += [] if delta is None else [delta]
        if delta is not None and delta.finish_reason is not None:
            return found
    return [*found, take(text, len(REPLY_IDS), [], "length")]


def test_regions_become_fields_of_deltas():
    for size in (1, 3, 7, 1000):
        text = answer(parser())
        assert not text.is_plain
        deltas = deltas_of(text, size)
        assert "".join(delta.reasoning for delta in deltas) == "Why not."
        assert "".join(delta.text for delta in deltas) == "I look it up."
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert calls == [ToolCall(i, str(i), "f", '{"a":"ä😀"}') for i in range(2)]
        assert deltas[-1].finish_reason == "length"
        # From the token that completes the first mark to the one that completes the second.
        texts = [TOKENIZER.backend.decode(REPLY_IDS[:i]) for i in range(len(REPLY_IDS))]
        begin, end = (
            next(i for i, t in enumerate(texts) if m in t) for m in ("<think>", "</think>")
        )
        assert text.num_reasoning_tokens == end - begin + 1


def test_an_answer_with_calls_that_stopped_has_its_own_finish_reason():
    text = answer(parser())
    deltas_of(text)
    event = TokenDelta(1, len(REPLY_IDS), [], Facts("stop"))
    assert text.take(event, []).finish_reason == "tool_calls"


def test_the_answer_ends_after_the_last_call_that_it_may_have():
    for size in (1, 5, 1000):
        text = answer(parser(max_calls=1))
        deltas = deltas_of(text, size)
        assert [call.index for delta in deltas for call in delta.tool_calls] == [0]
        assert deltas[-1].finish_reason == "tool_calls"
        assert TOKENIZER.backend.decode(text.token_ids).endswith("</tool_call>")
        assert text.token_ids == REPLY_IDS[: len(text.token_ids)] != REPLY_IDS


def test_a_resumed_answer_has_the_same_deltas_after_any_token():
    whole = deltas_of(answer(parser()))
    for num_known in range(1, len(REPLY_IDS)):
        mark = Mark(num_known, checksum_of(REPLY_IDS[:num_known]))
        for size in (1, 4):
            rest = deltas_of(answer(parser(), mark), size)
            after = whole[num_known:]
            for name in ("text", "reasoning"):
                parts = [
                    "".join(getattr(delta, name) for delta in deltas) for deltas in (rest, after)
                ]
                assert parts[0] == parts[1]
            for name in ("tool_calls", "token_ids"):
                parts = [
                    [x for delta in deltas for x in getattr(delta, name)]
                    for deltas in (rest, after)
                ]
                assert parts[0] == parts[1]


def test_stop_strings_apply_to_content_only():
    text = answer(parser(), stop=("not", "name", "it"))
    deltas = deltas_of(text)
    assert deltas[-1].stop_reason == "it" and deltas[-1].finish_reason == "stop"
    assert "".join(delta.reasoning for delta in deltas) == "Why not."
    assert "".join(delta.text for delta in deltas) == "I look "
