"""A scrape of the cluster has what the dashboard's panels and the alerts read, and what vLLM's dashboards read."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from live import Cluster, wait_until

from quire.cluster.local.ports import free_ports
from quire.cluster.scrape import MAX_AGE_S, SCRAPE_FAMILIES
from quire.protos.errors import ERROR_CODES, OVERLOAD_REASONS
from quire.protos.vllm_metrics import VLLM_GAUGES, VLLM_NAMES
from quire.replica.serving.replica_metrics import REPLICA_FAMILIES
from quire.router.observer import SESSION_OUTCOMES
from quire.router.request.router_metrics import ROUTER_FAMILIES
from tests.k8s.expressions import (
    RULES,
    concerns_tenants,
    expressions,
    panels,
    problems,
    series_of,
)

pytestmark = pytest.mark.system

PARTS = ("router", "queue", "prefill", "decode", "delivery")
PROMPT = list(range(7, 407))


def scrape(cluster: Cluster) -> str:
    """What Prometheus gets, with all that was answered before."""
    time.sleep(MAX_AGE_S)
    return httpx.get(f"{cluster.url}/metrics", timeout=60).text


def answer(cluster: Cluster, **fields: object) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, **fields}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).is_success


def test_every_metric_of_a_panel_or_an_alert_is_scraped(cluster):
    answer(cluster)
    # A router computes it every few seconds, from the requests since.
    wait_until(lambda: "quire_routing_regret_seconds{" in scrape(cluster), 60, "the regret")
    series = series_of(cluster.metrics())
    asked = [one for one in expressions() if not concerns_tenants(one)]
    assert len(asked) > 60
    assert [problem for one in asked for problem in problems(one, series)] == []


def test_the_scrape_has_no_family_that_the_documents_lack(cluster):
    declared = {f.name for f in (*ROUTER_FAMILIES, *REPLICA_FAMILIES, *SCRAPE_FAMILIES)}
    declared |= {alias.name for alias in VLLM_NAMES} | {gauge.name for gauge in VLLM_GAUGES}
    assert set(re.findall(r"^# TYPE (\S+)", scrape(cluster), re.MULTILINE)) == declared


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)
def test_promtool_accepts_the_scrape(cluster):
    """Only vLLM's names break a rule of promtool's: they have a colon, and some have no base unit."""
    ran = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scrape(cluster),
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = (ran.stdout + ran.stderr).splitlines()
    assert said and all(line.startswith("vllm:") for line in said), said


@contextmanager
def prometheus(cluster: Cluster, folder: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the cluster each second and evaluates the alerts."""
    (port,) = free_ports(1)
    (folder / "rules.yaml").write_text(yaml.safe_dump(RULES["spec"]))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "quire",
                "static_configs": [{"targets": [f"127.0.0.1:{cluster.http_port}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
                yield client
        finally:
            process.terminate()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_draws_every_panel_and_evaluates_every_alert(cluster, tmp_path):
    """Of a cluster that is well no alert fires."""

    def result(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
        response = client.get("/query", params={"query": expression})
        response.raise_for_status()  # while it starts, it is unavailable
        reply = response.json()
        assert reply["status"] == "success", (expression, reply)
        return reply["data"]["result"]

    with prometheus(cluster, tmp_path) as client:

        def has_scraped() -> bool:
            answer(cluster, user="talk")
            try:
                counts = result(client, "min(count_over_time(quire_build_info[1m]))")
            except httpx.HTTPError:
                return False
            is_scraped = bool(counts) and int(counts[0]["value"][1]) >= 4
            return is_scraped and bool(result(client, "quire_routing_regret_seconds"))

        wait_until(has_scraped, 60, "Prometheus has scraped four times")
        for panel in panels():
            for target in panel["targets"]:
                expression = target["expr"]
                expression = expression.replace("$__rate_interval", "30s")
                expression = re.sub(r"\$(application|model)", ".*", expression)
                found = result(client, expression)
                # Some show nothing until something goes wrong.
                assert found or "> 0" in expression or concerns_tenants(expression), panel["title"]
        groups = client.get("/rules").json()["data"]["groups"]
        states = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert len(states) == sum(len(group["rules"]) for group in RULES["spec"]["groups"])
        assert {rule["health"] for rule in states.values()} == {"ok"}
        assert [name for name, rule in states.items() if rule["state"] == "firing"] == []


def test_drops_hits_sessions_and_regret_have_series_by_their_labels(cluster):
    """Each series of a reason, code or tier exists before its first event, so that `rate` sees that event."""

    def has_interval() -> bool:
        answer(cluster)
        return "quire_routing_regret_high_seconds{" in scrape(cluster)

    wait_until(has_interval, 60, "two samples of one router")
    samples = cluster.metrics()

    def values_of(name: str, label: str) -> set[str]:
        return {s.labels[label] for s in samples if s.name == name}

    assert values_of("quire_requests_refused_total", "code") == set(ERROR_CODES)
    assert values_of("quire_answers_failed_total", "code") == set(ERROR_CODES)
    assert values_of("quire_requests_overloaded_total", "reason") == set(OVERLOAD_REASONS)
    assert values_of("quire_session_requests_total", "outcome") == set(SESSION_OUTCOMES)
    assert values_of("quire_prefix_hit_tokens_total", "tier") == {"device", "host", "peer"}
    family = "quire_routing_regret"
    router = next(s.labels["router"] for s in samples if s.name == f"{family}_high_seconds")
    regret = {
        s.name.removeprefix(f"{family}_"): s.value
        for s in samples
        if s.name.startswith(family) and s.labels["router"] == router
    }
    assert values_of(f"{family}_seconds", "policy") == {"slo"}
    assert 0 <= regret["low_seconds"] <= regret["seconds"] <= regret["high_seconds"]
    assert regret["seconds"] <= regret["modelled_delay_seconds"]
    assert regret["requests"] >= 2 and regret["cpu_seconds_total"] > 0


def test_a_second_request_captures_and_delivers_what_the_first_one_left(cluster):
    names = ("routed_prompt", "prefix_available", "prefix_captured", "prefix_delivered")

    def tokens() -> dict[str, float]:
        time.sleep(MAX_AGE_S)
        found = {name: cluster.metric(f"quire_{name}_tokens_total") for name in names}
        return found | {"on device": cluster.metric("quire_prefix_hit_tokens_total", tier="device")}

    answer(cluster)
    before = tokens()
    for _ in range(4):  # whatever router the proxy chooses
        answer(cluster)
    added = {name: value - before[name] for name, value in tokens().items()}
    assert added["routed_prompt"] == 4 * len(PROMPT)
    least = 4 * (len(PROMPT) // 64 * 64)
    for name in ("prefix_available", "prefix_captured", "prefix_delivered", "on device"):
        assert least <= added[name] < added["routed_prompt"], added
    assert added["prefix_available"] >= added["prefix_captured"]
    assert added["prefix_delivered"] == added["on device"]


def test_the_parts_of_all_requests_are_their_whole_time(cluster):
    answer(cluster, n=2)
    time.sleep(MAX_AGE_S)
    samples = cluster.metrics()

    def total(name: str) -> float:
        return sum(s.value for s in samples if s.name == f"quire_request_{name}_sum")

    # An answer whose client left before its first token has no parts.
    assert 0 < sum(total(f"{part}_seconds") for part in PARTS) <= total("seconds") * (1 + 1e-6)
    processes = [s for s in samples if s.name == "quire_process_cpu_seconds_total"]
    assert len(processes) == 4 and min(s.value for s in processes) > 0


def test_vllms_names_have_the_values_of_quires(cluster):
    answer(cluster)
    time.sleep(MAX_AGE_S)
    samples = cluster.metrics()

    def total(name: str) -> float:
        found = [s.value for s in samples if s.name == name]
        assert found, name
        return sum(found)

    for ours, theirs in (
        ("quire_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("quire_output_tokens_total", "vllm:generation_tokens_total"),
        ("quire_prefix_queried_tokens_total", "vllm:prefix_cache_queries_total"),
        ("quire_requests_finished_total", "vllm:request_success_total"),
        ("quire_requests_running", "vllm:num_requests_running"),
    ):
        assert total(ours) == total(theirs), ours
    assert total("vllm:prefix_cache_hits_total") > 0
    for gauge in VLLM_GAUGES:
        (sample,) = (s for s in samples if s.name == gauge.name)
        assert sample.labels == {"application": "quire", "model_name": "embedded", "engine": "0"}
