"""Traces of requests on real engines, as an in-memory collector receives them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from engine_transport import EngineTransport, make_service
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.cluster.tracing.trace_queue import TraceQueue
from quire.protos.errors import ContextLengthExceeded, DeadlineExceeded, Unavailable
from quire.router.request.service import RouterService
from quire.router.trace import request_trace
from quire.router.trace.tracer import Tracer
from quire.router.types import GenerationRequest

TRACE_ID, CLIENT_SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
PARENT = f"00-{TRACE_ID:032x}-{CLIENT_SPAN:016x}-01"
UNSAMPLED = PARENT[:-1] + "0"
NUM_TOKENS = 12
# Of one attempt, and of all the rest.
ATTEMPT = ["queue.router", "route", "attempt", "queue.replica", "prefill", "decode"]
REST = ["tokenise", "delivery"]

Spans = list[ReadableSpan]


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


def request(**fields: Any) -> GenerationRequest:
    given = dict(request_id="r", prompt="Once upon a time", max_tokens=NUM_TOKENS, ignore_eos=True)
    return GenerationRequest(**(given | dict(trace_headers=(PARENT, "vendor=1")) | fields))


async def read(service: RouterService, asked: GenerationRequest) -> None:
    async for _ in await service.generate(asked):
        pass


def traced(
    transport: EngineTransport,
    work: Callable[[RouterService], Awaitable[Any]],
    *,
    ratio: float = 0.0,
) -> Spans:
    """Run `work` with a service that traces, and return all spans that it exported."""
    exporter = InMemorySpanExporter()
    queue = TraceQueue(exporter, Resource({"service.name": "test"}), 10_000)

    async def main() -> None:
        service = make_service(transport)
        service.tracer = Tracer("router", ratio, queue)
        await asyncio.wait_for(work(service), 60)

    asyncio.run(main())
    queue.close()
    spans = list(exporter.get_finished_spans())
    assert (queue.num_exported, queue.num_dropped) == (len(spans), 0)
    return spans


def names(spans: Spans) -> Counter[str]:
    return Counter(span.name for span in spans)


def of(spans: Spans, name: str) -> ReadableSpan:
    (span,) = (span for span in spans if span.name == name)
    return span


def root_of(spans: Spans) -> ReadableSpan:
    """The request's span, after a check that all others are below it and within its time."""
    (root,) = (span for span in spans if span.kind is SpanKind.SERVER)
    by_id = {span.context.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    for span in spans:
        assert span.start_time <= span.end_time, span.name
        if span is not root:
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time, (span.name, parent.name)
            assert span.end_time <= root.end_time, span.name
    return root


def test_a_request_is_one_trace_below_its_client_with_all_its_parts(transport) -> None:
    spans = traced(transport, lambda service: read(service, request(session="s", seed=3)))
    root = root_of(spans)
    assert names(spans) == Counter([root.name, *REST, *ATTEMPT])
    assert root.name == "text_completion embedded"
    assert (root.context.trace_id, root.parent.span_id) == (TRACE_ID, CLIENT_SPAN)
    assert root.parent.is_remote
    assert root.context.trace_state.to_header() == "vendor=1"
    found = dict(root.attributes)
    assert len(found.pop("gen_ai.response.id")) == 32
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 60
    num_prompt = found.pop("gen_ai.usage.input_tokens")
    assert num_prompt == of(spans, "tokenise").attributes["gen_ai.usage.input_tokens"] > 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "embedded",
        "gen_ai.response.model": "embedded",
        "gen_ai.request.max_tokens": NUM_TOKENS,
        "gen_ai.request.seed": 3,
        "gen_ai.conversation.id": "s",
        "quire.request.id": "r",
        "quire.router": "router",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": NUM_TOKENS,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
    }


def test_the_parts_of_an_attempt_lie_end_to_end(transport) -> None:
    spans = traced(transport, lambda service: read(service, request(prompt="word " * 200)))
    root_of(spans)
    attempt, queue, prefill, decode = (
        of(spans, name) for name in ("attempt", "queue.replica", "prefill", "decode")
    )
    assert {s.parent.span_id for s in (queue, prefill, decode)} == {attempt.context.span_id}
    assert attempt.start_time <= queue.start_time
    # Each time is rounded down to nanoseconds by itself.
    assert prefill.start_time == queue.end_time
    assert decode.start_time == prefill.end_time
    assert decode.end_time == attempt.end_time
    assert prefill.end_time > prefill.start_time
    assert decode.end_time > decode.start_time
    # The way of the first token from the engine to the router comes after the prefill.
    assert prefill.end_time <= of(spans, "delivery").start_time
    route = of(spans, "route")
    assert of(spans, "queue.router").end_time == route.start_time
    assert route.end_time == attempt.start_time


def test_the_decision_is_explained(transport) -> None:
    async def work(service: RouterService) -> None:
        asked = request(prompt="A harbour at night. " * 30)
        await read(service, asked)
        await read(service, asked)
        [found] = [d for d in service.ring.last(1)]
        explained.append(found)

    explained: list[dict[str, Any]] = []
    spans = traced(transport, work)
    route = [span for span in spans if span.name == "route"][-1].attributes
    best, second = explained[0]["ranking"][:2]
    assert route["quire.replica"] == best["replica"]
    assert route["quire.cost_s"] == best["cost_s"]
    assert {k: route[f"quire.cost.{k}"] for k in best["terms"]} == best["terms"] != {}
    assert route["quire.runner_up"] == second["replica"]
    assert route["quire.runner_up.cost_s"] == second["cost_s"]
    assert route["quire.num_replicas"] == len(transport.names)
    predicted = best["cached_tokens"] + best["host_cached_tokens"]
    assert route["quire.predicted_cached_tokens"] == predicted
    prefill = [span for span in spans if span.name == "prefill"][-1].attributes
    assert prefill["quire.cached_tokens"] >= predicted


