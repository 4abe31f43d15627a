"""Bad words: token sequences that an output must not contain."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """Find the token ids that would complete a bad word.

    Parameters
    ----------
    words
        Non-empty sequences of token ids.
    """

    def __init__(self, words: Sequence[Sequence[int]]):
        self.single_ids = tuple(sorted({word[0] for word in words if len(word) == 1}))
        # The tokens of a word without the last one, to the last ids of the words that start with them.
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if len(word) > 1:
                self._last_ids.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._last_ids})

    @property
    def context_len(self) -> int:
        """Number of the newest output tokens that `excluded` needs."""
        return self._lengths[-1] if self._lengths else 0

    def excluded(self, newest: Sequence[int]) -> tuple[int, ...]:
        """Ids that must not come next.

        Parameters
        ----------
        newest
            The last `context_len` tokens of the output or more; fewer if the output is shorter.
        """
        ids = list(self.single_ids)
        for length in self._lengths:
            if length <= len(newest):
                ids += self._last_ids.get(tuple(newest[len(newest) - length :]), ())
        return tuple(ids)
