"""Splits messages that are longer than Serve's gRPC allows, and joins their parts.

Serve sends handle calls over gRPC with at most 4 MiB per message (`RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH`); a call
with a longer message fails. A frame with the log-probabilities of a long prompt can be longer, so it is sent in parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

# Half of Serve's default, because Serve adds data of its own.
MAX_MESSAGE_BYTES = 2 << 20


class Part(NamedTuple):
    """A part of a message; further parts follow in order."""

    data: bytes
    is_last: bool


def parts_of(message: bytes) -> Iterator[bytes | Part]:
    """Yield the message if it is short enough, otherwise its parts."""
    if len(message) <= MAX_MESSAGE_BYTES:
        yield message
        return
    for begin in range(0, len(message), MAX_MESSAGE_BYTES):
        end = begin + MAX_MESSAGE_BYTES
        yield Part(message[begin:end], end >= len(message))


async def whole(first: bytes | Part, following: Callable[[], Awaitable[bytes | Part]]) -> bytes:
    """Join the message that begins with `first`; `following` returns each further part."""
    if not isinstance(first, Part):
        return first
    data, is_last = [first.data], first.is_last
    while not is_last:
        part = await following()
        assert isinstance(part, Part)
        data.append(part.data)
        is_last = part.is_last
    return b"".join(data)
