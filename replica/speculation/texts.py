"""Texts in which the last tokens of a request are looked up, and what may follow them.

```
 request    a b c d e f g ... a b c          the last tokens
                  │  own text: d e f g ...   the draft: what followed at their newest earlier place
 prediction a b c d x                        the client's guess: followed from its start, found again after a difference
 tenant     ... a b c d y ...                recent answers to the same tenant
```

A `Match` is a place in a text. Its kind says how it was found, because the kinds differ in how often they are right.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from quire.replica.speculation.gram_table import (
    MAX_SIZE,
    SIZES,
    GramTables,
    Hashes,
    hashes_at_end,
    rolled,
)

# More new tokens than this are indexed with numpy.
_FEW_TOKENS = 24
# Kinds of matches. `PREDICTED`: the answer has followed the prediction so far. The others are the first of one kind for
# each size in `SIZES`.
PREDICTED = 0
IN_PREDICTION = 1
IN_OWN_TEXT = IN_PREDICTION + len(SIZES)
IN_RECENT_ANSWERS = IN_OWN_TEXT + len(SIZES)
NUM_KINDS = IN_RECENT_ANSWERS + len(SIZES)
# Tokens of a tenant's first text of answers. A full one is replaced by one of twice its size.
_FIRST_ANSWERS = 4096
_MAX_ANSWERS = 2**18
_MAX_POSITION = 2**31 - 2**20


class Match(NamedTuple):
    """A place in a text after tokens that equal the last ones of a request."""

    # The tokens after this place are the draft, [>= 1] int32. If fewer than wanted, they repeat.
    follows: np.ndarray
    kind: int
    repeats: bool = False

    def draft(self, count: int) -> np.ndarray:
        """Up to `count` tokens that may follow, [n] int32."""
        if self.repeats and len(self.follows) < count:
            return np.resize(self.follows, count)
        return self.follows[:count]


class OwnText:
    """The tokens of one request, prompt and output, as a text to look up its own last tokens."""

    def __init__(self) -> None:
        # Number of tokens that are indexed, but for the grams that end with the newest one.
        self._end = 0
        self._tables: GramTables | None = None
        # Hashes of the last tokens; empty while there are too few.
        self.hashes: Hashes = ()

    def advance(self, tokens: np.ndarray) -> None:
        """Index the tokens since the last call. `tokens` are all tokens of the request, [n] int32."""
        length, end = len(tokens), self._end
        if length <= MAX_SIZE or length == end:
            return
        tables = self._tables
        if tables is None or length > tables.num_tokens:
            self._tables = tables = GramTables(length + length // 4 + 64)
            tables.put_all(tokens[:-1])
            self.hashes = hashes_at_end(tokens)
        elif length - end > _FEW_TOKENS:
            first = end - MAX_SIZE
            tables.put_all(tokens[first:-1], first)
            self.hashes = hashes_at_end(tokens)
        else:
            hashes = self.hashes
            window = tokens[end - MAX_SIZE :].tolist()
            for i in range(MAX_SIZE, len(window)):
                tables.put(hashes, end + i - MAX_SIZE)
                hashes = rolled(hashes, window[i], window, i)
            self.hashes = hashes
        self._end = length

    def find(self, tokens: np.ndarray, tail: bytes, size_index: int) -> Match | None:
        """The newest earlier place of the last tokens; `tail` has the bytes of the last `MAX_SIZE` tokens."""
        tables = self._tables
        if tables is None:
            return None
        position, n = tables.candidate(self.hashes, size_index), SIZES[size_index]
        if position and tokens[position - n : position].tobytes() == tail[-4 * n :]:
            return Match(tokens[position:], IN_OWN_TEXT + size_index, repeats=True)
        return None


class PredictedText:
    """The client's prediction of an answer."""

    def __init__(self, tokens: np.ndarray):
        self._tokens = tokens
        self._tables = GramTables(len(tokens))
        self._tables.put_all(tokens)
        # Place of the next token while the answer follows the prediction; -1: it does not.
        self._next = 0

    def advance(self, new_tokens: np.ndarray) -> None:
        """Follow new tokens of the answer."""
        if self._next < 0:
            return
        end = self._next + len(new_tokens)
        followed = self._tokens[self._next : end].tobytes() == new_tokens.tobytes()
        self._next = end if followed else -1

    def following(self) -> Match | None:
        """The rest of the prediction while the answer follows it."""
        if 0 <= self._next < len(self._tokens):
            return Match(self._tokens[self._next :], PREDICTED)
        return None

    def find(self, hashes: Hashes, tail: bytes, size_index: int) -> Match | None:
        """The last place of the request's last tokens, from which the answer follows the prediction again."""
        position, n = self._tables.candidate(hashes, size_index), SIZES[size_index]
        if not 0 < position < len(self._tokens):
            return None
        if self._tokens[position - n : position].tobytes() != tail[-4 * n :]:
            return None
        self._next = position
        return Match(self._tokens[position:], IN_PREDICTION + size_index)


