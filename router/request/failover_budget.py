"""Limits how fast streams migrate to other replicas, over the whole cluster. Plain Python; the caller's clock.

A migrated stream computes its prompt and answer again. When replicas crash one after the other, migrating all streams
at once would spend the remaining replicas' time on work that the next crash discards, and delay new requests. The
budget covers the loss of several full replicas at once and refills slowly. A stream that finds it empty waits. Routers
do not communicate: each has an equal share, by the number of routers that are attached to the replicas.
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
            Seconds of a monotonic clock. A step backwards counts as no time.
        num_routers
            Routers that share the budget now, with this one; at least 1.
        """
        refill_s = self._refill_s * num_routers
        full = max(1.0, self._burst / num_routers)
        self._left = min(full, self._left + max(0.0, now_s - self._at_s) / refill_s)
        self._at_s = max(self._at_s, now_s)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) * refill_s
