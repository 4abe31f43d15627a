"""What is counted for every token and request reaches Ray's metrics whole, though only now and then."""

from __future__ import annotations

import random

import pytest

from quire.cluster import metrics

BOUNDARIES = [0.01, 0.1, 1]


class FakeGauge:
    """Keeps what is set, by boundary."""

    def __init__(self, tag_keys: tuple[str, ...]):
        self._tag_keys = tag_keys
        self.values: dict[str | None, float] = {}

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert tuple(tags or ()) == self._tag_keys
        self.values[(tags or {}).get("le")] = value


@pytest.fixture
def gauges(monkeypatch) -> dict[str, FakeGauge]:
    """All that were made, by name."""
    made: dict[str, FakeGauge] = {}

    def gauge(name: str, description: str, tag_keys: tuple[str, ...] = ()) -> FakeGauge:
        return made.setdefault(name, FakeGauge(tag_keys))

    monkeypatch.setattr(metrics.metrics, "Gauge", gauge)
    return made


def published(values: list[float]) -> None:
    """Into the gauges."""
    histogram = metrics.BusyHistogram("h", "Seconds", BOUNDARIES)
    for value in values:
        histogram.observe(value)
    histogram.publish()


def test_counts_are_cumulative_and_boundaries_belong_to_their_bucket(gauges):
    published([0.005, 0.01, 0.02, 0.1, 1, 7])
    assert gauges["h_bucket"].values == {"0.01": 2, "0.1": 4, "1.0": 5, "+Inf": 6}
    assert gauges["h_count"].values == {None: 6}
    assert gauges["h_sum"].values == {None: pytest.approx(8.135)}


def test_no_value_is_lost(gauges):
    rng = random.Random(1)
    values = [rng.expovariate(5) for _ in range(1000)]
    published(values)
    for le, count in gauges["h_bucket"].values.items():
        assert count == sum(value <= float(le) for value in values)


def test_a_histogram_without_values_is_there(gauges):
    published([])
    assert set(gauges["h_bucket"].values.values()) == {0}


def test_a_counter_is_told_every_count_once(monkeypatch):
    told: list[int] = []

    class FakeCounter:
        def __init__(self, name: str, description: str):
            self.inc = told.append

    monkeypatch.setattr(metrics.metrics, "Counter", FakeCounter)
    counter = metrics.BusyCounter("c", "Tokens")
    counter.publish()
    counter.inc(3)
    counter.inc(0)
    counter.inc(4)
    counter.publish()
    counter.publish()
    counter.inc(5)
    counter.publish()
    assert told == [7, 5]
