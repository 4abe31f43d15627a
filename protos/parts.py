"""Messages that are longer than one message of Serve's gRPC may be.

Serve brings handle calls over gRPC with at most 4 MiB a message (`RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH`), and a
call with a longer one fails. A frame with the log-probabilities of a long prompt can be: it travels in parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

MAX_MESSAGE_BYTES = 2 << 20  # half of Serve's default: what is around them counts as well


class Part(NamedTuple):
    """A part of a message; the others follow in order."""

    data: bytes
    is_last: bool


def parts_of(message: bytes) -> Iterator[bytes | Part]:
    """The message itself where it is short enough, else its parts."""
    if len(message) <= MAX_MESSAGE_BYTES:
        yield message
        return
    for begin in range(0, len(message), MAX_MESSAGE_BYTES):
        end = begin + MAX_MESSAGE_BYTES
        yield Part(message[begin:end], end >= len(message))


async def whole(first: bytes | Part, following: Callable[[], Awaitable[bytes | Part]]) -> bytes:
    """The message that begins with `first`; its other parts, if it has any, come from `following`."""
    if not isinstance(first, Part):
        return first
    data, is_last = [first.data], first.is_last
    while not is_last:
        part = await following()
        assert isinstance(part, Part)
        data.append(part.data)
        is_last = part.is_last
    return b"".join(data)
