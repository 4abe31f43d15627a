"""Bounds of the sampling parameters that shape the distribution; the engine's last word on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeGuard

import numpy as np

from quire.protos.errors import InvalidRequest
from quire.protos.wire import (
    GRAMMAR_KINDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    Grammar,
    SamplingParams,
)

MAX_PENALTY = 2.0  # of presence and frequency, either sign
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_IDS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64


def validate_distribution(params: SamplingParams, vocab_size: int, ending: set[int]) -> None:
    """Refuse what would leave no distribution to sample from.

    Parameters
    ----------
    ending
        Ids that end the request; masked while it has fewer than `min_tokens` tokens.

    Raises
    ------
    InvalidRequest
        Names the field, the bound and the value.
    """
    _check_real("min_p", params.min_p, 0.0, 1.0)
    _check_real("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_real("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    repetition = params.repetition_penalty
    if not is_real(repetition) or not 0 < repetition <= MAX_REPETITION_PENALTY:
        bound = f"must be a number in (0, {MAX_REPETITION_PENALTY:g}], got {repetition!r}"
        refuse("repetition_penalty", bound)
    _check_len("logit_bias", params.logit_bias, MAX_BIASED_IDS, "entries")
    _check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    for token, bias in params.logit_bias:
        _check_real(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len({token for token, _ in params.logit_bias}) < len(params.logit_bias):
        refuse("logit_bias", "must have each id once")
    if params.logprobs is not None:
        check_int("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.grammar is not None:
        _check_grammar(params, params.grammar)
    _check_bad_words(params.bad_words, vocab_size)
    _check_allowed(params, vocab_size, ending)


def _check_grammar(params: SamplingParams, grammar: Grammar) -> None:
    kind, text, field = grammar
    if kind not in GRAMMAR_KINDS:
        refuse(field, f"must be one of {', '.join(GRAMMAR_KINDS)}, got {kind!r}")
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        refuse(field, f"at most {MAX_GRAMMAR_BYTES} bytes, got {len(text.encode())}")
    # Where the grammar is complete only EOS may come: one that does not count would come for ever, one that
    # may not come yet leaves no token.
    if params.ignore_eos:
        refuse("ignore_eos", f"must be false together with {field}, got true")
    if params.min_tokens:
        refuse("min_tokens", f"must be 0 together with {field}, got {params.min_tokens}")


def _check_bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> None:
    _check_len("bad_words", words, MAX_BAD_WORDS, "words")
    for i, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            refuse(
                f"bad_words[{i}]", f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}"
            )
        _check_ids(f"bad_words[{i}]", word, vocab_size)


def _check_allowed(params: SamplingParams, vocab_size: int, ending: set[int]) -> None:
    allowed = params.allowed_token_ids
    _check_len("allowed_token_ids", allowed, vocab_size, "ids")
    _check_ids("allowed_token_ids", allowed, vocab_size)
    left = set(allowed) - {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        left -= ending
    if allowed and not left:
        refuse(
            "allowed_token_ids",
            f"must hold an id besides bad_words and, with min_tokens {params.min_tokens}, besides "
            f"EOS and stop ids; got {len(allowed)} ids",
        )


def is_real(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_int(field: str, value: int, low: int, high: int, high_name: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        refuse(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        name = f" ({high_name})" if high_name else ""
        refuse(field, f"must be in [{low}, {high}]{name}, got {value}")


def refuse(field: str, message: str) -> NoReturn:
    raise InvalidRequest(f"{field}: {message}", field=field)


def _check_real(field: str, value: object, low: float, high: float) -> None:
    if not is_real(value) or not low <= value <= high:  # NaN fails both
        refuse(field, f"must be a number in [{low:g}, {high:g}], got {value!r}")


def _check_len(field: str, value: Sequence[object], bound: int, noun: str) -> None:
    if len(value) > bound:
        refuse(field, f"at most {bound} {noun}, got {len(value)}")


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            refuse(field, f"must be integers, got {token!r}")
        if not 0 <= token < vocab_size:
            refuse(field, f"ids must be in [0, {vocab_size}), got {token}")
