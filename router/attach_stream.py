"""An attach stream that one call after the other carries.

Where calls go through Ray's object store, Ray keeps the id of every item of a streaming call until the call ends, on
both sides: in a hash set of the caller, 37 to 85 bytes each (Ray 2.60; found in dumps of routers), and in a vector of
the producer. A call as long as its replica's life would never give them back: with 120 frames a second that is 0.3 to
0.6 MB a minute at the caller alone. So after `MAX_CALL_FRAMES` the next call takes the stream over. The first one is
read to its end, so that no frame is lost or comes in another order, and nobody waits::

    router                                    replica
      ◀─ frames ────────────── call 1 ─────────  attachment
      ── attach(continues) ─── call 2 ────────▶  carried by call 2 from here on
      ◀─ those before, end ─── call 1 ─────────
      ◀─ frames ────────────── call 2 ─────────
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from quire.protos.parts import Part, whole
from quire.router.calls import answer_of

logger = logging.getLogger("ray.serve")
MAX_CALL_FRAMES = 4096  # 0.3 MB; 80 s of 20 ms steps


class Call(Protocol):
    """A `DeploymentResponseGenerator`."""

    async def __anext__(self) -> bytes | Part: ...

    def cancel(self) -> None: ...


class AttachStream:
    """The messages of an attach stream: a `Hello`, then frames.

    Ends when a call ends that none has taken over from, and raises what a call raises.

    Parameters
    ----------
    call
        Calls `attach`; with True to take over from the call before.
    spawn
        Runs a coroutine as a task with a context of its own.
    is_right
        Whether the first message of a call comes from the replica that was meant.
    may_call
        Whether Serve brings calls to that replica now.
    """

    def __init__(
        self,
        call: Callable[[bool], Call],
        spawn: Callable[[Coroutine[Any, Any, Call | None]], asyncio.Task[Call | None]],
        *,
        is_right: Callable[[bytes], bool],
        may_call: Callable[[], bool],
    ):
        self._call = call
        self._spawn = spawn
        self._is_right = is_right
        self._may_call = may_call
        self._read = call(False)
        self._open = [self._read]
        self._num_read = 0  # from the call that is read
        self._next: asyncio.Task[Call | None] | None = None

    def __aiter__(self) -> AttachStream:
        return self

    async def __anext__(self) -> bytes:
        read = self._read
        try:
            data = await answer_of(_message(read))
        except StopAsyncIteration:
            following = None if self._next is None else await self._next
            if following is None:
                raise
            self._open.remove(self._read)
            self._read, self._next, self._num_read = following, None, 0
            return await anext(self)
        self._num_read += 1
        if self._num_read % MAX_CALL_FRAMES == 0 and self._next is None and self._may_call():
            self._next = self._spawn(self._take_over())
        return data

    async def _take_over(self) -> Call | None:
        """Make the next call; None if it did not reach the replica: later again."""
        call = self._call(True)
        self._open.append(call)
        try:
            if self._is_right(await answer_of(_message(call))):
                return call
        except Exception as error:  # the call that is read says what there is to say
            logger.info("attach stream not taken over: %r", error)
        call.cancel()
        self._open.remove(call)
        self._next = None
        return None

    def cancel(self) -> None:
        """End all calls."""
        if self._next is not None:
            self._next.cancel()
        for call in self._open:
            call.cancel()


async def _message(call: Call) -> bytes:
    """The call's next message, in one part or several."""
    return await whole(await anext(call), lambda: anext(call))
