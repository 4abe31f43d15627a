"""Collectors of OpenTelemetry's protocol, over gRPC and HTTP: real servers that keep what they receive."""

from __future__ import annotations

import gzip
import random
import threading
from collections.abc import Iterable
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as plain data."""
    found: dict[str, Any] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = tuple(getattr(v, v.WhichOneof("value")) for v in value.values)
        found[one.key] = value
    return found


def root_of(spans: list[Span]) -> Span:
    """The request's span of a trace, after a check that all others are below it and within its time."""
    (root,) = (span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.trace_id == root.trace_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano, span.name
        if span is not root:
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, span.name
            assert span.end_time_unix_nano <= root.end_time_unix_nano, span.name
    return root


def new_parent() -> tuple[str, str]:
    """A client's `traceparent` that asks for a trace, and the trace's id."""
    trace_id = f"{random.getrandbits(128) | 1:032x}"
    return f"00-{trace_id}-{random.getrandbits(64) | 1:016x}-01", trace_id


class Receiver:
    """What a collector has received so far: spans, and the resource and the headers of the last export."""

    protocol: str
    endpoint: str

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.headers: dict[str, str] = {}

    def of_trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace; the id is in hexadecimal digits."""
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def take(self, request: messages.ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.headers = headers
        for of_resource in request.resource_spans:
            self.resource = plain(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class GrpcReceiver(Receiver, services.TraceServiceServicer):
    protocol = "grpc"

    def __init__(self) -> None:
        super().__init__()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        services.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(
        self, request: messages.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> messages.ExportTraceServiceResponse:
        self.take(request, dict(context.invocation_metadata()))
        return messages.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


class HttpReceiver(Receiver):
    protocol = "http/protobuf"

    def __init__(self) -> None:
        super().__init__()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = messages.ExportTraceServiceRequest.FromString(body)
                receiver.take(request, {k.lower(): v for k, v in self.headers.items()})
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
