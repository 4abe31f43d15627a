"""Makes what sends spans to the collector, from the section `tracing` and OpenTelemetry's variables."""

from __future__ import annotations

import importlib.metadata
import os
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import SpanExporter

from quire.cluster.config.http_section import TRACE_PROTOCOLS, TracingArgs
from quire.cluster.tracing.trace_queue import TraceQueue

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP_PATH = "/v1/traces"


def trace_queue(args: TracingArgs, router_id: str) -> TraceQueue:
    """Start the export of a router's traces.

    Raises
    ------
    ValueError
        A variable has an unknown protocol.
    """
    return TraceQueue(_exporter(args), _resource(router_id), args.max_queued_spans)


def _exporter(args: TracingArgs) -> SpanExporter:
    """Return the exporter. It reads the variables OTEL_EXPORTER_OTLP_... for what `args` leaves open."""
    protocol: str | None = args.protocol
    if protocol is None:
        given = [os.environ[name] for name in _PROTOCOL_VARIABLES if os.environ.get(name)]
        protocol = given[0] if given else TRACE_PROTOCOLS[0]
        if protocol not in TRACE_PROTOCOLS:
            raise ValueError(
                f"{' or '.join(_PROTOCOL_VARIABLES)} must be one of {', '.join(TRACE_PROTOCOLS)}, got {protocol!r}"
            )
    if protocol == "grpc":
        return GrpcExporter(endpoint=args.endpoint)
    endpoint = args.endpoint
    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _HTTP_PATH
    return HttpExporter(endpoint=endpoint)


def _resource(router_id: str) -> Resource:
    """Return the process's attributes; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    return Resource.create(
        {
            "service.name": "quire",
            "service.version": importlib.metadata.version("quire"),
            "service.instance.id": router_id,
            **OTELResourceDetector().detect().attributes,
        }
    )
