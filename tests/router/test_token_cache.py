"""Ids put together from remembered pieces are those of the whole text, whatever the text."""

from __future__ import annotations

import asyncio
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from quire.replica.embedded import CHECKPOINT
from quire.router.token_cache import MAX_PIECES, TokenCache, piece_pattern, split
from quire.router.tokenizer import INLINE_CHARS, AsyncTokenizer, TextTokenizer

EMBEDDED = TextTokenizer.load(CHECKPOINT)
SPECIAL = sorted(
    t.content for t in EMBEDDED.backend.get_added_tokens_decoder().values() if t.content
)
# What looks like a special token, what is cut in the middle of one, and what is nested or repeated.
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
    """Warm and cold, in a cache too small for all of them, several at a time."""

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


def test_of_the_next_turn_only_what_is_new_is_encoded(monkeypatch):
    encoded: list[str] = []
    encode_pieces = EMBEDDED.encode_pieces

    def record(pieces):
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


def test_short_texts_and_whole_prompts_do_not_fill_the_cache():
    tokenizer = AsyncTokenizer(EMBEDDED)
    encode(tokenizer, "x" * INLINE_CHARS)
    asyncio.run(tokenizer.encode("word " * 500, True, max_model_len=10**6))
    assert len(tokenizer.cache) == 0
    tokenizer.close()


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
