"""PNG plots of benchmark results. matplotlib is the extra `bench`: `pip install 'quire[bench]'`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.cache_watch import CacheSample
from quire.bench.measures import hit_rate_over_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

    from quire.bench.load import Run

_SIZE = (7.0, 4.2)


class NoPlots(RuntimeError):
    """matplotlib is not installed."""


@contextmanager
def _figure(path: Path, columns: int = 1) -> Iterator[Any]:
    """The axes of a figure that is written to `path`: one, or a list."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise NoPlots("plots need matplotlib: pip install 'quire[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(_SIZE[0] * columns, _SIZE[1]))
    yield axes
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def throughput_and_latency(
    rows: Sequence[dict[str, Any]], path: Path, *, is_sweep: bool = True
) -> None:
    """Throughput against latency, a point for each load, and percentiles of TTFT and gaps beside it.

    Parameters
    ----------
    rows
        Of `measures.summarise`, with `load`: the rate or the concurrency.
    is_sweep
        The rows are one load that grows: its points are joined by lines.
    """
    rows = [row for row in rows if row["ttft_ms"]]
    with _figure(path, 3) as (curve, first, gaps):
        x = [row["output_tokens_per_s"] for row in rows]
        for percent in ("p50", "p99"):
            y = [row["latency_ms"][percent] for row in rows]
            curve.plot(x, y, "o-" if is_sweep else "o", label=percent)
        for row in rows:
            curve.annotate(
                row["load"],
                (row["output_tokens_per_s"], row["latency_ms"]["p50"]),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize=7,
            )
        _finish(curve, "output tokens per second", "latency, ms", log_y=True)
        for axes, key, name in (
            (first, "ttft_ms", "first token"),
            (gaps, "gap_ms", "between two pieces"),
        ):
            _percentile_lines(axes, rows, key, "o-" if is_sweep else "o")
            _finish(axes, "load", f"{name}, ms", log_y=True)


def _percentile_lines(axes: Axes, rows: Sequence[dict[str, Any]], key: str, style: str) -> None:
    rows = [row for row in rows if row[key]]
    for percent in ("p50", "p90", "p99"):
        axes.plot(
            [row["load"] for row in rows],
            [row[key][percent] for row in rows],
            style,
            label=percent,
        )
    axes.tick_params(axis="x", rotation=30)


def goodput(rows: Sequence[dict[str, Any]], slo_text: str, path: Path) -> None:
    """Requests per second that were answered within the SLO, and all that were answered."""
    with _figure(path) as axes:
        names = [row["load"] for row in rows]
        axes.plot(names, [row["requests_per_s"] for row in rows], "o--", label="answered")
        axes.plot(names, [row["goodput_requests_per_s"] for row in rows], "o-", label=slo_text)
        axes.tick_params(axis="x", rotation=30)
        axes.set_ylim(bottom=0)
        _finish(axes, "load", "requests per second")


def cache(samples: Sequence[CacheSample], run: Run, began_s: float, path: Path) -> None:
    """Blocks in use, cached and free over time, and the hit rate of prompts below.

    Parameters
    ----------
    began_s
        `time.perf_counter` at the start of the run.
    """
    with _figure(path, 2) as (occupancy, hits):
        times = [sample.at_s - began_s for sample in samples]
        if samples:
            occupancy.stackplot(
                times,
                [
                    [s.in_use for s in samples],
                    [s.cached for s in samples],
                    [s.free for s in samples],
                ],
                labels=["in use", "cached", "free"],
                colors=["#c44e52", "#dd8452", "#e8e8e8"],
            )
        _finish(occupancy, "seconds", "blocks")
        window_s = max(run.duration_s / 40, 1e-3)
        points = hit_rate_over_time(run.records, window_s)
        hits.plot([t for t, _ in points], [percent for _, percent in points], "o-", markersize=3)
        hits.set_ylim(0, 100)
        _finish(hits, "seconds", "prompt tokens found in the cache, %", legend=False)


def comparison(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds of every engine on every workload with their extremes, and the floor."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.8 / len(engines)
    with _figure(path) as axes:
        for i, engine in enumerate(engines):
            own = {row["workload"]: row["seconds"] for row in rows if row["engine"] == engine}
            x = [workloads.index(name) + (i - (len(engines) - 1) / 2) * width for name in own]
            y = [seconds["median"] for seconds in own.values()]
            spread = [
                [s["median"] - s["min"] for s in own.values()],
                [s["max"] - s["median"] for s in own.values()],
            ]
            axes.bar(x, y, width, yerr=spread, label=engine, capsize=2)
        for i, name in enumerate(workloads):
            floors = [
                row["floor_s"] for row in rows if row["workload"] == name and "floor_s" in row
            ]
            if floors:
                axes.hlines(floors[0], i - 0.45, i + 0.45, colors="black", linestyles="dotted")
        axes.set_xticks(range(len(workloads)), workloads)
        _finish(axes, "dotted: the machine's floor", "seconds", log_y=True)


def scaling(series: Sequence[dict[str, Any]], path: Path) -> None:
    """Milliseconds of a step against one quantity at a time.

    Parameters
    ----------
    series
        `{"what": axis label, "points": [{"x", "median", "min", "p90"}], "log_x": bool}` each.
    """
    with _figure(path, len(series)) as all_axes:
        for axes, one in zip(all_axes if len(series) > 1 else [all_axes], series, strict=True):
            x = [point["x"] for point in one["points"]]
            axes.plot(x, [point["median"] for point in one["points"]], "o-", label="median")
            axes.fill_between(
                x,
                [point["min"] for point in one["points"]],
                [point["p90"] for point in one["points"]],
                alpha=0.2,
                label="min to p90",
            )
            axes.set_ylim(bottom=0)
            if one["log_x"]:
                axes.set_xscale("log")
            _finish(axes, one["what"], one["unit"])


def _finish(
    axes: Axes, x_label: str, y_label: str, *, log_y: bool = False, legend: bool = True
) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if log_y:
        axes.set_yscale("log")
    if legend:
        axes.legend(fontsize=8)