class Answers:
    """Recent answers to one tenant: a ring of tokens, and where each gram occurred last.

    A position counts all tokens that were ever added. The token at position p is in the ring at p modulo its length.
    """

    def __init__(self, num_tokens: int):
        self._ring = np.zeros(num_tokens, np.int32)
        self._tables = GramTables(num_tokens)
        self._end = 0

    @staticmethod
    def bytes_for(num_tokens: int) -> int:
        return 4 * num_tokens + GramTables.bytes_for(num_tokens)

    @property
    def num_bytes(self) -> int:
        return self.bytes_for(len(self._ring))

    @property
    def is_full(self) -> bool:
        return self._end >= len(self._ring)

    @property
    def is_worn(self) -> bool:
        """Whether positions no longer fit the tables."""
        return self._end > _MAX_POSITION

    def newest(self) -> np.ndarray:
        """The tokens in the ring, the oldest first."""
        at = self._end % len(self._ring)
        return (
            np.concatenate([self._ring[at:], self._ring[:at]]) if self.is_full else self._ring[:at]
        )

    def add(self, tokens: np.ndarray) -> None:
        """Append an answer. If it is longer than the ring, only its end is kept."""
        size = len(self._ring)
        tokens = tokens[-size:]
        at = self._end % size
        room = size - at
        self._ring[at : at + len(tokens)] = tokens[:room]
        self._ring[: max(0, len(tokens) - room)] = tokens[room:]
        self._tables.put_all(tokens, self._end)
        self._end += len(tokens)

    def find(self, hashes: Hashes, tail: bytes, size_index: int) -> Match | None:
        """The newest place of the request's last tokens."""
        position, n, size = (
            self._tables.candidate(hashes, size_index),
            SIZES[size_index],
            len(self._ring),
        )
        if not position or position >= self._end or position - n < self._end - size:
            return None
        at = position % size
        # A gram that goes around the ring's end is not looked at.
        if at < n or self._ring[at - n : at].tobytes() != tail[-4 * n :]:
            return None
        # Tokens before the place where the next answer goes.
        end = min(size, at + self._end - position)
        return Match(self._ring[at:end], IN_RECENT_ANSWERS + size_index)


class RecentAnswers:
    """The recent answers to each tenant, within a number of bytes for all tenants.

    When the bytes are used up, the tenant whose answers were used least recently is forgotten.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        # The least recently used first.
        self._of_tenant: OrderedDict[str, Answers] = OrderedDict()
        self.num_bytes = 0

    def of(self, tenant: str) -> Answers | None:
        """The answers to this tenant."""
        answers = self._of_tenant.get(tenant)
        if answers is not None:
            self._of_tenant.move_to_end(tenant)
        return answers

    def add(self, tenant: str, tokens: np.ndarray) -> None:
        """Add the end of a prompt and its answer."""
        answers = self._of_tenant.get(tenant)
        size = _FIRST_ANSWERS
        if answers is not None and (answers.is_full or answers.is_worn):
            size = min(2 * len(answers.newest()), _MAX_ANSWERS)
        while size > MAX_SIZE and Answers.bytes_for(size) > self._max_bytes:
            size //= 2
        if answers is None or answers.is_worn or Answers.bytes_for(size) > answers.num_bytes:
            answers = self._replace(tenant, answers, size)
        answers.add(tokens)
        self._of_tenant.move_to_end(tenant)

    def _replace(self, tenant: str, old: Answers | None, size: int) -> Answers:
        """Give a tenant a text of another size with the same tokens, and forget others if memory lacks."""
        answers = Answers(size)
        if old is not None:
            answers.add(old.newest())
            self.num_bytes -= old.num_bytes
            del self._of_tenant[tenant]
        while self._of_tenant and self.num_bytes + answers.num_bytes > self._max_bytes:
            _, forgotten = self._of_tenant.popitem(last=False)
            self.num_bytes -= forgotten.num_bytes
        self.num_bytes += answers.num_bytes
        self._of_tenant[tenant] = answers
        return answers
