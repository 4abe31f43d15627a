"""What an open live page costs a router: its share of the router's core.

    python -m tests.perf page_cost [--rounds 12] [--out FILE]

The router's whole HTTP application on a real socket, with a hundred replicas of 10,000 blocks. Other processes read
`/ui/state`. A router takes one core at most, so its requests slow down by the share of the core that the pages take.
*Share* is the CPU time of the router's process for each second with viewers, less that without.

*Ratio* is measured, not derived: another process sends completions over 16 connections as fast as they are answered,
and the ratio is that of the router's CPU time for a request without and with viewers, in the fastest rounds. Rounds
take turns. It needs a quiet machine: the pages cost the same CPU time for each second also where other programs take
most of the core, and then few requests share it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import uvicorn

from quire.cluster.app import APIS
from quire.cluster.bench.results import report
from quire.cluster.http.http_api import build_app
from quire.protos.wire import NO_FACTS, Facts, Frame, Hello, Load, Submit, TokenDelta
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.router_metrics import RouterMetrics
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.transport.transport import Attempt
from tests.perf.router.router_admission import EPOCH, HELLO

REPLICAS, BLOCKS, CONNECTIONS, OUTPUT = 100, 10_000, 16, 16
ROUND_S, WARM_UP_S = 3.0, 2.0
MAX_SHARE = 0.02
VIEWERS = (0, 1, 8)
MIN_RATIO = 1 - MAX_SHARE
LOAD = Load(
    num_running=12,
    num_decode_tokens=40_000,
    blocks_free=2000,
    blocks_cached=5000,
    blocks_in_use=3000,
    blocks_total=BLOCKS,
    prefill_s_per_token=2e-5,
    decode_step_s=0.02,
)


class InstantTransport:
    """Replicas that answer each request with `OUTPUT` tokens, one delta each, in the next turns of the loop."""

    def __init__(self, vocab_size: int):
        hello = dataclasses.replace(HELLO, vocab_size=vocab_size)
        self.hellos: dict[str, Hello] = {"r0": hello}
        self._ids = itertools.count(1)

    def next_stream_id(self) -> int:
        return next(self._ids)

    async def crashed_with(self, replica: str, stream_id: int) -> bool:
        return False

    def submit(self, submit: Submit, route: list[str]) -> Attempt:
        attempt = Attempt(submit.stream_id, route[0], on_cancel=lambda attempt: None)
        attempt.placed = True
        asyncio.get_running_loop().call_soon(self._answer, attempt, 0)
        return attempt

    def _answer(self, attempt: Attempt, index: int) -> None:
        is_last = index == OUTPUT - 1
        facts = Facts("length") if is_last else NO_FACTS if index else Facts()
        attempt.put(TokenDelta(attempt.stream_id, index, [100 + index], facts))
        if not is_last:
            asyncio.get_running_loop().call_soon(self._answer, attempt, index + 1)


def service_of() -> RouterService:
    tokenizer = TextTokenizer.load(resolve_checkpoint("embedded", None, weights=False))
    table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
    for i in range(REPLICAS):
        table.add(f"replica-{i:03}", EPOCH, block_tokens=32, weights=HELLO.weights)
        frame = Frame(EPOCH, load=LOAD, snapshot=np.empty(0, np.uint64))
        table.on_frame(f"replica-{i:03}", frame, time.monotonic())
    return RouterService(
        ModelFacts(name="embedded", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
        router_id="router",
        tokenizer=AsyncTokenizer(tokenizer, num_threads=1),
        template=None,
        table=table,
        policy=make_policy("slo"),
        transport=InstantTransport(tokenizer.backend.get_vocab_size()),
        observer=RouterMetrics(),
    )


SEND = """
import asyncio, itertools, json, random, sys
async def send(port, seconds, output):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop, number = asyncio.get_running_loop(), 0
    end_s = loop.time() + seconds
    while loop.time() < end_s:
        words = " ".join(random.choices(("harbour", "quire", "folded", "sheet", "letter"), k=200))
        body = json.dumps({"prompt": words, "max_tokens": output, "ignore_eos": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
                     b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        assert b" 200 " in head[:15], head
        size = int(head.lower().split(b"content-length:")[1].split(b"\\r\\n")[0])
        await reader.readexactly(size)
        number += 1
    return number
async def main(port, seconds, output, connections):
    sent = (send(int(port), float(seconds), int(output)) for _ in range(int(connections)))
    print(sum(await asyncio.gather(*sent)))
asyncio.run(main(*sys.argv[1:]))
"""

WATCH = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(b"GET /ui/state HTTP/1.1\\r\\nHost: localhost\\r\\nAccept: text/event-stream\\r\\n\\r\\n")
    while connection.recv(1 << 16):
        pass
"""


@contextlib.asynccontextmanager
async def watching(port: int, number: int) -> AsyncIterator[None]:
    start = asyncio.create_subprocess_exec
    viewers = [await start(sys.executable, "-c", WATCH, str(port)) for _ in range(number)]
    try:
        yield
    finally:
        for viewer in viewers:
            viewer.kill()
            await viewer.wait()


async def idle_share(seconds: float) -> float:
    """CPU seconds of this process for each second, while no requests come."""
    began_s, wall_s = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - began_s) / (time.monotonic() - wall_s)


async def us_per_request(port: int, seconds: float) -> float:
    """Send requests for some seconds; return the CPU microseconds of this process for each."""
    began_s = time.process_time()
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SEND),
        *map(str, (port, seconds, OUTPUT, CONNECTIONS)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await sender.communicate()
    return 1e6 * (time.process_time() - began_s) / int(output)


async def measure(rounds: int) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Return the shares of the idle router, and the microseconds of a request, by the number of viewers."""
    service = service_of()
    app = build_app(lambda: service, max_body_bytes=1 << 20, apis=APIS)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    await us_per_request(port, WARM_UP_S)
    shares: dict[int, list[float]] = {number: [] for number in VIEWERS}
    loaded_us: dict[int, list[float]] = {number: [] for number in VIEWERS}
    for turn in range(rounds):
        for number in VIEWERS if turn % 2 else reversed(VIEWERS):
            async with watching(port, number):
                await asyncio.sleep(0.2)  # until the viewers' interpreters run
                shares[number].append(await idle_share(ROUND_S))
                loaded_us[number].append(await us_per_request(port, ROUND_S))
    server.should_exit = server.force_exit = True
    await serving
    return shares, loaded_us


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "page_cost.json")
    arguments = parser.parse_args()
    shares, loaded_us = asyncio.run(measure(arguments.rounds))
    size = {"replicas": REPLICAS, "blocks": REPLICAS * BLOCKS}
    bars = []
    for number in VIEWERS[1:]:
        share = statistics.median(shares[number]) - statistics.median(shares[0])
        spread = report.spread_json(report.Spread.of(shares[number]))
        bars.append(
            report.Bar(f"page/share_{number}", share, "of a core", MAX_SHARE, details=size | spread)
        )
    for number in VIEWERS[1:]:
        ratio = min(loaded_us[0]) / min(loaded_us[number])
        spreads = {
            f"us_with_{viewers}": report.spread_json(report.Spread.of(loaded_us[viewers]))
            for viewers in (0, number)
        }
        name = f"page/ratio_{number}"
        bars.append(report.Bar(name, ratio, "ratio", MIN_RATIO, at_most=False, details=spreads))
    report.write(arguments.out, "python -m tests.perf page_cost", bars)


if __name__ == "__main__":
    main()
