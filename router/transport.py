"""What the request lifecycle sees of the bus: attempts, and what happens to them. Plain asyncio, no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.protos.wire import Completion, Hello, Submit, TokenDelta


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica, its stream or its call is gone before the request ended."""

    replica: str
    reason: str


Event = TokenDelta | Completion | Lost


class Attempt:
    """One request on one replica, seen from the router: a queue of events with a single reader.

    Tokens come in frames, the completion by the unary call; which of the two last messages comes first is not
    known. The attempt is over when the delta with the finish reason is there, or a failure.
    """

    def __init__(self, stream_id: int, replica: str, on_cancel: Callable[[Attempt], None]):
        self.stream_id = stream_id
        self.replica = replica  # who has it, as far as known
        self.placed = False  # a frame has confirmed it
        self.call: asyncio.Task[None] | None = None
        self.finished = False  # nothing more is taken
        self.needs_abort = True  # the replica may still be at work on it
        # When its unary call said that it ended well; the last frame should be here soon after.
        self.completed_s: float | None = None
        self._on_cancel = on_cancel
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()

    def put(self, event: Event) -> None:
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
        self._ready.set()

    async def next(self) -> Event:
        """Wait for the next event."""
        while not self._events:
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()

    def cancel(self) -> None:
        """The reader is done: end the request on its replica if it still runs there. Idempotent."""
        self._on_cancel(self)


class Transport(Protocol):
    """How the lifecycle reaches replicas; `router.bus.Bus` is the real one."""

    @property
    def hellos(self) -> dict[str, Hello]: ...

    def next_stream_id(self) -> int: ...

    def submit(self, submit: Submit, route: list[str]) -> Attempt: ...
