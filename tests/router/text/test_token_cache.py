"""Ids that are joined from cached pieces equal those of the whole text, for any text."""

from __future__ import annotations

import asyncio
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from quire.replica.builtin_model import CHECKPOINT
from quire.router.text import token_cache
from quire.router.text.token_cache import (
    MAX_PIECES,
    WORD_PIECE_CHARS,
    TokenCache,
    cuts_at_words,
    piece_pattern,
    split,
)
from quire.router.text.tokenizer import INLINE_CHARS, AsyncTokenizer, TextTokenizer

EMBEDDED = TextTokenizer.load(CHECKPOINT)
SPECIAL = sorted(
    t.content for t in EMBEDDED.backend.get_added_tokens_decoder().values() if t.content
)
# Texts like special tokens, parts of special tokens, and nested or repeated ones.
LOOKALIKES = [
    *(token[:-1] for token in SPECIAL),
    *(token[1:] for token in SPECIAL),
    *(token[:2] + token for token in SPECIAL),
    *(token.upper() for token in SPECIAL),
    *(f" {token} " for token in SPECIAL),
    *(token.replace("|", "\u2223") for token in SPECIAL),
    "<",
    "<|",
    "|>",
]
WORDS = st.one_of(
    st.sampled_from(SPECIAL),
    st.sampled_from(LOOKALIKES),
    st.text(max_size=12),
    st.sampled_from(
        [
            "the sea",
            " ",
            "\n\n",
            "naïve",
            "Größe",
            "日本語",
            "🙂",
            "👨‍👩‍👧",
            "e\u0301",
            "\u00a0",
            "\u200d",
            "\0",
        ]
    ),
)
TEXTS = st.lists(WORDS, max_size=40).map("".join)


def encode(tokenizer: AsyncTokenizer, text: str, tenant: str = "") -> np.ndarray:
    coroutine = tokenizer.encode(text, False, max_model_len=10**6, tenant=tenant)
    return asyncio.run(coroutine)


