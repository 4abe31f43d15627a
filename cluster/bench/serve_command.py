"""Run `quire bench serve`: send load to a running server, over OpenAI's API or Quire's gRPC."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cluster.bench.engines.floor import ModelShape, Rates, measure_rates
from quire.cluster.bench.load.agent_sessions import AgentShape, agents
from quire.cluster.bench.load.cache_watch import CacheSample, watching
from quire.cluster.bench.load.clients import Client, connect, served_model
from quire.cluster.bench.load.load_generator import (
    Progress,
    Run,
    closed_loop,
    open_loop,
    session_loop,
)
from quire.cluster.bench.load.workloads import (
    Lengths,
    PrefixMix,
    TimedRequest,
    closed,
    poisson,
    read_trace,
    sessions,
)
from quire.cluster.bench.results import plots, report
from quire.cluster.bench.results.measures import Slo, max_in_flight, summarise

_SETTINGS = (
    "model prompt_tokens output_tokens prefixes prefix_tokens rate concurrency duration_s requests_per_user "
    "sessions turns session_rate think_s agents token_scale time_scale speed seed"
).split()


# Where the key of a server may be. Other tools read the second one too.
_KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a sweep; `name` appears in tables and plots."""

    name: str
    num_requests: int
    start: Callable[[Client, Progress], Awaitable[Run]]


def loads(options: argparse.Namespace) -> Iterator[Load]:
    """Yield the loads that the options ask for: trace, then sessions, agents, rates and concurrencies.

    Raises
    ------
    ValueError
        An option is out of its bounds, or no load is given.
    """
    lengths = Lengths(options.prompt_tokens, options.output_tokens)
    mix = PrefixMix(options.prefixes, options.prefix_tokens)
    vocab, seed, nothing = options.vocab_size, options.seed, True
    if options.trace is not None:
        requests = read_trace(options.trace, vocab, speed=options.speed, limit=options.limit)
        yield _open(f"trace x{options.speed:g}", requests)
        nothing = False
    if options.sessions:
        talks = sessions(
            options.sessions,
            options.turns,
            options.session_rate,
            options.think_s,
            lengths,
            mix,
            vocab,
            seed,
        )
        name = f"{options.sessions} sessions"
        count = options.sessions * options.turns
        yield Load(name, count, lambda client, told: session_loop(client, talks, told))
        nothing = False
    if options.agents:
        yield _agents(options)
        nothing = False
    for i, rate in enumerate(options.rate):
        requests = poisson(rate, options.duration_s, lengths, mix, vocab, seed + i)
        yield _open(f"{rate:g}/s", requests)
        nothing = False
    for i, users in enumerate(options.concurrency):
        count = max(users, round(users * options.requests_per_user))
        requests = closed(count, lengths, mix, vocab, seed + 1000 + i)
        yield _closed(f"{users} users", requests, users)
        nothing = False
    if nothing:
        raise ValueError("load: give --rate, --concurrency, --trace, --sessions or --agents")


def _agents(options: argparse.Namespace) -> Load:
    shape = AgentShape(token_scale=options.token_scale, time_scale=options.time_scale)
    duration_s = options.duration_s
    turns = agents(options.agents, duration_s, shape, options.vocab_size, options.seed)
    return Load(
        f"{options.agents} agents",
        sum(map(len, turns)),
        lambda client, told: session_loop(client, turns, told, duration_s),
    )


def _open(name: str, requests: list[TimedRequest]) -> Load:
    return Load(name, len(requests), lambda client, told: open_loop(client, requests, told))


def _closed(name: str, requests: list[TimedRequest], users: int) -> Load:
    return Load(
        name, len(requests), lambda client, told: closed_loop(client, requests, users, told)
    )


