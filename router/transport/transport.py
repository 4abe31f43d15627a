"""Attempts and their events: the interface between a request's stream and the bus. Plain asyncio, no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from quire.protos.errors import QuireError
from quire.protos.wire import NO_FACTS, Completion, Hello, Submit, TokenDelta
from quire.router.transport.flow import Credit


@dataclass(frozen=True, slots=True)
class Lost:
    """The event that the replica, its attach stream or the call was lost before the request ended.

    Attributes
    ----------
    planned
        The replica drains, so the loss does not count as a failure of the request.
    """

    replica: str
    reason: str
    planned: bool = False


class OutputGap(Exception):
    """A replica sent later output of an attempt without the output before it."""


AttemptEvent = TokenDelta | Completion | Lost


class Attempt:
    """One request on one replica: a queue of events with a single reader.

    Tokens arrive in frames, the completion arrives with the unary call, and either may arrive first. The attempt ends
    with the delta that has the finish reason, or with a failure.

    Attributes
    ----------
    replica
        The replica that runs the request, as far as known.
    placed
        A frame has confirmed `replica`.
    num_read
        Number of output tokens that the reader has taken, including those of earlier attempts.
    taken_s
        Time at which the reader took its last delta; None while it waits for the next one, or before the client reads.
    finished
        Further events are dropped.
    needs_abort
        The replica may still work on the request.
    before_move
        Prepares the attempt's end on a replica that drains; does not raise an error.
    drops_retained
        The replica retains the request's blocks after its end (`Submit.retain_s`), and `cancel` ends this.
    completed_s
        Time at which the unary call reported a regular end (the last frame should arrive soon after); None: not yet.
    ended_s
        Time at which the last delta arrived; None: not yet.
    """

    def __init__(
        self,
        stream_id: int,
        replica: str,
        on_cancel: Callable[[Attempt], None],
        *,
        credit: Credit | None = None,
        on_low_credit: Callable[[Attempt], None] = lambda attempt: None,
    ):
        self.credit = credit
        self.num_read = 0
        self.taken_s: float | None = None
        self._on_low_credit = on_low_credit
        self.stream_id = stream_id
        self.replica = replica
        self.placed = False
        self.call: asyncio.Task[None] | None = None
        self.finished = False
        self.needs_abort = True
        self.before_move: Callable[[], Awaitable[None]] | None = None
        self._is_moving = False
        self.drops_retained = False
        self.completed_s: float | None = None
        self.ended_s: float | None = None
        self._unread_s = 0.0
        # Since when output waits for its reader; None: none does.
        self._unread_since_s: float | None = None
        self._on_cancel = on_cancel
        self._events: deque[AttemptEvent] = deque()
        # The reader waits for this future. An `asyncio.Event` would look up the event loop at every wait. For that,
        # Python 3.11 asks the kernel for the process id, which takes a seventh of a router's time for a token.
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, event: AttemptEvent) -> None:
        """Queue an event; drop it if the attempt has ended."""
        if self.finished:
            return
        if isinstance(event, TokenDelta):
            facts = event.facts
            if facts is not NO_FACTS and facts.finish_reason is not None:
                if facts.finish_reason in ("error", "abort"):
                    # The completion, which contains the error, will end the attempt.
                    event = dataclasses.replace(event, facts=facts._replace(finish_reason=None))
                else:
                    self.finished = True
                    self.needs_abort = False
                    self.ended_s = time.monotonic()
        elif isinstance(event, Completion):
            if event.finish_reason in ("stop", "length"):
                # The last delta, which follows all earlier tokens, ends the attempt.
                return
            self.finished = True
            self.needs_abort = False
        else:
            # `needs_abort` stays: the replica may still run the request.
            self.finished = True
        if self._waiter is None and not self._events:
            self._unread_since_s = time.monotonic()
        self._events.append(event)
        self._wake()

    async def move(self, reason: str) -> None:
        """Let the request go on elsewhere, since its replica drains. Only the first call does something."""
        if self._is_moving:
            return
        self._is_moving = True
        try:
            if self.before_move is not None and not self.finished:
                await self.before_move()
        finally:
            self.put(Lost(self.replica, reason, planned=True))

    async def next(self) -> AttemptEvent:
        """Wait for the next event. The call implies that the reader is done with the earlier events."""
        while (event := self.take()) is None:
            await self.arrival()
        return event

    def take(self) -> AttemptEvent | None:
        """Return the next event, or None if there is none yet."""
        self.taken_s = None
        if self.credit is not None and self.credit.is_low(self.num_read) and not self.finished:
            self._on_low_credit(self)
        if not self._events:
            return None
        event = self._events.popleft()
        if self._events:
            # Events that arrive together wake the reader once, and it may be away before it takes the second.
            if self._unread_since_s is None:
                self._unread_since_s = time.monotonic()
        elif self._unread_since_s is not None:
            self._unread_s, self._unread_since_s = self.unread_s(), None
        if isinstance(event, TokenDelta):
            self.num_read = event.index + len(event.token_ids)
        return event

    def arrival(self) -> asyncio.Future[None]:
        """Return a future that completes when the next event arrives. Used after `take` returned None."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._waiter = self._loop.create_future()
        return self._waiter

    @property
    def has_unread(self) -> bool:
        return bool(self._events)

    def unread_s(self) -> float:
        """Return the seconds so far in which output had arrived and the reader was not yet back for it."""
        if self._unread_since_s is None:
            return self._unread_s
        return self._unread_s + time.monotonic() - self._unread_since_s

    def fail(self, error: QuireError) -> None:
        """End the request with an error. Events that the reader has not read are dropped."""
        self._events.clear()
        self._events.append(Completion("error", 0, 0, 0, error=error.to_wire()))
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cancel(self) -> None:
        """End the request on its replica if it still runs there. Idempotent."""
        self._on_cancel(self)


class Transport(Protocol):
    """The methods by which a request's stream reaches replicas. `bus.Bus` implements them over Ray Serve."""

    @property
    def hellos(self) -> dict[str, Hello]: ...

    def next_stream_id(self) -> int: ...

    async def crashed_with(self, replica: str, stream_id: int) -> bool: ...

    def submit(self, submit: Submit, route: list[str]) -> Attempt: ...

    async def pull(self, submit: Submit, replica: str) -> bool: ...

    async def publish(self, submit: Submit, replica: str) -> bool: ...
