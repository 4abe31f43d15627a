"""Time for a new router to learn the caches of all replicas from their snapshots, and what it serves meanwhile.

    python -m tests.perf router_rebuild [--blocks 2000000] [--replicas 8]

The replicas are one other process: the product's event logs, filled with chains of blocks, and the product's frames,
over a Unix socket for each replica. The router is the product's table, index and policy in an event loop, with a task
for each attach stream as in `router/transport/bus.py`. While the snapshots arrive, the same loop decides `--rate`
requests a second, for prompts that one or two replicas hold. Requests come until the rebuild has ended, and then again
as many for comparison.

The rebuild ends when the digests of all replicas agree. *Hits* are prompt tokens that the chosen replica really holds.
A router that knows nothing spreads requests evenly, so by chance it finds one replica's share of them. *Late* is the
time by which the event loop starts a decision after it was due: how long a page of a snapshot holds it up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.bench.results.report import RESULTS, Bar, write
from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS
from quire.protos.wire import Frame, Load
from quire.replica.kv_cache.cache_events import EventLog
from quire.replica.loop import LoopOutput
from quire.replica.serving.attached_routers import AttachedRouters
from quire.router.fleet.replicas import ReplicaTable
from quire.router.fleet.tracked_replica import ReplicaState
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest
from quire.router.transport.page_turns import PageTurns

CHAIN_BLOCKS = 256  # a prompt of 16,384 tokens
SECOND_COPY = 0.1  # of the chains are held by two replicas
ANSWER_S = 0.05  # to a request's first token
GOAL_S, GOAL_LATE_MS = 5.0, 50.0
_LENGTH_BYTES = 4
_PREFILL_S_PER_TOKEN = 1e-5


@dataclass(frozen=True, slots=True)
class Caches:
    """Which replica holds which chain: the same in both processes, from one seed."""

    num_blocks: int
    num_replicas: int

    @property
    def num_chains(self) -> int:
        return -(-self.num_blocks // CHAIN_BLOCKS)

    def holders(self) -> list[list[int]]:
        """The replicas that hold each chain."""
        pick = random.Random(1)
        copies = [1 + (pick.random() < SECOND_COPY) for _ in range(self.num_chains)]
        return [pick.sample(range(self.num_replicas), min(n, self.num_replicas)) for n in copies]

    def chain(self, number: int) -> np.ndarray:
        """[CHAIN_BLOCKS] uint64 routing hashes."""
        return np.random.default_rng(number).integers(1, 2**64, CHAIN_BLOCKS, dtype=np.uint64)


# -- the replicas' process --------------------------------------------------------------------------------


def serve_replicas(caches: Caches, folder: str, ready: Any) -> None:
    """Serve the attach streams of all replicas until the process is ended."""
    logs = [EventLog(f"epoch-{i}") for i in range(caches.num_replicas)]
    for number, holders in enumerate(caches.holders()):
        hashes = caches.chain(number).tolist()
        for replica in holders:
            logs[replica].hold(hashes)
    for log in logs:
        log.flush()
    gc.freeze()
    asyncio.run(_serve(logs, folder, ready))


async def _serve(logs: list[EventLog], folder: str, ready: Any) -> None:
    servers = []
    for i, log in enumerate(logs):
        stream = _Stream(log)
        servers.append(await asyncio.start_unix_server(stream.attach, _socket(folder, i)))
    ready.set()
    await asyncio.gather(*(server.serve_forever() for server in servers))


class _Stream:
    """The attach stream of one replica."""

    def __init__(self, log: EventLog):
        self._log = log
        self._routers = AttachedRouters(log.epoch, lambda router: None)
        self._load = Load(prefill_s_per_token=_PREFILL_S_PER_TOKEN, num_steps=1)
        self._routers.publish(LoopOutput(events_seq=log.seq, digest=log.digest, load=self._load))

    async def attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = self._routers.stream("router", lambda: self._load)
        asking = asyncio.get_running_loop().call_soon(self._send_snapshot)
        try:
            async for frame in frames:
                writer.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            asking.cancel()
            writer.close()

    def _send_snapshot(self) -> None:
        self._routers.send_snapshot("router", *self._log.snapshot())


def _socket(folder: str, replica: int) -> str:
    return str(Path(folder, f"{replica}.socket"))


# -- the router -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Served:
    """The decisions of one phase.

    Attributes
    ----------
    hits
        Of each decision: the time since the phase began, tokens of its prompt that some replica holds, and those that
        the chosen one holds.
    late_s
        Time after which each decision was due that it began.
    """

    hits: list[tuple[float, int, int]] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    by_replica: Counter[str] = field(default_factory=Counter)

    def hit_ratio(self, begin: float = 0.0, end: float = 1.0) -> float:
        """Held tokens at the chosen replicas, as a share of those that some replica held, in a part of the phase."""
        last_s = self.hits[-1][0]
        chosen = [hit for hit in self.hits if begin * last_s <= hit[0] <= end * last_s]
        return sum(hit[2] for hit in chosen) / max(1, sum(hit[1] for hit in chosen))


class NewRouter:
    """A router that has just started: an empty table, attached to every replica."""

    def __init__(self, caches: Caches, folder: str, rate: float):
        self.table = ReplicaTable(PrefixIndex(max_blocks=2 * caches.num_blocks), lost_after_s=1e9)
        self._caches, self._folder, self._rate = caches, folder, rate
        self._holders = caches.holders()
        self._names = [f"replica-{i}" for i in range(caches.num_replicas)]
        self._policy, self._rng = make_policy("slo"), random.Random(2)
        self._page_turns = PageTurns()
        self.took_pages_s: list[float] = []
        self._rebuilt = asyncio.Event()

    async def run(self) -> tuple[float, float, Served, Served]:
        """Returns the seconds and the processor seconds of the rebuild, and what was served in it and afterwards."""
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        links = [asyncio.create_task(self._link(i)) for i in range(len(self._names))]
        meanwhile, afterwards = Served(), Served()
        deciding = asyncio.create_task(self._decide(meanwhile))
        await self._rebuilt.wait()
        took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        deciding.cancel()
        again = asyncio.create_task(self._decide(afterwards))
        while len(afterwards.hits) < max(500, len(meanwhile.hits)):
            await asyncio.sleep(0.05)
        for task in (again, *links):
            task.cancel()
        await asyncio.gather(deciding, again, *links, return_exceptions=True)
        return took_s, took_cpu_s, meanwhile, afterwards

    async def _link(self, i: int) -> None:
        reader, _ = await asyncio.open_unix_connection(_socket(self._folder, i))
        self.table.add(self._names[i], f"epoch-{i}", 32)
        while True:
            length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
            data = await reader.readexactly(length)
            frame = Frame.decode(data)
            if frame.snapshot is None:
                self._on_frame(self._names[i], frame)
            else:
                async with self._page_turns.turn():
                    began_s = time.perf_counter()
                    self._on_frame(self._names[i], frame)
                    self.took_pages_s.append(time.perf_counter() - began_s)

    def _on_frame(self, name: str, frame: Frame) -> None:
        action = self.table.on_frame(name, frame, time.monotonic())
        if action.resync_from is not None:
            raise RuntimeError(f"{name} asks for a resync: {action.reason}")
        if self._is_rebuilt():
            self._rebuilt.set()

    def _is_rebuilt(self) -> bool:
        table, index = self.table, self.table.index
        return all(
            name in table
            and table.state(name) is ReplicaState.ATTACHED
            and index.is_complete(name)
            and index.num_blocks(name)
            for name in self._names
        )

    async def _decide(self, served: Served) -> None:
        """Decide requests at the times of a Poisson process."""
        began_s = due_s = looked_s = time.monotonic()
        while True:
            due_s += self._rng.expovariate(self._rate)
            # Without a pause if it was due at the last look: requests are tasks of their own, and all that are due run.
            if due_s > looked_s:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                looked_s = time.monotonic()
            while not self.table.num_ready():
                await asyncio.sleep(0.001)
            self._decide_one(served, began_s, due_s)

    def _decide_one(self, served: Served, began_s: float, due_s: float) -> None:
        now_s = time.monotonic()
        number = self._rng.randrange(self._caches.num_chains)
        chain = self._caches.chain(number)
        held = ROUTING_BLOCK_TOKENS * CHAIN_BLOCKS
        num_tokens = held + 32
        fleet = self.table.fleet(chain, num_tokens, now_s)
        ranking = self._policy.choose(RouteRequest(num_tokens), fleet, now_s, self._rng)
        booking = self.table.book(ranking, chain, num_tokens, now_s)
        asyncio.get_running_loop().call_later(ANSWER_S, self.table.end, booking, now_s, 1)
        is_hit = self._names.index(booking.replica) in self._holders[number]
        served.hits.append((now_s - began_s, held, held * is_hit))
        served.late_s.append(now_s - due_s)
        served.by_replica[booking.replica] += 1


def measure(caches: Caches, rate: float) -> tuple[NewRouter, float, float, Served, Served]:
    """Rebuild one router's index."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve_replicas, args=(caches, folder, ready), daemon=True)
        process.start()
        try:
            if not ready.wait(300):
                raise RuntimeError("the replicas' process did not start")

            async def rebuild() -> tuple[NewRouter, float, float, Served, Served]:
                router = NewRouter(caches, folder, rate)
                gc.freeze()  # as a router does after its start
                return router, *await router.run()

            return asyncio.run(rebuild())
        finally:
            process.terminate()
            process.join()


