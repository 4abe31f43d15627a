"""Python time of a streamed token on the replica's and the router's side of the bus, without Ray.

    python -m tests.perf bus_overhead [--streams 128] [--out FILE]

Replica: `AttachedRouters.publish` of a step's columns, the wake-up of the attach stream, and the encoded frame.
Router: decoding the frame, `Bus` → `Attempt` → `RequestStream` (index check, detokeniser, stop matcher) →
`ChunkEncoder`, in one task per request as under HTTP, up to the bytes for the server. The objects are real except for a
stub of Serve's handle. Sockets, the proxy and Serve's own streams are not included.

The result is the wall time per token in steps with one token for each stream, as the median over the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.bench.results import report
from quire.cluster.http.http_body import parse_body
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_generation import GenerationResponse
from quire.protos.wire import Frame, Hello, Load, TokenRecord
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.loop import LoopOutput
from quire.replica.serving.attached_routers import AttachedRouters
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.transport.bus import Bus

ROUTER, REPLICA, EPOCH = "router", "replica", "epoch"
TEXT = "A quire is a gathering of pages, and many voices that sing the same words at one time. "
MAX_LEN = 8192
ROUTER_GOAL_US = 75.0
REPLICA_GOAL_US = 20.0


class StubHandle:
    """A Serve handle whose calls never return."""

    def options(self, **_: Any) -> StubHandle:
        return self

    def __getattr__(self, method: str) -> StubHandle:
        return self

    def remote(self, *_: Any, **__: Any) -> StubCall:
        return StubCall()


class StubCall:
    """The response of a call that never returns."""

    def __await__(self):
        return asyncio.get_running_loop().create_future().__await__()

    def cancel(self) -> None:
        pass


class ReplicaSide:
    """AttachedRouters of an engine with one attached router."""

    def __init__(self, streams: int):
        # No heartbeat between two steps, even on a slow machine.
        self.attachments = AttachedRouters(
            EPOCH, on_detach=lambda router_id: None, heartbeat_s=3600
        )
        self.frames = self.attachments.stream(ROUTER, Load)
        self._keys = np.empty(streams, object)
        self._stream_ids = np.zeros(streams, np.int64)
        self._sources = np.ones(streams, np.int32)
        self._step = 0

    def take(self, stream_ids: list[int]) -> None:
        """Set the ids of the router's streams, which run here."""
        self._keys[:] = [(ROUTER, stream_id) for stream_id in stream_ids]
        self._stream_ids[:] = stream_ids

    def output(self, token_ids: np.ndarray) -> LoopOutput:
        """The loop's output after a step with one token for each stream."""
        self._step += 1
        index = np.full(len(self._keys), self._step - 1, np.int32)
        tokens = TokenRecord(self._stream_ids, index, token_ids)
        load = Load(num_running=len(self._keys), num_steps=self._step)
        return LoopOutput(DeltaBatch([], tokens, self._keys, self._sources), load=load)


class RouterSide:
    """A router with its service and an HTTP answer in progress for each stream."""

    def __init__(self, streams: int):
        checkpoint = resolve_checkpoint("embedded", None, weights=False)
        self.tokenizer = TextTokenizer.load(checkpoint)
        table = ReplicaTable(PrefixIndex())
        self.bus = Bus(StubHandle(), "bus-overhead", ROUTER, table)
        self.bus.hellos[REPLICA] = Hello(
            replica=REPLICA,
            epoch=EPOCH,
            model_name="embedded",
            revision="",
            dtype="float32",
            vocab_size=self.tokenizer.backend.get_vocab_size(),
            max_model_len=MAX_LEN,
            max_cache_tokens=MAX_LEN,
            block_size=32,
            eos_token_ids=[],
            startup_s={},
        )
        table.add(REPLICA, EPOCH, weights=self.bus.hellos[REPLICA].weights)
        self.on_data(Frame(EPOCH, snapshot=np.empty(0, np.uint64)).encode())
        facts = ModelFacts(
            name="embedded", created_s=0, defaults=GenerationDefaults(), limits=Limits()
        )
        self.service = RouterService(
            facts,
            router_id=ROUTER,
            tokenizer=AsyncTokenizer(self.tokenizer, num_threads=1),
            template=None,
            table=table,
            policy=make_policy("slo"),
            transport=self.bus,
            # Answers begin after all requests are sent.
            admission=AdmissionLimits(dispatch_window_s=1e9, max_wait_s=1e9),
        )
        self.num_sent = 0
        self.tasks = [asyncio.create_task(self._answer(i)) for i in range(streams)]

    def on_data(self, data: bytes) -> None:
        """Process a frame as `Bus._attach` does."""
        self.bus._on_frame(REPLICA, Frame.decode(data))

    async def _answer(self, i: int) -> None:
        body = parse_body(
            CompletionRequest,
            {
                "model": "embedded",
                "prompt": [5 + i % 50, 7, 9],
                "max_tokens": MAX_LEN - 3,
                "stream": True,
                "stop": ["\n\nUser:"],
            },
        )
        response = GenerationResponse(self.service, body, body.to_request(f"request-{i}"))
        await response({}, _never, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self.num_sent += 1


async def _never() -> Any:
    await asyncio.get_running_loop().create_future()


async def run(streams: int, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds per token of each step, for the router and the replica."""
    router, replica = RouterSide(streams), ReplicaSide(streams)
    text_ids = router.tokenizer.encode(TEXT, add_special_tokens=False)
    first = asyncio.create_task(anext(replica.frames))
    while len(router.bus._attempts) < streams:
        await asyncio.sleep(0.01)
    replica.take(list(router.bus._attempts))
    replica.attachments.send_events(ROUTER, [])
    await first
    router_us: list[float] = []
    replica_us: list[float] = []
    for step in range(steps):
        offsets = np.arange(streams) + step
        output = replica.output(text_ids[offsets % len(text_ids)])
        began = time.perf_counter_ns()
        replica.attachments.publish(output)
        data = await anext(replica.frames)
        published = time.perf_counter_ns()
        target = router.num_sent + streams
        resumed = time.perf_counter_ns()
        router.on_data(data)
        for _ in range(8):  # iterations of the event loop, so that each stream's task runs once
            if router.num_sent >= target:
                break
            await asyncio.sleep(0)
        ended = time.perf_counter_ns()
        if router.num_sent < target:
            raise RuntimeError(f"step {step}: {target - router.num_sent} streams sent nothing")
        replica_us.append((published - began) / 1e3 / streams)
        router_us.append((ended - resumed) / 1e3 / streams)
    for task in router.tasks:
        task.cancel()
    await asyncio.gather(*router.tasks, return_exceptions=True)
    await replica.frames.aclose()
    await router.bus.close()
    return router_us, replica_us


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "bus_overhead.json")
    args = parser.parse_args()
    router_us, replica_us = asyncio.run(run(args.streams, args.steps))
    bars = [
        report.Bar(
            f"router/{name}_us_per_token",
            spread.median,
            "us",
            goal,
            details={"streams": args.streams, **report.spread_json(spread)},
        )
        for name, goal, spread in (
            ("router", ROUTER_GOAL_US, report.Spread.of(router_us)),
            ("replica", REPLICA_GOAL_US, report.Spread.of(replica_us)),
        )
    ]
    report.write(
        args.out,
        f"python -m tests.perf bus_overhead --streams {args.streams}",
        bars,
        method="wall time per token on one core, medians over steps",
    )


if __name__ == "__main__":
    main()
