"""Metric families: their declarations, their values in one process, and the text that Prometheus scrapes.

```
 Family (name, kind, help)  ──▶  MetricSet of a router  ──page()──┐
                            ──▶  MetricSet of a replica ──page()──┴──▶ join() ──▶ the body of GET /metrics
```

Values are plain integers and floats that one thread changes. The counters and histograms of prometheus_client take a
lock for each value, which is too slow per token. So the library only writes the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
_TOTAL = "_total"
# The words that name a unit.
_UNITS = frozenset(
    ("seconds", "tokens", "blocks", "bytes", "ratio", "requests", "calls", "replicas", "processes")
)

# The metrics of one process: family name to (HELP and TYPE lines, sample lines).
Page = dict[str, tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Family:
    """The declaration of a metric.

    Attributes
    ----------
    name
        The exposed name, with `_total` for a counter.
    help
        Description in one sentence.
    labels
        Names of labels in addition to those that identify the process.
    values
        All values of the family's only label, if they are known: each series then exists from the start.
    boundaries
        Upper bounds of a histogram's buckets, ascending, without infinity.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """The last unit in the name; 1 if the value is a plain number."""
        words = self.name.split("_")
        return next((word for word in reversed(words) if word in _UNITS), "1")


BUILD_INFO = Family(
    "quire_build_info", GAUGE, "The version of Quire that the process runs; always 1.", ("version",)
)
CPU_SECONDS = Family(
    "quire_process_cpu_seconds_total",
    COUNTER,
    "Processor time of the process, of all its threads.",
)


@dataclass(slots=True)
class Value:
    """A counter or a gauge."""

    value: float = 0


class Histogram:
    """Counts of values by bucket, and their sum.

    Parameters
    ----------
    boundaries
        Upper bounds of the buckets, ascending and inclusive.
    """

    __slots__ = ("boundaries", "counts", "sum")

    def __init__(self, boundaries: Sequence[float]):
        self.boundaries = tuple(boundaries)
        self.counts = [0] * (len(self.boundaries) + 1)  # the last bucket is above all boundaries
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.boundaries, value)] += 1
        self.sum += value


class MetricSet:
    """The values of some families in one process.

    Parameters
    ----------
    read
        Returns the current values, by name, of families without labels that are stored elsewhere. Called for each
        scrape.
    """

    def __init__(
        self,
        families: Sequence[Family],
        read: Callable[[], Mapping[str, float]] = dict,
    ):
        self.families = {family.name: family for family in families}
        self._read = read
        self._series: dict[str, dict[tuple[str, ...], Value | Histogram]] = {}
        for family in families:
            series = self._series[family.name] = {}
            if family.kind == HISTOGRAM:
                series[()] = Histogram(family.boundaries)
            elif not family.labels:
                series[()] = Value()
            for value in family.values:
                series[(value,)] = Value()

    def value(self, name: str, *labels: str) -> Value:
        """Return the counter or gauge with these label values. The caller changes it in place."""
        series = self._series[name]
        found = series.get(labels)
        if found is None:
            family = self.families[name]
            if len(labels) != len(family.labels) or family.values:
                raise ValueError(f"{name}: no series with the labels {labels}")
            found = series[labels] = Value()
        assert isinstance(found, Value)
        return found

    def forget(self, name: str, *labels: str) -> None:
        """Drop the series with these label values."""
        del self._series[name][labels]

    def series(self, name: str) -> Mapping[tuple[str, ...], Value | Histogram]:
        """Return the series of a family by their label values."""
        return self._series[name]

    def histogram(self, name: str) -> Histogram:
        """Return the family's only histogram."""
        found = self._series[name][()]
        assert isinstance(found, Histogram)
        return found

    def adopt(self, name: str, histogram: Histogram) -> None:
        """Expose a histogram that another object owns."""
        assert histogram.boundaries == self.families[name].boundaries
        self._series[name][()] = histogram

    def scalars(self) -> Iterable[tuple[Family, tuple[str, ...], float]]:
        """Yield the family, label values and present value of each counter and gauge."""
        self._refresh()
        for name, series in self._series.items():
            for labels, found in series.items():
                if isinstance(found, Value):
                    yield self.families[name], labels, found.value

    def page(self, labels: Mapping[str, str]) -> Page:
        """Return the text of all families.

        Parameters
        ----------
        labels
            Labels that identify the process; they come before each sample's own labels.
        """
        self._refresh()
        return {
            name: family_text(family, self._series[name], labels)
            for name, family in self.families.items()
        }

    def _refresh(self) -> None:
        for name, value in self._read().items():
            self.value(name).value = value


def family_text(
    family: Family, series: Mapping[tuple[str, ...], Value | Histogram], labels: Mapping[str, str]
) -> tuple[bytes, bytes]:
    """Return the HELP and TYPE lines of a family, and the lines of its samples.

    Parameters
    ----------
    series
        Values and histograms by the values of the family's labels.
    labels
        Labels that come before the family's own.
    """
    # Imported here, so that an engine without a server does not need prometheus_client.
    from prometheus_client.core import Metric

    metric = Metric(family.name.removesuffix(_TOTAL), family.help, family.kind)
    for label_values, found in series.items():
        of_series = {**labels, **dict(zip(family.labels, label_values, strict=True))}
        if isinstance(found, Value):
            metric.add_sample(family.name, of_series, found.value)
        else:
            _add_histogram(metric, of_series, found)
    return _split(metric)


def _add_histogram(metric: Metric, labels: dict[str, str], histogram: Histogram) -> None:
    counts, total = histogram.counts.copy(), 0
    for boundary, count in zip((*histogram.boundaries, "+Inf"), counts, strict=True):
        total += count
        le = boundary if isinstance(boundary, str) else f"{boundary:.12g}"
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": le}, total)
    metric.add_sample(f"{metric.name}_count", labels, total)
    metric.add_sample(f"{metric.name}_sum", labels, histogram.sum)


class _One:
    """A registry with one metric, for `generate_latest`."""

    def __init__(self, metric: Metric):
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _split(metric: Metric) -> tuple[bytes, bytes]:
    """Split a metric's text into its HELP and TYPE lines and its samples."""
    from prometheus_client import generate_latest

    help_line, type_line, samples = generate_latest(_One(metric)).split(b"\n", 2)
    return b"%b\n%b\n" % (help_line, type_line), samples


def join(pages: Iterable[Page]) -> bytes:
    """Join the pages of several processes. Each family appears once, with the samples of all processes."""
    heads: dict[str, bytes] = {}
    bodies: dict[str, list[bytes]] = {}
    for page in pages:
        for name, (head, body) in page.items():
            heads.setdefault(name, head)
            bodies.setdefault(name, []).append(body)
    return b"".join(heads[name] + b"".join(bodies[name]) for name in sorted(heads))