def test_a_failed_over_request_is_still_one_trace(transport) -> None:
    async def work(service: RouterService) -> None:
        transport.lose_after = [4]
        await read(service, request(max_tokens=40))

    spans = traced(transport, work)
    root = root_of(spans)
    assert names(spans) == Counter([root.name, *REST, *ATTEMPT, *ATTEMPT])
    first, second = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.start_time
    )
    assert [span.attributes["quire.attempt"] for span in (first, second)] == [1, 2]
    assert first.attributes["quire.replica"] != second.attributes["quire.replica"]
    assert first.status.description == "lost on purpose"
    assert second.status.is_unset and root.status.is_unset
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    (event,) = root.events
    assert event.name == "quire.failover"
    assert event.attributes["quire.replica"] == first.attributes["quire.replica"]
    assert event.attributes["quire.reason"] == "lost on purpose"
    assert 4 <= event.attributes["quire.emitted_tokens"] < 40
    assert first.end_time <= second.start_time
    # Each attempt has its own prefill and decode.
    parents = Counter(span.parent.span_id for span in spans)
    assert parents[first.context.span_id] == parents[second.context.span_id] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 40


def test_all_answers_of_a_request_are_in_its_trace(transport) -> None:
    prompts = ("Once upon a time", "The harbour")
    spans = traced(
        transport, lambda service: read(service, request(prompt=None, prompts=prompts, n=3))
    )
    root = root_of(spans)
    each = Counter(["delivery", *ATTEMPT])
    assert names(spans) == Counter({k: 6 * v for k, v in each.items()}) + Counter(
        [root.name, "tokenise", "tokenise"]
    )
    choices = Counter(s.attributes.get("quire.choice", 0) for s in spans if s.name == "attempt")
    assert choices == {0: 2, 1: 2, 2: 2}
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",) * 6
    assert root.attributes["gen_ai.usage.output_tokens"] == 6 * NUM_TOKENS
    tokenised = [s.attributes["gen_ai.usage.input_tokens"] for s in spans if s.name == "tokenise"]
    assert root.attributes["gen_ai.usage.input_tokens"] == sum(tokenised)


def test_the_spans_of_one_request_are_bounded(transport, monkeypatch) -> None:
    monkeypatch.setattr(request_trace, "MAX_SPANS", 5)
    spans = traced(transport, lambda service: read(service, request(n=4)))
    assert len(spans) == 6
    root = next(span for span in spans if span.kind is SpanKind.SERVER)
    assert root.attributes["quire.trace.num_left_out"] == 4 * len(["delivery", *ATTEMPT]) + 1 - 5


def test_embeddings_are_traced_until_the_last_one(transport) -> None:
    asked = request(prompt=None, prompts=("a", "b", "c"), max_tokens=1, ignore_eos=False)
    spans = traced(transport, lambda service: service.embed(asked, None))
    root = root_of(spans)
    assert root.name == "embeddings embedded"
    assert names(spans)["prefill"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 0


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_trace_ends_when_its_client_leaves(transport, is_begun: bool) -> None:
    async def work(service: RouterService) -> None:
        if is_begun:
            stream = await service.generate(request(max_tokens=200))
            await anext(aiter(stream))
            await stream.aclose()
            return
        task = asyncio.ensure_future(service.generate(request(max_tokens=200)))
        while not transport.submits:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    root = root_of(traced(transport, work))
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert root.status.is_unset


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"max_tokens": 10_000}, ContextLengthExceeded), ({"deadline_s": 1e-9}, DeadlineExceeded)],
)
def test_a_refused_request_is_traced_with_its_error(transport, fields, error) -> None:
    async def work(service: RouterService) -> None:
        with pytest.raises(error):
            await service.generate(request(**fields))

    root = root_of(traced(transport, work))
    assert root.attributes["error.type"] == error.code
    assert root.status.is_unset  # the request is at fault


def test_a_failed_request_has_an_error_status(transport) -> None:
    async def work(service: RouterService) -> None:
        service.max_move_s = 0.0
        transport.lose_after = [3]
        with pytest.raises(Unavailable):
            await read(service, request())

    spans = traced(transport, work)
    root = root_of(spans)
    assert root.attributes["error.type"] == Unavailable.code
    assert root.status.status_code is StatusCode.ERROR
    assert of(spans, "attempt").status.status_code is StatusCode.ERROR


def test_a_request_without_a_traced_client_is_sampled_by_the_ratio(transport) -> None:
    async def work(service: RouterService) -> None:
        for _ in range(20):
            await read(service, request(max_tokens=1, trace_headers=None))
            await read(service, request(max_tokens=1, trace_headers=(UNSAMPLED, "")))
            await read(service, request(max_tokens=1, trace_headers=("nonsense", "")))

    for ratio, least, most in ((0.0, 0, 0), (0.5, 5, 35), (1.0, 40, 40)):
        spans = traced(transport, work, ratio=ratio)
        roots = [span for span in spans if span.kind is SpanKind.SERVER]
        assert least <= len(roots) <= most
        assert all(root.parent is None for root in roots)
        assert len({root.context.trace_id for root in roots}) == len(roots)


def test_a_traced_client_is_followed_at_any_ratio(transport) -> None:
    assert traced(transport, lambda service: read(service, request()), ratio=0.0)
    off = request(trace_headers=(UNSAMPLED, ""))
    assert not traced(transport, lambda service: read(service, off), ratio=1.0)
