"""The embedded checkpoint loads, speaks, stops, and is what its scripts say it is."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from quire.replica.builtin_model import CHECKPOINT
from tests.replica.builtin_model import corpus, dialogues, train

MAX_BYTES = 6 * 1024 * 1024
CORPUS_DIGEST = "02904b036ba21414d91765de310343e81ec235e05be7648dca34d8b3ae3b26b4"

PLAIN_PROMPTS = (
    "Once upon a time",
    "A quire is",
    "There was once a small owl who",
    "The Lighthouse\n\nAt the edge of",
    "Dear Mara,",
    "Nobody went to the old library any more.",
)
CHAT_PROMPTS = (
    "Tell me a story about a lighthouse.",
    "Tell me a story about a dragon.",
    "Who are you?",
    "What is a quire?",
    "Hello!",
    "What is the capital of France?",
    "Count to seven.",
    "Write a poem.",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def corpus_words() -> set[str]:
    """Words that occur at least three times outside the users' turns: no random letters."""
    text = "".join(islice(corpus.documents(0), 4000))
    text = re.sub(r"<\|im_start\|>user\n.*?<\|im_end\|>", "", text, flags=re.DOTALL)
    return {word for word, count in Counter(words(text)).items() if count >= 3}


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", re.sub(r"<\|\w+\|>", " ", text))


def chat(tokenizer, *contents: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def complete(model, tokenizer, prompts: list[str], **options) -> list[list[int]]:
    """New token ids of each prompt, up to and with the first end token."""
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=300, **options)[:, batch.input_ids.shape[1] :]
    ends = set(model.generation_config.eos_token_id)
    rows = []
    for row in out.tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        rows.append(row if stop is None else row[: stop + 1])
    return rows


def test_the_checkpoint_is_a_small_llama_with_grouped_queries(model):
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= MAX_BYTES
    config = model.config
    assert config.model_type == "llama"
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings == 4096
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_generation_defaults_stop_at_both_end_tokens(model, tokenizer):
    defaults = model.generation_config
    ends = tokenizer.convert_tokens_to_ids([corpus.TURN_END, corpus.END_OF_TEXT])
    assert defaults.eos_token_id == ends
    assert (defaults.do_sample, defaults.temperature, defaults.top_p) == (True, 0.7, 0.9)


@pytest.mark.parametrize(
    ("options", "most_strange_words"),
    [({"do_sample": False, "temperature": None, "top_p": None}, 0), ({}, 0.02)],
    ids=["greedy", "temperature 0.7"],
)
def test_it_ends_by_itself_and_stays_in_its_vocabulary(
    model, tokenizer, corpus_words, options, most_strange_words
):
    torch.manual_seed(0)
    prompts = [*PLAIN_PROMPTS, *(chat(tokenizer, text) for text in CHAT_PROMPTS)]
    rows = complete(model, tokenizer, prompts, **options)
    spoken: list[str] = []
    turn_end, text_end = model.generation_config.eos_token_id
    for prompt, row in zip(prompts, rows, strict=True):
        is_chat = corpus.TURN_START in prompt
        text = ("" if is_chat else prompt) + tokenizer.decode(row)
        assert row[-1] == (turn_end if is_chat else text_end), text
        spoken += words(text)
    strange = [word for word in spoken if word not in corpus_words]
    assert len(strange) <= most_strange_words * len(spoken), strange


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (dialogues.facts, 0.9),
        (dialogues.questions, 0.9),
        (dialogues.identity, 0.9),
        (dialogues.farewell, 0.9),
        (dialogues.how_many, 0.5),
        (dialogues.naming, 0.5),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_greedy_answers_are_those_of_the_corpus(model, tokenizer, kind, least):
    turns = [kind(Random(f"held out {i}"))[0] for i in range(16)]
    prompts = [chat(tokenizer, question) for question, _ in turns]
    rows = complete(model, tokenizer, prompts, do_sample=False, temperature=None, top_p=None)
    answers = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    right = [answer == turn[1] for answer, turn in zip(answers, turns, strict=True)]
    assert sum(right) >= least * len(turns), list(zip(turns, answers, strict=True))


def test_probabilities_are_peaked_on_held_out_text(model, tokenizer):
    recipe = train.Recipe()
    result = train.evaluate(model, tokenizer.backend_tokenizer, recipe.held_out_seed, 60)
    assert result.mean_max_probability > 0.6
    assert result.loss < 0.6


@torch.no_grad()
def test_the_last_positions_are_predicted_as_well_as_the_first(model, tokenizer):
    recipe = train.Recipe(seed=train.Recipe().held_out_seed, batch_shapes=((1, 4096),))
    (row,) = islice(train.packed_rows(recipe, tokenizer.backend_tokenizer), 1)
    losses, _ = train.token_losses(model, row)
    assert losses[-1024:].mean() < 1.5 * losses[:1024].mean()


def test_the_chat_template_renders_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "You are Quire."},
        {"role": "user", "content": "  Hello — é 🐦\n"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "{{ 1 }}"},
    ]
    expected = (
        "<|im_start|>system\nYou are Quire.<|im_end|>\n"
        "<|im_start|>user\n  Hello — é 🐦\n<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n"
        "<|im_start|>user\n{{ 1 }}<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert corpus.render_chat(messages) == expected
    with_prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert with_prompt == expected + "<|im_start|>assistant\n"


@given(text=st.text())
def test_every_text_round_trips_through_the_tokenizer(tokenizer, text):
    backend = tokenizer.backend_tokenizer
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token_and_characters_span_tokens(tokenizer):
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokenizer.get_vocab())
    for face in ("🐦", "🎶", "語"):
        pieces = tokenizer(face).input_ids
        assert len(pieces) > 1
        assert tokenizer.decode(pieces[:-1]).endswith("\ufffd")
        assert tokenizer.decode(pieces) == face


def test_the_corpus_is_the_same_on_every_machine():
    assert corpus.digest(seed=0, count=1000) == CORPUS_DIGEST
    assert corpus.digest(seed=1, count=1000) != CORPUS_DIGEST
    assert list(islice(corpus.documents(3, first=7), 2)) == [
        corpus.document(3, 7),
        corpus.document(3, 8),
    ]


def test_documents_end_once_and_turns_are_balanced(tokenizer):
    for text in islice(corpus.documents(11), 300):
        assert text.count(corpus.END_OF_TEXT) == 1
        assert text.endswith(corpus.END_OF_TEXT)
        assert text.count(corpus.TURN_START) == text.count(corpus.TURN_END)
        assert len(tokenizer(text).input_ids) < train.MAX_POSITION


def test_the_committed_tokenizer_is_what_the_script_makes(tmp_path):
    train.save_tokenizer(train.train_tokenizer(train.Recipe()), tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (CHECKPOINT / file.name).read_bytes(), file.name


def test_a_short_training_is_deterministic_and_lowers_the_loss(tmp_path):
    recipe = train.Recipe(
        steps=20, vocab_size=400, tokenizer_documents=100, warmup_steps=5, batch_shapes=((4, 96),)
    )
    runs = []
    for name in ("first", "second"):
        tokenizer = train.train_tokenizer(recipe)
        trained, losses = train.train_model(recipe, tokenizer, progress=False)
        train.save(trained, tokenizer, tmp_path / name)
        runs.append(losses)
    assert runs[0] == runs[1]
    assert sum(runs[0][-5:]) < 0.9 * sum(runs[0][:5])
    assert train.differences(tmp_path / "first", tmp_path / "second") == []
    assert train.differences(tmp_path / "first", CHECKPOINT) == [
        "tokenizer.json",
        "model.safetensors",
    ]
