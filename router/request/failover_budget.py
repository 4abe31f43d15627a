"""How fast streams may move to other replicas, over the whole cluster. Plain Python; the caller's clock.

A move computes prompt and answer anew. When replicas die one after the other, moving everything at once would spend
the survivors' time on what the next death throws away, while those who wait for their first token wait longer. So
there is a budget that allows the loss of several full replicas at once and refills slowly; a stream that finds
it empty waits its turn. Routers say nothing to one another: each has an equal share, as many parts as there are
routers attached to the replicas.
"""

from __future__ import annotations


class FailoverBudget:
    """A router's share of a token bucket: one token for each move.

    Parameters
    ----------
    refill_s
        Seconds after which one more token is there for all routers; above 0.
    burst
        Tokens of a full bucket for all routers, at least 1. A share is one token at least.
    """

    def __init__(self, refill_s: float, burst: int):
        if refill_s <= 0 or burst < 1:
            raise ValueError(f"refill_s must be > 0 and burst >= 1, got {refill_s} and {burst}")
        self._refill_s = refill_s
        self._burst = burst
        self._left = float(burst)
        self._at_s = 0.0

    def take(self, now_s: float, num_routers: int = 1) -> float:
        """Take a token and return 0, or return the seconds after which there is one again.

        Parameters
        ----------
        now_s
            A monotonic clock's seconds; one that goes back counts as one that stands still.
        num_routers
            That share the budget now, this one included; at least 1.
        """
        refill_s = self._refill_s * num_routers
        full = max(1.0, self._burst / num_routers)
        self._left = min(full, self._left + max(0.0, now_s - self._at_s) / refill_s)
        self._at_s = max(self._at_s, now_s)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) * refill_s
