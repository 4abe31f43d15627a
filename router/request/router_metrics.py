"""The router's metrics: latencies, lengths and refusals of its clients' requests, and the state of its queue."""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from quire.protos.errors import ERROR_CODES, OVERLOAD_REASONS, Overloaded
from quire.protos.metric_families import (
    BUILD_INFO,
    COUNTER,
    CPU_SECONDS,
    GAUGE,
    HISTOGRAM,
    Family,
    MetricSet,
    Page,
)
from quire.protos.vllm_metrics import vllm_page
from quire.router.observer import (
    PREFILL_OUTCOMES,
    SESSION_OUTCOMES,
    AnswerEnd,
    Observer,
    PrefixUse,
    error_code,
)
from quire.router.request.context import RouterContext
from quire.router.status_types import RoutingRegret

FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
# Histogram boundaries. Seconds: from a cached prompt on an idle GPU to a long queue.
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# From a tokenised short prompt to a long one in a queue of the tokenizer's threads.
_ROUTER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10)
_REFUSAL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10)
_MIGRATION_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
# The first bucket holds exact predictions.
_MISPREDICTED_TOKENS = (0.5, 64, 256, 1024, 4096, 16_384, 65_536)


ROUTER_FAMILIES = (
    BUILD_INFO,
    CPU_SECONDS,
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
        "quire_requests_overloaded_total",
        COUNTER,
        "Requests that were refused as overloaded, by the bound that refused them.",
        ("reason",),
        values=OVERLOAD_REASONS,
    ),
    Family(
        "quire_requests_finished_total",
        COUNTER,
        "Answers that have ended, by finish reason; a request has one for each prompt and choice.",
        ("finish_reason",),
        values=FINISH_REASONS,
    ),
    Family(
        "quire_answers_failed_total",
        COUNTER,
        "Answers that an error ended after their first token, by error code.",
        ("code",),
        values=ERROR_CODES,
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
        "quire_request_router_seconds",
        HISTOGRAM,
        "Seconds from a request's arrival until the router has checked, tokenised and hashed its prompt.",
        boundaries=_ROUTER_S,
    ),
    Family(
        "quire_request_queue_seconds",
        HISTOGRAM,
        "Seconds that a request waits in the queues of the router and the replica for its first step.",
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
        "Seconds from a request's first token to the end of its answer, without delivery.",
        boundaries=_REQUEST_S,
    ),
    Family(
        "quire_request_delivery_seconds",
        HISTOGRAM,
        "Seconds in which output waited at the router because the client had not taken the output before it.",
        boundaries=_REQUEST_S,
    ),
    Family(
        "quire_request_time_per_output_token_seconds",
        HISTOGRAM,
        "Decode seconds of an answer divided by its output tokens after the first.",
        boundaries=_ITL_S,
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
        "Attempts after the first, of requests that continued on another replica; without the hand-overs of "
        "prefill replicas.",
    ),
    Family(
        "quire_migration_seconds",
        HISTOGRAM,
        "Seconds from the loss of a stream's replica, as the router sees it, to its next token.",
        boundaries=_MIGRATION_S,
    ),
    Family(
        "quire_disaggregated_prefills_total",
        COUNTER,
        "Requests that were sent to a prefill replica, by how they went on: moved to a replica that decodes, stayed "
        "there, or failed: another replica computed the prompt.",
        ("outcome",),
        values=PREFILL_OUTCOMES,
    ),
    Family(
        "quire_prefill_handover_seconds",
        HISTOGRAM,
        "Seconds from the end of a stream on its prefill replica to its next token.",
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
    # The same requests in all four, so that their quotients are shares of the prompts.
    Family(
        "quire_routed_prompt_tokens_total",
        COUNTER,
        "Prompt tokens of routed requests that have a first token.",
    ),
    Family(
        "quire_prefix_available_tokens_total",
        COUNTER,
        "Prompt tokens of these requests that some replica held, in any tier, when they were routed.",
    ),
    Family(
        "quire_prefix_captured_tokens_total",
        COUNTER,
        "Prompt tokens of these requests that the chosen replica held, as the router knew.",
    ),
    Family(
        "quire_prefix_delivered_tokens_total",
        COUNTER,
        "Prompt tokens of these requests that the engine took from its cache.",
    ),
    Family(
        "quire_session_requests_total",
        COUNTER,
        "Requests with a session, by where they went: the same replica as the last one, another, or unknown.",
        ("outcome",),
        values=SESSION_OUTCOMES,
    ),
    Family(
        "quire_routing_regret_seconds",
        GAUGE,
        "Seconds per request that hindsight would have saved, mean of the last minutes' sampled decisions.",
        ("policy",),
    ),
    Family(
        "quire_routing_regret_low_seconds",
        GAUGE,
        "Lower end of the 95% interval of the regret.",
        ("policy",),
    ),
    Family(
        "quire_routing_regret_high_seconds",
        GAUGE,
        "Upper end of the 95% interval of the regret; absent until there are two samples.",
        ("policy",),
    ),
    Family(
        "quire_routing_regret_modelled_delay_seconds",
        GAUGE,
        "Mean delay of the sampled requests to their first token, in the model that the regret is computed with.",
        ("policy",),
    ),
    Family(
        "quire_routing_regret_requests",
        GAUGE,
        "Sampled requests that the regret is computed from.",
        ("policy",),
    ),
    Family(
        "quire_routing_regret_cpu_seconds_total",
        COUNTER,
        "Processor time in which the router has computed the regret.",
    ),
    Family("quire_router_sessions", GAUGE, "Sessions whose last replica the router remembers."),
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
    Family("quire_trace_spans_exported_total", COUNTER, "Spans that the traces' collector took."),
    Family(
        "quire_trace_spans_dropped_total",
        COUNTER,
        "Spans that were lost: the queue was full, or the collector did not take them.",
    ),
    Family(
        "quire_router_attached_replicas", GAUGE, "Replicas that the router can send requests to."
    ),
)


