"""CPU time and latency of a streamed token, from the device's step to the client, in the whole system.

    python -m tests.perf data-plane [--streams 128 512] [--tokens 400]

The device takes 20 ms for every step and computes nothing (`paced_replica`), so each stream could get a token in each
step. Scheduler, frames, Ray, routers, HAProxy and the client share the machine and may delay it. One replica and two
routers serve streams of server-sent events and of gRPC, all sent at once.

CPU time comes from `/proc/PID/stat`, so it includes native code and the kernel. It is taken in the middle of the run,
when all streams have begun and none has ended, without the processes' idle use, and divided by the tokens that arrive
in that time. The result also has the CPU time of a gRPC server that only sends messages (`grpc_alone`). First tokens
are measured on lone requests to an idle system, sent at random times, so a timer on their way would show.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from quire.cluster.bench.load.workloads import FIRST_TOKEN_ID
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import percentile, percentiles_ms
from quire.cluster.bench.results.report import ROOT, Bar
from tests.perf.cluster.grpc_alone import grpc_alone
from tests.perf.cluster.live_cluster import LiveCluster, cpu_s, live_cluster
from tests.perf.cluster.paced_replica import STEP_S
from tests.perf.cluster.token_streams import GrpcStreams, SseStreams, TokenStream

MODEL = "paced"
VOCAB_SIZE = 1024
PROMPT_TOKENS = 16
NUM_BARRED = 128  # number of streams of the runs with bars
MOST_TOKENS = 128 * 400  # in one run; more streams get fewer tokens each
WINDOW = (0.25, 0.85)  # part of an ideal run in which CPU time is taken
NUM_LONE = 60  # requests that are sent one by one
WARM_UP = (8, 20)  # streams, tokens
GOALS = {"replica": 20.0, "router": 75.0}  # us of CPU per token


class Streams(Protocol):
    """Streams over one protocol."""

    async def read(self, prompt_ids: Sequence[int], num_tokens: int) -> TokenStream: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Window:
    """CPU time during a part of a run."""

    begin_s: float  # time.perf_counter
    end_s: float
    cpu_s: dict[str, float]  # by process group, in this time


@dataclass(frozen=True, slots=True)
class StreamRun:
    """Streams that were sent at once, each of `num_tokens` tokens."""

    num_tokens: int  # of each stream
    began_s: float  # time.perf_counter
    streams: list[TokenStream]
    window: Window

    @property
    def share_of_ideal(self) -> float:
        """Tokens per second from the first request to the last token, relative to one token per step and stream."""
        ended_s = max(stream.arrivals_s[-1] for stream in self.streams)
        return self.num_tokens * STEP_S / (ended_s - self.began_s)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive tokens of each stream."""
        return [gap for stream in self.streams for gap in stream.gaps_s]

    @property
    def num_in_window(self) -> int:
        """Tokens that arrived in the window."""
        begin_s, end_s = self.window.begin_s, self.window.end_s
        return sum(
            bisect.bisect(stream.arrivals_s, end_s) - bisect.bisect(stream.arrivals_s, begin_s)
            for stream in self.streams
        )

    def us_per_token(self, idle: Mapping[str, float]) -> dict[str, float]:
        """CPU time by process group; `idle` is each group's CPU time per idle second."""
        window, num_tokens = self.window, self.num_in_window
        if not num_tokens:
            raise RuntimeError(
                f"no token came in the middle of a run of {self.num_tokens} each: the machine is too busy"
            )
        lasted_s = window.end_s - window.begin_s
        return {
            who: 1e6 * (spent_s - idle[who] * lasted_s) / num_tokens
            for who, spent_s in window.cpu_s.items()
        }


class Meter:
    """CPU seconds by process group; this process is the client."""

    def __init__(self, pids: Mapping[str, Sequence[int]]):
        self._pids = pids

    @classmethod
    def of_cluster(cls, cluster: LiveCluster) -> Meter:
        """The routers and replicas of a cluster."""
        names = {"router": "Router", "replica": "Replica"}
        return cls({who: [*cluster.replicas("quire", n).values()] for who, n in names.items()})

    def read(self) -> dict[str, float]:
        """CPU seconds so far."""
        return {
            **{who: cpu_s(pids) for who, pids in self._pids.items()},
            "client": time.process_time(),
        }

    async def during(self, seconds: float) -> Window:
        """A window that starts now."""
        begin_s, before = time.perf_counter(), self.read()
        await asyncio.sleep(seconds)
        end_s, after = time.perf_counter(), self.read()
        return Window(begin_s, end_s, {who: after[who] - before[who] for who in before})


