"""How far a replica may run ahead of a client that reads slowly.

```
 output index   0 ...... written ........ received ........ end
                         └─ in this process ─┘               the replica pauses the request here
                         └──────── `num_tokens` at most ─────┘
```

What the client has taken moves `written`, and with every half of `num_tokens` `end` follows: so a client that reads
as fast as tokens come never waits, one grant serves a hundred tokens, and one that does not read costs no more than
`num_tokens` here and its blocks there. Plain Python, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable


class Credit:
    """The credit of one attempt, in output tokens.

    Parameters
    ----------
    num_tokens
        How far the replica may run ahead, at least 1.
    start
        The output index of the attempt's first token.
    """

    def __init__(self, num_tokens: int, start: int):
        self._num_tokens = num_tokens
        self.end = start + num_tokens  # output tokens that the replica may generate

    def is_low(self, written: int) -> bool:
        """Whether half of it is used up when the client has so many output tokens."""
        return self.end - written <= self._num_tokens // 2

    def extend(self, written: int) -> int:
        """Grant what the client's progress allows; returns the new end."""
        self.end = max(self.end, written + self._num_tokens)
        return self.end


def by_replica(grants: Iterable[tuple[str, int, int]]) -> dict[str, dict[int, int]]:
    """One message per replica of (replica, stream id, end)."""
    messages: dict[str, dict[int, int]] = {}
    for replica, stream_id, end in grants:
        messages.setdefault(replica, {})[stream_id] = end
    return messages
