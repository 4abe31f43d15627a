"""Processor time that traces add to a request of the router.

    python -m tests.perf trace_cost [--rounds 200] [--out FILE]

The whole router over replicas that answer at once with 16 tokens (those of `page_cost`), in this process: without a
tracer, with one that traces no request (`sample_ratio: 0`), with one whose clients ask for no trace, and with one that
traces each request. A traced request has nine spans. *loop* is what they add on the event loop; *export* is what the
queue's thread then does, up to the bytes for the collector. All times are processor times of this process, without the
garbage collector. The four take turns in random order; a result is the median of the differences within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from quire.cluster.bench.results import report
from quire.cluster.tracing import trace_queue
from quire.cluster.tracing.trace_queue import TraceQueue
from quire.router.request.service import RouterService
from quire.router.trace.tracer import Tracer
from quire.router.types import GenerationRequest
from tests.perf.router.costs.page_cost import OUTPUT, service_of

REQUESTS = 50  # of a round
TRACED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
MAX_UNTRACED_US, MAX_LOOP_US, MAX_EXPORT_US = 20.0, 200.0, 500.0
PROMPT = " ".join(["harbour", "quire", "folded", "sheet", "letter"] * 40)


class EncodeOnly(SpanExporter):
    """Does what an exporter does before it sends."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


async def us_per_request(service: RouterService, parent: str) -> float:
    """Send a round of requests, without the export of their traces."""
    headers = (parent, "") if parent else None
    began_s = time.process_time()
    for _ in range(REQUESTS):
        request = GenerationRequest(
            request_id="0" * 32,
            prompt=PROMPT,
            max_tokens=OUTPUT,
            ignore_eos=True,
            trace_headers=headers,
        )
        async for _ in await service.generate(request):
            pass
    return 1e6 * (time.process_time() - began_s) / REQUESTS


async def measure(rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a request in each round."""
    # Rounds export their own traces, so that the thread has none.
    trace_queue.EXPORT_S = 1e6
    queue = TraceQueue(EncodeOnly(), Resource({"service.name": "quire"}), 100_000)
    service = service_of()
    cases = {
        "off": (None, ""),
        "not_sampled": (Tracer("router", 0.0, queue), ""),
        "not_asked": (Tracer("router", 1.0, queue), TRACED[:-1] + "0"),
        "traced": (Tracer("router", 0.0, queue), TRACED),
    }
    found: dict[str, list[float]] = {name: [] for name in (*cases, "export")}
    order = random.Random(0)
    gc.disable()
    for turn in range(rounds + 1):
        for name in order.sample(list(cases), len(cases)):
            gc.collect()
            service.tracer, parent = cases[name]
            took_us = await us_per_request(service, parent)
            began_s = time.process_time()
            queue._export_all()
            exported_us = 1e6 * (time.process_time() - began_s) / REQUESTS
            if turn:  # the first one warms up
                found[name].append(took_us)
                if name == "traced":
                    found["export"].append(exported_us)
    assert queue.num_dropped == 0
    assert queue.num_exported == 9 * REQUESTS * (rounds + 1), queue.num_exported
    queue.close()
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "trace_cost.json")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.rounds))
    details = {f"{name}_us": report.spread_json(report.Spread.of(us)) for name, us in found.items()}
    more_us = {
        name: statistics.median(us - off for us, off in zip(found[name], found["off"], strict=True))
        for name in ("not_sampled", "not_asked", "traced")
    }
    bars = [
        report.Bar(f"trace/{name}_us", more_us[name], "us", MAX_UNTRACED_US, details=details)
        for name in ("not_sampled", "not_asked")
    ]
    export_us = statistics.median(found["export"])
    bars += [
        report.Bar("trace/loop_us", more_us["traced"], "us", MAX_LOOP_US),
        report.Bar("trace/export_us", export_us, "us", MAX_EXPORT_US),
    ]
    report.write(arguments.out, "python -m tests.perf trace_cost", bars)


if __name__ == "__main__":
    main()