def prompt(rng: random.Random) -> list[int]:
    """A prompt that was not sent before."""
    return [rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]


async def run_streams(
    client: Streams, meter: Meter, num_streams: int, num_tokens: int, rng: random.Random
) -> StreamRun:
    """Send all streams at once and read them.

    Raises
    ------
    RuntimeError
        A stream has another number of tokens, or a piece held several tokens.
    """
    ideal_s = num_tokens * STEP_S
    begin, end = (part * ideal_s for part in WINDOW)
    began_s = time.perf_counter()
    reads = [
        asyncio.ensure_future(client.read(prompt(rng), num_tokens)) for _ in range(num_streams)
    ]
    await asyncio.sleep(began_s + begin - time.perf_counter())
    window = await meter.during(end - begin)
    streams = await asyncio.gather(*reads)
    for stream in streams:
        if not stream.num_tokens == len(stream.arrivals_s) == num_tokens:
            raise RuntimeError(
                f"a stream of {num_tokens} tokens has {stream.num_tokens}, in "
                f"{len(stream.arrivals_s)} pieces"
            )
    return StreamRun(num_tokens, began_s, streams, window)


async def lone_ttfts(client: Streams, rng: random.Random) -> list[float]:
    """Seconds to the first token of requests that are sent one by one."""
    found = []
    for _ in range(NUM_LONE):
        await asyncio.sleep(rng.uniform(0.02, 0.07))
        found.append((await client.read(prompt(rng), 1)).ttft_s)
    return found


