"""The export of traces: in the background, bounded, counted; to collectors over gRPC and HTTP."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError
from quire.cluster.config.http_section import TracingArgs
from quire.cluster.tracing import trace_queue as trace_queue_module
from quire.cluster.tracing.collector import trace_queue
from quire.cluster.tracing.trace_queue import TraceQueue
from quire.router.trace.request_trace import RequestTrace
from quire.router.trace.trace_context import TraceContext
from tests.otlp_receiver import GrpcReceiver, HttpReceiver

NUM_PARTS = 3  # spans of a trace, without its root
RNG = random.Random(0)


def finished(queue: TraceQueue) -> RequestTrace:
    """Give a queue a small trace."""
    trace = RequestTrace(
        TraceContext(RNG.getrandbits(128), 0, True),
        RNG,
        queue.put,
        arrived_s=10.0,
        clock_zero_s=1e9,
    )
    for index in range(NUM_PARTS):
        trace.add("part", 10.0 + index, 11.0 + index, {"index": index})
    trace.event("event", 12.5, {"why": "because"})
    trace.leave(20.0)
    return trace


class Collector(SpanExporter):
    """Takes spans when it is allowed to."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS):
        self.batches: list[Sequence[ReadableSpan]] = []
        self.may_take = threading.Event()
        self.is_asked = threading.Event()
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        assert self.may_take.wait(30)
        self.batches.append(spans)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def shutdown(self) -> None:
        self.may_take.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(trace_queue_module, "EXPORT_S", 0.01)


def test_a_full_queue_drops_whole_traces_and_counts_them() -> None:
    collector = Collector()
    queue = TraceQueue(collector, Resource({}), 5 * (NUM_PARTS + 1) + 1)
    began = time.monotonic()
    finished(queue)
    assert collector.is_asked.wait(30)
    # The first trace is on its way and counts until it has arrived.
    for _ in range(7):
        finished(queue)
    assert time.monotonic() - began < 30  # no `put` waits for the collector
    assert (queue.num_exported, queue.num_dropped) == (0, 3 * (NUM_PARTS + 1))
    collector.may_take.set()
    queue.close()
    assert queue.num_exported == 5 * (NUM_PARTS + 1) == sum(map(len, collector.batches))
    for batch in collector.batches:
        assert len(batch) % (NUM_PARTS + 1) == 0


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, ValueError("cannot encode")])
def test_spans_that_the_collector_does_not_take_count_as_dropped(result) -> None:
    collector = Collector(result)
    collector.may_take.set()
    queue = TraceQueue(collector, Resource({}), 1000)
    finished(queue)
    while not queue.num_dropped:
        time.sleep(0.001)
    finished(queue)  # the thread still runs
    queue.close()
    assert (queue.num_exported, queue.num_dropped) == (0, 2 * (NUM_PARTS + 1))


def test_large_traces_are_exported_in_several_batches(monkeypatch) -> None:
    monkeypatch.setattr(trace_queue_module, "BATCH_SPANS", 6)
    collector = Collector()
    queue = TraceQueue(collector, Resource({}), 1000)
    for _ in range(9):
        finished(queue)
    collector.may_take.set()
    queue.close()
    assert sum(map(len, collector.batches)) == 9 * (NUM_PARTS + 1)
    assert all(len(batch) <= 6 + NUM_PARTS for batch in collector.batches)


def test_a_router_that_stops_does_not_wait_for_a_collector_that_is_away(monkeypatch) -> None:
    monkeypatch.setattr(trace_queue_module, "CLOSE_S", 0.1)
    queue = trace_queue(TracingArgs(endpoint="http://127.0.0.1:9"), "router")
    finished(queue)
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < 8  # the exporter alone would try for 10 s
    assert queue.num_dropped == NUM_PARTS + 1


@pytest.mark.parametrize("receiver_class", [GrpcReceiver, HttpReceiver])
def test_a_collector_receives_all_of_a_trace(receiver_class, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=secret")
    with receiver_class() as receiver:
        args = TracingArgs(endpoint=receiver.endpoint, protocol=receiver.protocol)
        queue = trace_queue(args, "router-1")
        trace = finished(queue)
        queue.close()
        assert queue.num_exported == NUM_PARTS + 1
    assert receiver.headers["x-collector-key"] == "secret"
    assert receiver.resource["service.name"] == "quire"
    assert receiver.resource["service.instance.id"] == "router-1"
    assert receiver.resource["deployment.environment.name"] == "test"
    *parts, root = receiver.spans
    assert int.from_bytes(root.trace_id, "big") == trace.trace_id
    assert [(s.start_time_unix_nano, s.end_time_unix_nano) for s in parts] == [
        (int((1e9 + 10 + i) * 1e9), int((1e9 + 11 + i) * 1e9)) for i in range(NUM_PARTS)
    ]
    assert {s.parent_span_id for s in parts} == {root.span_id}
    assert [event.name for event in root.events] == ["event"]


@pytest.mark.parametrize(
    ("given", "protocol"),
    [({}, "grpc"), ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http")],
)
def test_opentelemetrys_variables_fill_what_the_section_leaves_open(
    given: dict[str, str], protocol: str, monkeypatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with GrpcReceiver() if protocol == "grpc" else HttpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
        queue = trace_queue(TracingArgs(), "router")
        finished(queue)
        queue.close()
        assert queue.num_exported == NUM_PARTS + 1
    assert receiver.resource["service.name"] == "chat"


def test_an_unknown_protocol_is_refused_with_its_variable(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match=r"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.*'http/json'"):
        trace_queue(TracingArgs(), "router")


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://", ""])
def test_an_endpoint_without_a_scheme_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint.*http://collector:4317"):
        AppConfig.from_args({"tracing": {"endpoint": endpoint}})


def test_without_the_section_neither_exporters_nor_the_sdk_are_loaded() -> None:
    """FastAPI loads OpenTelemetry's API by itself, and Ray Serve the SDK; so this looks at what Quire loads alone."""
    code = """
import sys
import quire.cluster.config.app_config, quire.cluster.grpc.grpc_api, quire.cluster.http.http_api
import quire.router.request.service
print(*(name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
