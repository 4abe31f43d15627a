"""The drafts of one request: its last tokens, looked up in each text that it may draft from."""

from __future__ import annotations

import numpy as np

from quire.replica.core.request import Request
from quire.replica.speculation.gram_table import MAX_SIZE, SIZES
from quire.replica.speculation.texts import Match, OwnText, PredictedText, RecentAnswers


class RequestDrafts:
    """Follows the tokens of one request.

    Parameters
    ----------
    request
        A request that decodes.
    recent
        Recent answers, of which those to the same tenant are looked up; None: none are.
    """

    def __init__(self, request: Request, recent: RecentAnswers | None = None):
        self._text = OwnText()
        self._recent = recent
        # With an adapter, the scope is the tenant and the adapter, as for cached blocks.
        self._scope = request.chain.tenant
        self._prediction: PredictedText | None = None
        # Number of its tokens that are known here.
        self._num_tokens = request.num_prompt_tokens
        if request.prediction_ids is not None and len(request.prediction_ids):
            self._prediction = PredictedText(request.prediction_ids)

    def look(self, tokens: np.ndarray) -> Match | None:
        """Find what may follow `tokens`, all tokens of the request, [n] int32."""
        self._text.advance(tokens)
        prediction = self._prediction
        if prediction is not None:
            prediction.advance(tokens[self._num_tokens :])
            self._num_tokens = len(tokens)
            following = prediction.following()
            if following is not None:
                return following
        hashes = self._text.hashes
        if not hashes:
            return None
        tail = tokens[-MAX_SIZE:].tobytes()
        answers = None if self._recent is None else self._recent.of(self._scope)
        # The longest grams first; of the same length, the text that knows most about this answer.
        for size_index in range(len(SIZES)):
            found: Match | None = None
            if prediction is not None:
                found = prediction.find(hashes, tail, size_index)
            if found is None:
                found = self._text.find(tokens, tail, size_index)
            if found is None and answers is not None:
                found = answers.find(hashes, tail, size_index)
            if found is not None:
                return found
        return None