def bars_of(
    router: NewRouter, took_s: float, cpu_s: float, meanwhile: Served, afterwards: Served
) -> list[Bar]:
    """The bars, each with what explains it."""
    full = afterwards.hit_ratio()
    pages_ms = [1e3 * s for s in router.took_pages_s]
    late_ms = 1e3 * np.percentile(meanwhile.late_s, (50, 99, 100))
    shares = [meanwhile.by_replica[name] for name in router._names]
    return [
        Bar(
            "router/rebuild",
            took_s,
            "s",
            GOAL_S,
            details={
                "blocks": len(router.table.index),
                "processor_s": round(cpu_s, 3),
                "pages": len(pages_ms),
                "page_ms": [round(float(v), 2) for v in np.percentile(pages_ms, (50, 100))],
            },
        ),
        Bar(
            "router/rebuild_hits_of_full",
            meanwhile.hit_ratio() / full,
            "x",
            0.4,
            at_most=False,
            details={
                "requests": len(meanwhile.hits),
                "hits_in_each_quarter": [
                    round(meanwhile.hit_ratio(i / 4, (i + 1) / 4), 3) for i in range(4)
                ],
                "hits_afterwards": round(full, 3),
                "hits_by_chance": round((1 + SECOND_COPY) / len(router._names), 3),
                "requests_by_replica": sorted(shares),
            },
        ),
        Bar(
            "router/rebuild_late_p99",
            float(late_ms[1]),
            "ms",
            GOAL_LATE_MS,
            details={
                "p50_p99_max": [round(float(v), 2) for v in late_ms],
                "afterwards_p99": round(1e3 * float(np.percentile(afterwards.late_s, 99)), 2),
            },
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf router_rebuild",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--out", type=Path, default=RESULTS / "router_rebuild.json")
    options = parser.parse_args()
    bars = bars_of(*measure(Caches(options.blocks, options.replicas), options.rate))
    for bar in bars:
        print(bar.to_json())
    write(
        options.out,
        f"python -m tests.perf router_rebuild --blocks {options.blocks} --replicas "
        f"{options.replicas} --rate {options.rate:g}",
        bars,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
