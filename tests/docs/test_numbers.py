"""The numbers that the documents quote are those of the results that they link."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.documents import ROOT

RESULTS = ROOT / "tests" / "perf" / "results"
# Document, the quoted text with the value's format, file of the result, bar.
QUOTED = [
    ("README.md", "{:.2f} times Ray Serve", "ray_routers_spread", "router/spread_requests_over_power_of_two"),
    ("README.md", "| {:.0f} µs (median), goal 150 |", "router_index", "router/decision_p50_us"),
    ("README.md", "| {:.0f} µs over HTTP", "data_plane", "router/data_plane_sse_128_router_us_per_token"),
    ("README.md", "{:.0f} µs over gRPC", "data_plane", "router/data_plane_grpc_128_router_us_per_token"),
    ("README.md", "{:.0f} of 7,212", "chaos", "chaos/bad_streams"),
    ("README.md", "of {:,.0f}; ", "chaos", "chaos/streams"),
    ("README.md", "{:,.0f} migrations", "chaos", "chaos/migrations"),
    ("README.md", "{:,.0f} kills", "chaos", "chaos/kills"),
    ("README.md", "{:.2f} to 1.63 times", "cpu_workloads", "cpu/W3_over_best_peer"),
    ("README.md", "to {:.2f} times", "cpu_workloads", "cpu/W5_over_best_peer"),
    ("docs/performance.md", "| {:.2f} | 1.46 |", "cpu_workloads_zen5", "cpu/zen5/W1_over_best_peer"),
    ("docs/performance.md", "| {:.2f} | 1.27 |", "cpu_workloads_amx", "cpu/amx/W2_over_best_peer"),
    ("docs/performance.md", "{:.0f} µs median (goal", "router_index", "router/decision_p50_us"),
    ("docs/performance.md", "195), {:.0f} µs p99 | Zen 4, [r", "router_index", "router/decision_p99_us"),
    ("docs/performance.md", "| {:.3f} | Zen 5, [truth", "truth", "router/truth_hit_rate_of_pooled"),
    ("docs/performance.md", "| {:.3f} ms | 0.1 |", "host_overhead", "engine/host_ms_256"),
    ("docs/performance.md", "| {:.2f} ms | 0.4 |", "host_overhead", "engine/host_ms_1024"),
    ("docs/performance.md", "| {:.1f} s | 10 |", "startup", "start/first_token_s"),
    ("docs/performance.md", "| {:.1f} s | 3 |", "startup_beside", "start/first_token_beside_another_s"),
    (
        "docs/performance.md",
        "| {:.1f} s | 3 |",
        "startup_packed_zen5",
        "start/first_token_beside_another_s",
    ),
    ("docs/performance.md", "| {:.0f} MB | 500 |", "startup", "start/resident_besides_weights_and_cache_mb"),
    ("docs/performance.md", "| {:.0f}% | 90 | Zen 4", "system_throughput", "cpu/system_W1_percent_of_offline"),
    ("docs/performance.md", "| 16 → 24 | {:.2f} |", "lora", "lora/100_adapters_decode"),
    ("docs/performance.md", "| 96 → 24 | {:.2f} |", "lora", "lora/100_adapters_chat"),
    ("docs/security.md", "{:.2f} times the plain CPU", "tls_cost", "auth/tls_sse_cpu_per_token"),
    ("docs/security.md", "{:.2f} times over gRPC", "tls_cost", "auth/tls_grpc_cpu_per_token"),
    ("docs/models.md", "{:.0f} of 176 configurations", "families_variants", "families/variants/served"),
    ("docs/engine.md", "{:.0f} of 185 types are exact", "families_ranks", "tp/families/served"),
    ("docs/models.md", "| `bfloat16` | {:.4f} |", "real_models", "families/real/smollm2/bfloat16"),
    ("docs/models.md", "| `weights: int8` | {:.4f} |", "real_models", "families/real/smollm2/int8"),
    ("docs/models.md", " | {:.4f} | The loss in int8", "real_models", "families/real/gemma3_270m/int8"),
    ("docs/guarantees.md", "{:.1f} s at the 99th", "chaos", "chaos/added_stall_p99"),
    ("docs/guarantees.md", "{:.1f} s where the survivors", "chaos", "chaos/added_stall_lone_kill_p99"),
    ("docs/guarantees.md", "| {:.2f} | 1.00 | 1.00 |", "deterministic", "engine/deterministic_embedded_prefill"),
]  # fmt: skip


def value(file: str, bar: str) -> float:
    bars = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["bars"]
    (found,) = (item["value"] for item in bars if item["name"] == bar)
    return found


@pytest.mark.parametrize(("document", "quote", "file", "bar"), QUOTED)
def test_a_quoted_number_is_the_results(document: str, quote: str, file: str, bar: str):
    text = re.sub(r"\s+", " ", (ROOT / document).read_text(encoding="utf-8"))
    assert quote.format(value(file, bar)) in text
