"""What TLS adds to a streamed token: the same streams through Ray's HAProxy and through the TLS listener, in turns.

    python -m tests.perf tls-cost [--streams 32] [--tokens 400] [--rounds 5]

A process serves a router's front ends for HTTP and gRPC; every 20 ms each stream gets a token. Two proxies are in front
of it: HAProxy with the configuration that Ray renders, and the TLS listener. Each round has one run of each kind, in
changing order. The cost is the CPU time of the front ends and of the proxy, divided by the tokens. A whole router and
its replica take more for a token (`data_plane`), so TLS is a smaller part of theirs. The result is the median over the
rounds of TLS divided by plain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import random
import re
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import percentile
from quire.cluster.bench.results.report import ROOT, Bar
from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.local.ports import free_ports
from quire.cluster.proxies.ray_settings import SERVE_DEFAULTS
from quire.cluster.tls.certificates import read_certificates
from quire.cluster.tls.listener_process import ListenerProcess, RouterAddress
from quire.router.status_types import ModelInfo
from quire.router.types import GenerationRequest
from tests.cluster.authority import Authority
from tests.perf.cluster.data_plane import VOCAB_SIZE, Meter, StreamRun, Streams, run_streams
from tests.perf.cluster.paced_replica import STEP_S
from tests.perf.cluster.token_streams import GrpcStreams, SseStreams

PROXIES = {"plain": "haproxy", "tls": "tls_listener"}
KINDS = tuple(PROXIES)
PROTOCOLS = ("sse", "grpc")
MOST_RATIO = 1.10
MODEL = "acme/tiny"
WARM_UP_TOKENS = 20


async def serve_front_ends() -> None:
    """Serve both front ends until the process ends; prints their ports."""
    from tests.cluster.conftest import FakeService  # makes `live_router` importable

    class PacedService(FakeService):
        """Gives all streams their tokens at the same time, as a replica's steps do."""

        def model_info(self) -> ModelInfo:
            return dataclasses.replace(super().model_info(), vocab_size=VOCAB_SIZE)

        async def generate(self, request: GenerationRequest) -> Any:
            # The true vocabulary is small.
            return await super().generate(dataclasses.replace(request, prompt="once"))

        @property
        def token_s(self) -> float:
            return STEP_S - time.monotonic() % STEP_S

        @token_s.setter
        def token_s(self, value: float) -> None:
            pass

    from live_router import router

    async with router(PacedService(), []) as address:
        print(address.http_port, address.grpc_port, flush=True)
        await asyncio.Event().wait()


@dataclasses.dataclass(frozen=True, slots=True)
class Servers:
    """Ports by kind, for HTTP and gRPC, and a meter of the processes."""

    ports: dict[str, list[int]]
    authority: Authority
    meter: Meter


@contextlib.asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[Servers]:
    """Front ends, HAProxy as Ray configures it, and the TLS listener."""
    command = [sys.executable, "-m", "tests.perf.cluster.tls_cost", "serve"]
    ports, authority = free_ports(6), Authority()
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)) as front:
        http_port, grpc_port = map(int, front.stdout.readline().split())
        binary, config = rendered(folder, ports[:4], http_port, grpc_port)
        certificate_file, key_file = authority.issue().write(folder, "server")
        args = TlsArgs(
            certificate_file=certificate_file,
            key_file=key_file,
            host="127.0.0.1",
            http_port=ports[4],
            grpc_port=ports[5],
        )
        log = (folder / "haproxy.log").open("wb")
        with log, ended(subprocess.Popen([binary, "-db", "-f", config], stderr=log)) as haproxy:
            listener = ListenerProcess(folder / "listener", binary, SERVE_DEFAULTS)
            await listener.start(args, read_certificates(args))
            await listener.set_routers([RouterAddress("127.0.0.1", http_port, grpc_port)])
            await asyncio.sleep(3.0)  # health checks pass
            meter = Meter(
                {
                    "front_ends": [front.pid],
                    "haproxy": [haproxy.pid],
                    "tls_listener": [listener.pid],
                }
            )
            try:
                by_kind = {"plain": ports[:2], "tls": ports[4:]}
                yield Servers(by_kind, authority, meter)
            finally:
                await listener.kill()


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """End the process after the block."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def rendered(folder: Path, ports: list[int], http_port: int, grpc_port: int) -> tuple[str, str]:
    """HAProxy's binary, and the path of its configuration as Ray renders it."""
    path = str(folder / "haproxy.cfg")
    asked = {
        "path": path,
        "host": "127.0.0.1",
        "ports": ports,
        "http_servers": [http_port],
        "grpc_servers": [grpc_port],
    }
    options = yaml.safe_load((ROOT / "cluster.yaml").read_text())["controller_options"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/cluster/render_haproxy.py")],
        input=json.dumps([asked]),
        text=True,
        env=os.environ | options["runtime_env"]["env_vars"],
        capture_output=True,
        check=True,
    )
    # Ray answers HAProxy's health check of gRPC, and these front ends are without Ray.
    text = Path(path).read_text()
    before, name, grpc_backend = text.partition("backend grpc-quire")
    grpc_backend = re.sub(r" check( observe .*)?$", "", grpc_backend, flags=re.MULTILINE)
    Path(path).write_text(before + name + grpc_backend)
    return result.stdout.strip(), path


