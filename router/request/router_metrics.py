"""The router's metrics: latencies, lengths and refusals of its clients' requests, and the state of its queue."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from quire.protos.errors import ERROR_CODES, Overloaded
from quire.protos.metric_families import (
    BUILD_INFO,
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Family,
    MetricSet,
    Page,
)
from quire.router.admission.gate import AdmissionGate
from quire.router.observer import AnswerEnd, Observer, error_code
from quire.router.transport.transport import Transport

FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
# Histogram boundaries. Seconds: from a cached prompt on an idle GPU to a long queue.
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_REFUSAL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10)
_MIGRATION_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
# The first bucket holds exact predictions.
_MISPREDICTED_TOKENS = (0.5, 64, 256, 1024, 4096, 16_384, 65_536)


ROUTER_FAMILIES = (
    BUILD_INFO,
    Family(
        "quire_requests_received_total",
        COUNTER,
        "Requests that arrived at the router, also those that it refused.",
    ),
    Family(
        "quire_requests_refused_total",
        COUNTER,
        "Requests that were refused before their first token, by error code.",
        ("code",),
        values=ERROR_CODES,
    ),
    Family(
        "quire_requests_finished_total",
        COUNTER,
        "Answers that have ended, by finish reason; a request has one for each prompt and choice.",
        ("finish_reason",),
        values=FINISH_REASONS,
    ),
    Family(
        "quire_time_to_first_token_seconds",
        HISTOGRAM,
        "Seconds from a request's arrival at the router to its first token.",
        boundaries=_TTFT_S,
    ),
    Family(
        "quire_inter_token_seconds",
        HISTOGRAM,
        "Seconds between two deltas of one stream.",
        boundaries=_ITL_S,
    ),
    Family(
        "quire_request_seconds",
        HISTOGRAM,
        "Seconds from a request's arrival at the router to the end of its answer.",
        boundaries=_REQUEST_S,
    ),
    Family(
        "quire_request_queue_seconds",
        HISTOGRAM,
        "Seconds from a request's arrival at the router to its first step on a replica.",
        boundaries=_REQUEST_S,
    ),
    Family(
        "quire_request_prefill_seconds",
        HISTOGRAM,
        "Seconds from a request's first step to its first token.",
        boundaries=_REQUEST_S,
    ),
    Family(
        "quire_request_decode_seconds",
        HISTOGRAM,
        "Seconds from a request's first token to the end of its answer.",
        boundaries=_REQUEST_S,
    ),
    Family(
        "quire_request_prompt_tokens",
        HISTOGRAM,
        "Length of the prompts of ended answers in tokens.",
        boundaries=_TOKENS,
    ),
    Family(
        "quire_request_output_tokens",
        HISTOGRAM,
        "Length of ended answers in tokens.",
        boundaries=_TOKENS,
    ),
    Family(
        "quire_refusal_seconds",
        HISTOGRAM,
        "Seconds from a request's arrival at the router to its refusal as overloaded.",
        boundaries=_REFUSAL_S,
    ),
    Family(
        "quire_migrations_total",
        COUNTER,
        "Attempts after the first, of requests that continued on another replica.",
    ),
    Family(
        "quire_migration_seconds",
        HISTOGRAM,
        "Seconds from the loss of a stream's replica, as the router sees it, to its next token.",
        boundaries=_MIGRATION_S,
    ),
    # One histogram for each sign of predicted - actual: their counts are equal, and their sums subtract.
    Family(
        "quire_router_over_predicted_cached_tokens",
        HISTOGRAM,
        "Tokens of a prompt that the router expected in the replica's cache and that were not there.",
        boundaries=_MISPREDICTED_TOKENS,
    ),
    Family(
        "quire_router_under_predicted_cached_tokens",
        HISTOGRAM,
        "Tokens of a prompt that were in the replica's cache and that the router did not expect there.",
        boundaries=_MISPREDICTED_TOKENS,
    ),
    Family("quire_router_queued_requests", GAUGE, "Requests that wait at the router."),
    Family(
        "quire_router_queued_prompt_tokens",
        GAUGE,
        "Prompt tokens of the requests that wait at the router.",
    ),
    Family(
        "quire_router_expected_wait_seconds",
        GAUGE,
        "Seconds to the first token of a request that came after all that wait at the router; 0 if none waits.",
    ),
    Family(
        "quire_router_attached_replicas", GAUGE, "Replicas that the router can send requests to."
    ),
)


class RouterMetrics(Observer):
    """Turns the events of requests (`Observer`) into metrics."""

    def __init__(self) -> None:
        self.metrics = MetricSet(ROUTER_FAMILIES, self._read)
        self._gate: AdmissionGate | None = None
        self._transport: Transport | None = None
        histogram = self.metrics.histogram
        self._ttft = histogram("quire_time_to_first_token_seconds")
        # An attribute instead of a method saves one call for every token.
        self._itl = histogram("quire_inter_token_seconds")
        self.on_inter_token = self._itl.observe  # type: ignore[method-assign, assignment]
        self._request = histogram("quire_request_seconds")
        self._queue = histogram("quire_request_queue_seconds")
        self._prefill = histogram("quire_request_prefill_seconds")
        self._decode = histogram("quire_request_decode_seconds")
        self._prompt = histogram("quire_request_prompt_tokens")
        self._output = histogram("quire_request_output_tokens")
        self._refusal = histogram("quire_refusal_seconds")
        self._migration = histogram("quire_migration_seconds")
        self._over = histogram("quire_router_over_predicted_cached_tokens")
        self._under = histogram("quire_router_under_predicted_cached_tokens")
        self._received = self.metrics.value("quire_requests_received_total")
        self._migrations = self.metrics.value("quire_migrations_total")
        self.metrics.value("quire_build_info", importlib.metadata.version("quire")).value = 1

    def follow(self, gate: AdmissionGate, transport: Transport) -> None:
        """Set the objects that the gauges are read from."""
        self._gate, self._transport = gate, transport

    def page(self, labels: Mapping[str, str]) -> Page:
        """Return all families; `labels` name this router."""
        return self.metrics.page(labels)

    def _read(self) -> dict[str, float]:
        gate, transport = self._gate, self._transport
        if gate is None or transport is None:
            return {}
        return {
            "quire_router_queued_requests": len(gate.queue),
            "quire_router_queued_prompt_tokens": gate.queue.tokens,
            "quire_router_expected_wait_seconds": gate.wait_behind_all_s(),
            "quire_router_attached_replicas": len(transport.hellos),
        }

    # -- the observer ------------------------------------------------------------------------------------

    def on_request(self) -> None:
        self._received.value += 1

    def on_refusal(self, error: Exception, seconds: float) -> None:
        self.metrics.value("quire_requests_refused_total", error_code(error)).value += 1
        if isinstance(error, Overloaded):
            self._refusal.observe(seconds)

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def num_deltas(self) -> int:
        return sum(self._itl.counts)

    def on_migration(self, stall_s: float) -> None:
        self._migration.observe(stall_s)

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        self._over.observe(max(0, predicted_tokens - cached_tokens))
        self._under.observe(max(0, cached_tokens - predicted_tokens))

    def on_end(self, end: AnswerEnd) -> None:
        self._migrations.value += max(0, end.explain.attempts - 1)
        is_answered = end.explain.answered
        if end.finish_reason == "error" and not is_answered:
            # A refusal, which `on_refusal` counts.
            return
        self.metrics.value("quire_requests_finished_total", end.finish_reason).value += 1
        self._request.observe(end.total_s)
        self._prompt.observe(end.usage.prompt_tokens)
        self._output.observe(end.usage.completion_tokens)
        if is_answered:
            self._queue.observe(end.queue_s)
            self._prefill.observe(end.prefill_s)
            self._decode.observe(end.decode_s)
