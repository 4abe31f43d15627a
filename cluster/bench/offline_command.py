"""Run `quire bench offline`: batches through an engine in this process, against the machine's floor."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from quire.cluster.bench.engines import step_times
from quire.cluster.bench.engines.checkpoints import SHAPES, build
from quire.cluster.bench.engines.floor import ModelShape, best_of, floor_of, measure_rates
from quire.cluster.bench.load.engine_client import EngineClient
from quire.cluster.bench.load.load_generator import Run, closed_loop
from quire.cluster.bench.load.workloads import TimedRequest, Workload, batches
from quire.cluster.bench.results import plots, report
from quire.cluster.bench.results.measures import Slo, summarise


async def run_batch(
    client: EngineClient, workload: Workload, repetition: int | str, show: bool
) -> tuple[Run, float]:
    """Run one batch, all requests at once. Returns its records and its start (`time.perf_counter`)."""
    from tqdm import tqdm

    requests = [
        TimedRequest(0.0, tuple(prompt), workload.output_tokens)
        for prompt in workload.prompts(repetition, client.config.vocab_size)
    ]
    client.samples.clear()
    began_s = time.perf_counter()
    with tqdm(total=len(requests), unit="request", desc=workload.name, disable=not show) as bar:
        run = await closed_loop(client, requests, len(requests), lambda record: bar.update())
    return run, began_s


async def measure(
    options: argparse.Namespace, workloads: list[Workload], engine: dict[str, Any]
) -> dict[str, Any]:
    """Run every workload `options.repetitions` times and collect what the report needs."""
    show = sys.stderr.isatty() and not options.quiet
    client = EngineClient(**engine)
    slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
    rates = [measure_rates(client.config.dtype)]
    rows, last = [], {}
    try:
        await run_batch(client, Workload("warm-up", 8, 0, 128, 4), 0, False)
        for workload in workloads:
            runs = []
            before = client.telemetry()
            drafted, accepted = client.num_drafted, client.num_accepted
            for repetition in range(options.repetitions):
                run, began_s = await run_batch(client, workload, repetition, show)
                runs.append(run)
                last[workload.name] = (run, list(client.samples), began_s)
            # Report the repetition with the median duration.
            runs.sort(key=lambda run: run.duration_s)
            row = summarise(runs[(len(runs) - 1) // 2], slo)
            seconds = [run.duration_s for run in runs]
            rows.append(
                {"workload": workload.name, "load": workload.name, "seconds": seconds}
                | row
                | {"steps": step_times.since(before, client.telemetry())}
                | {"drafted_tokens": client.num_drafted - drafted}
                | {"accepted_tokens": client.num_accepted - accepted}
            )
        rates.append(measure_rates(client.config.dtype))
    finally:
        await client.close()
    return {
        "rows": rows,
        "last": last,
        "rates": best_of(rates),
        "startup_s": {name: round(s, 2) for name, s in client.startup_s.items()},
        "shape": shape_of(client.checkpoint, client.config.dtype),
        "num_threads": client.config.num_threads,
        "dtype": client.config.dtype,
    }


def shape_of(checkpoint: Path, dtype: str) -> ModelShape | None:
    """The model's shape for the floor; None if the floor does not cover this model."""
    try:
        return ModelShape.of_checkpoint(checkpoint, dtype)
    except (ValueError, KeyError):
        return None


def add_floors(
    found: dict[str, Any], workloads: list[Workload], rows: list[dict[str, Any]]
) -> None:
    """Add the floor in seconds and the percentage of it that each row reached."""
    for workload, row in zip(workloads, rows, strict=True):
        seconds = row["seconds"]
        row["seconds"] = {
            "median": round(statistics.median(seconds), 4),
            "min": round(min(seconds), 4),
            "max": round(max(seconds), 4),
            "turns": len(seconds),
        }
        if found["shape"] is not None:
            floor = floor_of(workload, found["shape"], found["rates"])
            row["floor_s"] = round(floor.total_s, 4)
            row["percent_of_floor"] = round(100 * floor.total_s / row["seconds"]["median"], 1)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per workload, then where the time of its steps went."""
    print(
        f"{'workload':16}{'s':>9}{'tokens/s':>10}{'of floor':>10}{'TTFT p50':>11}{'p99 ms':>9}"
        f"{'gap p50':>10}{'p99 ms':>9}{'cached':>8}"
    )
    for row in rows:
        first, gap = row["ttft_ms"], row["gap_ms"] or {"p50": 0.0, "p99": 0.0}
        percent = f"{row['percent_of_floor']:.0f}%" if "percent_of_floor" in row else "-"
        print(
            f"{row['workload']:16}{row['seconds']['median']:>9.3f}{row['output_tokens_per_s']:>10.1f}"
            f"{percent:>10}{first['p50']:>11.1f}{first['p99']:>9.1f}{gap['p50']:>10.1f}{gap['p99']:>9.1f}"
            f"{row['hit_percent']:>7.0f}%"
        )
    for row in rows:
        print(f"\nsteps of {row['workload']}, all turns:")
        print(*(f"  {line}" for line in step_times.lines(row["steps"])), sep="\n")
        if row["drafted_tokens"]:
            print(f"  drafted tokens {row['drafted_tokens']}, accepted {row['accepted_tokens']}")


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    workloads = list(batches(options.workloads))
    model = options.model
    if model in SHAPES and not Path(model).is_dir():
        model = str(build(model, Path(options.checkpoints) / model))
    engine: dict[str, Any] = {"model": model, "dtype": options.dtype, **options.engine_options}
    engine.setdefault("num_threads", options.threads)
    if options.model != "embedded":
        engine.setdefault("max_model_len", max(2048, *(w.max_tokens for w in workloads)))
    found = asyncio.run(measure(options, workloads, engine))
    rows = found["rows"]
    add_floors(found, workloads, rows)
    print_table(rows)
    rates = found["rates"].to_json()
    print(f"floor: {rates['memory_gb_per_s']:g} GB/s, {rates['gflop_per_s']:g} GFLOP/s")
    out: Path = options.out
    settings = {key: value for key, value in engine.items() if key != "model"}
    report.write(
        out / "offline.json",
        f"quire bench offline {Path(options.model).name} --workloads {' '.join(options.workloads)}",
        [],
        model=Path(options.model).name,
        settings=settings | {"dtype": found["dtype"], "num_threads": found["num_threads"]},
        rates=rates,
        startup_s=found["startup_s"],
        rows=rows,
    )
    left_out: list[str] = []
    if not options.no_plots:
        for name, (run, samples, began_s) in found["last"].items():
            path = out / f"offline_{_file_name(name)}_cache.png"
            left_out += plots.cache(samples, run, began_s, path)
        left_out += plots.throughput_and_latency(rows, out / "offline_latency.png", is_sweep=False)
    for sentence in left_out:
        print(sentence)
    print(f"written to {out}")
    return 0


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)
