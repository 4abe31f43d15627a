"""Decides whether a request may wait at a router, and after which time the client of a refused request should retry.

The functions are pure: they use no clock and no asyncio.

    expected wait for the first token  =  W + B / r + P + M

    W  seconds of prefill queued at the replica with the shortest queue
    B  seconds of prefill in this router's queue before the request (`FairQueue.prefill_s_ahead`). Shorter prompts
       that arrive later and overtake it are part of M
    r  measured rate: seconds of prefill that leave the router's queue per second. It equals the number of replicas
       while they only prefill, and is smaller while decoding or memory limits them
    P  seconds of the request's own prefill
    M  margin: the error of recent estimates (`Shortfall`), at most half of the limit

This holds while requests wait for prefill. A replica may also have time but no free row (slot of a running request), as
with short prompts and long answers. Then a request starts when another one ends, prompt lengths do not matter, and
W + B / r is replaced by

    (n + z sqrt(n)) / q    n: this router's requests without a first token before this one, in the queue or at a
                              replica, and this one
                           q: measured rate of rows that come free per second; before a measurement, the rate by
                              Little's law (`Turnover`)

This is the 99th percentile of the time until n rows come free, if they come free independently (Poisson; z = 2.33). In
reality, answers of equal length that started together end together, routers compete for rows, and replicas fail. M
covers these errors, because it is measured.

A request that can be sent at once is never refused: its prefill would take as long later. Another request is refused if
it would wait longer than `max_wait_s`, or if its tenant's share of the queue is full. The share equals the free part of
the queue (dynamic threshold of Choudhury and Hahne 1998, alpha = 1): one tenant can fill half of the queue, two a third
each, and a new tenant always finds room. B follows the order of the fair queue, so a tenant that floods the router is
refused while others are not.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from quire.protos.errors import Overloaded
from quire.router.admission.fair_queue import FairQueue, Ticket

_RATE_HORIZON_S = 10.0
# The expected rate counts as much as this many seconds of measurement.
_PRIOR_S = 2.0
MAX_RETRY_AFTER_S = 300.0
_LEAST_RETRY_S = 0.1
# Lower bound of a rate, whose measurements decay towards zero.
_LEAST_RATE = 1e-9
# Errors of estimates are kept for `_MEMORY_S`, and at most `_MAX_REMEMBERED` of them.
_MEMORY_S = 60.0
_MAX_REMEMBERED = 256
# Share of the admitted requests that should start within the limit, and the normal distribution's quantile at it.
_KEPT_PART = 0.99
_Z = 2.33


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The limits of one router's queue.

    Attributes
    ----------
    max_wait_s
        Longest expected wait for the first token, by the estimate above.
    max_queued_requests, max_queued_tokens
        Most requests in the router's queue, and most prompt tokens of these requests.
    dispatch_window_s
        Send requests to a replica while it has less prefill queued than this. A replica serves its queue in its own
        order and the router in the fair order, so the window is just large enough to keep the replica busy.
    max_replica_waiting_requests
        Send requests to a replica while at most this many wait there for a row or for memory, by its last report.
        It limits queues of short prompts, which `dispatch_window_s` does not.
    quantum_tokens
        Tokens that a tenant's turn adds to its balance (`FairQueue`). Smaller is fairer over short times.
    """

    max_wait_s: float = 30.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 * 1024**2
    dispatch_window_s: float = 0.5
    max_replica_waiting_requests: int = 32
    quantum_tokens: int = 1024


class DrainRate:
    """Measures a rate while the queue is not empty: of prefill seconds that leave it, or of rows that come free."""

    def __init__(self) -> None:
        self._released = 0.0
        self._elapsed_s = 0.0
        self._prior_s = _PRIOR_S

    def on_release(self, amount: float) -> None:
        """Count seconds of prefill that left the queue, or rows that came free."""
        self._released += amount

    def on_time(self, elapsed_s: float) -> None:
        """Advance the time by `elapsed_s`, during which the queue was not empty."""
        keep = math.exp(-elapsed_s / _RATE_HORIZON_S)
        self._released *= keep
        self._elapsed_s = self._elapsed_s * keep + elapsed_s
        self._prior_s *= keep

    def rate(self, num_replicas: int) -> float:
        """Return the rate of prefill seconds.

        The number of replicas is the expected rate. It counts as a measurement over two seconds, and decays like one.
        """
        expected = max(1, num_replicas)
        return self._measured(expected)

    def request_rate(self, expected: float | None = None) -> float:
        """Return the rate of rows; `expected` counts like the number of replicas in `rate`.

        Without `expected`, return the highest rate that agrees with the measurement: as if one more row came free just
        now.
        """
        if expected is not None:
            return self._measured(expected)
        return (self._released + 1.0) / self._elapsed_s if self._elapsed_s else math.inf

    def _measured(self, expected: float) -> float:
        rate = (self._released + self._prior_s * expected) / (self._elapsed_s + self._prior_s)
        return max(rate, _LEAST_RATE)


