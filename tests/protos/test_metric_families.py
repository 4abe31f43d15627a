"""Values reach the text that Prometheus reads whole, and each series is there from the start."""

from __future__ import annotations

import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.protos.metric_families import COUNTER, GAUGE, HISTOGRAM, Family, MetricSet, join

BOUNDARIES = (0.01, 0.1, 1)
FAMILIES = (
    Family("quire_ends_total", COUNTER, "Ends.", ("reason",), values=("stop", "length")),
    Family("quire_facts_info", GAUGE, "Facts.", ("size", "kind")),
    Family("quire_wait_seconds", HISTOGRAM, "Waits.", boundaries=BOUNDARIES),
    Family("quire_waiting", GAUGE, "Requests that wait."),
)


def samples(*sets: MetricSet) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels, of processes p0, p1, ..."""
    text = join(metrics.page({"process": f"p{i}"}) for i, metrics in enumerate(sets)).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def value(found: dict, name: str, **labels: str) -> float:
    return found[name, frozenset({"process": "p0", **labels}.items())]


def test_counts_are_cumulative_and_boundaries_belong_to_their_bucket():
    metrics = MetricSet(FAMILIES)
    for seconds in (0.005, 0.01, 0.02, 0.1, 1, 7):
        metrics.histogram("quire_wait_seconds").observe(seconds)
    found = samples(metrics)
    counts = {le: value(found, "quire_wait_seconds_bucket", le=le) for le in ("0.01", "0.1", "1")}
    assert counts == {"0.01": 2, "0.1": 4, "1": 5}
    assert value(found, "quire_wait_seconds_bucket", le="+Inf") == 6
    assert value(found, "quire_wait_seconds_count") == 6
    assert value(found, "quire_wait_seconds_sum") == pytest.approx(8.135)


def test_no_value_is_lost():
    rng = random.Random(1)
    values = [rng.expovariate(5) for _ in range(1000)]
    metrics = MetricSet(FAMILIES)
    for seconds in values:
        metrics.histogram("quire_wait_seconds").observe(seconds)
    found = samples(metrics)
    for le in ("0.01", "0.1", "1", "+Inf"):
        count = value(found, "quire_wait_seconds_bucket", le=le)
        assert count == sum(seconds <= float(le) for seconds in values)


def test_series_without_a_value_are_there():
    found = samples(MetricSet(FAMILIES))
    assert value(found, "quire_ends_total", reason="stop") == 0
    assert value(found, "quire_ends_total", reason="length") == 0
    assert value(found, "quire_wait_seconds_bucket", le="+Inf") == 0
    assert value(found, "quire_waiting") == 0


def test_a_label_value_that_was_not_declared_is_a_mistake():
    metrics = MetricSet(FAMILIES)
    with pytest.raises(ValueError, match="quire_ends_total"):
        metrics.value("quire_ends_total", "unheard of")
    with pytest.raises(ValueError, match="quire_facts_info"):
        metrics.value("quire_facts_info", "16")


def test_values_that_are_kept_elsewhere_are_read_when_the_text_is_written():
    kept = {"quire_waiting": 3}
    metrics = MetricSet(FAMILIES, lambda: kept)
    assert value(samples(metrics), "quire_waiting") == 3
    kept["quire_waiting"] = 5
    assert value(samples(metrics), "quire_waiting") == 5
    scalars = {(family.name, labels): value for family, labels, value in metrics.scalars()}
    assert scalars["quire_waiting", ()] == 5
    assert scalars["quire_ends_total", ("stop",)] == 0


def test_pages_are_joined_by_family():
    one, other = MetricSet(FAMILIES), MetricSet(FAMILIES[:1])
    one.value("quire_ends_total", "stop").value += 2
    other.value("quire_ends_total", "stop").value += 5
    one.value("quire_facts_info", "16", 'a "quoted"\nkind \\').value = 1
    text = join([one.page({"process": "p0"}), other.page({"process": "p1"})]).decode()
    assert text.count("# TYPE quire_ends_total counter\n") == 1
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert names.index("quire_facts_info") == names.count("quire_ends_total") == 4
    found = samples(one, other)
    ends = {"reason": "stop"}
    assert value(found, "quire_ends_total", **ends) == 2
    assert value(found, "quire_ends_total", process="p1", **ends) == 5
    assert value(found, "quire_facts_info", size="16", kind='a "quoted"\nkind \\') == 1
