"""The admission gate: sends a request to a replica at once, queues it, or refuses it. Plain asyncio, no Ray.

    arrives ──a replica is open, queue empty───────────────────────────────▶ sent
       │                                                                      ▲
       ├──wait too long, or tenant's share full──▶ Overloaded                 │ its turn, a replica is open
       └──▶ fair queue ──┬───────────────────────────────────────────────────┘
                         ├──deadline passed──▶ DeadlineExceeded
                         ├──no replica for `max_away_s`──▶ Unavailable
                         └──client disconnected──▶ removed

A replica is *open* while at most `dispatch_window_s` of prefill is queued there, few requests wait there, and it can
accept one more. So replicas stay busy, and the gate decides the order as late as possible. A *row* is a running
request's slot in a replica's request table.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.protos.errors import DeadlineExceeded, Overloaded, Unavailable
from quire.router.admission.fair_queue import FairQueue, Ticket
from quire.router.admission.wait_bounds import (
    AdmissionLimits,
    DrainRate,
    Shortfall,
    Turnover,
    expected_wait_s,
    refusal,
)
from quire.router.policy.policy import Ranking

# Time between two looks for an open replica. Replicas report once a step.
POLL_S = 0.01
# Requests to send before other tasks of the event loop may run.
_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that arrives at the gate.

    Attributes
    ----------
    tokens
        Prompt tokens.
    deadline_s
        Time of the gate's clock; None: no deadline.
    rank
        Ranks the replicas for this request by their present state; raises `Unavailable` if there is no replica.
    send
        Books the request on the best replica of a ranking and submits it. `enter` passes its exceptions on.
    """

    tenant: str
    tokens: int
    priority: int
    deadline_s: float | None
    rank: Callable[[], Ranking]
    send: Callable[[Ranking], None]


class AdmittedRequest:
    """A request that the gate has sent and that has not ended.

    Its measured wait and duration improve the estimates for later requests.
    """

    __slots__ = ("_answered_s", "_entered_s", "_estimate_s", "_gate", "_has_left")

    def __init__(self, gate: AdmissionGate, estimate_s: float, entered_s: float):
        self._gate = gate
        self._estimate_s = estimate_s
        self._entered_s = entered_s
        self._answered_s: float | None = None
        self._has_left = False

    def answered(self, *, is_usual: bool = True) -> None:
        """Record the first token.

        Parameters
        ----------
        is_usual
            False for a request that lost a replica before its first token: its wait does not measure the queue.
        """
        if self._answered_s is None and not self._has_left:
            estimate_s = self._estimate_s if is_usual else None
            self._answered_s = self._gate.on_answer(estimate_s, self._entered_s)

    def left(self) -> None:
        """Record the end of the request, with or without a first token."""
        if not self._has_left:
            self._has_left = True
            self._gate.on_leave(self._answered_s)


@dataclass(frozen=True, slots=True)
class _Waiter:
    arrival: Arrival
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _View:
    """The state of the fleet when a ranking was made.

    Attributes
    ----------
    is_open
        At least one replica is open.
    queued_s, prefill_s
        W and P of `wait_bounds`: the smallest queued prefill of all replicas, and the request's own prefill on the best
        replica, in seconds.
    lacks_places
        Requests wait because replicas have no free rows or accept no more requests, not because they lack time.
    num_waiting
        Requests of all routers that wait for a row at the replicas.
    """

    is_open: bool
    queued_s: float
    prefill_s: float
    num_replicas: int
    lacks_places: bool
    num_waiting: float


