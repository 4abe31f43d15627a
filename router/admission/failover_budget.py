"""Limits the rate of streams that migrate to other replicas, over the whole cluster.

A replica computes the prompt and the answer of a migrated stream again. When replicas crash one after the other,
migrating all streams at once would spend the remaining replicas' time on work that the next crash discards, and delay
new requests. The budget covers the loss of several full replicas at once and refills slowly. A stream waits while it is
empty. Routers do not communicate: each has an equal share, by the number of routers that the replicas report. Plain
Python; the caller passes the time.
"""

from __future__ import annotations


class FailoverBudget:
    """A router's share of a token bucket; a migration takes one token.

    Parameters
    ----------
    refill_s
        Seconds in which the bucket of all routers gains one token; above 0.
    burst
        Tokens in the full bucket of all routers; at least 1. A router's share is at least one token.
    """

    def __init__(self, refill_s: float, burst: int):
        if refill_s <= 0 or burst < 1:
            raise ValueError(f"refill_s must be > 0 and burst >= 1, got {refill_s} and {burst}")
        self._refill_s = refill_s
        self._burst = burst
        self._left = float(burst)
        self._at_s = 0.0

    def take(self, now_s: float, num_routers: int = 1) -> float:
        """Take a token and return 0, or return the seconds until there is one.

        Parameters
        ----------
        now_s
            Time of a monotonic clock. If it is before that of an earlier call, no time has passed.
        num_routers
            Number of routers that share the budget now, including this one; at least 1.
        """
        refill_s = self._refill_s * num_routers
        full = max(1.0, self._burst / num_routers)
        self._left = min(full, self._left + max(0.0, now_s - self._at_s) / refill_s)
        self._at_s = max(self._at_s, now_s)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) * refill_s
