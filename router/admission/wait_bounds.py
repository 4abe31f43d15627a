"""Whether a request may wait at a router, and when one that may not should come again. Pure.

    the time it would wait for its first token  =  W + B / r + P + M

    W  seconds of prefill queued at the replica that has least
    B  seconds of prefill that wait at this router and go before it (`FairQueue.prefill_s_ahead`); what shorter
       prompts that come later take before a long one is in M
    r  seconds of prefill that leave the router's queue in a second, as measured: the number of replicas
       while prefill is what they are busy with, less when decoding or memory holds them up
    P  seconds of its own prefill
    M  by which such estimates have lately been too small (`Shortfall`), at most half of the bound

That holds while prefill is what everybody waits for. Where the replicas have time but no places, short prompts with
long answers for instance, requests start as others end, whatever their prompts cost, and instead of W + B / r it is

    (n + z sqrt(n)) / q    n requests of this router that go before it, here or at a replica, and itself; q places
                           come free in a second, as measured; before that, by Little's law (`Turnover`)

which is the 99th percentile of the time until n places come free, if each comes free by itself (Poisson; z = 2.33).
But answers of one length that began together end together, routers race for the places, replicas fail: M knows how
late that makes the unlucky, because it is learnt from them.

A request that can go at once is never refused: later it would take as long. One that would wait longer than
`max_wait_s` is, and so is one that finds its tenant's share of the queue taken. That share is as much as is still free
(the dynamic threshold of Choudhury and Hahne 1998, alpha = 1): a single tenant may fill half of the queue, two a third
each, and however many there are, a newcomer finds room. B is counted in the order of the fair queue, so a tenant that
floods the router is refused and the others are not.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from quire.protos.errors import Overloaded
from quire.router.admission.fair_queue import FairQueue, Ticket

_RATE_HORIZON_S = 10.0
_PRIOR_S = 2.0  # seconds of measurement that the expected rate counts for
MAX_RETRY_AFTER_S = 300.0
_LEAST_RETRY_S = 0.1
_LEAST_RATE = 1e-9  # what has long been measured decays to nothing
_MEMORY_S = 60.0  # of a shortfall
_MAX_REMEMBERED = 256
_KEPT_PART = 0.99  # of the accepted requests shall start within the bound
_Z = 2.33  # standard deviations: the quantile of the normal distribution for _KEPT_PART


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The bounds of one router's queue.

    Attributes
    ----------
    max_wait_s
        For the first token, by the estimate above.
    max_queued_requests, max_queued_tokens
        That wait at the router.
    dispatch_window_s
        Prefill that a replica has queued while requests go there at once. What waits there is served in the
        replica's order, what waits here in the fair one; so it is as small as keeps the replica busy.
    max_replica_waiting_requests
        Requests that wait at a replica for a row or for memory, by its last report, while others still go there.
        Bounds what `dispatch_window_s` does not: short prompts that wait for those.
    quantum_tokens
        See `FairQueue`.
    """

    max_wait_s: float = 30.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 * 1024**2
    dispatch_window_s: float = 0.5
    max_replica_waiting_requests: int = 32
    quantum_tokens: int = 1024


class DrainRate:
    """What leaves the queue in a second, while somebody waits: seconds of prefill, or requests."""

    def __init__(self) -> None:
        self._released = 0.0
        self._elapsed_s = 0.0
        self._prior_s = _PRIOR_S

    def on_release(self, amount: float) -> None:
        """A request left the queue for a replica, or a place there."""
        self._released += amount

    def on_time(self, elapsed_s: float) -> None:
        """So much time passed while the queue held somebody."""
        keep = math.exp(-elapsed_s / _RATE_HORIZON_S)
        self._released *= keep
        self._elapsed_s = self._elapsed_s * keep + elapsed_s
        self._prior_s *= keep

    def rate(self, num_replicas: int) -> float:
        """Of seconds of prefill; the number of replicas counts as if it had been measured for two seconds before,
        and is forgotten like all that was."""
        expected = max(1, num_replicas)
        return self._measured(expected)

    def request_rate(self, expected: float | None = None) -> float:
        """Of requests; what is expected counts like the number of replicas above. Where nothing can be, it is the
        highest that the time so far has not refuted: as if one more were just leaving."""
        if expected is not None:
            return self._measured(expected)
        return (self._released + 1.0) / self._elapsed_s if self._elapsed_s else math.inf

    def _measured(self, expected: float) -> float:
        rate = (self._released + self._prior_s * expected) / (self._elapsed_s + self._prior_s)
        return max(rate, _LEAST_RATE)


