"""The sequences of replies are the rendered conversation, encoded as a whole, whatever the texts are."""

from __future__ import annotations

import numpy as np
import pytest
from family_templates import LLAMA3, QWEN3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from quire.protos.errors import ContextLengthExceeded, InvalidRequest
from quire.replica.builtin_model import CHECKPOINT
from quire.router.question_types import Question
from quire.router.scoring import question_prompts
from quire.router.scoring.question_prompts import (
    MAX_REPLIES,
    QuestionPrompts,
    check_questions,
    common_len,
    encode_questions,
    framed_messages,
    make_frame,
    new_places,
)
from quire.router.text.chat_template import ChatTemplate, TemplateOptions
from quire.router.text.special_tokens import GUARD
from quire.router.text.tokenizer import TextTokenizer

PLAIN = TemplateOptions(add_generation_prompt=False)
TEXTS = st.lists(
    st.sampled_from(
        ["hello ", "world", "cats and dogs", "\n", " ", "é", "</s>", "<s", "|im_end|>", ">", "12"]
    ),
    min_size=1,
    max_size=12,
).map("".join)


def prompts_of(
    template: ChatTemplate, tokenizer: TextTokenizer, messages: list, questions: list[Question]
) -> QuestionPrompts:
    places = new_places()
    text = template.render(framed_messages(messages, places), PLAIN, special=tokenizer.special)
    eos = [tokenizer.special.id_of("</s>") or 2]
    frame = make_frame(text, places, eos, tokenizer, tokenizer.special)
    return encode_questions(frame, questions, tokenizer, 1 << 16)