# Family to its value, for each policy.
_REGRETS: Mapping[str, Callable[[RoutingRegret], float]] = MappingProxyType(
    {
        "quire_routing_regret_seconds": lambda regret: regret.mean_s,
        "quire_routing_regret_low_seconds": lambda regret: regret.low_s,
        "quire_routing_regret_high_seconds": lambda regret: regret.high_s,
        "quire_routing_regret_modelled_delay_seconds": lambda regret: regret.modelled_s,
        "quire_routing_regret_requests": lambda regret: regret.num_requests,
    }
)


class RouterMetrics(Observer):
    """Turns the events of requests (`Observer`) into metrics."""

    def __init__(self) -> None:
        self.metrics = MetricSet(ROUTER_FAMILIES, self._read)
        self._router: RouterContext | None = None
        histogram = self.metrics.histogram
        self._ttft = histogram("quire_time_to_first_token_seconds")
        # An attribute instead of a method saves one call for every token.
        self._itl = histogram("quire_inter_token_seconds")
        self.on_inter_token = self._itl.observe  # type: ignore[method-assign, assignment]
        self._request = histogram("quire_request_seconds")
        self._at_router = histogram("quire_request_router_seconds")
        self._queue = histogram("quire_request_queue_seconds")
        self._prefill = histogram("quire_request_prefill_seconds")
        self._decode = histogram("quire_request_decode_seconds")
        self._delivery = histogram("quire_request_delivery_seconds")
        self._per_token = histogram("quire_request_time_per_output_token_seconds")
        self._prompt = histogram("quire_request_prompt_tokens")
        self._output = histogram("quire_request_output_tokens")
        self._refusal = histogram("quire_refusal_seconds")
        self._migration = histogram("quire_migration_seconds")
        self._handover = histogram("quire_prefill_handover_seconds")
        self._over = histogram("quire_router_over_predicted_cached_tokens")
        self._under = histogram("quire_router_under_predicted_cached_tokens")
        self._routed, self._available, self._captured, self._delivered = (
            self.metrics.value(f"quire_{name}_tokens_total")
            for name in ("routed_prompt", "prefix_available", "prefix_captured", "prefix_delivered")
        )
        self._received = self.metrics.value("quire_requests_received_total")
        self._migrations = self.metrics.value("quire_migrations_total")
        self.metrics.value("quire_build_info", importlib.metadata.version("quire")).value = 1

    def follow(self, router: RouterContext) -> None:
        """Set the router that the gauges are read from."""
        self._router = router

    def page(self, labels: Mapping[str, str], *, vllm_names: bool = False) -> Page:
        """Return all families, on request also under vLLM's names; `labels` name this router."""
        page = self.metrics.page(labels)
        return page | vllm_page(self.metrics, labels, labels["router"]) if vllm_names else page

    def _read(self) -> dict[str, float]:
        values = {CPU_SECONDS.name: time.process_time()}
        router = self._router
        if router is None:
            return values
        gate = router.gate
        self._show_regrets(router.regret.regrets)
        if router.tracer is not None:
            sink = router.tracer.sink
            values["quire_trace_spans_exported_total"] = sink.num_exported
            values["quire_trace_spans_dropped_total"] = sink.num_dropped
        return values | {
            "quire_routing_regret_cpu_seconds_total": router.regret.cpu_s,
            "quire_router_sessions": len(router.table.sessions),
            "quire_router_queued_requests": len(gate.queue),
            "quire_router_queued_prompt_tokens": gate.queue.tokens,
            "quire_router_expected_wait_seconds": gate.wait_behind_all_s(),
            "quire_router_attached_replicas": len(router.transport.hellos),
        }

    def _show_regrets(self, regrets: Sequence[RoutingRegret]) -> None:
        for name, value in _REGRETS.items():
            # Until there are two samples, the upper end of the interval is infinite: the series is left out.
            values = {r.policy: value(r) for r in regrets if math.isfinite(value(r))}
            for (policy,) in set(self.metrics.series(name)) - {(policy,) for policy in values}:
                self.metrics.forget(name, policy)
            for policy, seconds in values.items():
                self.metrics.value(name, policy).value = seconds

    # -- the observer ------------------------------------------------------------------------------------

    def on_request(self) -> None:
        self._received.value += 1

    def on_refusal(self, error: Exception, seconds: float) -> None:
        self.metrics.value("quire_requests_refused_total", error_code(error)).value += 1
        if isinstance(error, Overloaded):
            self.metrics.value("quire_requests_overloaded_total", error.reason).value += 1
            self._refusal.observe(seconds)

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def num_deltas(self) -> int:
        return sum(self._itl.counts)

    def on_migration(self, stall_s: float) -> None:
        self._migration.observe(stall_s)

    def on_handover(self, stall_s: float) -> None:
        self._handover.observe(stall_s)

    def on_prefill(self, outcome: str) -> None:
        self.metrics.value("quire_disaggregated_prefills_total", outcome).value += 1

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        self._over.observe(max(0, predicted_tokens - cached_tokens))
        self._under.observe(max(0, cached_tokens - predicted_tokens))

    def on_prefix(self, use: PrefixUse) -> None:
        self._routed.value += use.prompt
        self._available.value += use.available
        self._captured.value += use.captured
        self._delivered.value += use.delivered

    def on_session_request(self, outcome: str) -> None:
        self.metrics.value("quire_session_requests_total", outcome).value += 1

    def on_end(self, end: AnswerEnd) -> None:
        self._migrations.value += max(0, end.explain.attempts - 1 - end.explain.num_handovers)
        is_answered = end.explain.answered
        if end.finish_reason == "error" and not is_answered:
            # A refusal, which `on_refusal` counts.
            return
        self.metrics.value("quire_requests_finished_total", end.finish_reason).value += 1
        self._request.observe(end.total_s)
        self._prompt.observe(end.usage.prompt_tokens)
        self._output.observe(end.usage.completion_tokens)
        if end.error_code:
            self.metrics.value("quire_answers_failed_total", end.error_code).value += 1
        if is_answered:
            self._at_router.observe(end.router_s)
            self._queue.observe(end.queue_s)
            self._prefill.observe(end.prefill_s)
            self._decode.observe(end.decode_s)
            self._delivery.observe(end.delivery_s)
            num_later = end.usage.completion_tokens - 1
            if num_later > 0:
                self._per_token.observe(end.decode_s / num_later)
