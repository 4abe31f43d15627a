"""What clients experience and what waits, in Ray's metrics: the router's histograms, counters and gauges."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left

from ray.serve import metrics

from quire.router.gate import AdmissionGate
from quire.router.observer import Observer
from quire.router.types import Explain, Usage

# Seconds; from a cached prompt on an idle GPU to a long queue.
_TTFT_BOUNDARIES = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]
_REFUSAL_BOUNDARIES = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10]
_MOVE_BOUNDARIES = [0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 30]
# Tokens; below the first boundary is 0. Ray's histograms take no negative boundary, so that the two
# signs of predicted - actual are two histograms: their counts are equal, their sums subtract.
_MISPREDICTION_BOUNDARIES = [0.5, 64, 256, 1024, 4096, 16_384, 65_536]
_ITL_BOUNDARIES = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]


_PERIOD_S = 1.0


class QueueGauges:
    """What waits at one router, in Ray's metrics; set by a timer once a second, as the replicas' gauges are."""

    def __init__(self, gate: AdmissionGate) -> None:
        self._gate = gate
        self._requests = metrics.Gauge(
            "quire_router_queued_requests", description="Requests that wait at the router"
        )
        self._tokens = metrics.Gauge(
            "quire_router_queued_prompt_tokens", description="Prompt tokens of those requests"
        )
        self._wait_s = metrics.Gauge(
            "quire_router_expected_wait_seconds",
            description="Until the first token of a request that went after all that wait at the router; "
            "0 while none does",
        )
        self._timer = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self._requests.set(len(self._gate.queue))
            self._tokens.set(self._gate.queue.tokens)
            self._wait_s.set(self._gate.wait_behind_all_s())
            await asyncio.sleep(_PERIOD_S)


class BusyHistogram:
    """A histogram that takes a value per token or per request.

    Ray's own took a quarter of all that a router does for a token: tags are put together and checked, and the GIL goes
    to another thread and has to be fetched back. So values are counted here, and `publish` sets gauges to what
    Prometheus makes of a histogram: counts up to each boundary `le`, `_sum` and `_count`.

    Parameters
    ----------
    boundaries
        Ascending.
    """

    def __init__(self, name: str, description: str, boundaries: list[float]) -> None:
        self._boundaries = boundaries
        self._counts = [0] * (len(boundaries) + 1)  # the last: beyond all boundaries
        self._sum = 0.0
        self._bucket_gauge = metrics.Gauge(
            f"{name}_bucket", description=f"{description}: at most le", tag_keys=("le",)
        )
        self._sum_gauge = metrics.Gauge(f"{name}_sum", description=f"{description}: their sum")
        self._count_gauge = metrics.Gauge(f"{name}_count", description=f"{description}: how many")

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._boundaries, value)] += 1
        self._sum += value

    def publish(self) -> None:
        """Set the gauges."""
        total = 0
        for boundary, count in zip((*self._boundaries, math.inf), self._counts, strict=True):
            total += count
            le = "+Inf" if boundary == math.inf else str(float(boundary))
            self._bucket_gauge.set(total, tags={"le": le})
        self._sum_gauge.set(self._sum)
        self._count_gauge.set(total)


class BusyCounter:
    """A counter for every request: Ray's hears of the sum."""

    def __init__(self, name: str, description: str) -> None:
        self._counter = metrics.Counter(name, description=description)
        self._unpublished = 0

    def inc(self, count: int) -> None:
        self._unpublished += count

    def publish(self) -> None:
        """Tell Ray's counter."""
        if self._unpublished:
            self._counter.inc(self._unpublished)
            self._unpublished = 0


class ServeObserver(Observer):
    """Records into `ray.serve.metrics`, which add the application, deployment and replica as tags; what happens often
    with a timer, once a second."""

    def __init__(self) -> None:
        self._ttft = BusyHistogram(
            "quire_time_to_first_token_seconds",
            "From a request's arrival at the router to its first token",
            _TTFT_BOUNDARIES,
        )
        self._itl = BusyHistogram(
            "quire_inter_token_seconds",
            "Seconds between two deltas of one stream",
            _ITL_BOUNDARIES,
        )
        self._over_predicted = BusyHistogram(
            "quire_router_over_predicted_cached_tokens",
            "max(0, predicted - actual) cached tokens of a request's prompt",
            _MISPREDICTION_BOUNDARIES,
        )
        self._under_predicted = BusyHistogram(
            "quire_router_under_predicted_cached_tokens",
            "max(0, actual - predicted) cached tokens of a request's prompt",
            _MISPREDICTION_BOUNDARIES,
        )
        self._tokens_in = BusyCounter(
            "quire_router_prompt_tokens", "Prompt tokens of ended requests"
        )
        self._tokens_out = BusyCounter("quire_router_output_tokens", "Tokens given to clients")
        self._cached = BusyCounter(
            "quire_router_cached_tokens", "Prompt tokens found in a replica's cache"
        )
        self._migrations = BusyCounter(
            "quire_migrations", "Attempts after the first: streams that moved"
        )
        self._refusal = metrics.Histogram(
            "quire_refusal_seconds",
            description="From a request's arrival at the router to its refusal as overloaded",
            boundaries=_REFUSAL_BOUNDARIES,
        )
        self._move = metrics.Histogram(
            "quire_move_seconds",
            description="From the loss of a stream's replica, as the router sees it, to its next token",
            boundaries=_MOVE_BOUNDARIES,
        )
        self._busy = (
            self._ttft,
            self._itl,
            self._over_predicted,
            self._under_predicted,
            self._tokens_in,
            self._tokens_out,
            self._cached,
            self._migrations,
        )
        self._timer = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            for metric in self._busy:
                metric.publish()
            await asyncio.sleep(_PERIOD_S)

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def on_inter_token(self, itl_s: float) -> None:
        self._itl.observe(itl_s)

    def on_refusal(self, seconds: float) -> None:
        self._refusal.observe(seconds)

    def on_move(self, stall_s: float) -> None:
        self._move.observe(stall_s)

    def on_prediction(self, predicted_tokens: int, cached_tokens: int) -> None:
        self._over_predicted.observe(max(0, predicted_tokens - cached_tokens))
        self._under_predicted.observe(max(0, cached_tokens - predicted_tokens))

    def on_end(self, usage: Usage, explain: Explain) -> None:
        self._tokens_in.inc(usage.prompt_tokens)
        self._tokens_out.inc(usage.completion_tokens)
        self._cached.inc(usage.cached_tokens)
        self._migrations.inc(max(0, explain.attempts - 1))
