"""The names of vLLM's metrics for the values of Quire's, for dashboards and gateways that know only those.

An application looks like one vLLM server. Its gauges are one series, which the router that is scraped adds up
(`gauges_page`): the Gateway API inference extension reads one series of a name and ignores the others. Its counters and
histograms are one series for each process: a sum would fall whenever a process ends, and `rate` would take this for a
restart of all. Their label `engine`, vLLM's number of an engine, is the id of the process.

The names, types and labels are those of vLLM 0.2x (`vllm/v1/metrics/loggers.py`) and of the model server protocol of
the inference extension (`docs/proposals/003-model-server-protocol`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quire.protos.metric_families import (
    GAUGE,
    Family,
    Histogram,
    MetricSet,
    Page,
    Value,
    family_text,
)

Series = Mapping[tuple[str, ...], Value | Histogram]


@dataclass(frozen=True, slots=True)
class VllmName:
    """A family of vLLM.

    Attributes
    ----------
    name
        The exposed name.
    of
        Quire's family that has the values, and whose type it takes.
    labels
        Names of labels in addition to `model_name` and `engine`.
    series
        Makes the series from the values of a process; None: they are those of `of`.
    """

    name: str
    of: str
    help: str
    labels: tuple[str, ...] = ()
    series: Callable[[MetricSet], Series] | None = None


def _finished(metrics: MetricSet) -> Series:
    """Count answers that ended with a tool call as stopped: vLLM's engine does not know of calls."""
    counts: defaultdict[tuple[str, ...], Value] = defaultdict(Value)
    for (reason,), found in metrics.series("quire_requests_finished_total").items():
        assert isinstance(found, Value)
        counts["stop" if reason == "tool_calls" else reason,].value += found.value
    return counts


def _hits(*tiers: str) -> Callable[[MetricSet], Series]:
    def count(metrics: MetricSet) -> Series:
        found = [metrics.value("quire_prefix_hit_tokens_total", tier).value for tier in tiers]
        return {(): Value(sum(found))}

    return count


def _missed_on_device(metrics: MetricSet) -> Series:
    """Count the tokens that were looked up in host memory: those that the device did not have."""
    queried = metrics.value("quire_prefix_queried_tokens_total").value
    hits = metrics.value("quire_prefix_hit_tokens_total", "device").value
    return {(): Value(queried - hits)}


def _cache_config(metrics: MetricSet) -> Series:
    names = metrics.families["quire_cache_info"].labels
    block_size, num_blocks = names.index("block_size"), names.index("num_blocks")
    return {
        (labels[block_size], labels[num_blocks]): found
        for labels, found in metrics.series("quire_cache_info").items()
    }