def headers_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the headers with the key, for HTTP and gRPC; empty without a key.

    Raises
    ------
    ValueError
        The key cannot be in a header. The message does not contain it.
    """
    found = [options.api_key, *map(os.environ.get, _KEY_VARIABLES)]
    key = next((one for one in found if one), None)
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ValueError("api-key: must be printable ASCII, got other characters")
    return {"authorization": f"Bearer {key}"}


async def measure(
    options: argparse.Namespace, chosen: list[Load]
) -> list[tuple[Load, Run, list[CacheSample], float]]:
    """Run the loads one after the other."""
    show = sys.stderr.isatty() and not options.quiet
    extra = dict(options.extra)
    if (options.sessions or options.agents) and not options.url.startswith("grpc"):
        extra.setdefault("return_token_ids", True)
    headers = headers_of(options)
    client = connect(options.url, options.model, extra, headers)
    watched = options.watch
    if watched is None and options.url.startswith("grpc://"):
        watched = options.url.removeprefix("grpc://")
    found = []
    try:
        for load in chosen:
            async with watching(watched, headers) as samples:
                began_s = time.perf_counter()
                run = await _run(load, client, show)
            found.append((load, run, samples, began_s))
    finally:
        await client.close()
    return found


async def _run(load: Load, client: Client, show: bool) -> Run:
    """Run one load, with a progress bar if `show`."""
    from tqdm import tqdm

    with tqdm(total=load.num_requests, unit="request", desc=load.name, disable=not show) as bar:
        return await load.start(client, lambda record: bar.update())


def floor_s(run: Run, shape: ModelShape, rates: Rates) -> float:
    """Least seconds of work for the answered requests at the machine's best rates.

    Prompt tokens that the cache did not have are computed at the GEMM rate. The number of decode steps is the least
    that the largest number of requests in flight allows; each step reads all weights and every request's keys and
    values.
    """
    answered = [record for record in run.records if not record.error]
    if not answered:
        return 0.0
    flop_per_s, byte_per_s = rates.gflop_per_s * 1e9, rates.memory_gb_per_s * 1e9
    flops = kv_bytes = decode_tokens = 0.0
    for record in answered:
        new = record.prompt_tokens - record.cached_tokens
        flops += 2 * shape.layer_parameters * new + 2 * shape.head_parameters
        flops += shape.attention_flops(new * record.cached_tokens + new**2 / 2)
        rest = record.num_tokens - 1
        decode_tokens += rest
        kv_bytes += shape.kv_bytes_per_token * rest * (record.prompt_tokens + rest / 2)
    steps = decode_tokens / max(1, max_in_flight(answered))
    decode_flops = 2 * decode_tokens * (shape.layer_parameters + shape.head_parameters)
    decode_bytes = steps * shape.weight_bytes + kv_bytes
    return flops / flop_per_s + max(decode_flops / flop_per_s, decode_bytes / byte_per_s)


def print_table(rows: list[dict[str, Any]], slo: Slo) -> None:
    """Print one line per load."""
    print(
        f"{'load':14}{'answered':>9}{'failed':>7}{'tok/s':>8}{'of floor':>9}"
        f"{'TTFT p50':>10}{'p99':>9}{'gap p50':>9}{'p99':>9}{'good':>7}{'cached':>8}{'sent late p99':>15}"
    )
    for row in rows:
        first = row["ttft_ms"] or {"p50": float("nan"), "p99": float("nan")}
        gap = row["gap_ms"] or {"p50": float("nan"), "p99": float("nan")}
        percent = f"{row['percent_of_floor']:.0f}%" if "percent_of_floor" in row else "-"
        print(
            f"{row['load']:14}{row['num_requests'] - row['num_failed']:>9}{row['num_failed']:>7}"
            f"{row['output_tokens_per_s']:>8.1f}{percent:>9}{first['p50']:>10.1f}{first['p99']:>9.1f}"
            f"{gap['p50']:>9.1f}{gap['p99']:>9.1f}{row['good_percent']:>6.0f}%{row['hit_percent']:>7.0f}%"
            f"{row['sent_late_ms']['p99']:>12.1f} ms"
        )
        if row["num_failed"]:
            print(f"  first failure: {row['first_error']}")
    print(
        f"times in ms; good: first token <= {slo.ttft_ms:g} ms and <= {slo.tpot_ms:g} ms per token"
    )


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 1 if any request failed."""
    slo = Slo(options.slo_ttft_ms, options.slo_tpot_ms)
    chosen = list(loads(options))
    if not options.model and not options.url.startswith("grpc://"):
        options.model = served_model(options.url, headers_of(options))
        print(f"model: {options.model}")
    found = asyncio.run(measure(options, chosen))
    shape = rates = None
    if options.checkpoint is not None:
        shape = ModelShape.of_checkpoint(options.checkpoint, options.dtype)
        rates = measure_rates(options.dtype)  # the server is idle now
    rows = []
    for load, run, _, _ in found:
        row = {"load": load.name, **summarise(run, slo)}
        row["max_in_flight"] = max_in_flight(run.records)
        if shape is not None and rates is not None and run.duration_s:
            row["floor_s"] = round(floor_s(run, shape, rates), 4)
            row["percent_of_floor"] = round(100 * row["floor_s"] / run.duration_s, 1)
        rows.append(row)
    print_table(rows, slo)
    out: Path = options.out
    left_out = [] if options.no_plots else _draw(rows, found, slo, out)
    for sentence in left_out:
        print(sentence)
    settings = {name: getattr(options, name) for name in _SETTINGS}
    report.write(
        out / "serve.json",
        "quire bench serve",
        [],
        settings=settings,
        slo={"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        rates=None if rates is None else rates.to_json(),
        rows=rows,
        plots_left_out=left_out,
    )
    print(f"written to {out}")
    return 1 if any(row["num_failed"] for row in rows) else 0


def _draw(
    rows: list[dict[str, Any]],
    found: list[tuple[Load, Run, list[CacheSample], float]],
    slo: Slo,
    out: Path,
) -> list[str]:
    """Write the plots. Returns a sentence for each plot without data."""
    text = f"first token <= {slo.ttft_ms:g} ms, <= {slo.tpot_ms:g} ms per token"
    left_out = plots.throughput_and_latency(rows, out / "serve_latency.png")
    left_out += plots.goodput(rows, text, out / "serve_goodput.png")
    for i, (_, run, samples, began_s) in enumerate(found):
        left_out += plots.cache(samples, run, began_s, out / f"serve_{i}_cache.png")
    return left_out
