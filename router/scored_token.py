"""Tokens with their log-probabilities, for front ends and router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token and its log-probability in the model's own distribution.

    Attributes
    ----------
    logprob
        Natural logarithm; None for the first token of a prompt, which has no distribution.
    text
        The token's own text; bytes that are not a whole character become U+FFFD.
    utf8
        The bytes that the token adds to the text.
    """

    token_id: int
    logprob: float | None
    text: str
    utf8: bytes


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One token and the likeliest tokens at its position, best first.

    Attributes
    ----------
    rank
        Rank of a prompt's token among all tokens, 1 for the likeliest; None if not asked for.
    text_offset
        Characters of the prompt, or of the answer, before the token.
    """

    token: ScoredToken
    top: tuple[ScoredToken, ...]
    rank: int | None = None
    text_offset: int = 0
