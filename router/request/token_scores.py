"""Adds the text of each token to log-probabilities, as clients receive them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.protos.wire import PromptLogprobs, TokenLogprob
from quire.router.scored_token import ScoredToken, TokenScores
from quire.router.text.detokenizer import DetokenizerFactory
from quire.router.transport.transport import OutputGap


class TokenScorer:
    """Adds texts to log-probabilities that come from replicas."""

    def __init__(self, detokenizers: DetokenizerFactory):
        self._detokenizers = detokenizers

    def output_scores(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        offsets: Sequence[int],
    ) -> list[TokenScores]:
        """Return the scores of output tokens.

        Parameters
        ----------
        logprobs
            One for each token, and possibly more at the end.
        offsets
            For each token, the characters of the answer before it.
        """
        return [
            TokenScores(
                self._scored(token_id, logprob.logprob),
                tuple(map(self._scored, logprob.top_ids, logprob.top_logprobs)),
                text_offset=offset,
            )
            for token_id, logprob, offset in zip(
                token_ids, logprobs[: len(token_ids)], offsets, strict=True
            )
        ]

    def prompt_scores(
        self, first_id: int, parts: Sequence[PromptLogprobs], *, skip_special_tokens: bool
    ) -> list[TokenScores]:
        """Return the scores of a prompt's first token, which has none, and of the tokens in `parts`.

        Parameters
        ----------
        skip_special_tokens
            Leave special tokens out of the prompt's text, because the tokenizer added them to it.
        """
        detokenizer = self._detokenizers.new(skip_special_tokens)
        num_chars = len(detokenizer.feed([first_id]))
        scores = [TokenScores(self._scored(first_id, None), ())]
        for part in parts:
            tops = zip(part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
            columns = (part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist(), tops)
            for token_id, logprob, rank, top in zip(*columns, strict=True):
                token, likeliest = self._scored(token_id, logprob), tuple(map(self._scored, *top))
                scores.append(TokenScores(token, likeliest, rank, num_chars))
                num_chars += len(detokenizer.feed([token_id]))
        return scores

    def _scored(self, token_id: int, logprob: float | None) -> ScoredToken:
        utf8 = self._detokenizers.token_bytes(token_id)
        return ScoredToken(token_id, logprob, utf8.decode(errors="replace"), utf8)


class PromptParts:
    """The log-probabilities of one prompt, which a replica sends in parts.

    Parameters
    ----------
    start
        Position of the first prompt token that has a log-probability.
    num_tokens
        Number of prompt tokens that have log-probabilities, from `start` on; 0 if the request does not ask for them.
    """

    def __init__(self, start: int, num_tokens: int):
        self._start = start
        self._num_tokens = num_tokens
        self._num_taken = 0
        self.parts: list[PromptLogprobs] = []

    @property
    def is_complete(self) -> bool:
        return self._num_taken >= self._num_tokens

    def take(self, part: PromptLogprobs) -> None:
        """Add a part; skip positions that an earlier attempt has sent.

        Raises
        ------
        OutputGap
            Positions before this part are missing.
        """
        expected = self._start + self._num_taken
        if part.start > expected:
            raise OutputGap(
                f"log-probabilities of prompt tokens {expected} to {part.start - 1} are missing"
            )
        part = part.after(expected)
        if len(part):
            self.parts.append(part)
            self._num_taken += len(part)

    def check_complete(self) -> None:
        """Raise `OutputGap` if parts are missing although the answer has started."""
        if not self.is_complete:
            raise OutputGap(
                f"log-probabilities of {self._num_taken} of {self._num_tokens} prompt tokens "
                "came before the first token"
            )