@pytest.fixture(scope="module")
def tokenizers_of_each_kind(byte_level: Tokenizer, byte_fallback: Tokenizer) -> list[TextTokenizer]:
    made = []
    for backend in (byte_level, byte_fallback):
        copy = Tokenizer.from_str(backend.to_str())
        copy.add_special_tokens(
            [
                AddedToken(t, special=True, normalized=False)
                for t in ("<s>", "</s>", "<|im_end|>", "<|im_start|>")
            ]
        )
        made.append(TextTokenizer(copy, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert [tokenizer.cuts_at_words for tokenizer in made] == [True, False]
    return made


def test_a_sequence_is_the_whole_text_encoded_at_once(tokenizers_of_each_kind) -> None:
    @example("hello </s> world", "cats and dogs", ["hello", "world"], False)
    @settings(max_examples=30)
    @given(TEXTS, TEXTS, st.lists(TEXTS, min_size=2, max_size=4, unique=True), st.booleans())
    def check(state: str, question: str, replies: list[str], answers: bool) -> None:
        messages = [{"role": "user", "content": state * 20}]
        if answers:  # The question is a turn of its own.
            messages.append({"role": "assistant", "content": "hello"})
        for tokenizer in tokenizers_of_each_kind:
            for source in (
                QWEN3,
                "{% for m in messages %}[{{ m.role }}] {{ m.content }} </s>{% endfor %}",
            ):
                template = ChatTemplate(source)
                prompts = prompts_of(
                    template, tokenizer, messages, [Question(question, (*replies,))]
                )
                for i, reply in enumerate(replies):
                    whole = template.render(
                        framed_messages(messages, (question, reply)),
                        PLAIN,
                        special=tokenizer.special,
                    )
                    end = "</s>" if source != QWEN3 else "<|im_end|>"
                    until = whole[: whole.rindex(end)].removesuffix(" " if source != QWEN3 else "")
                    expected = tokenizer.special.encode(until.removesuffix(GUARD)).tolist()
                    assert prompts.prompt_ids(0, i).tolist()[:-1] == expected
                own = [prompts.prompt_ids(0, i) for i in range(len(replies))]
                assert prompts.questions[0].start == common_len(own) == prompts.shared_len
                assert prompts.max_len == max(map(len, own))

    check()


def test_the_conversation_is_encoded_once_and_each_token_counts_once() -> None:
    tokenizer = TextTokenizer.load(CHECKPOINT)
    template = ChatTemplate.load(CHECKPOINT)
    messages = [{"role": "user", "content": "The tide is in the harbour at night. " * 40}]
    questions = [
        Question("Is it late?", ("yes", "no")),
        Question("Where?", ("quay", "sea", "seaside")),
    ]
    prompts = prompts_of(template, tokenizer, messages, questions)
    sequences = [prompts.prompt_ids(q, i) for q, size in ((0, 2), (1, 3)) for i in range(size)]
    assert len(prompts.conversation_ids) > 0.7 * min(map(len, sequences))
    assert prompts.shared_len == common_len(sequences) >= len(prompts.conversation_ids)
    tree = {tuple(ids[:n].tolist()) for ids in sequences for n in range(1, len(ids) + 1)}
    within = prompts.num_tokens - len(tree)
    # Two of three replies to a question may have more in common than all three; this counts twice.
    assert 0 <= within <= 4
    assert all(ids[-1] == sequences[0][-1] for ids in sequences), "the end of the turn"


def test_a_template_that_changes_the_last_turns_is_refused() -> None:
    tokenizer = TextTokenizer.load(CHECKPOINT)
    for source in (
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}{{ messages[-2].content }}",
    ):
        with pytest.raises(InvalidRequest, match="does not write the last two turns as they are"):
            prompts_of(ChatTemplate(source), tokenizer, [], [Question("a", ("b", "c"))])


def test_texts_at_the_ends_may_be_stripped() -> None:
    """Llama 3's template strips each message; the placeholders have no white space to strip."""
    tokenizer = TextTokenizer.load(CHECKPOINT)
    template = ChatTemplate(LLAMA3, {"bos_token": ""})
    prompts = prompts_of(
        template, tokenizer, [{"role": "user", "content": " a "}], [Question("b?", ("c", "d"))]
    )
    text = tokenizer.decode(prompts.prompt_ids(0, 1), False)
    assert text.startswith("<|start_header_id|>user<|end_header_id|>\n\na \n\nb?<|eot_id|>")


def test_too_much_text_and_too_many_tokens_are_refused(monkeypatch) -> None:
    tokenizer, template = TextTokenizer.load(CHECKPOINT), ChatTemplate.load(CHECKPOINT)
    questions = [Question("hello " * 50, ("yes", "no"))] * 4
    ask = lambda: prompts_of(template, tokenizer, [{"role": "user", "content": "x"}], questions)  # noqa: E731
    num_tokens = sum(len(ask().prompt_ids(q, i)) for q in range(4) for i in range(2))
    monkeypatch.setattr(question_prompts, "MAX_SCORED_TOKENS", num_tokens)
    ask()
    monkeypatch.setattr(question_prompts, "MAX_SCORED_TOKENS", num_tokens - 1)
    with pytest.raises(
        ContextLengthExceeded, match=f"at most {num_tokens - 1} tokens.* {num_tokens}$"
    ):
        ask()
    monkeypatch.setattr(question_prompts, "MAX_ENCODED_CHARS", 400)
    with pytest.raises(
        ContextLengthExceeded, match="at most 400 characters to encode, got 760 in the first 2"
    ):
        ask()


@pytest.mark.parametrize(
    ("questions", "field", "message"),
    [
        ([], "questions", "at least 1 question, got 0"),
        ([("a", "b")] * 401, "questions", "at most 400 questions, got 401"),
        (
            [tuple(map(str, range(MAX_REPLIES)))] * 17,
            "questions",
            "at most 4096 allowed answers in all, got 4335",
        ),
        (
            [("a", "b"), tuple(map(str, range(256)))],
            "questions[1]",
            "at most 255 allowed answers, got 256",
        ),
        ([("a", "a")], "questions[0]", "differ"),
        ([("a", "")], "questions[0]", "not empty"),
    ],
)
def test_bounds_name_the_question(questions, field, message) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_questions([Question("q", replies) for replies in questions])
    assert caught.value.field == field


def test_the_common_length_is_that_of_the_shortest_agreement() -> None:
    ids = np.arange(6, dtype=np.int32)
    assert common_len([ids]) == 6
    assert common_len([ids, ids[:4], np.array([0, 1, 9], np.int32)]) == 2
    assert common_len([ids, ids[1:]]) == 0
