"""The drafts of one request: its last tokens, looked up in each text that it may draft from."""

from __future__ import annotations

import numpy as np

from quire.replica.core.request import Request
from quire.replica.speculation.gram_table import MAX_SIZE, SIZES
from quire.replica.speculation.texts import Answers, Match, OwnText, PredictedText


class RequestDrafts:
    """Follows the tokens of one request.

    Parameters
    ----------
    request
        A request that decodes.
    answers
        Recent answers to the same tenant; None: not looked up.
    """

    def __init__(self, request: Request, answers: Answers | None = None):
        self._text = OwnText()
        self._answers = answers
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
        # The longest grams first; of the same length, the text that knows most about this answer.
        for size_index in range(len(SIZES)):
            found: Match | None = None
            if prediction is not None:
                found = prediction.find(hashes, tail, size_index)
            if found is None:
                found = self._text.find(tokens, tail, size_index)
            if found is None and self._answers is not None:
                found = self._answers.find(hashes, tail, size_index)
            if found is not None:
                return found
        return None
