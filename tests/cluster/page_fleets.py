"""A router's view of a fleet of any size, in virtual time: the real table, index, policy and ring, and simple replicas.

    python tests/cluster/page_fleets.py [REPLICAS] [PORT]

serves its live page, to look at it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque

import numpy as np

from quire.protos.wire import Frame, Load
from quire.router.admission.gate import AdmissionGate
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.explain.decisions import DecisionRing
from quire.router.explain.live_state import live_state
from quire.router.explain.regret_worker import RegretWorker
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.observer import Observer
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest
from quire.router.status_types import Decisions, LiveState
from quire.router.types import Explain

BLOCK = 16
PREFILL_S, STEP_S = 2e-5, 0.02  # of a token, of a step
CHAT = "abcdefghijkmnopqrstuvwxyz0123456789"


class SimpleReplica:
    """Runs requests at constant speeds and counts its blocks; a few blocks wait for the running step."""

    def __init__(self, name: str, num_blocks: int, num_host_blocks: int):
        self.name = name
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.cached = num_blocks // 5
        self.running: list[list] = []  # blocks, and the time of the end
        self.steps = self.preemptions = 0
        self.seq = 0

    def load(self, now_s: float) -> Load:
        ended = [one for one in self.running if one[1] <= now_s]
        self.running = [one for one in self.running if one[1] > now_s]
        self.cached += sum(blocks for blocks, _ in ended)
        in_use = sum(blocks for blocks, _ in self.running)
        held = 3 if self.running and self.steps % 3 == 0 else 0
        self.cached = max(0, min(self.cached, self.num_blocks - in_use - held))
        self.steps += bool(self.running) * 25
        num = len(self.running)
        host = self.num_host_blocks
        return Load(
            num_running=min(num, 64),
            num_waiting=max(0, num - 64),
            num_decode_tokens=in_use * BLOCK,
            blocks_free=self.num_blocks - in_use - held - self.cached,
            blocks_cached=self.cached,
            blocks_in_use=in_use,
            blocks_total=self.num_blocks,
            prefill_s_per_token=PREFILL_S,
            decode_step_s=STEP_S + 1e-4 * num,
            num_steps=self.steps,
            host_blocks_total=host,
            host_blocks_cached=host * 2 // 3,
            host_blocks_free=host - host * 2 // 3,
            num_routers=2,
        )


class FleetService:
    """What the page asks of a router's service."""

    def __init__(
        self, num_replicas: int, num_blocks: int = 10_000, *, host: bool = True, seed: int = 0
    ):
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
        self.ring = DecisionRing("router-7tq2xk0d", 256, clock=lambda: self.now_s)
        self.regret = RegretWorker(self.ring, clock=lambda: self.now_s)
        self.gate = AdmissionGate(AdmissionLimits(), lambda: self.now_s)
        self.policy = make_policy("slo")
        self.replicas = {}
        for _ in range(num_replicas):
            name = "".join(self.rng.choices(CHAT, k=8))
            blocks = num_blocks if num_replicas > 6 else num_blocks // (1 + len(self.replicas) % 3)
            self.replicas[name] = SimpleReplica(name, blocks, blocks // 2 if host else 0)
            self.table.add(name, "e", block_tokens=BLOCK)
        self.prefixes = [
            np.array([self.rng.getrandbits(63) for _ in range(48)], np.uint64) for _ in range(40)
        ]
        self.pending: deque[tuple[float, Explain, float]] = deque()
        self.bookings: list = []
        self.deltas = 0.0
        self.report()

    def report(self) -> None:
        """Every replica sends a frame."""
        for name, replica in self.replicas.items():
            self.table.on_frame(name, Frame("e", load=replica.load(self.now_s)), self.now_s)

    def ask(self, request_id: str = "", left: str = "", attempts: int = 1) -> Explain:
        """Decide one request."""
        rng = self.rng
        prefix = self.prefixes[min(int(rng.expovariate(0.12)), 39)]
        tokens = 64 * rng.randint(8, 48) + rng.randint(1, 63)
        hashes = np.concatenate([prefix, [rng.getrandbits(63)]])[: tokens // 64].astype(np.uint64)
        avoid = {left} if left else frozenset()
        fleet = self.table.fleet(hashes, tokens, self.now_s, avoid=avoid)
        ranking = self.policy.choose(RouteRequest(tokens), fleet, self.now_s, rng)
        best = ranking[0]
        explain = Explain(
            router=self.ring.router_id,
            replica=best.replica,
            predicted_cached_tokens=best.cached_tokens,
            attempts=attempts,
        )
        request_id = request_id or f"{rng.getrandbits(64):016x}"
        self.ring.add(
            request_id,
            f"{rng.getrandbits(128):032x}",
            ranking,
            tokens,
            explain,
            self.now_s,
            "",
            left,
        )
        booking = self.table.book(ranking, hashes, tokens, self.now_s)
        ttft_s = (
            0.012 + best.wait_s + (tokens - best.cached_tokens) * PREFILL_S * rng.uniform(0.9, 1.4)
        )
        self.pending.append((self.now_s + ttft_s, explain, ttft_s))
        output = min(900, int(rng.expovariate(1 / 250)) + 8)
        end_s = self.now_s + ttft_s + output * STEP_S
        self.replicas[best.replica].running.append([(tokens + output) // BLOCK, end_s])
        self.bookings.append((end_s, booking))
        return explain

    def pass_time(self, seconds: float, requests_per_s: float) -> None:
        for _ in range(max(1, round(seconds / 0.05))):
            self.now_s += 0.05
            num = requests_per_s * 0.05
            for _ in range(int(num) + (self.rng.random() < num % 1)):
                self.ask()
            for item in list(self.pending):
                if item[0] <= self.now_s:
                    self.pending.remove(item)
                    _, explain, ttft_s = item
                    explain.answered_attempt, explain.ttft_s, explain.queue_s = 1, ttft_s, 0.002
                    explain.cached_tokens = explain.predicted_cached_tokens
            self.bookings.sort(key=lambda one: one[0])
            while self.bookings and self.bookings[0][0] <= self.now_s:
                self.table.end(self.bookings.pop(0)[1], self.now_s, 200)
            self.deltas += 0.05 / STEP_S * sum(len(r.running) for r in self.replicas.values())
            self.report()

    def lose(self, name: str) -> None:
        """A replica's streams continue elsewhere."""
        self.table.set_lost(name)
        for i in range(min(5, len(self.replicas[name].running))):
            self.ask(f"chat-{i}-{self.rng.getrandbits(24):06x}", left=name, attempts=2)
        self.replicas[name].running.clear()

    # -- the service ------------------------------------------------------------------------------------

    async def live_state(self, payer: str | None = None) -> LiveState:
        observer = Observer()
        observer.num_deltas = lambda: int(self.deltas)
        parts = (self.ring, self.gate, self.table, observer)
        return live_state(*parts, "Qwen/Qwen3-8B", self.now_s, payer, self.regret.regrets)

    async def decisions(self, request_id, limit, payer=None) -> Decisions:
        found = self.ring.find(request_id, payer) if request_id else self.ring.last(limit, payer)
        return Decisions([self.ring.router_id], 0, found)


async def serve(num_replicas: int, port: int) -> None:
    import uvicorn

    from quire.cluster.app import APIS
    from quire.cluster.http.http_api import build_app

    service = FleetService(num_replicas, 10_000)
    requests_per_s = 2.2 * num_replicas
    for _ in range(5):
        service.pass_time(4, requests_per_s)
        service.regret.step()
    app = build_app(lambda: service, max_body_bytes=1 << 16, apis=APIS)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    last = time.monotonic()
    lost_s = last + 6
    while not serving.done():
        await asyncio.sleep(0.2)
        now = time.monotonic()
        service.pass_time(now - last, requests_per_s)
        last = now
        if now > lost_s:
            lost_s = float("inf")
            names = sorted(service.replicas)
            service.lose(names[1])
            if num_replicas > 2:
                service.table.set_draining(names[2])


if __name__ == "__main__":
    given = [int(value) for value in sys.argv[1:]] + [None, None]
    asyncio.run(serve(given[0] or 100, given[1] or 8040))
