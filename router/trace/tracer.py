"""Decides which requests are traced, and hands finished traces on."""

from __future__ import annotations

import random
import secrets
import time
from typing import Protocol

from quire.router.trace.request_trace import RequestTrace
from quire.router.trace.trace_context import TraceContext
from quire.router.types import GenerationRequest

# OpenTelemetry's TraceIdRatioBased compares these bits of the trace id, so services with equal ratios agree.
_RATIO_BITS = 64


class TraceSink(Protocol):
    """Exports traces. `quire.cluster.tracing.trace_queue.TraceQueue` implements this.

    Attributes
    ----------
    num_exported, num_dropped
        Spans so far.
    """

    num_exported: int
    num_dropped: int

    def put(self, trace: RequestTrace) -> None:
        """Take a finished trace. It must not block."""
        ...

    def close(self) -> None:
        """Export what is queued, within a few seconds. It blocks."""
        ...


class Tracer:
    """Starts the traces of one router's requests.

    A request with a valid `traceparent` is traced if its client traces it. Of the others, a share is traced.

    Parameters
    ----------
    sample_ratio
        The share of requests without `traceparent` to trace, from 0 to 1.
    sink
        Takes each finished trace.
    """

    def __init__(self, router_id: str, sample_ratio: float, sink: TraceSink):
        self.sink = sink
        self._router_id = router_id
        self._bound = round(sample_ratio * 2**_RATIO_BITS)
        self._rng = random.Random(secrets.randbits(128))

    def begin(
        self, request: GenerationRequest, operation: str, model: str, now_s: float
    ) -> RequestTrace | None:
        """Start the trace of a request that has arrived now; None: this request is not traced.

        Parameters
        ----------
        operation
            The value of `gen_ai.operation.name`.
        """
        headers = request.trace_headers
        parent = None if headers is None else TraceContext.parse(*headers)
        if parent is None:
            trace_id = self._rng.getrandbits(128) or 1
            if trace_id & (2**_RATIO_BITS - 1) >= self._bound:
                return None
            parent = TraceContext(trace_id, 0, True)
        elif not parent.sampled:
            return None
        trace = RequestTrace(
            parent, self._rng, self.sink.put, arrived_s=now_s, clock_zero_s=time.time() - now_s
        )
        trace.describe_request(request, operation, model, self._router_id)
        return trace
