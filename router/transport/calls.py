"""Awaiting what a replica answers, over whatever Serve brings a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from quire.protos.parts import Part, whole

T = TypeVar("T")


class StreamingCall(Protocol):
    """A `DeploymentResponseGenerator`."""

    async def __anext__(self) -> bytes | Part: ...

    def cancel(self) -> None: ...


class CallEnded(Exception):
    """The replica has ended a call: most likely it is about to end itself."""


async def answer_of(call: Awaitable[T]) -> T:
    """What `call` gives or raises.

    Over gRPC a replica that ends cancels the calls that it has, and its `CancelledError` is raised here, where nobody
    has cancelled anything. To whoever awaits it, it would look like a cancellation of their own task.

    Raises
    ------
    CallEnded
        Instead of that one.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallEnded("the replica has ended the call") from None


async def next_message(call: StreamingCall) -> bytes:
    """The next message of a streaming call, which may come in several parts.

    Raises
    ------
    StopAsyncIteration
        The call is over.
    CallEnded
        The replica has ended it.
    """
    return await answer_of(_whole_message(call))


async def _whole_message(call: StreamingCall) -> bytes:
    return await whole(await anext(call), lambda: anext(call))
