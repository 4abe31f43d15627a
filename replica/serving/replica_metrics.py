"""The replica's metrics: its requests, its cache and its engine."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
from quire.replica.loop import STEP_BOUNDARIES_S, LoopOutput
from quire.replica.serving.ahead_restores import NO_ROUTER

if TYPE_CHECKING:
    from quire.replica.engine import Engine
    from quire.replica.kv_transport.kv_transport import KvTransport

_CACHE_FACTS = ("block_size", "num_blocks", "num_host_blocks", "max_tokens", "number_format")
_GAUGES = (  # name, field of `Load`, help
    ("quire_requests_running", "num_running", "Requests with KV in the cache."),
    ("quire_requests_waiting", "num_waiting", "Accepted requests that are not yet scheduled."),
    (
        "quire_queued_prefill_tokens",
        "queued_prefill_tokens",
        "Tokens that waiting and running requests still have to prefill.",
    ),
    ("quire_kv_blocks_free", "blocks_free", "Free KV blocks."),
    ("quire_kv_blocks_cached", "blocks_cached", "KV blocks that only the prefix cache uses."),
    (
        "quire_kv_blocks_retained",
        "blocks_retained",
        "Cached KV blocks that are retained for sessions: evicted after the others.",
    ),
    ("quire_kv_blocks_in_use", "blocks_in_use", "KV blocks of live requests."),
    (
        "quire_host_blocks_free",
        "host_blocks_free",
        "Free blocks of the node's pool. One replica of each node reports the pool.",
    ),
    (
        "quire_host_blocks_cached",
        "host_blocks_cached",
        "Blocks of the node's pool with prefixes that any replica of the node can restore.",
    ),
    (
        "quire_host_blocks_retained",
        "host_blocks_retained",
        "Cached blocks of the node's pool that are retained for sessions: evicted after the others.",
    ),
    (
        "quire_host_blocks_in_use",
        "host_blocks_in_use",
        "Blocks of the node's pool of preempted requests, or being copied.",
    ),
    (
        "quire_engine_stalled_seconds",
        "stalled_s",
        "Seconds since the last step ended while there is work; 0 when idle.",
    ),
)
_TOTALS = (  # name, field of `Load`, help
    (
        "quire_preemptions_total",
        "num_preemptions",
        "Running requests that were preempted.",
    ),
    (
        "quire_offloads_total",
        "num_offloads",
        "Preempted requests whose blocks were copied to the host tier.",
    ),
    (
        "quire_restores_total",
        "num_restores",
        "Preempted requests whose blocks were restored from the host tier.",
    ),
)
_COUNTERS = (
    ("quire_prompt_tokens_total", "Prompt tokens of finished requests."),
    ("quire_output_tokens_total", "Tokens that the engine generated."),
    ("quire_prefix_queried_tokens_total", "Prompt tokens looked up in the prefix cache."),
    (
        "quire_drafted_tokens_total",
        "Tokens of finished requests that were drafted by speculative decoding and verified.",
    ),
    (
        "quire_accepted_draft_tokens_total",
        "Drafted tokens of finished requests that are part of the answer.",
    ),
    ("quire_kv_evictions_total", "Cached KV blocks that were evicted."),
    (
        "quire_host_evictions_total",
        "Cached blocks of the host tier that were evicted.",
    ),
    ("quire_peer_exported_blocks_total", "Blocks that were sent to other nodes."),
    ("quire_peer_imported_blocks_total", "Blocks that were copied from other nodes."),
    (
        "quire_peer_refused_blocks_total",
        "Blocks from other nodes that were damaged, not asked for, or had no room.",
    ),
)
TIERS = ("device", "host", "peer")
REPLICA_FAMILIES = (
    BUILD_INFO,
    CPU_SECONDS,
    Family(
        "quire_cache_info",
        GAUGE,
        "The KV cache: tokens per block, blocks, blocks of the host tier, total tokens, number format; always 1.",
        _CACHE_FACTS,
    ),
    *(Family(name, GAUGE, text) for name, _, text in _GAUGES),
    Family(
        "quire_kv_usage_ratio",
        GAUGE,
        "Fraction of the KV blocks in use by live requests, from 0 to 1.",
    ),
    Family("quire_kv_block_tokens", GAUGE, "Tokens per KV block."),
    *(Family(name, COUNTER, text) for name, _, text in _TOTALS),
    *(Family(name, COUNTER, text) for name, text in _COUNTERS),
    Family(
        "quire_prefix_hit_tokens_total",
        COUNTER,
        "Prompt tokens found in the prefix cache, by the tier that held them: the device, the pool of the node, or "
        "another node from which the request pulled them.",
        ("tier",),
        values=TIERS,
    ),
    Family(
        "quire_engine_step_seconds",
        HISTOGRAM,
        "Seconds from a step's launch to its tokens on the host.",
        boundaries=STEP_BOUNDARIES_S,
    ),
)


class ReplicaMetrics:
    """Counts tokens from the engine's outputs, and reads all other values from the engine at each scrape."""

    def __init__(self, engine: Engine, transport: KvTransport | None = None) -> None:
        self._engine = engine
        self._transport = transport
        self.metrics = MetricSet(REPLICA_FAMILIES, self._read)
        value = self.metrics.value
        self._output, self._prompt = (
            value("quire_output_tokens_total"),
            value("quire_prompt_tokens_total"),
        )
        self._queried = value("quire_prefix_queried_tokens_total")
        self._drafted = value("quire_drafted_tokens_total")
        self._accepted = value("quire_accepted_draft_tokens_total")
        self._hit, self._host_hit, self._peer_hit = (
            value("quire_prefix_hit_tokens_total", tier) for tier in TIERS
        )
        self.metrics.adopt("quire_engine_step_seconds", engine.step_seconds)
        config = engine.config
        value("quire_kv_block_tokens").value = config.block_size
        facts = (
            config.block_size,
            engine.load().blocks_total,
            config.num_host_blocks,
            config.max_cache_tokens,
            config.number_format,
        )
        value("quire_cache_info", *map(str, facts)).value = 1
        value("quire_build_info", importlib.metadata.version("quire")).value = 1

    def on_output(self, output: LoopOutput) -> None:
        """Count the output of a step, except that of requests without a router, which has no reader."""
        num_tokens = len(output.deltas.tokens.token_ids)
        for delta in output.deltas.whole:
            if delta.key[0] == NO_ROUTER:
                continue
            num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._prompt.value += delta.facts.num_prompt_tokens
                self._queried.value += delta.facts.num_prompt_tokens
                on_host = delta.facts.num_host_cached_tokens
                from_peer = delta.facts.num_peer_cached_tokens or 0
                self._hit.value += delta.facts.num_cached_tokens - on_host
                self._host_hit.value += on_host - from_peer
                self._peer_hit.value += from_peer
                self._drafted.value += delta.facts.num_drafted or 0
                self._accepted.value += delta.facts.num_accepted or 0
        self._output.value += num_tokens

    def page(self, labels: Mapping[str, str], *, vllm_names: bool = False) -> Page:
        """The page with all metric families, on request also under vLLM's names; `labels` identify the replica."""
        page = self.metrics.page(labels)
        return page | vllm_page(self.metrics, labels, labels["replica"]) if vllm_names else page

    def _read(self) -> dict[str, float]:
        load = self._engine.load()
        values = {name: getattr(load, field) for name, field, _ in (*_GAUGES, *_TOTALS)}
        values[CPU_SECONDS.name] = time.process_time()
        values["quire_kv_usage_ratio"] = load.blocks_in_use / max(1, load.blocks_total)
        device, host = self._engine.num_evictions()
        values |= {"quire_kv_evictions_total": device, "quire_host_evictions_total": host}
        if self._transport is not None:
            values |= {
                "quire_peer_exported_blocks_total": self._transport.exporter.num_exported,
                "quire_peer_imported_blocks_total": self._transport.num_imported,
                "quire_peer_refused_blocks_total": self._transport.num_refused,
            }
        return values
