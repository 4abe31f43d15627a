"""PNG plots of benchmark results. They need matplotlib: `pip install 'quire[bench]'`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.bench.load.cache_watch import CacheSample
from quire.cluster.bench.results.measures import hit_rate_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from quire.cluster.bench.load.load_generator import Run

_SIZE = (7.0, 4.2)
_NOTHING_ANSWERED = "no request was answered"
_UNWATCHED = "the cache was not watched; give --watch HOST:PORT of Quire's gRPC"


class NoPlots(RuntimeError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """One frame of a figure."""

    name: str
    draw: Callable[[Axes], None]
    missing: str = ""  # why the panel cannot be drawn


def _figure(path: Path, panels: Sequence[_Panel]) -> list[str]:
    """Write the panels that have data, side by side, to `path`; write no file if none has data.

    Returns
    -------
    A sentence for each panel that is not drawn.

    Raises
    ------
    NoPlots
        matplotlib is not installed.
    """
    path.unlink(missing_ok=True)  # from an earlier run
    drawn = [panel for panel in panels if not panel.missing]
    if drawn:
        pyplot = _pyplot()
        figure, frames = pyplot.subplots(
            1, len(drawn), figsize=(_SIZE[0] * len(drawn), _SIZE[1]), squeeze=False
        )
        for axes, panel in zip(frames[0], drawn, strict=True):
            panel.draw(axes)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
    return [f"{path.name}: {p.name} not drawn: {p.missing}" for p in panels if p.missing]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise NoPlots("plots need matplotlib: pip install 'quire[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def throughput_and_latency(
    rows: Sequence[dict[str, Any]], path: Path, *, is_sweep: bool = True
) -> list[str]:
    """Plot throughput against latency with a point for each load, and percentiles of TTFT and gaps.

    Parameters
    ----------
    rows
        Rows of `measures.summarise` with `load`, the name of the load.
    is_sweep
        Whether the rows are one load at growing rates; lines then join their points.

    Returns
    -------
    A sentence for each panel that is not drawn.
    """
    style = "o-" if is_sweep else "o"
    none = "" if any(row["ttft_ms"] for row in rows) else _NOTHING_ANSWERED
    # A logarithmic axis cannot show zeros, and the gaps are zero if every answer came in one piece.
    has_gaps = any(row["gap_ms"] and row["gap_ms"]["p99"] > 0 for row in rows)
    no_gaps = none or ("" if has_gaps else "every answer came in one piece")
    rows = [row for row in rows if row["ttft_ms"]]
    return _figure(
        path,
        [
            _Panel("latency", lambda axes: _latency_curve(axes, rows, style), none),
            _Panel(
                "time to first token",
                lambda axes: _percentile_lines(axes, rows, "ttft_ms", style, "first token, ms"),
                none,
            ),
            _Panel(
                "time between pieces",
                lambda axes: _percentile_lines(
                    axes, rows, "gap_ms", style, "between two pieces, ms"
                ),
                no_gaps,
            ),
        ],
    )


def _latency_curve(axes: Axes, rows: Sequence[dict[str, Any]], style: str) -> None:
    x = [row["output_tokens_per_s"] for row in rows]
    for percent in ("p50", "p99"):
        axes.plot(x, [row["latency_ms"][percent] for row in rows], style, label=percent)
    for row in rows:
        axes.annotate(
            row["load"],
            (row["output_tokens_per_s"], row["latency_ms"]["p50"]),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=7,
        )
    _finish(axes, "output tokens per second", "latency, ms", log_y=True)


def _percentile_lines(
    axes: Axes, rows: Sequence[dict[str, Any]], key: str, style: str, y_label: str
) -> None:
    rows = [row for row in rows if row[key]]
    for percent in ("p50", "p90", "p99"):
        axes.plot(
            [row["load"] for row in rows],
            [row[key][percent] for row in rows],
            style,
            label=percent,
        )
    axes.tick_params(axis="x", rotation=30)
    _finish(axes, "load", y_label, log_y=True)


def goodput(rows: Sequence[dict[str, Any]], slo_text: str, path: Path) -> list[str]:
    """Plot requests per second: all answered requests, and those within the SLO."""

    def draw(axes: Axes) -> None:
        names = [row["load"] for row in rows]
        axes.plot(names, [row["requests_per_s"] for row in rows], "o--", label="answered")
        axes.plot(names, [row["goodput_requests_per_s"] for row in rows], "o-", label=slo_text)
        axes.tick_params(axis="x", rotation=30)
        axes.set_ylim(bottom=0)
        _finish(axes, "load", "requests per second")

    none = "" if any(row["ttft_ms"] for row in rows) else _NOTHING_ANSWERED
    return _figure(path, [_Panel("goodput", draw, none)])


def cache(samples: Sequence[CacheSample], run: Run, began_s: float, path: Path) -> list[str]:
    """Plot blocks in use, cached and free over time, and the hit rate of prompts.

    Parameters
    ----------
    began_s
        `time.perf_counter` at the start of the run.
    """
    points = hit_rate_over_time(run.records, max(run.duration_s / 40, 1e-3))

    def draw_occupancy(axes: Axes) -> None:
        axes.stackplot(
            [sample.at_s - began_s for sample in samples],
            [[s.in_use for s in samples], [s.cached for s in samples], [s.free for s in samples]],
            labels=["in use", "cached", "free"],
            colors=["#c44e52", "#dd8452", "#e8e8e8"],
        )
        _finish(axes, "seconds", "blocks")

    def draw_hits(axes: Axes) -> None:
        axes.plot([t for t, _ in points], [percent for _, percent in points], "o-", markersize=3)
        axes.set_ylim(0, 100)
        _finish(axes, "seconds", "prompt tokens found in the cache, %", legend=False)

    # An area needs two samples.
    unwatched = "" if len(samples) > 1 else _UNWATCHED
    return _figure(
        path,
        [
            _Panel("blocks over time", draw_occupancy, unwatched),
            _Panel("hit rate", draw_hits, "" if points else _NOTHING_ANSWERED),
        ],
    )


def comparison(rows: Sequence[dict[str, Any]], path: Path) -> list[str]:
    """Plot each engine's median seconds on each workload with minimum and maximum, and the floor."""
    none = "" if rows else "no engine ended a workload"
    return _figure(path, [_Panel("comparison", lambda axes: _bars(axes, rows), none)])


def _bars(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.8 / len(engines)
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
        floors = [row["floor_s"] for row in rows if row["workload"] == name and "floor_s" in row]
        if floors:
            axes.hlines(floors[0], i - 0.45, i + 0.45, colors="black", linestyles="dotted")
    axes.set_xticks(range(len(workloads)), workloads)
    _finish(axes, "dotted: the machine's floor", "seconds", log_y=True)


def scaling(series: Sequence[dict[str, Any]], path: Path) -> list[str]:
    """Plot milliseconds of a step against one quantity per panel.

    Parameters
    ----------
    series
        One `{"what": axis label, "points": [{"x", "median", "min", "p90"}], "log_x": bool}` for each panel.
    """
    return _figure(
        path,
        [
            _Panel(one["what"], partial(_scaling, one=one), "" if one["points"] else "no points")
            for one in series
        ],
    )


def _scaling(axes: Axes, one: dict[str, Any]) -> None:
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
