"""Sends finished traces to a collector, from a thread of its own.

On the event loop a trace costs one append. The thread turns its spans into OpenTelemetry's and exports them in batches.
If the collector is slower than the requests, or away, the queue fills, and further traces are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from quire.router.trace.request_trace import RequestTrace
from quire.router.trace.span import Span

logger = logging.getLogger("ray.serve")
# Seconds between two exports.
EXPORT_S = 1.0
# Spans of one export: OpenTelemetry's default.
BATCH_SPANS = 512
# Seconds for which a router that stops waits for the last export.
CLOSE_S = 5.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("quire.router")


class TraceQueue:
    """Exports traces in the background. Implements `quire.router.trace.tracer.TraceSink`.

    Parameters
    ----------
    resource
        The attributes of the process.
    max_spans
        Most spans that wait for an export.

    Attributes
    ----------
    num_exported
        Spans that the collector has taken.
    num_dropped
        Spans that were lost: the queue was full, or the collector did not take them.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource, max_spans: int):
        self.num_exported = 0
        self.num_dropped = 0
        self._exporter = exporter
        self._resource = resource
        self._max_spans = max_spans
        self._traces: deque[RequestTrace] = deque()
        self._num_queued = 0
        # Both threads change the numbers.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-export", daemon=True)
        self._thread.start()

    def put(self, trace: RequestTrace) -> None:
        """Queue a finished trace; drop it whole if its spans find no room."""
        num_spans = len(trace.spans)
        with self._lock:
            if self._num_queued + num_spans > self._max_spans:
                self.num_dropped += num_spans
                return
            self._num_queued += num_spans
            self._traces.append(trace)

    def close(self) -> None:
        """Export what is queued, for at most `CLOSE_S`, and end the thread. Call no other method afterwards."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        # Ends the attempts of an export that still runs.
        self._exporter.shutdown()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EXPORT_S):
            self._export_all()
        self._export_all()

    def _export_all(self) -> None:
        batch: list[ReadableSpan] = []
        while self._traces:
            batch += self._spans(self._traces.popleft())
            if len(batch) >= BATCH_SPANS or not self._traces:
                self._export(batch)
                batch = []

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:
            # The thread must survive: later traces may be fine.
            logger.warning("traces: an export failed: %s", error)
            is_taken = False
        with self._lock:
            self._num_queued -= len(batch)
            if is_taken:
                self.num_exported += len(batch)
            else:
                self.num_dropped += len(batch)

    def _spans(self, trace: RequestTrace) -> Iterator[ReadableSpan]:
        state = TraceState.from_header([trace.state]) if trace.state else None

        def context(span_id: int, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, is_remote, _SAMPLED, state)

        def unix_ns(at_s: float) -> int:
            return int((at_s + trace.clock_zero_s) * 1e9)

        def convert(span: Span, kind: SpanKind) -> ReadableSpan:
            parent = None
            if span.parent_id:
                parent = context(span.parent_id, is_remote=kind is SpanKind.SERVER)
            return ReadableSpan(
                span.name,
                context(span.span_id),
                parent,
                self._resource,
                span.attributes,
                [Event(e.name, e.attributes, unix_ns(e.at_s)) for e in span.events],
                [Link(context(span_id)) for span_id in span.links],
                kind,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=unix_ns(span.start_s),
                end_time=unix_ns(span.end_s),
                instrumentation_scope=_SCOPE,
            )

        *parts, root = trace.spans
        for span in parts:
            yield convert(span, SpanKind.INTERNAL)
        yield convert(root, SpanKind.SERVER)
