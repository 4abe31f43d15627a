"""Copies of counters and gauges in Ray's own metrics, for deployments that scrape Ray's agents.

`GET /metrics` serves all metrics. Histograms are not copied to Ray: its histograms accept only single values, 10 us
each, so a complete histogram could only be copied as gauges. The names are the same, with Ray's prefix `ray_`.
"""

from __future__ import annotations

import asyncio

from ray.serve import metrics

from quire.protos.metric_families import COUNTER, GAUGE, MetricSet

_PERIOD_S = 1.0


class RayMetrics:
    """Copies the counters and gauges of a `MetricSet` to Ray once a second.

    Ray adds the labels application, deployment and replica. Create it in the event loop that changes the values.
    """

    def __init__(self, source: MetricSet) -> None:
        self._source = source
        self._counters: dict[str, metrics.Counter] = {}
        self._gauges: dict[str, metrics.Gauge] = {}
        for family in source.families.values():
            options = {"description": family.help, "tag_keys": family.labels}
            if family.kind == COUNTER:
                # Ray's exporter appends `_total`.
                name = family.name.removesuffix("_total")
                self._counters[family.name] = metrics.Counter(name, **options)
            elif family.kind == GAUGE:
                self._gauges[family.name] = metrics.Gauge(family.name, **options)
        self._copied: dict[tuple[str, tuple[str, ...]], float] = {}
        self._timer = asyncio.create_task(self._run())

    def copy(self) -> None:
        """Update Ray's metrics to the current values."""
        for family, labels, value in self._source.scalars():
            tags = dict(zip(family.labels, labels, strict=True))
            if family.kind != COUNTER:
                self._gauges[family.name].set(value, tags=tags)
                continue
            added = value - self._copied.get((family.name, labels), 0)
            if added:
                self._counters[family.name].inc(added, tags=tags)
                self._copied[family.name, labels] = value

    async def _run(self) -> None:
        while True:
            self.copy()
            await asyncio.sleep(_PERIOD_S)