async def measure(options: argparse.Namespace) -> dict[tuple[str, str], list[StreamRun]]:
    """Runs by protocol and kind."""
    rng = random.Random("tls-cost")
    runs: dict[tuple[str, str], list[StreamRun]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with servers(Path(folder)) as found:
            context = ssl.create_default_context(cadata=found.authority.certificate.decode())
            plain, tls = found.ports["plain"], found.ports["tls"]
            clients: dict[tuple[str, str], Streams] = {
                ("sse", "plain"): SseStreams(plain[0], MODEL),
                ("sse", "tls"): SseStreams(tls[0], MODEL, context),
                ("grpc", "plain"): GrpcStreams(plain[1], MODEL),
                ("grpc", "tls"): GrpcStreams(tls[1], MODEL, found.authority.certificate),
            }
            for client in clients.values():
                await asyncio.gather(*(client.read([1, 2, 3], WARM_UP_TOKENS) for _ in range(8)))
            for index in range(options.rounds):
                for protocol in PROTOCOLS:
                    for kind in KINDS if index % 2 else reversed(KINDS):
                        gc.disable()  # a collection would delay every stream
                        run = await run_streams(
                            clients[protocol, kind],
                            found.meter,
                            options.streams,
                            options.tokens,
                            rng,
                        )
                        gc.enable()
                        runs.setdefault((protocol, kind), []).append(run)
                        print(protocol, kind, costs_us(run), flush=True)
            for client in clients.values():
                await client.close()
    return runs


def costs_us(run: StreamRun) -> dict[str, float]:
    """CPU time per token by process."""
    idle = dict.fromkeys(run.window.cpu_s, 0.0)
    return {who: round(us, 2) for who, us in run.us_per_token(idle).items()}


def server_us(run: StreamRun, kind: str) -> float:
    """CPU time of the front ends and of the proxy that the streams passed, per token."""
    costs = costs_us(run)
    return costs["front_ends"] + costs[PROXIES[kind]]


def gap_ms(run: StreamRun, kind: str) -> float:
    """Mean time between two tokens of a stream."""
    return 1e3 * statistics.fmean(run.gaps_s)


def bars_of(runs: dict[tuple[str, str], list[StreamRun]]) -> list[Bar]:
    """For each protocol: CPU time and time per token, TLS relative to plain."""
    bars = []
    for protocol in PROTOCOLS:
        for name, value, unit in (
            ("cpu_per_token", server_us, "us"),
            ("time_per_token", gap_ms, "ms"),
        ):
            plain, tls = ([value(run, kind) for run in runs[protocol, kind]] for kind in KINDS)
            ratios = [with_tls / without for without, with_tls in zip(plain, tls, strict=True)]
            details = {
                f"plain_{unit}": round(statistics.median(plain), 2),
                f"tls_{unit}": round(statistics.median(tls), 2),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
            ratio = statistics.median(ratios)
            name = f"auth/tls_{protocol}_{name}"
            bars.append(Bar(name, ratio, "x", MOST_RATIO, details=details))
    return bars


def row_of(protocol: str, kind: str, runs: list[StreamRun]) -> dict[str, Any]:
    """Medians over the rounds."""
    costs = [costs_us(run) for run in runs]
    medians = {who: round(statistics.median(c[who] for c in costs), 2) for who in costs[0]}
    gaps_ms = [1e3 * percentile(run.gaps_s, 99) for run in runs]
    return {
        "protocol": protocol,
        "kind": kind,
        "cpu_us_per_token": medians,
        "gap_p99_ms": round(statistics.median(gaps_ms), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "tls_cost.json")
    options = parser.parse_args()
    runs = asyncio.run(measure(options))
    report.write(
        options.out,
        f"python -m tests.perf tls-cost --streams {options.streams} --tokens {options.tokens}"
        f" --rounds {options.rounds}",
        bars_of(runs),
        rows=[row_of(*key, found) for key, found in runs.items()],
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        import uvloop

        uvloop.run(serve_front_ends())
    else:
        main()