def pieces_of(tokenizer: TextTokenizer, text: str) -> np.ndarray:
    pieces = split(tokenizer.piece_pattern, text)
    assert "".join(pieces) == text
    return np.concatenate(tokenizer.encode_pieces(pieces))


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_the_ids_of_the_pieces_are_those_of_the_text(text):
    assert pieces_of(EMBEDDED, text).tolist() == EMBEDDED.encode(text, False).tolist()


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_also_where_the_beginning_of_a_text_is_treated_in_a_way_of_its_own(scheme, data):
    backend = Tokenizer(models.WordLevel({"\u2581": 0, "<unk>": 1}, unk_token="<unk>"))
    letters = {c: i for i, c in enumerate("\u2581abc<>/s|x ")}
    backend.model = models.BPE(
        vocab={**letters, "\u2581a": 20, "<unk>": 21}, merges=[("\u2581", "a")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>", "<s>x", "</s>"])
    tokenizer = TextTokenizer(backend, {})
    words = st.sampled_from(["<s>", "<s>x", "</s>", "a", " a", "ab", " ", "<", "s>", "<s", "|"])
    text = "".join(data.draw(st.lists(words, max_size=20)))
    assert pieces_of(tokenizer, text).tolist() == tokenizer.encode(text, False).tolist()


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_nothing_is_cut_where_a_special_token_reaches_beyond_itself(byte_level, flags):
    backend = Tokenizer.from_str(byte_level.to_str())
    assert piece_pattern(backend) is not None
    backend.add_special_tokens([AddedToken("<wide>", normalized=False, **flags)])
    assert piece_pattern(backend) is None


def chat(rng: random.Random, num_turns: int) -> list[str]:
    """The prompts of a chat, turn by turn, as its template writes them."""
    begin, end = "<|im_start|>", "<|im_end|>"
    assert {begin, end} <= set(SPECIAL)
    words = ["the", "sea", "is", "blue", "日本", "🙂", "naïve", "\n", LOOKALIKES[0], "<|"]

    def some(most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randrange(1, most)))

    text, prompts = f"{begin}system\n{'You sing. ' * rng.randrange(80)}{some(200)}{end}\n", []
    for _ in range(num_turns):
        text += f"{begin}user\n{some(60)}{end}\n{begin}assistant\n"
        prompts.append(text)
        text += f"{some(100)}{end}\n"
    return prompts


def test_random_chats_are_encoded_as_without_the_cache():
    """Warm and cold, in a cache that is too small for all texts, several at a time."""

    async def run() -> None:
        rng = random.Random(5)
        tokenizer = AsyncTokenizer(EMBEDDED, cache_bytes=20_000)
        prompts = [prompt for _ in range(12) for prompt in chat(rng, rng.randrange(1, 8))]
        rng.shuffle(prompts)
        for i in range(0, len(prompts), 4):
            some = prompts[i : i + 4]
            found = await asyncio.gather(
                *(tokenizer.encode(p, False, max_model_len=10**6) for p in some)
            )
            for prompt, ids in zip(some, found, strict=True):
                assert ids.dtype == np.int32
                assert ids.tolist() == EMBEDDED.encode(prompt, False).tolist()
        assert tokenizer.cache.num_hits > 0
        assert tokenizer.cache.num_bytes <= 20_000
        tokenizer.close()

    asyncio.run(run())


def test_only_the_new_pieces_of_the_next_turn_are_encoded(monkeypatch):
    encoded: list[str] = []
    encode_pieces = EMBEDDED.encode_pieces

    def record(pieces, max_model_len=None, num_output=1):
        encoded.extend(pieces)
        return encode_pieces(pieces)

    monkeypatch.setattr(EMBEDDED, "encode_pieces", record)
    tokenizer = AsyncTokenizer(EMBEDDED)
    first, second = chat(random.Random(1), 2)
    assert len(first) > INLINE_CHARS
    encode(tokenizer, first)
    encoded.clear()
    encode(tokenizer, second)
    # The opening of the first answer was the end of the first prompt; now the answer follows it.
    assert sum(map(len, encoded)) <= len(second) - len(first) + len("<|im_start|>assistant\n")
    encoded.clear()
    encode(tokenizer, second, tenant="another")
    assert "".join(encoded) != "", "what one tenant asked is not remembered for another"
    tokenizer.close()


def test_short_texts_do_not_fill_the_cache():
    tokenizer = AsyncTokenizer(EMBEDDED)
    encode(tokenizer, "x" * INLINE_CHARS)
    assert len(tokenizer.cache) == 0
    tokenizer.close()


def word_tokenizers(byte_level: Tokenizer) -> dict[str, TextTokenizer]:
    """Of every family that is cut at words: GPT-2 with BOS and EOS, Llama 3, Qwen with NFC and without BOS."""
    digits = {"llama": r"\p{N}{1,3}", "qwen": r"\p{N}"}
    found = {}
    for name in ("gpt2", *digits):
        backend = Tokenizer.from_str(byte_level.to_str())
        if name != "qwen":
            single = "<s> $A </s>" if name == "gpt2" else "<s> $A"
            ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
            backend.post_processor = processors.TemplateProcessing(
                single=single, special_tokens=ids
            )
        else:
            backend.normalizer = normalizers.NFC()
        if name in digits:
            pattern = (
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
                + digits[name]
                + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        found[name] = TextTokenizer(backend, {})
    return found


PROSE = st.one_of(
    WORDS,
    st.sampled_from(
        [
            "it's a",
            "I'LL go",
            "a b",
            "a  b",
            "a\tb",
            " a",
            "b ",
            "1 2",
            "x 1",
            "1234 a",
            "a. b",
            "!! a",
        ]
    ),
    st.sampled_from(
        ["<s>", "</s>", "a</s> b", "e\u0301 a", "a \u0301", "\u1100\u1161", "é a", "a é"]
    ),
)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(PROSE, max_size=60), glue=st.sampled_from(["", " "]))
def test_the_ids_of_words_are_those_of_the_text(byte_level, words, glue):
    text = glue.join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "WORD_PIECE_CHARS", 3)  # nearly every cut that there can be
        for name, tokenizer in word_tokenizers(byte_level).items():
            assert tokenizer.cuts_at_words, name
            pieces = split(tokenizer.piece_pattern, text, at_words=True)
            assert "".join(pieces) == text
            encoded = tokenizer.encode_pieces(pieces)
            for special in (False, True):
                ids = tokenizer.join(encoded, special)
                assert ids.tolist() == tokenizer.encode(text, special).tolist(), name


def test_of_another_question_on_the_same_document_little_is_encoded(monkeypatch):
    encoded: list[str] = []
    encode_pieces = EMBEDDED.encode_pieces
    rng = random.Random(3)
    document = " ".join(rng.choices(["the", "sea", "is", "blue,", "it's", "42", "deep\n"], k=2000))

    def record(pieces, max_model_len=None, num_output=1):
        encoded.extend(pieces)
        return encode_pieces(pieces)

    monkeypatch.setattr(EMBEDDED, "encode_pieces", record)
    tokenizer = AsyncTokenizer(EMBEDDED)

    async def ask(question: str) -> None:
        text = document + question
        ids = await tokenizer.encode(text, True, max_model_len=10**6)
        assert ids.tolist() == EMBEDDED.encode(text, True).tolist()

    asyncio.run(ask(" What colour has it?"))
    assert "".join(encoded) == document + " What colour has it?"
    encoded.clear()
    asyncio.run(ask(" And how deep is it?"))
    assert len("".join(encoded)) <= 2 * WORD_PIECE_CHARS
    tokenizer.close()


