"""Traces of a real cluster, as a collector receives them over OTLP: one request is one trace with plausible times."""

from __future__ import annotations

import time

import httpx
import pytest
from live import Cluster, wait_until
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from quire.protos import generation_pb2
from tests.otlp_receiver import GrpcReceiver, new_parent, plain, root_of

pytestmark = pytest.mark.system
NUM_TOKENS = 24
PARTS = {
    "tokenise",
    "queue.router",
    "route",
    "attempt",
    "queue.replica",
    "prefill",
    "decode",
    "delivery",
}


def spans_of(collector: GrpcReceiver, trace_id: str) -> dict[str, Span]:
    """The spans of a trace by name, once they have arrived; all of a trace are in one export."""
    wait_until(lambda: collector.of_trace(trace_id), 30, "the trace arrives")
    spans = collector.of_trace(trace_id)
    root = root_of(spans)
    found = {span.name: span for span in spans}
    assert found.keys() == PARTS | {root.name}
    assert len(found) == len(spans)
    return found | {"root": root}


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def complete(cluster: Cluster, prompt: str, parent: str, request_id: str) -> float:
    """Ask over HTTP; returns the seconds that it took."""
    began = time.monotonic()
    with cluster.openai() as client:
        answer = client.completions.create(
            model="embedded",
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers={"traceparent": parent, "x-request-id": request_id},
        )
    assert answer.usage.completion_tokens == NUM_TOKENS
    return time.monotonic() - began


def test_a_request_over_http_is_one_trace_with_plausible_times(cluster, collector):
    prompt = f"The harbour at night, {time.time()}. " + "Rain on the quay. " * 20
    for attempt in range(2):
        parent, trace_id = new_parent()
        began = time.time()
        took_s = complete(cluster, prompt, parent, f"traced-{attempt}")
        spans = spans_of(collector, trace_id)
        root, found = spans["root"], plain(spans["root"].attributes)
        assert root.name == "text_completion embedded"
        assert root.parent_span_id.hex() == parent.split("-")[2]
        assert began - 0.01 < root.start_time_unix_nano / 1e9 < began + took_s
        assert seconds(root) <= took_s
        assert found["quire.request.id"] == f"traced-{attempt}"
        assert found["gen_ai.usage.output_tokens"] == NUM_TOKENS
        assert found["gen_ai.response.finish_reasons"] == ("length",)
        # Work takes time; the parts of the attempt are no longer than all of it.
        parts = [spans[name] for name in ("queue.replica", "prefill", "decode")]
        assert seconds(spans["prefill"]) > 0
        assert seconds(spans["decode"]) > 0
        assert sum(map(seconds, parts)) <= seconds(spans["attempt"]) + 1e-6
        ttft_s = found["gen_ai.response.time_to_first_chunk"]
        assert spans["prefill"].end_time_unix_nano <= root.start_time_unix_nano + ttft_s * 1e9 + 1e3
    # The second time the prompt's blocks are cached, as the router predicted in its own blocks of 64 tokens.
    route, prefill = plain(spans["route"].attributes), plain(spans["prefill"].attributes)
    assert 0 < route["quire.predicted_cached_tokens"] <= prefill["quire.cached_tokens"]
    assert found["gen_ai.usage.cache_read.input_tokens"] == prefill["quire.cached_tokens"]


def test_a_trace_explains_what_the_router_explains(cluster, collector):
    parent, trace_id = new_parent()
    request_id = f"explained-{time.time()}"
    complete(cluster, "Once upon a time", parent, request_id)
    route = plain(spans_of(collector, trace_id)["route"].attributes)
    answer = httpx.get(
        f"{cluster.url}/v1/router/explain", params={"request_id": request_id}, timeout=60
    )
    (decision,) = answer.json()["data"]
    best, second = decision["ranking"]
    assert route["quire.replica"] == best["replica"]
    assert route["quire.cost_s"] == best["cost_s"]
    assert {n: route[f"quire.cost.{n}"] for n in best["terms"]} == best["terms"] != {}
    assert route["quire.runner_up"] == second["replica"]
    assert route["quire.runner_up.cost_s"] == second["cost_s"]


def test_a_request_over_grpc_is_traced_too(cluster, collector, generation):
    parent, trace_id = new_parent()
    request = generation_pb2.GenerateRequest(prompt="Once upon a time", ignore_eos=True)
    request.sampling.max_tokens = NUM_TOKENS
    metadata = [("traceparent", parent), ("tracestate", "vendor=1")]
    for _ in generation.Generate(request, metadata=metadata, timeout=60):
        pass
    root = spans_of(collector, trace_id)["root"]
    assert root.parent_span_id.hex() == parent.split("-")[2]
    assert root.trace_state == "vendor=1"


def test_only_requests_of_traced_clients_are_traced_and_spans_are_counted(cluster, collector):
    parent, trace_id = new_parent()
    num_spans = len(collector.spans)
    complete(cluster, "Once", parent[:-1] + "0", "not-traced")
    complete(cluster, "Once", "nonsense", "no-context")  # `sample_ratio` is 0
    complete(cluster, "Once", parent, "traced")
    spans = spans_of(collector, trace_id)
    assert len(collector.spans) == num_spans + len(spans) - 1
    wait_until(
        lambda: cluster.metric("quire_trace_spans_exported_total") == len(collector.spans),
        30,
        "the routers have counted their spans",
    )
    assert cluster.metric("quire_trace_spans_dropped_total") == 0
