"""A source of drafts that knows the plain output of each request, and spoils it at random places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.replica.core.draft_source import Reserve
from quire.replica.core.request import Request


class OracleDrafts:
    """A `DraftSource`.

    Parameters
    ----------
    outputs
        The plain output of each request by key; requests without one get no draft.
    vocab_size
        Wrong tokens are drawn from [0, vocab_size).
    max_draft_tokens
        Longest draft.
    wrong
        Probability that a drafted token is wrong.
    silent
        Probability that a request gets no draft.
    """

    def __init__(
        self,
        outputs: Mapping[object, Sequence[int]],
        vocab_size: int,
        *,
        seed: int = 0,
        max_draft_tokens: int = 5,
        wrong: float = 0.3,
        silent: float = 0.2,
    ):
        self.outputs = outputs
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self._max_draft_tokens = max_draft_tokens
        self._wrong = wrong
        self._silent = silent
        self.live: set[object] = set()  # asked about and not ended
        self.num_drafted = 0
        self.num_accepted = 0
        self.steps: list[tuple[int, int]] = []  # rows and drafted tokens of the steps that decode

    def attach(self, reserve: Reserve) -> None:
        """Does nothing: this source needs no blocks."""

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        self.live |= {request.key for request in requests}
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> np.ndarray:
        random = self._random
        begin = request.num_tokens - (request.num_prompt_tokens + request.num_emitted)
        known = self.outputs.get(request.key, [])
        assert list(known[:begin]) == request.token_ids[request.num_tokens - begin :].tolist()
        if random.random() < self._silent:
            return np.empty(0, np.int32)
        draft = np.array(known[begin : begin + random.integers(self._max_draft_tokens + 1)], int)
        # After the plain output's end a source may guess anything.
        draft = np.concatenate([draft, random.integers(self._vocab_size, size=2)]).astype(np.int32)
        is_wrong = random.random(len(draft)) < self._wrong
        draft[is_wrong] = random.integers(self._vocab_size, size=is_wrong.sum())
        return draft[: self._max_draft_tokens]

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        assert request.key in self.live and 0 <= num_accepted <= num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        assert num_rows > 0 and duration_s >= 0
        self.steps.append((num_rows, num_drafted))

    def end(self, request: Request) -> None:
        self.live.discard(request.key)
