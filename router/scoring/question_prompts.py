"""The token sequences of the replies to questions about one conversation.

The chat template is rendered once, with placeholders for a question and a reply:

    <|im_start|>user\\nSTATE\\n\\nQUESTION<|im_end|>\\n<|im_start|>assistant\\nREPLY<|im_end|>\\n
    └──────── before ────────┘        └────────── between ──────────┘     └ end ┘

A sequence is the text up to a reply's end, encoded as a whole, and the token with which the model ends a turn. So no
sequence of a question is the beginning of another one, and a reply's score is the probability that it is the whole
answer. It counts the tokens after those that all sequences of the question have in common: the common tokens would
change all scores by the same amount.

All sequences share the tokens of the conversation. Only texts after the last place where the tokenizer allows a cut
(`text/token_cache.py`) are encoded again for each question and reply.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.protos.errors import ContextLengthExceeded, InvalidRequest
from quire.protos.field_checks import at_most
from quire.router.question_types import Question
from quire.router.text.special_tokens import GUARD, SpecialTokens
from quire.router.text.token_cache import split
from quire.router.text.tokenizer import MAX_BYTES_PER_TOKEN, TextTokenizer

MAX_QUESTIONS = 400  # OpenAI's bound
MAX_REPLIES = 255  # of a question; OpenAI's bound of choices
MAX_REPLIES_IN_ALL = 4096
# Tokens of all sequences together. Each sequence is sent to a replica as a whole.
MAX_SCORED_TOKENS = 16 * 1024**2
# Characters to encode in all. A tokenizer takes 0.2 to 0.5 us for each.
MAX_ENCODED_CHARS = 4 * 1024**2

_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """A rendered conversation with places for a question and a reply.

    Attributes
    ----------
    before
        The text up to the question.
    between
        The text between a question and a reply.
    end_id
        The token that ends the assistant's turn; None: the checkpoint has none.
    special
        Protects the texts of questions and replies; None: no protection.
    """

    before: str
    between: str
    end_id: int | None
    special: SpecialTokens | None

    def protected(self, text: str) -> str:
        """Return a text in which no special token counts."""
        return text if self.special is None else self.special.protect(text)


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """The sequences of the replies to one question.

    Attributes
    ----------
    ids
        For each reply [tokens] int32: the tokens after the conversation's.
    start
        Number of leading tokens, the conversation's included, that all sequences have in common.
    """

    ids: list[np.ndarray]
    start: int


@dataclass(frozen=True, slots=True)
class QuestionPrompts:
    """The sequences of all questions.

    Attributes
    ----------
    conversation_ids
        [tokens] int32: the first tokens of each sequence.
    """

    conversation_ids: np.ndarray
    questions: list[ReplyTokens]

    def prompt_ids(self, question: int, reply: int) -> np.ndarray:
        """Return a whole sequence, [tokens] int32."""
        return np.concatenate([self.conversation_ids, self.questions[question].ids[reply]])

    @property
    def max_len(self) -> int:
        """Number of tokens of the longest sequence."""
        return len(self.conversation_ids) + max(
            len(ids) for question in self.questions for ids in question.ids
        )

    @property
    def shared_len(self) -> int:
        """Number of leading tokens that all sequences have in common."""
        firsts = [question.ids[0] for question in self.questions]
        common = len(self.conversation_ids) + common_len(firsts)
        return min(common, *(question.start for question in self.questions))

    @property
    def num_tokens(self) -> int:
        """Number of tokens if those that several sequences have in common count once."""
        num_shared, num_before = self.shared_len, len(self.conversation_ids)
        total = num_shared
        for question in self.questions:
            total += question.start - num_shared
            total += sum(num_before + len(ids) - question.start for ids in question.ids)
        return total


def check_questions(questions: Sequence[Question]) -> None:
    """Check the number of questions and replies, and that a question's replies differ.

    Raises
    ------
    InvalidRequest
        Names the question.
    """
    if not questions:
        raise InvalidRequest("questions must have at least 1 question, got 0", field="questions")
    at_most("questions", len(questions), MAX_QUESTIONS, "questions")
    num_replies = sum(len(question.replies) for question in questions)
    at_most("questions", num_replies, MAX_REPLIES_IN_ALL, "allowed answers in all")
    for i, question in enumerate(questions):
        where = f"questions[{i}]"
        at_most(where, len(question.replies), MAX_REPLIES, "allowed answers")
        if not all(question.replies) or len(set(question.replies)) < len(question.replies):
            raise InvalidRequest(
                f"{where} must have allowed answers that are not empty and differ from each other",
                field=where,
            )


def framed_messages(
    messages: Sequence[Mapping[str, Any]], places: tuple[str, str]
) -> list[dict[str, Any]]:
    """Return the conversation with a question of the user and a reply of the assistant.

    A question joins the user's last turn if the conversation ends with it, because many templates want turns that
    alternate.

    Parameters
    ----------
    places
        The placeholders of the question and the reply.
    """
    question, reply = places
    turns = [dict(message) for message in messages]
    content = turns[-1].get("content") if turns else None
    if turns and turns[-1].get("role") == "user" and isinstance(content, str):
        if content:
            question = content + _PARAGRAPH + question
        turns[-1]["content"] = question
    else:
        turns.append({"role": "user", "content": question})
    return [*turns, {"role": "assistant", "content": reply}]


def new_places() -> tuple[str, str]:
    """Return placeholders of a question and a reply. They are random, so that no client can write them."""
    return secrets.token_hex(16), secrets.token_hex(16)


def make_frame(
    text: str,
    places: tuple[str, str],
    eos_token_ids: Sequence[int],
    tokenizer: TextTokenizer,
    special: SpecialTokens | None,
) -> PromptFrame:
    """Cut a rendered conversation at its placeholders.

    Raises
    ------
    InvalidRequest
        The chat template does not write the question and the reply once each, in this order.
    """
    parts = [part.split(places[1]) for part in text.split(places[0])]
    if [len(part) for part in parts] != [1, 2]:
        raise InvalidRequest(
            "the chat template does not write the last two turns as they are, so no reply can be scored",
            field="messages",
        )
    (before,), (between, after) = parts
    # Some templates write a space before the token that ends the turn.
    first_ids = _encode(tokenizer, after.lstrip()[:64])[:1].tolist()
    end_ids = [i for i in first_ids if i in eos_token_ids] or list(eos_token_ids)[:1]
    return PromptFrame(before, between, end_ids[0] if end_ids else None, special)


def encode_questions(
    frame: PromptFrame, questions: Sequence[Question], tokenizer: TextTokenizer, max_model_len: int
) -> QuestionPrompts:
    """Return the sequences of all replies. It may take seconds, so call it in a thread.

    Raises
    ------
    ContextLengthExceeded
        A sequence is longer than the model, there is too much text to encode, or there are too many tokens.
    """
    cut = _last_cut(frame.before, tokenizer)
    conversation_ids = _encode(tokenizer, frame.before[:cut])
    num_before, num_chars, num_tokens = len(conversation_ids), 0, 0
    encoded = []
    for i, question in enumerate(questions):
        text = frame.before[cut:] + frame.protected(question.text) + frame.between
        longest = len(text) + max(map(len, question.replies))
        if longest > MAX_BYTES_PER_TOKEN * max_model_len:
            raise _too_long(f"questions[{i}]", longest, "characters", max_model_len)
        own_cut = _last_cut(text, tokenizer)
        replies = [text[own_cut:] + frame.protected(reply) for reply in question.replies]
        num_chars += own_cut + sum(map(len, replies))
        if num_chars > MAX_ENCODED_CHARS:
            raise ContextLengthExceeded(
                f"questions must have at most {MAX_ENCODED_CHARS} characters to encode, got {num_chars} in the first "
                f"{i + 1}",
                field="questions",
            )
        own_ids = _encode(tokenizer, text[:own_cut])
        end = np.array([] if frame.end_id is None else [frame.end_id], np.int32)
        ids = [np.concatenate([own_ids, _encode(tokenizer, reply), end]) for reply in replies]
        most = num_before + max(map(len, ids))
        if most > max_model_len:
            raise _too_long(f"questions[{i}]", most, "tokens", max_model_len)
        num_tokens += sum(num_before + len(of_reply) for of_reply in ids)
        encoded.append(ReplyTokens(ids, num_before + common_len(ids)))
    if num_tokens > MAX_SCORED_TOKENS:
        raise ContextLengthExceeded(
            f"questions: the prompts of all allowed answers must have at most {MAX_SCORED_TOKENS} tokens together, "
            f"got {num_tokens}",
            field="questions",
        )
    return QuestionPrompts(conversation_ids, encoded)


def _too_long(where: str, length: int, unit: str, max_model_len: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{where}: input, question and allowed answer have {length} {unit} together; the model takes {max_model_len} "
        "tokens",
        field=where,
    )


def common_len(sequences: Sequence[np.ndarray]) -> int:
    """Return the number of leading tokens that some sequences have in common."""
    shortest = min(map(len, sequences))
    first = sequences[0][:shortest]
    for ids in sequences[1:]:
        differs = first != ids[: len(first)]
        if differs.any():
            first = first[: int(differs.argmax())]
    return len(first)


def _last_cut(text: str, tokenizer: TextTokenizer) -> int:
    """Return the last place at which both parts of a text can be encoded apart; 0 if there is none."""
    if tokenizer.piece_pattern is None:
        return 0
    start = len(text)
    for piece in reversed(split(tokenizer.piece_pattern, text, tokenizer.cuts_at_words)):
        start -= len(piece)
        # A token behind GUARD is plain text.
        if start and text[start - 1] != GUARD:
            return start
    return 0


def _encode(tokenizer: TextTokenizer, text: str) -> np.ndarray:
    if GUARD in text:
        return tokenizer.special.encode(text)
    return tokenizer.encode(text, add_special_tokens=False) if text else np.array([], np.int32)
