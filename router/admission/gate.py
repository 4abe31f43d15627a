"""Where requests wait for their turn: the running part of admission. Plain asyncio, no Ray.

    arrives ──a replica is open, nobody waits──────────────────────────────▶ sent
       │                                                                      ▲
       ├──would wait too long, its share is taken──▶ Overloaded               │ its turn, a replica is open
       └──▶ fair queue ──┬───────────────────────────────────────────────────┘
                         ├──deadline passed──▶ DeadlineExceeded
                         ├──no replica for `max_away_s`──▶ Unavailable
                         └──its client has gone──▶ removed

A replica is *open* while it has less than `dispatch_window_s` of prefill queued, few requests waiting, and places for
more. So the replicas are kept busy, and the order is decided here, as late as it can be.
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

POLL_S = 0.01  # the queue looks for an open replica so often; frames come once a step
_BATCH = 32  # requests sent in one go before the event loop gets its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request at the gate.

    Attributes
    ----------
    rank
        The replicas as they are now, for this request; raises Unavailable when there is none.
    send
        Submit and book it; what it raises goes to who waits in `enter`.
    deadline_s
        On the gate's clock.
    """

    tenant: str
    tokens: int
    priority: int
    deadline_s: float | None
    rank: Callable[[], Ranking]
    send: Callable[[Ranking], None]


class AdmittedRequest:
    """A request that the gate let through, until it ends: what it waits for its first token the next ones may wait,
    and as long as it keeps its place the next ones may keep theirs."""

    __slots__ = ("_answered_s", "_entered_s", "_estimate_s", "_gate", "_has_left")

    def __init__(self, gate: AdmissionGate, estimate_s: float, entered_s: float):
        self._gate = gate
        self._estimate_s = estimate_s
        self._entered_s = entered_s
        self._answered_s: float | None = None
        self._has_left = False

    def answered(self, *, is_usual: bool = True) -> None:
        """Its first token came; not usual is that of a request that lost its replica before."""
        if self._answered_s is None and not self._has_left:
            estimate_s = self._estimate_s if is_usual else None
            self._answered_s = self._gate.on_answer(estimate_s, self._entered_s)

    def left(self) -> None:
        """It ended, with or without a first token."""
        if not self._has_left:
            self._has_left = True
            self._gate.on_leave(self._answered_s)


@dataclass(frozen=True, slots=True)
class _Waiter:
    arrival: Arrival
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _View:
    """What a ranking says of the fleet."""

    is_open: bool
    queued_s: float  # W of the replica that has least
    prefill_s: float  # P on the best
    num_replicas: int
    lacks_places: bool  # and not only time, where no replica is open
    num_waiting: float  # for a place at the replicas, of this router and of others