class Turnover:
    """Estimates the rate at which rows come free: rows in use divided by their mean time of use (Little 1961).

    Unlike `DrainRate`, it needs no request that has waited for a row.
    """

    def __init__(self) -> None:
        # Rows of requests that have a first token.
        self.num_held = 0
        self._held_s: deque[float] = deque(maxlen=_MAX_REMEMBERED)
        self._sum_s = 0.0

    def on_end(self, held_s: float) -> None:
        """Record that a row came free after `held_s`."""
        self.num_held -= 1
        if len(self._held_s) == _MAX_REMEMBERED:
            self._sum_s -= self._held_s[0]
        self._held_s.append(held_s)
        self._sum_s += held_s

    def rate(self, num_starting: float = 0.0) -> float | None:
        """Return the rows that come free per second; None before the first one has come free.

        Parameters
        ----------
        num_starting
            Requests that have a row but no first token yet. After a burst to an idle cluster, these are all requests.
        """
        if self._sum_s <= 0:
            return None
        return max(1.0, self.num_held + num_starting) * len(self._held_s) / self._sum_s


class Shortfall:
    """Measures the margin M: by how much the waits of admitted requests exceeded their estimates.

    With this margin added to their estimates, 99 of 100 recent requests would have started in time. The next requests
    do too, whatever causes the errors, if they are like the last ones (conformal prediction, Vovk et al. 2005).
    """

    def __init__(self) -> None:
        # Time of the measurement, and wait minus estimate in seconds.
        self._errors: deque[tuple[float, float]] = deque(maxlen=_MAX_REMEMBERED)
        # None: must be computed, since an error was added.
        self._margin_s: float | None = 0.0

    def on_wait(self, estimate_s: float, wait_s: float, now_s: float) -> None:
        """Record a request that got its first token after `wait_s`. `estimate_s` is its estimate without margin."""
        self._errors.append((now_s, wait_s - estimate_s))
        self._margin_s = None

    def margin_s(self, now_s: float) -> float:
        """Return the margin in seconds, 0 without measurements. It is computed here, because only a queue needs it."""
        if self._margin_s is None or (self._errors and now_s - self._errors[0][0] > _MEMORY_S):
            self._margin_s = self._measure(now_s)
        return self._margin_s

    def _measure(self, now_s: float) -> float:
        errors = self._errors
        while errors and now_s - errors[0][0] > _MEMORY_S:
            errors.popleft()
        # The next error exceeds the k-th smallest of n with a probability of at most 1 - k / (n + 1).
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
    """Return the expected seconds until the first token, by the formulas of the module's docstring without M.

    Parameters
    ----------
    ticket
        The new request, not in the queue.
    queued_s, rate
        W, prefill seconds queued at the replicas; and r, prefill seconds that leave the queue per second.
    num_unanswered
        Requests of this router that were sent and have no first token yet.
    request_rate
        q, rows that come free per second, if the replicas lack rows; None if they lack time.
    """
    if request_rate is None:
        before_s = queued_s + queue.prefill_s_ahead(ticket) / rate
    else:
        # Rows that must come free, with the one for this request.
        num = queue.num_ahead(ticket) + num_unanswered + 1
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
    """Return the error for a request that may not wait; None if it may.

    Parameters
    ----------
    ticket
        The new request, not in the queue.
    wait_s
        Its expected wait, from `expected_wait_s`.
    queued_s, margin_s
        W, the part of the wait for requests queued at replicas; and the margin M.
    """
    if wait_s + margin_s > limits.max_wait_s:
        # Retry when the wait has shrunk to the limit. A long prompt may exceed the limit alone: then retry when the
        # queue is short enough to send it at once.
        before_s = wait_s - ticket.prefill_s
        after_s = min(wait_s + margin_s - limits.max_wait_s, before_s - limits.dispatch_window_s)
        return _overloaded(
            f"the first token would take {wait_s:.1f} s ({queued_s:.1f} s of it for requests that are queued at every "
            f"replica), and up to {margin_s:.1f} s more by the error of recent estimates; the limit is "
            f"{limits.max_wait_s:g} s (router.max_wait_s)",
            after_s,
            "max_wait_s",
        )
    own_requests, own_tokens = queue.of_tenant(ticket.tenant)
    free_requests = limits.max_queued_requests - len(queue)
    if own_requests + 1 > free_requests:
        return _overloaded(
            f"{len(queue)} requests wait at this router; this tenant has {own_requests} and may have at most the "
            f"{free_requests} that are free of {limits.max_queued_requests} (router.max_queued_requests)",
            wait_s / 2,
            "max_queued_requests",
        )
    free_tokens = limits.max_queued_tokens - queue.tokens
    if own_tokens + ticket.tokens > free_tokens:
        return _overloaded(
            f"prompts of {queue.tokens} tokens wait at this router; this tenant has {own_tokens} and may have at most "
            f"the {free_tokens} that are free of {limits.max_queued_tokens} (router.max_queued_tokens), "
            f"the new prompt has {ticket.tokens}",
            wait_s / 2,
            "max_queued_tokens",
        )
    return None


def _overloaded(message: str, retry_after_s: float, reason: str) -> Overloaded:
    bounded_s = min(max(retry_after_s, _LEAST_RETRY_S), MAX_RETRY_AFTER_S)
    return Overloaded(message, retry_after_s=bounded_s, reason=reason)