class AdmissionGate:
    """Admits requests to the replicas, in fair order.

    Parameters
    ----------
    max_away_s
        Refuse the waiting requests after no replica has been available for this time.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        clock: Callable[[], float],
        *,
        max_away_s: float = 30.0,
    ):
        self.limits = limits
        self._clock = clock
        self._max_away_s = max_away_s
        self._queue = FairQueue(limits.quantum_tokens)
        self._waiters: dict[Ticket, _Waiter] = {}
        # Rate of prefill seconds that leave the queue, measured while the replicas lack time.
        self._rate = DrainRate()
        # Rate of rows that come free, measured while the replicas lack rows.
        self._request_rate = DrainRate()
        # Requests that were sent and have no first token yet.
        self._num_unanswered = 0
        self._turnover = Turnover()
        self._shortfall = Shortfall()
        self._last = _View(True, 0.0, 0.0, 1, False, 0.0)
        self._pump: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def reconfigure(self, limits: AdmissionLimits, *, max_away_s: float) -> None:
        """Apply new limits. Requests that already wait stay queued."""
        self._queue.set_quantum(limits.quantum_tokens)
        self.limits = limits
        self._max_away_s = max_away_s

    @property
    def queue(self) -> FairQueue:
        """The queue, for reading."""
        return self._queue

    def queued_prefill_s(self) -> float:
        """Return the prefill seconds of the waiting requests."""
        return self._queue.prefill_s

    def wait_behind_all_s(self) -> float:
        """Return the expected seconds to the first token of a request at the end of the queue; 0 if it is empty.

        It is the mean by the measured rates; admission decides by the 99th percentile.
        """
        if not self._queue:
            return 0.0
        last = self._last
        if last.lacks_places:
            num = len(self._queue) + self._num_unanswered
            return num / self._place_rate(last)
        return last.queued_s + self._queue.prefill_s / self._rate.rate(last.num_replicas)

    def check(self, tenant: str, priority: int) -> None:
        """Refuse a request that would be refused with any prompt, to save the work of encoding its prompt.

        Raises
        ------
        Overloaded
            Even the shortest prompt would wait too long, or the tenant's share of the queue is full.
        """
        if self._queue:
            least = Ticket(tenant, 0, 0.0, priority, arrived_s=self._clock())
            wait_s = self._expected_wait_s(least, self._last)
            error = self._refusal(least, wait_s, self._last)
            if error is not None:
                raise error

    async def enter(self, arrival: Arrival) -> AdmittedRequest:
        """Send a request now, or wait until its turn and send it then.

        The caller reports the first token and the end to the returned object.

        Raises
        ------
        Overloaded
            The request would wait too long, or its tenant's share of the queue is full.
        DeadlineExceeded
            The deadline passed while the request waited.
        Unavailable
            No replica has been available for `max_away_s`.
        """
        ranking = arrival.rank()
        view = self._view(ranking)
        now_s = self._clock()
        ticket = Ticket(
            arrival.tenant,
            arrival.tokens,
            view.prefill_s,
            arrival.priority,
            arrival.deadline_s,
            now_s,
        )
        wait_s = self._expected_wait_s(ticket, view)
        admitted = AdmittedRequest(self, wait_s, now_s)
        if view.is_open and not self._queue:
            arrival.send(ranking)
        else:
            self._last = view
            error = self._refusal(ticket, wait_s, view)
            if error is not None:
                raise error
            if view.is_open:
                # It may be this request's turn already.
                self._wake.set()
            await self._wait(ticket, arrival)
        self._num_unanswered += 1
        return admitted

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for computed tokens; a negative number corrects an earlier charge."""
        self._queue.charge(tenant, tokens)

    def notify(self) -> None:
        """Check the queue now: a request has started or ended, so a replica may be open."""
        if self._queue:
            self._wake.set()

    def on_answer(self, estimate_s: float | None, entered_s: float) -> float:
        """Record a first token, and return the present time.

        Parameters
        ----------
        estimate_s
            The expected wait, to be compared with the measured one; None: do not compare.
        """
        now_s = self._clock()
        self._num_unanswered -= 1
        self._turnover.num_held += 1
        if estimate_s is not None:
            self._shortfall.on_wait(estimate_s, now_s - entered_s, now_s)
        return now_s

    def on_leave(self, answered_s: float | None) -> None:
        """Record the end of a request; `answered_s` is the time of its first token, if it had one."""
        # Count rows when requests end. Requests that leave the queue are no measure: they may fill rows that were free.
        if self._queue and self._last.lacks_places:
            self._request_rate.on_release(1)
        if answered_s is None:
            self._num_unanswered -= 1
        else:
            self._turnover.on_end(self._clock() - answered_s)

    def _expected_wait_s(self, ticket: Ticket, view: _View) -> float:
        return expected_wait_s(
            self._queue,
            ticket,
            queued_s=view.queued_s,
            rate=self._rate.rate(view.num_replicas),
            num_unanswered=self._num_unanswered,
            request_rate=self._place_rate(view) if view.lacks_places else None,
        )

    def _place_rate(self, view: _View) -> float:
        """Return the expected number of rows that come free per second."""
        num_starting = max(0.0, self._num_unanswered - view.num_waiting)
        return self._request_rate.request_rate(self._turnover.rate(num_starting))

    def _refusal(self, ticket: Ticket, wait_s: float, view: _View) -> Overloaded | None:
        return refusal(
            self.limits,
            self._queue,
            ticket,
            wait_s=wait_s,
            queued_s=view.queued_s,
            # At most half of the limit, so that errors measured while a replica hung cannot refuse every request.
            margin_s=min(self._shortfall.margin_s(self._clock()), self.limits.max_wait_s / 2),
        )

    async def _wait(self, ticket: Ticket, arrival: Arrival) -> None:
        waiter = _Waiter(arrival, asyncio.get_running_loop().create_future())
        self._queue.push(ticket)
        self._waiters[ticket] = waiter
        if self._pump is None:
            # Use an empty context: Serve cancels the tasks that were started in a request's context with that request.
            self._pump = asyncio.get_running_loop().create_task(
                self._run(), context=contextvars.Context()
            )
        try:
            await waiter.done
        finally:
            if self._waiters.pop(ticket, None) is not None and ticket in self._queue:
                self._queue.remove(ticket)

    async def _run(self) -> None:
        """Send waiting requests until the queue is empty."""
        seen_s = away_s = self._clock()
        try:
            while self._queue:
                now_s = self._clock()
                lacking = self._request_rate if self._last.lacks_places else self._rate
                lacking.on_time(now_s - seen_s)
                seen_s = now_s
                for ticket in self._queue.expire(now_s):
                    self._end(
                        ticket,
                        DeadlineExceeded(
                            "the request's deadline passed while it waited to be sent"
                        ),
                    )
                num_sent = self._send_some()
                if num_sent is not None:
                    away_s = now_s
                elif now_s - away_s > self._max_away_s:
                    self._end_all(Unavailable("no replica is ready to serve the model"))
                if num_sent == _BATCH:
                    await asyncio.sleep(0)
                    continue
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._wake.wait()
        finally:
            self._pump = None

    def _send_some(self) -> int | None:
        """Send requests in fair order while a replica is open; return their number, or None if there is no replica."""
        for num_sent in range(_BATCH):
            ticket = self._queue.next()
            if ticket is None:
                return num_sent
            arrival = self._waiters[ticket].arrival
            try:
                ranking = arrival.rank()
            except Unavailable:
                return None
            self._last = view = self._view(ranking)
            if not view.is_open:
                return num_sent
            self._queue.take(ticket)
            if not view.lacks_places:
                self._rate.on_release(ticket.prefill_s)
            try:
                arrival.send(ranking)
            except Exception as error:
                self._end(ticket, error)
            else:
                self._end(ticket, None)
        return _BATCH

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        waiter = self._waiters.pop(ticket, None)
        if ticket in self._queue:
            self._queue.remove(ticket)
        if waiter is not None and not waiter.done.done():
            if error is None:
                waiter.done.set_result(None)
            else:
                waiter.done.set_exception(error)

    def _end_all(self, error: Exception) -> None:
        for ticket in list(self._waiters):
            self._end(ticket, error)

    def _view(self, ranking: Ranking) -> _View:
        """Return the state of the fleet. If the policy estimates no wait, only counts of requests close a replica."""
        fleet, best = ranking.fleet, ranking[0]
        wait_s = ranking.wait_s
        if wait_s is None:
            wait_s = np.zeros(len(fleet))
        num_waiting = fleet.columns.num_waiting
        few = num_waiting <= self.limits.max_replica_waiting_requests
        # A replica without places would refuse the request.
        few &= fleet.columns.num_places >= 1
        has_time = wait_s <= self.limits.dispatch_window_s
        is_open = bool((few & has_time).any())
        # While some replica is open, keep the last value. Not derived from prefill time: while rows are lacking, many
        # queued short prompts add up to much prefill too.
        lacks_places = self._last.lacks_places if is_open else not few.all()
        return _View(
            is_open,
            float(wait_s.min()),
            best.prefill_s,
            len(fleet),
            lacks_places,
            float(num_waiting.sum()),
        )