VLLM_NAMES = (
    VllmName(
        "vllm:time_to_first_token_seconds",
        "quire_time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
    ),
    VllmName(
        "vllm:inter_token_latency_seconds",
        "quire_inter_token_seconds",
        "Seconds between two deltas of one stream.",
    ),
    VllmName(
        "vllm:request_time_per_output_token_seconds",
        "quire_request_time_per_output_token_seconds",
        "Mean seconds of an answer's output tokens after the first.",
    ),
    VllmName(
        "vllm:e2e_request_latency_seconds",
        "quire_request_seconds",
        "Seconds from a request's arrival to the end of its answer.",
    ),
    VllmName(
        "vllm:request_queue_time_seconds",
        "quire_request_queue_seconds",
        "Seconds that a request waits for its first step.",
    ),
    VllmName(
        "vllm:request_prefill_time_seconds",
        "quire_request_prefill_seconds",
        "Seconds from a request's first step to its first token.",
    ),
    VllmName(
        "vllm:request_decode_time_seconds",
        "quire_request_decode_seconds",
        "Seconds from a request's first token to its last.",
    ),
    VllmName(
        "vllm:request_prompt_tokens",
        "quire_request_prompt_tokens",
        "Length of the prompts of ended answers in tokens.",
    ),
    VllmName(
        "vllm:request_generation_tokens",
        "quire_request_output_tokens",
        "Length of ended answers in tokens.",
    ),
    VllmName(
        "vllm:request_success_total",
        "quire_requests_finished_total",
        "Answers that have ended, by finish reason.",
        ("finished_reason",),
        _finished,
    ),
    VllmName(
        "vllm:prompt_tokens_total",
        "quire_prompt_tokens_total",
        "Prompt tokens of finished requests.",
    ),
    VllmName(
        "vllm:generation_tokens_total",
        "quire_output_tokens_total",
        "Tokens that were generated.",
    ),
    VllmName(
        "vllm:prefix_cache_queries_total",
        "quire_prefix_queried_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
    ),
    VllmName(
        "vllm:prefix_cache_hits_total",
        "quire_prefix_hit_tokens_total",
        "Prompt tokens found in the prefix cache on the device.",
        series=_hits("device"),
    ),
    VllmName(
        "vllm:external_prefix_cache_queries_total",
        "quire_prefix_queried_tokens_total",
        "Prompt tokens looked up in host memory, because the device did not have them.",
        series=_missed_on_device,
    ),
    VllmName(
        "vllm:external_prefix_cache_hits_total",
        "quire_prefix_hit_tokens_total",
        "Prompt tokens found in the prefix cache in host memory, of this node or another one.",
        series=_hits("host", "peer"),
    ),
    VllmName(
        "vllm:spec_decode_num_draft_tokens_total",
        "quire_drafted_tokens_total",
        "Tokens that were drafted by speculative decoding and verified.",
    ),
    VllmName(
        "vllm:spec_decode_num_accepted_tokens_total",
        "quire_accepted_draft_tokens_total",
        "Drafted tokens that are part of the answer.",
    ),
    VllmName(
        "vllm:num_preemptions_total",
        "quire_preemptions_total",
        "Running requests that were preempted.",
    ),
    VllmName(
        "vllm:cache_config_info",
        "quire_cache_info",
        "Tokens per KV block, and number of blocks; always 1.",
        ("block_size", "num_gpu_blocks"),
        _cache_config,
    ),
)
RUNNING, WAITING, USAGE = VLLM_GAUGES = (
    Family("vllm:num_requests_running", GAUGE, "Requests with KV in the cache."),
    Family(
        "vllm:num_requests_waiting", GAUGE, "Requests that wait at the routers and the replicas."
    ),
    Family("vllm:kv_cache_usage_perc", GAUGE, "Fraction of the KV blocks in use, from 0 to 1."),
)


def vllm_page(metrics: MetricSet, labels: Mapping[str, str], engine: str) -> Page:
    """Return the counters and histograms of one process under vLLM's names.

    Parameters
    ----------
    metrics
        Its values, as refreshed by the last `MetricSet.page`.
    labels
        Labels that identify the process.
    engine
        The process's id.
    """
    page: Page = {}
    for alias in VLLM_NAMES:
        source = metrics.families.get(alias.of)
        if source is not None:
            family = Family(alias.name, source.kind, alias.help, alias.labels)
            series = metrics.series(alias.of) if alias.series is None else alias.series(metrics)
            page[alias.name] = family_text(family, series, {**labels, "engine": engine})
    return page


def gauges_page(pages: Iterable[Page], labels: Mapping[str, str]) -> Page:
    """Return vLLM's gauges: one series each, for all processes together.

    Parameters
    ----------
    pages
        The pages of all processes, with Quire's names.
    labels
        Labels that identify the application.
    """
    pages = list(pages)
    waiting = _total(pages, "quire_requests_waiting") + _total(
        pages, "quire_router_queued_requests"
    )
    in_use = _total(pages, "quire_kv_blocks_in_use")
    total = in_use + sum(_total(pages, f"quire_kv_blocks_{state}") for state in ("cached", "free"))
    values = {
        RUNNING: _total(pages, "quire_requests_running"),
        WAITING: waiting,
        USAGE: in_use / total if total else 0.0,
    }
    return {
        family.name: family_text(family, {(): Value(value)}, {**labels, "engine": "0"})
        for family, value in values.items()
    }


def _total(pages: Iterable[Page], name: str) -> float:
    """Return the sum of a family's samples."""
    lines = (line for page in pages if name in page for line in page[name][1].splitlines())
    return sum(float(line.rpartition(b" ")[2]) for line in lines)
