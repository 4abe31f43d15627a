"""Flow control: limits how far a replica runs ahead of a client that reads slowly.

```
 output index   0 ...... written ........ received ........ end
                         └─ in this process ─┘               the replica pauses the request here
                         └──────── `num_tokens` at most ─────┘
```

`written` grows as the client reads. Each time half of `num_tokens` is used up, a grant moves `end`. So a client that
reads as fast as the replica generates never waits. A client that does not read costs at most `num_tokens` tokens in
this process, and its request's blocks at the replica. Plain Python, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.protos.errors import SlowClient


def slow_client(num_read: int, timeout_s: float) -> SlowClient:
    """Return the error of a client that has read `num_read` output tokens, and then nothing for `timeout_s`."""
    return SlowClient(
        f"the client has read nothing for {timeout_s:g} s (slow_client_timeout_s), with tokens waiting "
        f"after output index {num_read - 1}: the request has ended"
    )


class Credit:
    """The credit of one attempt, in output tokens.

    Parameters
    ----------
    num_tokens
        Tokens that the replica may be ahead of the client; at least 1.
    start
        The output index of the attempt's first token.
    """

    def __init__(self, num_tokens: int, start: int):
        self._num_tokens = num_tokens
        # The replica may generate the output tokens before this index.
        self.end = start + num_tokens

    def is_low(self, written: int) -> bool:
        """Return whether half of the credit is used up, if the client has read `written` output tokens."""
        return self.end - written <= self._num_tokens // 2

    def extend(self, written: int) -> int:
        """Extend the credit to `num_tokens` after the tokens that the client has read; return the new end."""
        self.end = max(self.end, written + self._num_tokens)
        return self.end


def by_replica(grants: Iterable[tuple[str, int, int]]) -> dict[str, dict[int, int]]:
    """Group grants (replica, stream id, end) into one message for each replica: {stream id: end}."""
    messages: dict[str, dict[int, int]] = {}
    for replica, stream_id, end in grants:
        messages.setdefault(replica, {})[stream_id] = end
    return messages
