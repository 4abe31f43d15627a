"""The checkpoint's tokenizer without transformers, and its thread pool."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from quire.protos.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from quire.protos.field_checks import utf8_len
from quire.router.text.tokenizer import INLINE_CHARS, AsyncTokenizer, TextTokenizer

TEXTS = st.text(st.sampled_from("helo wrd,\n你😀é<s>/"), max_size=40)


def save(tokenizer, folder, **config):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer(byte_fallback, tmp_path):
    return TextTokenizer.load(save(byte_fallback, tmp_path, bos_token="<s>", eos_token="</s>"))


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_ids_and_text_equal_transformers(family, config, request, tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = request.getfixturevalue(family)
    folder = save(backend, tmp_path, bos_token="<s>", eos_token="</s>", **config)
    ours = TextTokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    @given(TEXTS, st.booleans(), st.booleans())
    def compare(text, add_special_tokens, skip_special_tokens):
        ids = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens).tolist() == ids
        decoded = theirs.decode(ids, skip_special_tokens=skip_special_tokens)
        assert ours.decode(np.array(ids, np.int32), skip_special_tokens) == decoded

    compare()
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_chat_templates_text_gets_no_second_bos(tokenizer):
    assert tokenizer.encode("<s>hello", add_special_tokens=False).tolist()[:2] != [1, 1]
    assert tokenizer.encode("<s>hello").tolist()[:2] == [1, 1]
    assert tokenizer.encode("hello").dtype == np.int32


def test_special_tokens_may_be_objects_or_in_the_older_map_file(byte_level, tmp_path):
    save(byte_level, tmp_path, eos_token={"content": "</s>", "lstrip": False}, unk_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "no"}')
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_truncation_and_padding_of_the_file_are_off(byte_fallback, tmp_path):
    backend = Tokenizer.from_str(byte_fallback.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = TextTokenizer.load(save(backend, tmp_path))
    assert len(tokenizer.encode("hello " * 10)) == 12 and len(tokenizer.encode("a")) == 3


def test_a_post_processor_of_the_file_is_kept(byte_level, tmp_path):
    backend = Tokenizer.from_str(byte_level.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    ids = TextTokenizer.load(save(backend, tmp_path)).encode("hello").tolist()
    assert (ids[0], ids[-1]) == (0, 1)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"only tokenizer\.model.* without a fast version"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)


def test_detokenizers_come_from_the_tokenizer(tokenizer):
    prompt = tokenizer.encode("hello").tolist()
    ids = tokenizer.encode("world", add_special_tokens=False).tolist()
    assert tokenizer.detokenizer().feed(ids) == "world"
    assert tokenizer.detokenizer(prompt_ids=prompt).feed(ids) == " world"


def test_utf8_len_counts_bytes_and_names_a_lone_surrogate():
    assert utf8_len("aé你😀", "prompt") == 10
    with pytest.raises(InvalidRequest, match=r"stop is not valid Unicode.*character 1") as caught:
        utf8_len("a\ud800", "stop")
    assert caught.value.field == "stop"


def encode(tokenizer, text, **options):
    async def main():
        pool = AsyncTokenizer(tokenizer)
        try:
            return await pool.encode(text, max_model_len=100_000, **options)
        finally:
            pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("length", [1, INLINE_CHARS, INLINE_CHARS + 1, 20_000])
def test_inline_and_in_a_thread_give_the_same_ids(tokenizer, length):
    text = ("hello world " * length)[:length]
    assert encode(tokenizer, text).tolist() == tokenizer.encode(text).tolist()
    assert encode(tokenizer, text, add_special_tokens=False)[0] != 1


def test_a_text_that_cannot_fit_is_refused_by_its_bytes(tokenizer):
    async def main():
        pool = AsyncTokenizer(tokenizer)
        await pool.encode("é" * 64, max_model_len=8)
        with pytest.raises(ContextLengthExceeded, match="messages has 130 bytes; at most 128"):
            await pool.encode("é" * 65, max_model_len=8, field="messages")
        with pytest.raises(InvalidRequest, match="prompt is not valid Unicode"):
            await pool.encode("\udfff", max_model_len=8)
        pool.close()

    asyncio.run(main())


def test_waiting_texts_are_bounded_and_cancelled_ones_count_until_done(tokenizer, monkeypatch):
    gate = threading.Event()

    def slow(text, add_special_tokens=True, max_model_len=None, num_output=1):
        gate.wait(10)
        return np.zeros(1, np.int32)

    monkeypatch.setattr(tokenizer, "encode", slow)

    async def main():
        pool = AsyncTokenizer(tokenizer, num_threads=1, max_pending=2)
        text = "a" * (INLINE_CHARS + 1)
        tasks = [asyncio.create_task(pool.encode(text, max_model_len=100)) for _ in range(2)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match=r"2 prompts are waiting.*limit is 2"):
            await pool.encode(text, max_model_len=100)
        gate.set()
        assert (await tasks[1]).tolist() == [0]
        await asyncio.sleep(0.01)
        assert (await pool.encode(text, max_model_len=100)).tolist() == [0]
        pool.close()

    asyncio.run(main())


def test_the_event_loop_runs_on_while_a_long_text_is_encoded(byte_level, tmp_path):
    """A guard against `Tokenizer.encode`, which keeps the GIL for as long as it runs."""
    tokenizer = TextTokenizer.load(save(byte_level, tmp_path))
    text = "hello world this is some text " * 30_000

    async def main():
        pool = AsyncTokenizer(tokenizer)
        start_s = last_s = time.perf_counter()
        task = asyncio.create_task(pool.encode(text, max_model_len=1_000_000))
        longest_s = 0.0
        while not task.done():
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        pool.close()
        return last_s - start_s, longest_s, await task

    total_s, longest_s, ids = asyncio.run(main())
    assert tokenizer.decode(ids) == text
    assert longest_s < max(0.1, total_s / 2)


def test_bad_words_are_forbidden_at_the_start_and_after_a_space():
    from quire.replica.builtin_model import CHECKPOINT

    tokenizer = TextTokenizer.load(CHECKPOINT)
    ids = tokenizer.bad_word_ids((" quire", "."))
    assert all(ids) and len(set(ids)) == len(ids)
    texts = [tokenizer.decode(list(word)).strip() for word in ids]
    assert set(texts) == {"quire", "."}
    assert tokenizer.bad_word_ids(()) == ()
