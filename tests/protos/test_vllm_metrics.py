"""vLLM's names have the values of Quire's, and are those that dashboards and gateways read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.protos.metric_families import MetricSet, Page, join
from quire.protos.vllm_metrics import VLLM_GAUGES, VLLM_NAMES, gauges_page, vllm_page
from quire.replica.serving.replica_metrics import REPLICA_FAMILIES
from quire.router.request.router_metrics import FINISH_REASONS, ROUTER_FAMILIES

APPLICATION = {"application": "quire", "model_name": "m"}
# Of the model server protocol of the Gateway API inference extension: type, and labels that it reads.
GATEWAY = {
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:cache_config_info": ("gauge", {"block_size", "num_gpu_blocks"}),
}
# Of vLLM's own dashboard (examples/observability/prometheus_grafana/grafana.json), all except the longest answer of a
# request's choices, vllm:request_max_num_generation_tokens: Quire counts each answer.
DASHBOARD = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_success_total": "counter",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}
# Ray's dashboard of vLLM has panels for connectors to other machines and disks, which Quire does not have.
NOT_SERVED = re.compile(r"vllm_(nixl|kv_offload)_|vllm_num_requests_swapped$")


def a_router() -> MetricSet:
    metrics = MetricSet(ROUTER_FAMILIES)
    for i, reason in enumerate(FINISH_REASONS):
        metrics.value("quire_requests_finished_total", reason).value = 1 + 10 * i
    metrics.value("quire_router_queued_requests").value = 3
    for seconds in (0.02, 0.3, 40):
        metrics.histogram("quire_time_to_first_token_seconds").observe(seconds)
    return metrics


def a_replica(scale: int) -> MetricSet:
    metrics = MetricSet(REPLICA_FAMILIES)
    metrics.value("quire_cache_info", "32", "100", "0", "3200", "float32").value = 1
    values = {
        "requests_running": 2,
        "requests_waiting": 1,
        "kv_blocks_in_use": 10,
        "kv_blocks_cached": 20,
        "kv_blocks_free": 70,
        "prefix_queried_tokens_total": 1000,
    }
    for name, value in values.items():
        metrics.value(f"quire_{name}").value = scale * value
    metrics.value("quire_prefix_hit_tokens_total", "device").value = 300 * scale
    metrics.value("quire_prefix_hit_tokens_total", "host").value = 30 * scale
    metrics.value("quire_prefix_hit_tokens_total", "peer").value = 20 * scale
    return metrics


def process_page(metrics: MetricSet, name: str) -> Page:
    labels = {**APPLICATION, "process": name}
    return metrics.page(labels) | vllm_page(metrics, labels, name)


@pytest.fixture(scope="module")
def text() -> str:
    pages = [
        process_page(a_router(), "r1"),
        process_page(a_replica(1), "e1"),
        process_page(a_replica(3), "e2"),
    ]
    return join([*pages, gauges_page(pages, APPLICATION)]).decode()


def samples(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    (found,) = (v for of, v in samples(text)[name].items() if labels.items() <= set(of))
    return found


def types(text: str) -> Mapping[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def test_gauges_are_one_series_for_the_whole_application(text):
    found = samples(text)
    for family in VLLM_GAUGES:
        (labels,) = found[family.name]
        assert dict(labels) == {**APPLICATION, "engine": "0"}
    assert value(text, "vllm:num_requests_running") == 2 + 6
    assert value(text, "vllm:num_requests_waiting") == 1 + 3 + 3
    assert value(text, "vllm:kv_cache_usage_perc") == 40 / 400


def test_usage_without_a_replica_is_0():
    page = gauges_page([], APPLICATION)
    assert value(join([page]).decode(), "vllm:kv_cache_usage_perc") == 0


def test_counters_and_histograms_have_the_values_of_the_process(text):
    for engine, scale in (("e1", 1), ("e2", 3)):
        assert value(text, "vllm:prefix_cache_queries_total", engine=engine) == 1000 * scale
        assert value(text, "vllm:prefix_cache_hits_total", engine=engine) == 300 * scale
        queries, hits = 700 * scale, 50 * scale
        assert value(text, "vllm:external_prefix_cache_queries_total", engine=engine) == queries
        assert value(text, "vllm:external_prefix_cache_hits_total", engine=engine) == hits
    found = samples(text)
    for end in ("bucket", "sum", "count"):
        ours = found[f"quire_time_to_first_token_seconds_{end}"]
        theirs = found[f"vllm:time_to_first_token_seconds_{end}"]
        assert {labels | {("engine", "r1")}: v for labels, v in ours.items()} == theirs
    assert value(text, "vllm:time_to_first_token_seconds_count", engine="r1") == 3


def test_answers_that_ended_with_a_call_count_as_stopped(text):
    counts = {
        dict(labels)["finished_reason"]: v
        for labels, v in samples(text)["vllm:request_success_total"].items()
    }
    assert counts == {"stop": 1 + 21, "length": 11, "abort": 31, "error": 41}


def test_a_gateway_finds_what_it_reads(text):
    found, kinds = samples(text), types(text)
    for name, (kind, labels) in GATEWAY.items():
        assert kinds[name] == kind
        for series in found[name]:
            assert labels | {"model_name", "engine"} <= dict(series).keys()
    assert value(text, "vllm:cache_config_info", engine="e1", block_size="32") == 1


def test_the_dashboard_of_vllm_finds_what_it_reads(text):
    kinds = types(text)
    assert {name: kinds.get(name) for name in DASHBOARD} == DASHBOARD
    for name, kind in DASHBOARD.items():
        for series in samples(text)[f"{name}_bucket" if kind == "histogram" else name]:
            assert dict(series)["model_name"] == "m"


def test_the_names_in_rays_dashboard_of_vllm_are_served(text):
    """They begin with `ray_vllm_` there: Ray exports vLLM's metrics under its own prefix."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    folder = Path(ray.origin).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    panels = (folder / "serve_llm_dashboard_panels.py").read_text(encoding="utf-8")
    read = {name for name in re.findall(r"\bray_(vllm_\w+)", panels) if not NOT_SERVED.match(name)}
    served = {name.replace(":", "_") for name in samples(text)}
    served |= {name.replace(":", "_") for name in types(text)}
    assert len(read) > 15 and read <= served


def test_no_name_appears_twice():
    names = [alias.name for alias in VLLM_NAMES] + [family.name for family in VLLM_GAUGES]
    assert len(names) == len(set(names))