class Turnover:
    """How fast places come free: those held over the time for which one is (Little 1961). Known before anybody has
    waited for one."""

    def __init__(self) -> None:
        self.num_held = 0  # by requests with a first token
        self._held_s: deque[float] = deque(maxlen=_MAX_REMEMBERED)
        self._sum_s = 0.0

    def on_end(self, held_s: float) -> None:
        """A place came free that was held for so long."""
        self.num_held -= 1
        if len(self._held_s) == _MAX_REMEMBERED:
            self._sum_s -= self._held_s[0]
        self._held_s.append(held_s)
        self._sum_s += held_s

    def rate(self, num_starting: float = 0.0) -> float | None:
        """Places in a second; None while none came free.

        Parameters
        ----------
        num_starting
            Requests without a first token that have a place already: of a burst that finds all places empty that is
            everyone, and what comes free later is what they hold.
        """
        if self._sum_s <= 0:
            return None
        return max(1.0, self.num_held + num_starting) * len(self._held_s) / self._sum_s


class Shortfall:
    """By how much the waits of accepted requests exceeded their estimates: what to add to the next estimate so that
    all but one in a hundred would have kept it. An estimate with such a margin holds whatever the error is made of, as
    long as the next requests are like the last (conformal prediction, Vovk et al. 2005)."""

    def __init__(self) -> None:
        self._errors: deque[tuple[float, float]] = deque(maxlen=_MAX_REMEMBERED)  # when, seconds
        self._margin_s: float | None = 0.0  # None: not found since the last error

    def on_wait(self, estimate_s: float, wait_s: float, now_s: float) -> None:
        """A request got its first token after `wait_s`; `estimate_s` is without a margin."""
        self._errors.append((now_s, wait_s - estimate_s))
        self._margin_s = None

    def margin_s(self, now_s: float) -> float:
        """Seconds, zero while nothing is known. Found when it is asked for: while nobody waits, nobody does."""
        if self._margin_s is None or (self._errors and now_s - self._errors[0][0] > _MEMORY_S):
            self._margin_s = self._measure(now_s)
        return self._margin_s

    def _measure(self, now_s: float) -> float:
        errors = self._errors
        while errors and now_s - errors[0][0] > _MEMORY_S:
            errors.popleft()
        # The k-th smallest of n is exceeded by the next with probability 1 - k / (n + 1) at most.
        k = min(len(errors), math.ceil(_KEPT_PART * (len(errors) + 1)))
        kth = sorted(error_s for _, error_s in errors)[k - 1] if errors else 0.0
        return max(0.0, kth)


def expected_wait_s(
    queue: FairQueue,
    ticket: Ticket,
    *,
    queued_s: float,
    rate: float,
    num_unanswered: int = 0,
    request_rate: float | None = None,
) -> float:
    """Seconds until the first token: the estimate above without its margin.

    Parameters
    ----------
    ticket
        A new one, not in the queue.
    queued_s, rate
        W and r.
    num_unanswered
        Requests of this router at the replicas that have no token yet.
    request_rate
        q, where the replicas lack places; None: they lack time.
    """
    if request_rate is None:
        before_s = queued_s + queue.prefill_s_ahead(ticket) / rate
    else:
        num = queue.num_ahead(ticket) + num_unanswered + 1  # places, with its own
        before_s = (num + _Z * math.sqrt(num)) / request_rate
    return before_s + ticket.prefill_s


def refusal(
    limits: AdmissionLimits,
    queue: FairQueue,
    ticket: Ticket,
    *,
    wait_s: float,
    queued_s: float,
    margin_s: float = 0.0,
) -> Overloaded | None:
    """The error for a request that may not wait; None if it may.

    Parameters
    ----------
    ticket
        A new one, not in the queue.
    wait_s
        By `expected_wait_s`.
    queued_s, margin_s
        W and M.
    """
    if wait_s + margin_s > limits.max_wait_s:
        # When the excess is gone; but a long prompt need not wait for longer than until it can go at once.
        before_s = wait_s - ticket.prefill_s
        after_s = min(wait_s + margin_s - limits.max_wait_s, before_s - limits.dispatch_window_s)
        return _overloaded(
            f"the first token would take {wait_s:.1f} s, {queued_s:.1f} s of it for what is queued at "
            f"every replica, and up to {margin_s:.1f} s more as such estimates go; the limit is "
            f"{limits.max_wait_s:g} s (router.max_wait_s)",
            after_s,
        )
    own_requests, own_tokens = queue.of_tenant(ticket.tenant)
    free_requests = limits.max_queued_requests - len(queue)
    if own_requests + 1 > free_requests:
        return _overloaded(
            f"{len(queue)} requests wait at this router, {own_requests} of them this tenant's, which may have as "
            f"many as are still free of {limits.max_queued_requests} (router.max_queued_requests)",
            wait_s / 2,
        )
    free_tokens = limits.max_queued_tokens - queue.tokens
    if own_tokens + ticket.tokens > free_tokens:
        return _overloaded(
            f"prompts of {queue.tokens} tokens wait at this router, {own_tokens} of them this tenant's; with "
            f"{ticket.tokens} more it would have more than are still free of {limits.max_queued_tokens} "
            "(router.max_queued_tokens)",
            wait_s / 2,
        )
    return None


def _overloaded(message: str, retry_after_s: float) -> Overloaded:
    bounded_s = min(max(retry_after_s, _LEAST_RETRY_S), MAX_RETRY_AFTER_S)
    return Overloaded(message, retry_after_s=bounded_s)
