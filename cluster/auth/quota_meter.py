"""Measures the use of one key against its quotas. Pure: the caller passes the time and the number of routers.

Routers do not communicate: each enforces its share, the quota divided by the number of routers that the replicas
report. A proxy spreads the requests evenly, so a key gets its quota unless it has fewer concurrent requests than there
are routers.

    tokens per minute    a token bucket that holds one minute's tokens. A prompt is charged when its request is
                         admitted, the output when the answer ends, so the balance can fall below zero: the debt must
                         be refilled before the next request.
    concurrent requests  a count, rounded up per router
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.cluster.auth.key_file import Quotas
from quire.protos.errors import RateLimited

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0


class TokenState(NamedTuple):
    """The state of a token bucket as a client sees it, over all routers.

    Attributes
    ----------
    reset_s
        Seconds until the bucket is full.
    """

    limit: int
    remaining: int
    reset_s: float


class QuotaMeter:
    """One router's share of a key's quotas.

    Attributes
    ----------
    quotas
        May be replaced at any time; what is used stays used.
    """

    def __init__(self, quotas: Quotas):
        self.quotas = quotas
        self.num_running = 0
        # Tokens taken from the full bucket of this router. A new key begins with a full bucket.
        self._num_taken = 0.0
        self._at_s = 0.0

    def enter(self, num_routers: int) -> None:
        """Count a request that begins.

        Raises
        ------
        RateLimited
            Too many requests of the key run.
        """
        most = self.quotas.concurrent_requests
        if most is not None and self.num_running >= math.ceil(most / num_routers):
            raise RateLimited(
                f"the key's quota is concurrent_requests {most}, and that many of its requests run",
                retry_after_s=BUSY_RETRY_S,
            )
        self.num_running += 1

    def leave(self) -> None:
        """Count a request that ends."""
        self.num_running -= 1

    def take(self, num_tokens: int, now_s: float, num_routers: int) -> None:
        """Take the tokens of a prompt. A prompt above the whole quota needs a full bucket, and leaves a debt.

        Raises
        ------
        RateLimited
            The bucket has fewer tokens.
        """
        quota = self.quotas.tokens_per_minute
        if quota is None:
            return
        share = quota / num_routers
        self._refill(share, now_s)
        lacking = min(num_tokens, share) - (share - self._num_taken)
        if lacking > 0:
            raise RateLimited(
                f"the key's quota is tokens_per_minute {quota}: the request has {num_tokens} prompt tokens, and "
                f"{max(0, int((share - self._num_taken) * num_routers))} tokens are left",
                retry_after_s=lacking / share * MINUTE_S,
            )
        self._num_taken += num_tokens

    def charge(self, num_tokens: int) -> None:
        """Take tokens that were generated; a negative number gives tokens back."""
        if self.quotas.tokens_per_minute is not None:
            self._num_taken = max(0.0, self._num_taken + num_tokens)

    def tokens(self, now_s: float, num_routers: int) -> TokenState | None:
        """Return the bucket's state; None without a quota of tokens."""
        quota = self.quotas.tokens_per_minute
        if quota is None:
            return None
        share = quota / num_routers
        self._refill(share, now_s)
        remaining = max(0, int((share - self._num_taken) * num_routers))
        return TokenState(quota, remaining, self._num_taken / share * MINUTE_S)

    def _refill(self, share: float, now_s: float) -> None:
        refilled = max(0.0, now_s - self._at_s) * share / MINUTE_S
        self._num_taken = max(0.0, self._num_taken - refilled)
        self._at_s = max(self._at_s, now_s)


def duration(seconds: float) -> str:
    """Write seconds as OpenAI's headers do: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.4g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
