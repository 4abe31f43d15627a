"""Percentiles, throughput, goodput and hit rate of a run's records. Pure functions, without a clock or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.cluster.bench.load.load_generator import Record, Run

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective; a request is good if both bounds hold."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0

    def holds(self, record: Record) -> bool:
        """Whether a request was answered within both bounds; a failed request was not."""
        if record.error:
            return False
        return 1e3 * record.ttft_s <= self.ttft_ms and 1e3 * record.tpot_s <= self.tpot_ms


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is at least as large as `percent` percent of all values.

    Raises
    ------
    ValueError
        There are no values, or `percent` is outside (0, 100].
    """
    if not values:
        raise ValueError("no values")
    if not 0 < percent <= 100:
        raise ValueError(f"percent: must be in (0, 100], got {percent:g}")
    ranked = sorted(values)
    return ranked[max(0, -int(-percent * len(ranked) // 100) - 1)]


def percentiles_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds; None without values."""
    if not values_s:
        return None
    return {
        f"p{percent}": float(f"{1e3 * percentile(values_s, percent):.4g}")
        for percent in PERCENTILES
    }


def summarise(run: Run, slo: Slo) -> dict[str, Any]:
    """Summarise a run as one row of a result.

    Failed requests count in `num_failed` and against goodput, and in nothing else.
    """
    answered = [record for record in run.records if not record.error]
    duration_s = run.duration_s
    good = sum(map(slo.holds, run.records))
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    cached_tokens = sum(record.cached_tokens for record in answered)
    output_tokens = sum(record.num_tokens for record in answered)
    errors = [record.error for record in run.records if record.error]
    return {
        "num_requests": len(run.records),
        "num_failed": len(errors),
        **({"first_error": errors[0]} if errors else {}),
        "duration_s": round(duration_s, 3),
        "requests_per_s": _rate(len(answered), duration_s),
        "output_tokens": output_tokens,
        "output_tokens_per_s": _rate(output_tokens, duration_s),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "host_cached_tokens": sum(record.host_cached_tokens for record in answered),
        "hit_percent": round(100 * cached_tokens / prompt_tokens, 1) if prompt_tokens else 0.0,
        "goodput_requests_per_s": _rate(good, duration_s),
        "good_percent": round(100 * good / len(run.records), 1) if run.records else 0.0,
        "ttft_ms": percentiles_ms([record.ttft_s for record in answered]),
        "tpot_ms": percentiles_ms([r.tpot_s for r in answered if len(r.tokens) > 1]),
        "gap_ms": percentiles_ms([gap for record in answered for gap in record.gaps_s]),
        "latency_ms": percentiles_ms([record.latency_s for record in answered]),
        "sent_late_ms": percentiles_ms([record.lag_s for record in run.records]),
        "event_loop_late_ms": percentiles_ms(run.loop_lags_s),
    }


def max_in_flight(records: Sequence[Record]) -> int:
    """Largest number of requests in flight at the same time."""
    edges = [(r.due_s, 1) for r in records if not r.error]
    edges += [(r.arrivals_s[-1], -1) for r in records if not r.error]
    most = now = 0
    for _, step in sorted(edges):
        now += step
        most = max(most, now)
    return most


def hit_rate_over_time(records: Sequence[Record], window_s: float) -> list[tuple[float, float]]:
    """Compute the hit rate in windows of time: (end of window, percent of prompt tokens found in the cache).

    A request counts in the window of its first token. Windows without an answer are left out.
    """
    if window_s <= 0:
        raise ValueError(f"window_s: must be > 0, got {window_s:g}")
    sums: dict[int, list[int]] = {}
    for record in records:
        if not record.error:
            entry = sums.setdefault(int(record.arrivals_s[0] // window_s), [0, 0])
            entry[0] += record.cached_tokens
            entry[1] += record.prompt_tokens
    return [
        ((number + 1) * window_s, 100 * cached / prompt)
        for number, (cached, prompt) in sorted(sums.items())
        if prompt
    ]


def _rate(count: float, seconds: float) -> float:
    return float(f"{count / seconds:.4g}") if seconds > 0 else 0.0
