"""Awaits replies of replicas, for calls over gRPC and over Ray's object store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from quire.protos.wire_codec import Part, whole

T = TypeVar("T")
# Serve's options for calls over gRPC instead of Ray's object store. Arguments and replies are plain data, but the
# serializer must be pickle: Serve sends exceptions as replies, which msgpack cannot encode. The replica's port
# unpickles everything that a caller sends, so it is protected by Ray's token and by the address that it listens on
# (`cluster/proxies/ray_proxies.py`).
OVER_GRPC = {
    "_by_reference": False,
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}


class StreamingCall(Protocol):
    """Serve's `DeploymentResponseGenerator`: the messages of a streaming call."""

    async def __anext__(self) -> bytes | Part: ...

    def cancel(self) -> None: ...


class CallEnded(Exception):
    """The replica has cancelled a call, most likely because its process ends."""


async def answer_of(call: Awaitable[T]) -> T:
    """Return the reply to `call`, or raise its exception.

    Over gRPC, a replica whose process ends cancels its calls, and its `CancelledError` is raised in this process. The
    caller would take that for a cancellation of its own task.

    Raises
    ------
    CallEnded
        The replica has cancelled the call.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallEnded("the replica has ended the call") from None


async def next_message(call: StreamingCall) -> bytes:
    """Return the next message of a streaming call; it may arrive in several parts.

    Raises
    ------
    StopAsyncIteration
        The stream has ended.
    CallEnded
        The replica has cancelled the call.
    """
    return await answer_of(_whole_message(call))


async def _whole_message(call: StreamingCall) -> bytes:
    return await whole(await anext(call), lambda: anext(call))
