"""The engine's checks of sampling parameters: the bounds that routers check too, and those that need the model.

Checks that need the model use the size of its vocabulary or its EOS ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import at_most, check_ids, invalid
from quire.protos.sampling_bounds import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    RANGES,
    check_sampling,
)
from quire.protos.wire import POOLINGS, SamplingParams

# Numbers that must not be None.
_REQUIRED = [name for name in RANGES if getattr(SamplingParams(), name) is not None]


def check_params(params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Refuse parameters out of their bounds, and those that leave no token to sample.

    Raises
    ------
    InvalidRequest
        Names the field, the bound and the value.
    """
    for name in _REQUIRED:
        RANGES[name].check(name, getattr(params, name))
    check_sampling(params, vocab_size)
    if params.pooling not in ("", *POOLINGS):
        raise invalid("pooling", f"one of {', '.join(POOLINGS)}, or empty", params.pooling)
    if params.pooling and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "None with pooling", params.prompt_logprobs)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens must be <= max_tokens, which is {params.max_tokens}, got {params.min_tokens}",
            field="min_tokens",
        )
    _check_bad_words(params.bad_words, vocab_size)
    ending = set(params.stop_token_ids)
    if not params.ignore_eos:
        ending.update(eos_token_ids)
    if params.min_tokens and len(ending) >= vocab_size:
        raise InvalidRequest(
            f"min_tokens must be 0 when stop_token_ids and EOS cover the vocabulary of {vocab_size}, got "
            f"{params.min_tokens}",
            field="min_tokens",
        )
    _check_some_token_is_left(params, ending)


def _check_bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> None:
    at_most("bad_words", len(words), MAX_BAD_WORD_SEQUENCES, "token sequences")
    for i, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words[{i}] must have 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}",
                field=f"bad_words[{i}]",
            )
        check_ids(f"bad_words[{i}]", word, vocab_size)


def _check_some_token_is_left(params: SamplingParams, ending: set[int]) -> None:
    """Refuse `allowed_token_ids` if other parameters exclude all of these ids for the first token.

    Parameters
    ----------
    ending
        Ids that end the request. They are masked while the output has fewer than `min_tokens` tokens.
    """
    left = set(params.allowed_token_ids) - {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        left -= ending
    if params.allowed_token_ids and not left:
        raise InvalidRequest(
            f"allowed_token_ids must hold an id besides bad_words and, with min_tokens {params.min_tokens}, besides "
            f"EOS and stop ids; got {len(params.allowed_token_ids)} ids",
            field="allowed_token_ids",
        )
