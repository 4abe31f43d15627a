"""`GET /metrics`: one answer for all processes, in bounded time, whatever asks how often; its names keep the rules."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from live_app import serving
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from quire.cluster import scrape
from quire.cluster.scrape import SCRAPE_FAMILIES, Answers, Scrape
from quire.protos.metric_families import COUNTER, GAUGE, HISTOGRAM, Family, MetricSet, join
from quire.replica.serving.replica_metrics import REPLICA_FAMILIES
from quire.router.request.router_metrics import ROUTER_FAMILIES
from tests.cpu_time import least_cpu_s

SETS = (ROUTER_FAMILIES, REPLICA_FAMILIES, SCRAPE_FAMILIES)
FAMILIES = {family.name: family for families in SETS for family in families}
TICKS = (Family("quire_ticks_total", COUNTER, "Ticks."),)


def process(name: str, ticks: int):
    metrics = MetricSet(TICKS)
    metrics.value("quire_ticks_total").value = ticks
    return name, metrics.page({"process": name})


def answering(
    *processes, silent: int = 0, after_s: float = 0.0
) -> Callable[[float], Awaitable[Answers]]:
    async def ask(timeout_s: float) -> Answers:
        ask.num_calls += 1
        await asyncio.sleep(after_s)
        return dict(processes), silent

    ask.num_calls = 0
    return ask


def read(text: bytes) -> dict[str, float]:
    """Ticks by process, and silent processes by deployment."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            label = sample.labels.get("process") or sample.labels.get("deployment")
            if label is not None:
                found[label] = sample.value
    return found


def test_every_process_is_there_once_and_the_own_page_is_the_newest():
    async def run() -> None:
        routers = answering(process("r1", 1), process("r2", 2))
        replicas = answering(process("e1", 3))
        sources = {"Router": routers, "Replica": replicas}
        whole = Scrape({"application": "a"}, lambda: process("r1", 7), sources)
        text = await whole.text()
        assert read(text) == {"r1": 7, "r2": 2, "e1": 3, "Router": 0, "Replica": 0}
        assert b'quire_scrape_silent_processes{application="a",deployment="Router"} 0.0' in text

    asyncio.run(run())


def test_silent_processes_and_a_source_that_fails_are_counted_and_the_rest_is_there():
    async def fails(timeout_s: float) -> Answers:
        raise RuntimeError("no such deployment")

    async def run() -> None:
        replicas = answering(process("e1", 3), silent=2)
        sources = {"Router": fails, "Replica": replicas}
        text = await Scrape({}, lambda: process("r1", 7), sources).text()
        assert read(text) == {"r1": 7, "e1": 3, "Router": 1, "Replica": 2}

    asyncio.run(run())


def test_who_asks_at_once_or_soon_after_gets_the_same_answer(monkeypatch):
    async def run() -> None:
        source = answering(process("e1", 3), after_s=0.05)
        whole = Scrape({}, lambda: process("r1", 7), {"Replica": source})
        texts = await asyncio.gather(*(whole.text() for _ in range(50)))
        assert len(set(texts)) == 1 and source.num_calls == 1
        assert await whole.text() == texts[0] and source.num_calls == 1
        monkeypatch.setattr(scrape, "MAX_AGE_S", 0.0)
        await asyncio.sleep(0.01)
        await whole.text()
        assert source.num_calls == 2

    asyncio.run(run())


def test_a_client_that_leaves_does_not_end_the_scrape_of_others():
    async def run() -> None:
        source = answering(process("e1", 3), after_s=0.05)
        whole = Scrape({}, lambda: process("r1", 7), {"Replica": source})
        leaving, staying = asyncio.create_task(whole.text()), asyncio.create_task(whole.text())
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert read(await staying)["e1"] == 3 and source.num_calls == 1

    asyncio.run(run())


def test_a_large_fleet_holds_the_loop_for_less_than_50_ms():
    """64 routers and 256 replicas: each has written its own text, so that there is only joining left."""
    routers = [(f"r{i}", MetricSet(ROUTER_FAMILIES).page({"router": f"r{i}"})) for i in range(64)]
    page = MetricSet(REPLICA_FAMILIES).page({"replica": "e"})
    replicas = [(f"e{i}", page) for i in range(256)]

    async def run() -> None:
        sources = {"Router": answering(*routers), "Replica": answering(*replicas)}
        text = await Scrape({}, lambda: routers[0], sources).text()
        assert text.count(b"quire_inter_token_seconds_count{") == 64

    assert least_cpu_s(lambda: asyncio.run(run()), 0.05) < 0.05


def test_own_page_is_written_in_less_than_50_ms():
    metrics = MetricSet(ROUTER_FAMILIES)
    labels = {"application": "a", "deployment": "Router", "model_name": "m", "router": "r"}
    assert least_cpu_s(lambda: metrics.page(labels), 0.05) < 0.05


