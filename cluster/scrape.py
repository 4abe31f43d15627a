"""`GET /metrics`: the metrics of all routers and replicas, gathered by the router that receives the request.

```
 Prometheus ──GET /metrics──▶ proxy ──▶ some router ──┬─ own page
                                                      ├─ own_metrics ──▶ the other routers  (`Peers`)
                                                      └─ metrics_page ─▶ the replicas       (`Bus`)
```

A proxy sends a scrape to any one of the routers, so each router can answer for all. Each process writes its own samples
as text (its page), and the router that gathers them only joins the texts. A process that does not answer delays a
scrape by at most `TIMEOUT_S`, and `quire_scrape_silent_processes` counts it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from quire.protos.metric_families import GAUGE, Family, MetricSet, Page, join
from quire.protos.vllm_metrics import gauges_page

logger = logging.getLogger(__name__)
TIMEOUT_S = 2.0  # a fifth of the default `scrape_timeout` of Prometheus
# Scrapes within this time get the same answer, so each process is asked at most once a second.
MAX_AGE_S = 1.0
SCRAPE_FAMILIES = (
    Family(
        "quire_scrape_silent_processes",
        GAUGE,
        "Running processes of the deployment that did not report their metrics to this scrape in time.",
        ("deployment",),
    ),
    Family(
        "quire_scrape_seconds",
        GAUGE,
        "Seconds spent on gathering the metrics of all processes.",
    ),
)

# Pages by process id, and the number of processes that did not answer.
Answers = tuple[dict[str, Page], int]


class Scrape:
    """Gathers the metrics of the application.

    Parameters
    ----------
    labels
        Labels of the application.
    own_page
        Returns the id and the page of this router.
    sources
        For each deployment a function that asks its processes for their pages and returns within the given seconds.
    vllm_names
        Add the gauges of vLLM (`gauges_page`).
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        own_page: Callable[[], tuple[str, Page]],
        sources: Mapping[str, Callable[[float], Awaitable[Answers]]],
        *,
        vllm_names: bool = False,
    ):
        self._labels = dict(labels)
        self._own_page = own_page
        self._sources = dict(sources)
        self._vllm_names = vllm_names
        self._metrics = MetricSet(SCRAPE_FAMILIES)
        self._task: asyncio.Task[bytes] | None = None
        self._done_s = 0.0

    async def text(self) -> bytes:
        """Return the metrics as text, at most `MAX_AGE_S` old. Concurrent scrapes share one result."""
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._done_s > MAX_AGE_S):
            # In a new context: calls in the request's context would carry its id and be cancelled with it.
            task = asyncio.get_running_loop().create_task(
                self._gather(), context=contextvars.Context()
            )
            self._task = task
        return await asyncio.shield(task)

    async def _gather(self) -> bytes:
        began_s = time.monotonic()
        deployments = list(self._sources)
        answers = await asyncio.gather(
            *(self._sources[name](TIMEOUT_S) for name in deployments), return_exceptions=True
        )
        pages: dict[str, Page] = {}
        for name, answer in zip(deployments, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("no metrics of %s: %r", name, answer)
                answer = ({}, 1)
            found, num_silent = answer
            pages |= found
            self._metrics.value("quire_scrape_silent_processes", name).value = num_silent
        own_id, own_page = self._own_page()
        pages[own_id] = own_page
        added = gauges_page(pages.values(), self._labels) if self._vllm_names else {}
        self._done_s = time.monotonic()
        self._metrics.value("quire_scrape_seconds").value = self._done_s - began_s
        return join([*pages.values(), added, self._metrics.page(self._labels)])