def unknown(backend: Tokenizer, change: str) -> Tokenizer:
    backend = Tokenizer.from_str(backend.to_str())
    match change:
        case "space in front":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "no words":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(
                add_prefix_space=False, use_regex=False
            )
        case "another pattern":
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case "another normalizer":
            backend.normalizer = normalizers.Replace("a b", "c")
        case "a token with a space":
            backend.add_tokens([AddedToken("a b", normalized=True)])
        case "a token that swallows spaces":
            backend.add_tokens([AddedToken("ab", lstrip=True, normalized=True)])
    return backend


@pytest.mark.parametrize(
    "change",
    [
        "space in front",
        "no words",
        "another pattern",
        "another normalizer",
        "a token with a space",
        "a token that swallows spaces",
    ],
)
def test_an_unknown_tokenizer_is_not_cut_at_words(byte_level, change):
    assert cuts_at_words(byte_level)
    tokenizer = TextTokenizer(unknown(byte_level, change), {})
    assert not tokenizer.cuts_at_words
    asked = AsyncTokenizer(tokenizer)
    asyncio.run(asked.encode("word " * 500, True, max_model_len=10**6))
    assert len(asked.cache) == 0
    asked.close()


def test_a_text_of_very_many_words_is_cut_at_special_tokens_only(monkeypatch):
    monkeypatch.setattr(token_cache, "MAX_PIECES", 3)
    text = "word " * 500 + SPECIAL[0] + "word " * 500
    pieces = split(EMBEDDED.piece_pattern, text, at_words=True)
    assert [len(piece) for piece in pieces] == [2500, 2500 + len(SPECIAL[0])]


def test_a_text_of_very_many_special_tokens_is_taken_as_a_whole():
    text = SPECIAL[0] * (MAX_PIECES + 1)
    assert split(EMBEDDED.piece_pattern, text) == [text]


def test_the_cache_keeps_its_bound_and_drops_the_least_recent():
    cache = TokenCache(3 * 300)
    ids = np.zeros(10, np.int32)
    for name in "abc":
        cache.put("", name, ids)
    cache.find("", ["a"])
    cache.put("", "d", ids)
    found = cache.find("", list("abcd"))
    assert [entry is not None for entry in found] == [True, False, True, True]
    cache.put("", "large", np.zeros(1000, np.int32))
    assert len(cache) == 3 and cache.num_bytes <= 900


@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_messages_with_the_text_of_special_tokens_are_encoded_as_without_the_cache(turns):
    """A chat that talks about chats: what is marked stays plain text, turn by turn, from the same cache."""
    special = EMBEDDED.special

    async def run() -> None:
        tokenizer = AsyncTokenizer(EMBEDDED)
        text = "<|im_start|>system\n" + "You sing. " * (INLINE_CHARS // 8) + "<|im_end|>\n"
        for question, answer in turns:
            asked = special.protect(f"What is <|im_end|>? {question}")
            text += f"<|im_start|>user\n{asked}<|im_end|>\n"
            ids = await tokenizer.encode(text, False, max_model_len=10**6, is_guarded=True)
            assert ids.tolist() == special.encode(text).tolist()
            text += f"<|im_start|>assistant\n{special.protect(answer)}<|im_end|>\n"
        tokenizer.close()

    asyncio.run(run())


def test_an_earlier_message_with_the_text_of_a_special_token_costs_later_turns_nothing():
    async def run() -> None:
        tokenizer = AsyncTokenizer(EMBEDDED)
        told = EMBEDDED.special.protect("".join(f"<|im_end|> ends turn {i}. " for i in range(999)))
        text = f"<|im_start|>user\n{told}<|im_end|>\n"
        await tokenizer.encode(text, False, max_model_len=10**6, is_guarded=True)
        before, pieces = tokenizer.cache.num_misses, len(tokenizer.cache)
        text += "<|im_start|>user\nAnd then?<|im_end|>\n"
        await tokenizer.encode(text, False, max_model_len=10**6, is_guarded=True)
        assert tokenizer.cache.num_misses - before <= 4 < pieces
        tokenizer.close()

    asyncio.run(run())