# -- the route -------------------------------------------------------------------------------------------


def test_the_route_answers_in_prometheus_format(service):
    with serving(service) as client:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        (family,) = text_string_to_metric_families(answer.text)
        assert (family.name, family.type) == ("quire_tests", "counter")


def test_what_a_front_end_refuses_is_counted_and_what_the_service_refuses_is_not_counted_twice(
    service,
):
    with serving(service) as client:
        assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
        body = {"prompt": "a", "no_such_field": 1}
        assert client.post("/v1/completions", json=body).status_code == 400
        large = {"prompt": "a" * (1 << 17)}
        assert client.post("/v1/chat/completions", json=large).status_code == 413
        assert client.post("/v1/completions", json={"prompt": "a", "model": "x"}).status_code == 404
        codes = ["invalid_request", "unsupported_field", "body_too_large"]
        assert service.refused_by_front_end == codes
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert service.refused_by_front_end == codes


# -- names -----------------------------------------------------------------------------------------------

# As `promtool check metrics` has them (prometheus/client_golang, promlint).
_UNITS = ("seconds", "tokens", "ratio", "blocks", "requests", "replicas", "processes", "info")
_NOT_BASE_UNITS = re.compile(
    r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|kb|mb|kib|mib|kilobytes|percent)(_|$)"
)


def problems(family: Family) -> list[str]:
    found = []
    if not re.fullmatch(r"quire_[a-z0-9_]+", family.name):
        found.append("a name is quire_ and lower case")
    if family.name.endswith("_total") != (family.kind == COUNTER):
        found.append("_total is the end of counters and of nothing else")
    if re.search(r"_(bucket|sum|count|created)$", family.name):
        found.append("reserved end")
    if re.search(r"_(counter|gauge|histogram|summary)(_|$)", family.name):
        found.append("the type is not part of the name")
    if _NOT_BASE_UNITS.search(family.name):
        found.append("base units only")
    if family.name.endswith("_ratio") and family.kind != GAUGE:
        found.append("a ratio is a gauge")
    if family.kind == HISTOGRAM and not family.name.endswith(("_seconds", "_tokens")):
        found.append("a histogram names its unit")
    if not re.fullmatch(r"[A-Z].*\w\.", family.help) or len(family.help.split()) < 3:
        found.append("HELP is a sentence")
    if list(family.boundaries) != sorted(set(family.boundaries)):
        found.append("boundaries ascend")
    if bool(family.boundaries) != (family.kind == HISTOGRAM):
        found.append("histograms have boundaries")
    if {"le", "quantile"} & set(family.labels):
        found.append("reserved label")
    # An estimate is absent until it has samples.
    is_late = family.name.endswith(("_info", "_processes")) or "_regret_" in family.name
    if family.labels and not family.values and not is_late:
        found.append("each series exists from the start")
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_the_rules(name):
    assert problems(FAMILIES[name]) == []


@pytest.mark.parametrize(
    "family",
    [
        Family("quire_things", COUNTER, "Things that are counted."),
        Family("quire_wait_ms", GAUGE, "Milliseconds of a wait."),
        Family("quire_wait_seconds", HISTOGRAM, "Seconds of a wait."),
        Family("quire_wait_seconds_sum", GAUGE, "Seconds of a wait."),
        Family("quire_Things", GAUGE, "Things that are there."),
        Family("quire_things", GAUGE, "things"),
    ],
)
def test_a_family_that_breaks_a_rule_is_found(family):
    assert problems(family)


def test_a_name_means_one_thing():
    for families in SETS:
        names = [family.name for family in families]
        assert len(names) == len(set(names))
    for name in FAMILIES:
        same = {family for families in SETS for family in families if family.name == name}
        assert len(same) == 1, name
    exposed = [
        f"{n}{end}"
        for n, f in FAMILIES.items()
        if f.kind == HISTOGRAM
        for end in ("_sum", "_count", "_bucket")
    ]
    assert not FAMILIES.keys() & set(exposed)


def whole_text() -> str:
    return join(MetricSet(families).page({"process": "p"}) for families in SETS).decode()


def test_the_text_is_read_by_both_parsers_of_the_library():
    """The second wants families of counters without `_total`, and an end."""
    text = whole_text()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    strict = re.sub(r"^(# (?:HELP|TYPE) \w+)_total ", r"\1 ", text, flags=re.MULTILINE) + "# EOF\n"
    open_metrics = {family.name: family for family in open_metrics_families(strict)}
    for name, family in FAMILIES.items():
        base = name.removesuffix("_total")
        for parsed in (found[base], open_metrics[base]):
            assert (parsed.type, parsed.documentation) == (family.kind, family.help)
        assert found[base].samples or family.labels