async def measure(
    cluster: LiveCluster, streams: Sequence[int], num_tokens: int, idle_s: float
) -> dict[str, Any]:
    """Runs by protocol and number of streams, lone first tokens by protocol, CPU per idle second by group."""
    meter, rng = Meter.of_cluster(cluster), random.Random("data-plane")
    clients: dict[str, Streams] = {
        "sse": SseStreams(cluster.http_port, MODEL),
        "grpc": GrpcStreams(cluster.grpc_port, MODEL),
    }
    found: dict[str, Any] = {"runs": {}, "lone_s": {}}
    try:
        for client in clients.values():
            num, tokens = WARM_UP
            await asyncio.gather(*(client.read(prompt(rng), tokens) for _ in range(num)))
        await asyncio.sleep(2.0)  # the warm-up's remaining work
        idle = await meter.during(idle_s)
        found["idle"] = {who: s / idle_s for who, s in idle.cpu_s.items()}
        for protocol, client in clients.items():
            found["lone_s"][protocol] = await lone_ttfts(client, rng)
            for num_streams in streams:
                tokens = min(num_tokens, MOST_TOKENS // num_streams)
                gc.disable()  # a collection would delay every stream
                run = await run_streams(client, meter, num_streams, tokens, rng)
                gc.enable()
                found["runs"][protocol, num_streams] = run
                print_run(protocol, run, found["idle"])
    finally:
        for client in clients.values():
            await client.close()
    return found


async def measure_alone(num_streams: int, num_tokens: int) -> float:
    """CPU time in us per message of a server that only sends, with this number of streams."""
    rng, nothing = random.Random("alone"), {"server": 0.0, "client": 0.0}
    with grpc_alone(STEP_S) as (port, pid):
        client = GrpcStreams(port, MODEL)
        try:
            num, tokens = WARM_UP
            await asyncio.gather(*(client.read(prompt(rng), tokens) for _ in range(num)))
            run = await run_streams(client, Meter({"server": [pid]}), num_streams, num_tokens, rng)
        finally:
            await client.close()
    return run.us_per_token(nothing)["server"]


def print_run(protocol: str, run: StreamRun, idle: Mapping[str, float]) -> None:
    """One line of the printed table."""
    row = row_of(run, idle)
    costs = ", ".join(f"{who} {us:.1f}" for who, us in row["cpu_us_per_token"].items())
    print(
        f"{protocol:5}{row['streams']:>4} streams  {row['percent_of_ideal']:5.1f}% of ideal  "
        f"gap p50 {row['gap_ms']['p50']:g}, p99 {row['gap_ms']['p99']:g} ms  us per token: {costs}",
        flush=True,
    )


def row_of(run: StreamRun, idle: Mapping[str, float]) -> dict[str, Any]:
    """A run as JSON."""
    share = run.share_of_ideal
    return {
        "streams": len(run.streams),
        "tokens_each": run.num_tokens,
        "tokens_per_s": round(len(run.streams) / STEP_S * share),
        "percent_of_ideal": round(100 * share, 1),
        "ttft_ms": percentiles_ms([stream.ttft_s for stream in run.streams]),
        "gap_ms": percentiles_ms(run.gaps_s),
        "cpu_us_per_token": {who: round(us, 2) for who, us in run.us_per_token(idle).items()},
    }


def bars_of(found: Mapping[str, Any]) -> list[Bar]:
    """Bars of the runs with `NUM_BARRED` streams, and of lone requests."""
    bars = []
    for (protocol, num_streams), run in found["runs"].items():
        if num_streams != NUM_BARRED:
            continue
        name = f"router/data_plane_{protocol}_{num_streams}"
        bars.append(
            Bar(f"{name}_percent_of_ideal", 100 * run.share_of_ideal, "%", 90.0, at_most=False)
        )
        gap_s = percentile(run.gaps_s, 99)
        bars.append(Bar(f"{name}_inter_token_p99", gap_s / STEP_S, "steps", 2.0))
        costs = run.us_per_token(found["idle"])
        for who, goal in GOALS.items():
            details = {}
            if (protocol, who) == ("grpc", "router"):
                details = {"grpcio_alone_us": round(found["grpcio_alone_us"], 1)}
            bars.append(Bar(f"{name}_{who}_us_per_token", costs[who], "us", goal, details=details))
    for protocol, seconds in found["lone_s"].items():
        bars.append(
            Bar(
                f"router/data_plane_{protocol}_first_token_p99",
                percentile(seconds, 99) / STEP_S,
                "steps",
                2.0,
                details={
                    "ms": percentiles_ms(seconds),
                    "min_ms": round(1e3 * min(seconds), 2),
                    "requests": len(seconds),
                },
            )
        )
    return bars


def serve_config(max_streams: int) -> dict[str, Any]:
    """The repository's cluster.yaml with one paced replica that has rows for all streams."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    (application,) = config["applications"]
    application["import_path"] = "tests.perf.cluster.paced_replica:build"
    application["args"] = {
        "served_model_name": MODEL,
        "device": "cpu",
        "replicas": 1,
        "routers": 2,
        "engine": {
            "async_batching": "on",  # as on a GPU: the next step is planned while one runs
            "max_running_requests": max_streams,
            "max_prefill_ms": None,
            "num_blocks": 8192,
            "num_threads": 1,
        },
        # All streams are sent at once, and the replica has a row for each. No stream may wait at a router for the
        # next report, because that wait is not measured here.
        "router": {"max_replica_waiting_requests": max_streams, "max_wait_s": 3600.0},
    }
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[NUM_BARRED, 512])
    parser.add_argument("--tokens", type=int, default=400, help="of a stream, at most")
    parser.add_argument("--idle-s", type=float, default=8.0, help="seconds to watch idle processes")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "data_plane.json")
    options = parser.parse_args()
    with live_cluster(serve_config(max(options.streams))) as cluster:
        found = asyncio.run(measure(cluster, options.streams, options.tokens, options.idle_s))
    # With the same number of streams, after the cluster has ended, so that nothing else runs.
    found["grpcio_alone_us"] = asyncio.run(measure_alone(NUM_BARRED, options.tokens))
    print(f"grpcio alone: {found['grpcio_alone_us']:.1f} us per message", flush=True)
    idle = found["idle"]
    streams = " ".join(map(str, options.streams))
    report.write(
        options.out,
        f"python -m tests.perf data-plane --streams {streams} --tokens {options.tokens}",
        bars_of(found),
        step_ms=1e3 * STEP_S,
        idle_percent_of_core={who: round(100 * s, 2) for who, s in idle.items()},
        rows=[
            {"protocol": protocol, **row_of(run, idle)}
            for (protocol, _), run in found["runs"].items()
        ],
    )


if __name__ == "__main__":
    main()
