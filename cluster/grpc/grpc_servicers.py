"""Registers the gRPC services with a limit on requests: the `grpc_servicer_functions` of the Serve config.

A protobuf message of 8 MB can contain four million messages. Parsing it takes 250 MB and 0.2 s, in which the process
does nothing else. Therefore the fields of a request are counted before it is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from quire.protos.errors import BodyTooLarge, InvalidRequest, QuireError

# Longer texts do not fit the context of any model.
MAX_MESSAGE_BYTES = 8 * 1024**2
# Fields of a request and of all its parts. 4,096 chat messages have three each. Counting takes 0.5 us per field.
MAX_FIELDS = 16 * 1024
# This many bytes of packed numbers count as a field. So a request has at most 4 MiB of them, which take 30 ms to parse;
# the longest prompt of token ids has 1.5 MiB.
PACKED_BYTES = 256
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


@dataclass(frozen=True, slots=True)
class Unparsed:
    """Replaces a request that was not parsed, so that the method can refuse it with our status.

    An exception in a deserializer would give the client gRPC's own status.
    """

    error: QuireError


def accepted(request: Any) -> None:
    """Check that a request was parsed.

    Raises
    ------
    BodyTooLarge
        The request is too large.
    InvalidRequest
        The request is not a message of this type.
    """
    if isinstance(request, Unparsed):
        raise request.error


def add_GenerationServicer_to_server(servicer: Any, server: Any) -> None:
    """Register the service like `generation_pb2_grpc`, with limits on requests."""
    _add(generation_pb2_grpc.add_GenerationServicer_to_server, generation_pb2, servicer, server)


def add_ControlServicer_to_server(servicer: Any, server: Any) -> None:
    """Register the service like `control_pb2_grpc`, with limits on requests."""
    _add(control_pb2_grpc.add_ControlServicer_to_server, control_pb2, servicer, server)


def add_HealthServicer_to_server(servicer: Any, server: Any) -> None:
    """Register the service like `health_pb2_grpc`, with limits on requests."""
    _add(health_pb2_grpc.add_HealthServicer_to_server, health_pb2, servicer, server)


class _Handlers:
    """Collects the handlers that the generated code registers; stands in for a server."""

    def __init__(self) -> None:
        # Handlers by the method's name. They are named tuples, but grpcio's type stubs do not say so.
        self.by_method: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignore generic handlers: they are the same as the registered method handlers."""

    def add_registered_method_handlers(
        self, service_name: str, handlers: Mapping[str, Any]
    ) -> None:
        self.by_method.update(handlers)


def _add(add: Callable[[Any, Any], None], module: Any, servicer: Any, server: Any) -> None:
    given = _Handlers()
    add(servicer, given)
    (service,) = module.DESCRIPTOR.services_by_name.values()
    handlers = {
        name: handler._replace(request_deserializer=_bounded(module, service, name))
        for name, handler in given.by_method.items()
    }
    generic = _ServiceHandler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_registered_method_handlers(service.full_name, handlers)


class _ServiceHandler(grpc.GenericRpcHandler):
    """The methods of a service. A call of an unknown method is refused with the names of the known ones.

    Ray Serve reads and replaces the attribute `_method_handlers`, which grpcio's own class has too.
    """

    def __init__(self, service: str, handlers: Mapping[str, Any]):
        self._prefix = f"/{service}/"
        self._method_handlers = {self._prefix + name: h for name, h in handlers.items()}
        self._refusal = f"this method is not served; {service} has {', '.join(sorted(handlers))}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call; None for other services."""
        if not details.method.startswith(self._prefix):
            return None
        handler = self._method_handlers.get(details.method)
        return handler or grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, self._refusal)


def _bounded(module: Any, service: Any, method: str) -> Callable[[bytes], Message | Unparsed]:
    descriptor = service.methods_by_name[method].input_type
    message_class = getattr(module, descriptor.name)

    def parse(raw: bytes) -> Message | Unparsed:
        if len(raw) > MAX_MESSAGE_BYTES:
            return _too_large(f"at most {MAX_MESSAGE_BYTES} bytes, got {len(raw)}")
        if _fields_left(raw, 0, len(raw), descriptor, MAX_FIELDS) < 0:
            return _too_large(
                f"at most {MAX_FIELDS} fields in all its parts, got more; {PACKED_BYTES} bytes of a list of numbers "
                "count as one"
            )
        try:
            return message_class.FromString(raw)
        except DecodeError:
            return Unparsed(InvalidRequest(f"the request must be a {descriptor.full_name}"))

    return parse


def _too_large(bound: str) -> Unparsed:
    return Unparsed(BodyTooLarge(f"the request must have {bound}"))


def _fields_left(raw: bytes, at: int, end: int, descriptor: Descriptor, budget: int) -> int:
    """Return `budget` minus the number of fields of the message in raw[at:end]; negative if there are more fields.

    Counting stops when the budget is used up, or at bytes that are not protobuf, which the parser refuses.
    """
    while at < end and budget >= 0:
        budget -= 1
        tag, at = _varint(raw, at, end)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(raw, at, end)
        elif kind == _BYTES:
            length, at = _varint(raw, at, end)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                part_end = min(at + length, end)
                budget = _fields_left(raw, at, part_end, field.message_type, budget)
            elif field is not None and field.cpp_type != field.CPPTYPE_STRING:
                budget -= length // PACKED_BYTES
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            # Groups, which proto3 messages do not have. Their fields count as fields of this message.
            continue
    return budget


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it, which is `end` if the number is incomplete."""
    value = shift = 0
    while at < end and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return value, end
