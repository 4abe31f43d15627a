"""What the request lifecycle sees of the bus: attempts, and what happens to them. Plain asyncio, no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.protos.errors import QuireError
from quire.protos.wire import Completion, Hello, Submit, TokenDelta
from quire.router.transport.flow import Credit


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica, its stream or its call is gone before the request ended."""

    replica: str
    reason: str
    planned: bool = False  # a drain: nothing is wrong with the request


AttemptEvent = TokenDelta | Completion | Lost


class Attempt:
    """One request on one replica, seen from the router: a queue of events with a single reader.

    Tokens come in frames, the completion by the unary call; which of the two last messages comes first is not
    known. The attempt is over when the delta with the finish reason is there, or a failure.
    """

    def __init__(
        self,
        stream_id: int,
        replica: str,
        on_cancel: Callable[[Attempt], None],
        *,
        credit: Credit | None = None,
        on_low_credit: Callable[[Attempt], None] | None = None,
    ):
        self.credit = credit
        self.num_read = (
            0  # output tokens that the reader has taken, those of earlier attempts included
        )
        # Since when the reader is busy with what it took last; None while it waits, or before it is a client's.
        self.taken_s: float | None = None
        self._on_low_credit = on_low_credit
        self.stream_id = stream_id
        self.replica = replica  # who has it, as far as known
        self.placed = False  # a frame has confirmed it
        self.call: asyncio.Task[None] | None = None
        self.finished = False  # nothing more is taken
        self.needs_abort = True  # the replica may still be at work on it
        # When its unary call said that it ended well; the last frame should be here soon after.
        self.completed_s: float | None = None
        self._on_cancel = on_cancel
        self._events: deque[AttemptEvent] = deque()
        # Of the reader, while there is nothing to read. An `asyncio.Event` looks for the loop at every wait, for which
        # Python 3.11 asks the kernel for its process id: a seventh of what a router does for a token.
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the reader

    def put(self, event: AttemptEvent) -> None:
        """Queue an event; after the last one, later ones are dropped."""
        if self.finished:
            return
        if isinstance(event, TokenDelta):
            if event.finish_reason in ("error", "abort"):
                # The completion ends the attempt: it says why.
                event = dataclasses.replace(event, finish_reason=None)
            self.finished = event.finish_reason is not None
            self.needs_abort = not self.finished
        elif isinstance(event, Completion):
            if event.finish_reason in ("stop", "length"):
                return  # the last delta ends the attempt, in order with the tokens before it
            self.finished = True
            self.needs_abort = False
        else:
            self.finished = True  # only out of sight: the replica itself may be well
        self._events.append(event)
        self._wake()

    async def next(self) -> AttemptEvent:
        """Wait for the next event. Whoever asks for it has done with those before."""
        while (event := self.take()) is None:
            await self.arrival()
        return event

    def take(self) -> AttemptEvent | None:
        """`next` without waiting: None when nothing is there."""
        self.taken_s = None
        if self.credit is not None and self.credit.is_low(self.num_read) and not self.finished:
            self._on_low_credit(self)
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, TokenDelta):
            self.num_read = event.index + len(event.token_ids)
        return event

    def arrival(self) -> asyncio.Future[None]:
        """For the reader that has found nothing: done with the next event."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._waiter = self._loop.create_future()
        return self._waiter

    @property
    def has_unread(self) -> bool:
        return bool(self._events)

    def fail(self, error: QuireError) -> None:
        """Give the request up from this side: the reader gets the error instead of what it has not read."""
        self._events.clear()
        self._events.append(Completion("error", 0, 0, 0, error=error.to_wire()))
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cancel(self) -> None:
        """The reader is done: end the request on its replica if it still runs there. Idempotent."""
        self._on_cancel(self)


class Transport(Protocol):
    """How the lifecycle reaches replicas; `router.bus.Bus` is the real one."""

    @property
    def hellos(self) -> dict[str, Hello]: ...

    def next_stream_id(self) -> int: ...

    async def crashed_with(self, replica: str, stream_id: int) -> bool: ...

    def submit(self, submit: Submit, route: list[str]) -> Attempt: ...
