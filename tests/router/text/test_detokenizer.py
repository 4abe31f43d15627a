"""Incremental detokenising: any chunking gives the text of decoding all ids at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from quire.router.text.detokenizer import MAX_HELD_BYTE_TOKENS, DetokenizerFactory

SHARED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None
)
TEXTS = st.text(st.sampled_from("helo wrd,\n你好😀👩🏽‍🚀é\ufffd"), max_size=12)


@pytest.fixture(params=["byte_level", "byte_fallback", "metaspace"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def factory(tokenizer):
    return DetokenizerFactory(tokenizer)


def draw_ids(data, tokenizer):
    """Random ids mixed with the tokens of real text, and some beyond the vocabulary."""
    token = st.integers(0, tokenizer.get_vocab_size() + 1).map(lambda i: [i])
    low = st.integers(0, 258).map(lambda i: [i])  # where the bytes are
    text = TEXTS.map(lambda t: tokenizer.encode(t, add_special_tokens=False).ids)
    ids = [i for part in data.draw(st.lists(st.one_of(token, low, text), max_size=8)) for i in part]
    runs, byte_tokens = 0, {i for t, i in tokenizer.get_vocab().items() if t.startswith("<0x")}
    for token_id in ids:
        hidden = token_id >= tokenizer.get_vocab_size() or token_id in (0, 1, 2)
        runs = runs + 1 if token_id in byte_tokens else runs if hidden else 0
        assume(runs < MAX_HELD_BYTE_TOKENS)  # longer runs are another test
    return ids


def in_chunks(detokenizer, ids, sizes):
    text, position = [], 0
    for size in [*sizes, len(ids)]:
        text.append(detokenizer.feed(ids[position : position + size]))
        position += size
    return "".join(text), detokenizer.flush()


@SHARED
@given(st.data())
def test_any_chunking_equals_the_whole_decode(tokenizer, factory, data):
    ids, skip = draw_ids(data, tokenizer), data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=10))
    emitted, rest = in_chunks(factory.new(skip), ids, sizes)
    assert emitted + rest == tokenizer.decode(ids, skip_special_tokens=skip)
    assert emitted == in_chunks(factory.new(skip), ids, [1] * len(ids))[0]


@SHARED
@given(st.data())
def test_a_primed_stream_continues_the_prompts_text(tokenizer, factory, data):
    prompt = tokenizer.encode("hello wor", add_special_tokens=False).ids
    ids = draw_ids(data, tokenizer)
    emitted, rest = in_chunks(factory.new(True, prompt), ids, [2, 3])
    before = tokenizer.decode(prompt)
    assert emitted + rest == tokenizer.decode(prompt + ids)[len(before) :]


def test_an_emoji_over_several_tokens_is_held_back_until_it_is_complete(tokenizer, factory):
    ids = tokenizer.encode("😀 hello", add_special_tokens=False).ids
    if "😀" not in tokenizer.decode(ids):
        pytest.skip("the tokenizer does not know it")
    detokenizer = factory.new()
    pieces = [detokenizer.feed([token_id]) for token_id in ids] + [detokenizer.flush()]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces).strip() == "😀 hello"


def test_text_is_emitted_with_its_last_token(tokenizer, factory):
    detokenizer = factory.new()
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    assert detokenizer.feed(ids).strip() == "hello world" and detokenizer.flush() == ""


def test_flush_replaces_an_incomplete_character(byte_level, byte_fallback):
    for tokenizer, ids in (
        (byte_level, [byte_level.token_to_id(c) for c in "ðŁ"]),  # F0 9F
        (byte_fallback, [byte_fallback.token_to_id(t) for t in ("<0xF0>", "<0x9F>")]),
    ):
        detokenizer = DetokenizerFactory(tokenizer).new()
        assert detokenizer.feed(ids) == ""
        assert detokenizer.flush() == tokenizer.decode(ids) != ""
        assert detokenizer.flush() == ""


def test_endless_line_breaks_are_emitted(byte_fallback):
    newline, letter = byte_fallback.token_to_id("<0x0A>"), byte_fallback.token_to_id("a")
    detokenizer = DetokenizerFactory(byte_fallback).new()
    text = detokenizer.feed([letter]) + "".join(detokenizer.feed([newline]) for _ in range(100))
    assert len(text) >= 100 - MAX_HELD_BYTE_TOKENS
    assert text + detokenizer.flush() == "a" + "\n" * 100


def test_endless_invalid_bytes_take_linear_time(byte_level, byte_fallback):
    for tokenizer, token in ((byte_level, "ÿ"), (byte_fallback, "<0xFF>")):
        detokenizer = DetokenizerFactory(tokenizer).new()
        assert detokenizer.feed(tokenizer.encode("a", add_special_tokens=False).ids) == "a"
        start_s = time.process_time()
        text = "".join(detokenizer.feed([tokenizer.token_to_id(token)]) for _ in range(20_000))
        assert text + detokenizer.flush() == "\ufffd" * 20_000
        assert time.process_time() - start_s < 2.0  # quadratic: over half a minute
