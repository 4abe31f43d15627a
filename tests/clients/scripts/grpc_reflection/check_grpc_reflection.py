"""gRPC without generated code: services, methods and messages come from the server's reflection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from checks import Target, run
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICES = {"quire.v1.Generation", "quire.v1.Control", "grpc.health.v1.Health"}
_TIMEOUT_S = 60


class _Application(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Names the application in the metadata of every call, reflection included."""

    def __init__(self, name: str):
        self._metadata = (("application", name),)

    def _intercept(self, continuation, details, request):
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _intercept


@contextmanager
def _channel(target: Target) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target.grpc) as channel:
        yield grpc.intercept_channel(channel, _Application(target.application))


def _call(target: Target, service: str, method: str, **fields):
    """The answer of a method, or the list of a stream's messages."""
    with _channel(target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        described = pool.FindServiceByName(service).methods_by_name[method]
        request = GetMessageClass(described.input_type)(**fields)
        make = channel.unary_stream if described.server_streaming else channel.unary_unary
        call = make(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        answer = call(request, timeout=_TIMEOUT_S)
        return list(answer) if described.server_streaming else answer


def services(target: Target) -> None:
    with _channel(target) as channel:
        listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert listed >= SERVICES, listed


def model_info(target: Target) -> None:
    assert target.model in str(_call(target, "quire.v1.Control", "GetModelInfo"))


def loads(target: Target) -> None:
    assert _call(target, "quire.v1.Control", "GetLoads").ListFields()


def generate_once(target: Target) -> None:
    fields = {"prompt": "One, two,", "sampling": {"max_tokens": 8}}
    assert _call(target, "quire.v1.Generation", "GenerateOnce", **fields).text


def generate(target: Target) -> None:
    """A stream has the text of the whole answer."""
    fields = {"prompt": "One, two,", "sampling": {"max_tokens": 8, "seed": 7}}
    whole = _call(target, "quire.v1.Generation", "GenerateOnce", **fields)
    messages = _call(target, "quire.v1.Generation", "Generate", **fields)
    assert "".join(message.text for message in messages) == whole.text


def health(target: Target) -> None:
    serving = 1
    assert _call(target, "grpc.health.v1.Health", "Check").status == serving


run([services, model_info, loads, generate_once, generate, health])