class AdmissionGate:
    """Lets requests through to the replicas, in fair order.

    Parameters
    ----------
    max_away_s
        Who waits while there is no replica at all gives up after so long.
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
        self._rate = DrainRate()  # of prefill, while the replicas lack time
        self._request_rate = DrainRate()  # of places, while they lack those
        self._num_unanswered = 0  # of those let through
        self._turnover = Turnover()
        self._shortfall = Shortfall()
        self._last = _View(True, 0.0, 0.0, 1, False, 0.0)
        self._pump: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def reconfigure(self, limits: AdmissionLimits, *, max_away_s: float) -> None:
        """Take on other bounds. Who waits goes on waiting, whatever the new ones would have said of them."""
        self._queue.set_quantum(limits.quantum_tokens)
        self.limits = limits
        self._max_away_s = max_away_s

    @property
    def queue(self) -> FairQueue:
        """To be read only."""
        return self._queue

    def queued_prefill_s(self) -> float:
        """Seconds of prefill that wait here."""
        return self._queue.prefill_s

    def wait_behind_all_s(self) -> float:
        """Seconds until the first token of a request that went after all that waits here, by the rates of
        `router/admission/wait_bounds.py`: the mean, where admission asks for the 99th percentile; 0 while nobody
        waits."""
        if not self._queue:
            return 0.0
        last = self._last
        if last.lacks_places:
            num = len(self._queue) + self._num_unanswered
            return num / self._place_rate(last)
        return last.queued_s + self._queue.prefill_s / self._rate.rate(last.num_replicas)

    def check(self, tenant: str, priority: int) -> None:
        """Refuse what would be refused whatever its prompt, before work is done for it.

        Raises
        ------
        Overloaded
        """
        if self._queue:
            least = Ticket(tenant, 0, 0.0, priority, arrived_s=self._clock())
            wait_s = self._expected_wait_s(least, self._last)
            error = self._refusal(least, wait_s, self._last)
            if error is not None:
                raise error

    async def enter(self, arrival: Arrival) -> AdmittedRequest:
        """Send a request, now or when it is its turn. Who gets the `AdmittedRequest` tells it of the first token.

        Raises
        ------
        Overloaded
            It would wait too long, or its tenant has too many waiting.
        DeadlineExceeded
            Its deadline passed while it waited.
        Unavailable
            There has been no replica for too long.
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
                self._wake.set()  # its turn may be at once
            await self._wait(ticket, arrival)
        self._num_unanswered += 1
        return admitted

    def charge(self, tenant: str, tokens: float) -> None:
        """Tokens were computed for a tenant; negative ones were charged before and were not."""
        self._queue.charge(tenant, tokens)

    def notify(self) -> None:
        """A request moved on: a replica may be open again."""
        if self._queue:
            self._wake.set()

    def on_answer(self, estimate_s: float | None, entered_s: float) -> float:
        """Returns the time."""
        now_s = self._clock()
        self._num_unanswered -= 1
        self._turnover.num_held += 1
        if estimate_s is not None:
            self._shortfall.on_wait(estimate_s, now_s - entered_s, now_s)
        return now_s

    def on_leave(self, answered_s: float | None) -> None:
        # Not when it started: while empty places are being filled many start, and none comes free.
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
        """Places that come free in a second."""
        num_starting = max(0.0, self._num_unanswered - view.num_waiting)
        return self._request_rate.request_rate(self._turnover.rate(num_starting))

    def _refusal(self, ticket: Ticket, wait_s: float, view: _View) -> Overloaded | None:
        return refusal(
            self.limits,
            self._queue,
            ticket,
            wait_s=wait_s,
            queued_s=view.queued_s,
            # What a replica that hung has taught shall not close the queue: at least half of the bound is left.
            margin_s=min(self._shortfall.margin_s(self._clock()), self.limits.max_wait_s / 2),
        )

    async def _wait(self, ticket: Ticket, arrival: Arrival) -> None:
        waiter = _Waiter(arrival, asyncio.get_running_loop().create_future())
        self._queue.push(ticket)
        self._waiters[ticket] = waiter
        if self._pump is None:
            # In a context of its own: Serve cancels what was started in that of a request with it.
            self._pump = asyncio.get_running_loop().create_task(
                self._run(), context=contextvars.Context()
            )
        try:
            await waiter.done
        finally:
            if self._waiters.pop(ticket, None) is not None and ticket in self._queue:
                self._queue.remove(ticket)

    async def _run(self) -> None:
        """Send who waits, until nobody does."""
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
        """Send those whose turn it is while a replica is open; None when there is none at all."""
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
        """Of a policy that does not price the queue only the waiting requests count."""
        fleet = ranking.fleet
        best = ranking[0]
        wait_s = ranking.wait_s
        if wait_s is None:
            wait_s = np.zeros(len(fleet))
        few = fleet.num_waiting <= self.limits.max_replica_waiting_requests
        few &= fleet.num_places >= 1  # else it would come back refused
        has_time = wait_s <= self.limits.dispatch_window_s
        is_open = bool((few & has_time).any())
        # What an open replica lacked is what the others before lacked. Where there are many short prompts and no
        # places for them their prefill looks like much.
        lacks_places = self._last.lacks_places if is_open else not few.all()
        return _View(
            is_open,
            float(wait_s.min()),
            best.prefill_s,
            len(fleet),
            lacks_places,
            float(fleet.num_waiting.sum()),
        )
