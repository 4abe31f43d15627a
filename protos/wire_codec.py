"""Encodes dataclasses for the bus: the list of the field values as msgpack, with a version and a checksum.

Fields are written in the order of their declaration, and a reader expects exactly their number. A field of a type that
msgpack does not know has a `Codec` in its annotation: `Annotated[np.ndarray, array("<i4")]`.

A message that is longer than Serve's gRPC allows travels in parts. Serve sends handle calls over gRPC with at most
4 MiB per message (`RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH`); a call with a longer message fails. A frame with the
log-probabilities of a long prompt can be longer.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, Self

import msgpack
import numpy as np

WIRE_VERSION = 10
_CHECKSUM_BYTES = 4
# Half of Serve's default, because Serve adds data of its own.
MAX_MESSAGE_BYTES = 2 << 20


class WireError(ValueError):
    """The bytes are not a message of this version."""


class Codec(NamedTuple):
    """Functions that convert a field's value to a value that msgpack knows, and back; None: no conversion."""

    pack: Callable[[Any], Any] | None
    unpack: Callable[[Any], Any] | None


def array(dtype: str) -> Codec:
    """Codec for a one-dimensional array: its bytes in C order. It is decoded to a read-only array."""

    def pack(values: np.ndarray) -> bytes:
        return values.astype(dtype, "C", copy=False).tobytes() if len(values) else b""

    return Codec(pack, lambda data: np.frombuffer(data, dtype))


def optional(codec: Codec) -> Codec:
    """Codec for None or a value of another codec."""
    pack, unpack = codec

    def or_none(convert: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        return convert and (lambda value: None if value is None else convert(value))

    return Codec(or_none(pack), or_none(unpack))


def record(kind: Any) -> Codec:
    """Codec for a class with the methods `to_wire` and `from_wire`."""
    return Codec(kind.to_wire, kind.from_wire)


def named_tuple(kind: Callable[..., Any]) -> Codec:
    """Codec for a NamedTuple, which msgpack writes as a list."""
    return Codec(None, lambda values: kind(*values))


def list_of(codec: Codec) -> Codec:
    """Codec for a list of values of another codec."""
    pack, unpack = codec
    return Codec(pack and _each(pack), unpack and _each(unpack))


def _each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: [convert(value) for value in values]


class Record:
    """Base of a dataclass that is written as the list of its fields."""

    __slots__ = ()

    def to_wire(self) -> list[Any]:
        """Return the values of all fields, converted to values that msgpack knows."""
        kind: Any = type(self)
        layout = _layout(kind)
        values = list(layout.get(self))
        for i, pack in layout.packers:
            values[i] = pack(values[i])
        return values

    @classmethod
    def from_wire(cls, values: list[Any]) -> Self:
        """Make a record from the result of `to_wire`. The list is changed in place.

        Raises
        ------
        WireError
            The number of values differs from the number of fields.
        """
        kind: Any = cls
        layout = _layout(kind)
        if len(values) != layout.num_fields:
            raise WireError(f"{cls.__name__}: {len(values)} fields, expected {layout.num_fields}")
        for i, unpack in layout.unpackers:
            values[i] = unpack(values[i])
        return cls(*values)


class Message(Record):
    """Base of a record that travels alone: msgpack of the version and the fields, followed by a CRC-32 of these bytes.

    The checksum costs a microsecond per kilobyte; without it, a token with a flipped bit would be served.
    """

    __slots__ = ()

    def encode(self) -> bytes:
        body: bytes = msgpack.packb([WIRE_VERSION, *self.to_wire()])
        return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a message; refuse one that is damaged, truncated or of another version.

        Raises
        ------
        WireError
            Names the message and the reason.
        """
        name = cls.__name__
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
            raise WireError(f"{name}: the checksum does not fit these {len(data)} bytes")
        try:
            values = msgpack.unpackb(body)
        except Exception as error:
            raise WireError(f"{name}: not msgpack: {error}") from error
        if not isinstance(values, list) or not values or values[0] != WIRE_VERSION:
            version = values[0] if isinstance(values, list) and values else None
            raise WireError(f"{name}: wire version {version!r}, this side speaks {WIRE_VERSION}")
        return cls.from_wire(values[1:])


class _Layout(NamedTuple):
    """The fields of a record class, in the order of their declaration."""

    num_fields: int
    get: Callable[[Any], tuple[Any, ...]]  # all values
    packers: list[tuple[int, Callable[[Any], Any]]]  # index of a field, and its codec's function
    unpackers: list[tuple[int, Callable[[Any], Any]]]


@functools.cache
def _layout(kind: Any) -> _Layout:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    codecs = [_codec(hints[name]) for name in names]
    return _Layout(
        len(names),
        operator.attrgetter(*names),
        [(i, codec.pack) for i, codec in enumerate(codecs) if codec.pack is not None],
        [(i, codec.unpack) for i, codec in enumerate(codecs) if codec.unpack is not None],
    )


def _codec(hint: Any) -> Codec:
    codecs = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Codec)]
    return codecs[0] if codecs else Codec(None, None)


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
