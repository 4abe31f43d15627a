"""How many tokens to draft for each request: as many as raise the tokens per second of the whole step.

A draft's k-th token counts only if those before it are right, so it is worth `acceptance ** k` tokens. All tokens of
all drafts are sorted by their worth. The first j are drafted, with the j that is best for

    (rows + worth of the first j) / (1 + fixed + per_token * j)
"""

from __future__ import annotations

import numpy as np

from quire.replica.speculation.texts import NUM_KINDS

# The predicted gain must be at least this share, or nothing is drafted.
_LEAST_GAIN = 0.03
# Weight of the average of all requests in the acceptance of one request, in tokens.
_PRIOR_TOKENS = 2.0


class Acceptance:
    """The fraction of drafted tokens that are right, given that those before them are. Newer ones count more."""

    def __init__(self, right: float, wrong: float, keep: float):
        self.right = right
        self.wrong = wrong
        self._keep = keep

    def observe(self, num_right: int, is_wrong: bool) -> None:
        """A draft had this many right tokens, and then a wrong one or its end."""
        self.right = self._keep * self.right + num_right
        self.wrong = self._keep * self.wrong + is_wrong

    def rate(self) -> float:
        """The fraction by this record alone."""
        return self.right / (self.right + self.wrong)

    def given(self, prior: float) -> float:
        """The fraction by this record and a prior one."""
        weight = self.right + self.wrong + _PRIOR_TOKENS
        return (self.right + _PRIOR_TOKENS * prior) / weight


def kinds() -> list[Acceptance]:
    """A record for each kind of match, over all requests; at first as if one of two tokens had been right."""
    return [Acceptance(1.0, 1.0, 0.98) for _ in range(NUM_KINDS)]


def choose_lengths(
    num_rows: int,
    acceptance: np.ndarray,
    most: np.ndarray,
    extra: tuple[float, float],
    max_drafted: int,
) -> np.ndarray:
    """Choose the number of tokens to draft for some requests of a step, [n] integers.

    Parameters
    ----------
    num_rows
        Number of rows in the step.
    acceptance, most
        [n] each: the chance of each drafted token, and how many there are.
    extra
        The cost of drafting at all and of each token, as a fraction of a plain step.
    max_drafted
        Most tokens for all requests together.
    """
    fixed, per_token = extra
    k = np.arange(1, int(most.max()) + 1)
    worth = np.where(k <= most[:, None], acceptance[:, None] ** k, 0.0).ravel()
    order = np.argsort(-worth, kind="stable")[:max_drafted]
    gained = np.cumsum(worth[order])
    rate = (1 + gained / num_rows) / (1 + fixed + per_token * np.arange(1, len(order) + 1))
    best = int(rate.argmax())
    if rate[best] < 1 + _LEAST_GAIN:
        return np.zeros(len(acceptance), np.int64)
    chosen = order[: best + 1]
    chosen = chosen[worth[chosen] > 0]
    return np.bincount(chosen // len(k), minlength=len(acceptance))
