"""What TLS adds to a streamed token: the same streams through the plain ports and the TLS ports, in turns.

    python -m tests.perf tls-cost [--streams 64] [--tokens 150] [--rounds 5]

One cluster serves both; the device takes 20 ms for every step and computes nothing (`paced_replica`). Each round has
one run of each kind, in changing order. The cost of a kind is the CPU time of all processes of the server that a token
passes through, divided by the tokens; `data_plane` says how it is measured. The result is the median over the rounds
of TLS divided by plain.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import ssl
import statistics
import tempfile
from pathlib import Path
from typing import Any

from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import percentile
from quire.cluster.bench.results.report import Bar
from quire.cluster.local.ports import free_ports
from quire.cluster.local.process_session import session_pids
from tests.cluster.authority import Authority
from tests.perf.cluster.data_plane import (
    MODEL,
    WARM_UP,
    Meter,
    StreamRun,
    Streams,
    prompt,
    run_streams,
    serve_config,
)
from tests.perf.cluster.live_cluster import LiveCluster, live_cluster
from tests.perf.cluster.token_streams import GrpcStreams, SseStreams

KINDS = ("plain", "tls")
PROTOCOLS = ("sse", "grpc")
MOST_RATIO = 1.10


def meter_of(cluster: LiveCluster) -> Meter:
    """CPU time of routers, replicas, Ray's HAProxy and the TLS listener's."""
    pids = {
        who: [*cluster.replicas("quire", name).values()]
        for who, name in (("router", "Router"), ("replica", "Replica"))
    }
    pids |= {"haproxy": [], "tls_listener": []}
    for pid in session_pids(os.getsid(pids["router"][0])):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        if "haproxy\0-db" in command:
            pids["tls_listener" if "quire-tls" in command else "haproxy"].append(pid)
    if not (pids["haproxy"] and pids["tls_listener"]):
        raise RuntimeError(f"both proxies must run, got {pids}")
    return Meter(pids)


async def measure(
    cluster: LiveCluster, tls_ports: list[int], authority: Authority, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs by protocol and kind, and CPU per idle second by group of processes."""
    meter, rng = meter_of(cluster), random.Random("tls-cost")
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    clients: dict[tuple[str, str], Streams] = {
        ("sse", "plain"): SseStreams(cluster.http_port, MODEL),
        ("sse", "tls"): SseStreams(tls_ports[0], MODEL, context),
        ("grpc", "plain"): GrpcStreams(cluster.grpc_port, MODEL),
        ("grpc", "tls"): GrpcStreams(tls_ports[1], MODEL, authority.certificate),
    }
    runs: dict[tuple[str, str], list[StreamRun]] = {key: [] for key in clients}
    try:
        for client in clients.values():
            num, tokens = WARM_UP
            await asyncio.gather(*(client.read(prompt(rng), tokens) for _ in range(num)))
        await asyncio.sleep(2.0)  # the warm-up's remaining work
        window = await meter.during(options.idle_s)
        idle = {who: seconds / options.idle_s for who, seconds in window.cpu_s.items()}
        for index in range(options.rounds):
            for protocol in PROTOCOLS:
                for kind in KINDS if index % 2 else reversed(KINDS):
                    gc.disable()  # a collection would delay every stream
                    run = await run_streams(
                        clients[protocol, kind], meter, options.streams, options.tokens, rng
                    )
                    gc.enable()
                    runs[protocol, kind].append(run)
                    costs = {who: round(us, 1) for who, us in run.us_per_token(idle).items()}
                    print(protocol, kind, costs, flush=True)
    finally:
        for client in clients.values():
            await client.close()
    return {"runs": runs, "idle": idle}


def server_us(run: StreamRun, idle: dict[str, float]) -> float:
    """CPU time of the server per token."""
    return sum(us for who, us in run.us_per_token(idle).items() if who != "client")


def gap_ms(run: StreamRun) -> float:
    """Mean time between two tokens of a stream."""
    return 1e3 * statistics.fmean(run.gaps_s)


def bars_of(found: dict[str, Any]) -> list[Bar]:
    """For each protocol: CPU time and time per token, TLS relative to plain."""
    bars = []
    for protocol in PROTOCOLS:
        plain, tls = (found["runs"][protocol, kind] for kind in KINDS)
        by_name = {
            "cpu_per_token": (lambda run: server_us(run, found["idle"]), "us"),
            "time_per_token": (gap_ms, "ms"),
        }
        for name, (value, unit) in by_name.items():
            pairs = [(value(a), value(b)) for a, b in zip(plain, tls, strict=True)]
            ratios = [with_tls / without for without, with_tls in pairs]
            details = {
                f"plain_{unit}": round(statistics.median(a for a, _ in pairs), 2),
                f"tls_{unit}": round(statistics.median(b for _, b in pairs), 2),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
            ratio = statistics.median(ratios)
            bars.append(Bar(f"auth/tls_{protocol}_{name}", ratio, "x", MOST_RATIO, details=details))
    return bars


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians over the rounds."""
    rows = []
    for (protocol, kind), runs in found["runs"].items():
        costs = [run.us_per_token(found["idle"]) for run in runs]
        rows.append(
            {
                "protocol": protocol,
                "kind": kind,
                "cpu_us_per_token": {
                    who: round(statistics.median(cost[who] for cost in costs), 2)
                    for who in costs[0]
                },
                "gap_p99_ms": round(
                    statistics.median(1e3 * percentile(run.gaps_s, 99) for run in runs), 2
                ),
                "percent_of_ideal": round(
                    statistics.median(100 * run.share_of_ideal for run in runs), 1
                ),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=8.0, help="seconds to watch idle processes")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "tls_cost.json")
    options = parser.parse_args()
    config, authority, ports = serve_config(options.streams), Authority(), free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        certificate_file, key_file = authority.issue().write(Path(folder), "server")
        config["applications"][0]["args"]["tls"] = {
            "certificate_file": certificate_file,
            "key_file": key_file,
            "host": "127.0.0.1",
            "http_port": ports[0],
            "grpc_port": ports[1],
        }
        with live_cluster(config) as cluster:
            found = asyncio.run(measure(cluster, ports, authority, options))
    report.write(
        options.out,
        f"python -m tests.perf tls-cost --streams {options.streams} --tokens {options.tokens}"
        f" --rounds {options.rounds}",
        bars_of(found),
        rows=rows_of(found),
    )


if __name__ == "__main__":
    main()
