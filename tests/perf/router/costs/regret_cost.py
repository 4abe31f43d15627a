"""Processor time of the thread that computes regret, and what it does to the event loop next to it.

    python -m tests.perf regret_cost

A ring full of real decisions of the policy `slo`, for fleets of several sizes. *Share* is the thread's part of a core
when it replays the whole ring in each of its periods, as on a busy router. *Late* is how long a task that is due waits
for the event loop, in turns: without a thread, with the product's, and with one that does not pause between two
replays. The last one shows what the product's thread does while it replays, 2% of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from quire.cluster.bench.results.report import RESULTS, Bar, write
from quire.protos.wire import Frame, Load
from quire.router.explain.decisions import DecisionRing
from quire.router.explain.regret_worker import MAX_SHARE, PERIOD_S, RegretWorker
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest
from quire.router.types import Explain

NUM_DECISIONS = 256  # the default of `router.max_explained_decisions`
_TURN_S, _TASK_PERIOD_S = 2.2 * PERIOD_S, 0.002


def full_ring(num_replicas: int) -> DecisionRing:
    """A ring of decisions in a fleet that was loaded by them."""
    rng = random.Random(0)
    table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
    for i in range(num_replicas):
        table.add(f"replica-{i}", "e", 32)
        load = Load(num_running=i % 8, prefill_s_per_token=1e-4 * rng.uniform(0.7, 1.4))
        table.on_frame(f"replica-{i}", Frame("e", load=load), 0.0)
    ring = DecisionRing("router", NUM_DECISIONS, lambda: 10.0)
    policy = make_policy("slo")
    prefixes = np.random.default_rng(0).integers(1, 2**63, (40, 64), dtype=np.uint64)
    for i in range(NUM_DECISIONS):
        now_s = 0.02 * i
        hashes = prefixes[rng.randrange(len(prefixes))]
        fleet = table.fleet(hashes, 4200, now_s)
        ranking = policy.choose(RouteRequest(4200), fleet, now_s, rng)
        explain = Explain(replica=ranking.names()[0], attempts=1)
        table.book(ranking, hashes, 4200, now_s)
        if i % 10:
            explain.answered_attempt, explain.ttft_s = 1, 0.4
            explain.cached_tokens = ranking[0].cached_tokens
        ring.add(str(i), str(i), ranking, 4200, explain, now_s)
    return ring


def step_s(ring: DecisionRing) -> float:
    """Processor seconds of one replay of the ring: the median of ten."""
    taken = []
    for _ in range(10):
        worker = RegretWorker(ring, lambda: 10.0)
        worker.step()
        taken.append(worker.cpu_s)
    return float(np.median(taken))


@contextmanager
def product(ring: DecisionRing) -> Iterator[None]:
    """During the block, the product's thread runs, and its ring is always full of new decisions."""
    worker, ended = RegretWorker(ring, lambda: 10.0), threading.Event()

    def renew() -> None:
        while not ended.wait(PERIOD_S / 5):
            ring.num_added += NUM_DECISIONS

    renewing = threading.Thread(target=renew)
    renewing.start()
    worker.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        worker.close()
    if not worker.regrets:
        raise RuntimeError("the thread has replayed nothing")


@contextmanager
def unpaused(ring: DecisionRing) -> Iterator[None]:
    """During the block, a thread replays the ring again and again."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            RegretWorker(ring, lambda: 10.0).step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def late_s() -> list[float]:
    """Time by which each of many tasks began later than it was due."""
    found, due_s = [], time.perf_counter()
    end_s = due_s + _TURN_S
    while due_s < end_s:
        due_s += _TASK_PERIOD_S
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        found.append(time.perf_counter() - due_s)
        due_s = max(due_s, time.perf_counter())
    return found


def bars_of(steps_s: dict[int, float], late: dict[str, list[float]]) -> list[Bar]:
    """The largest fleet's share, and the lateness."""
    shares = {n: s / max(PERIOD_S, s / MAX_SHARE) for n, s in steps_s.items()}
    p99_ms = {name: round(1e3 * float(np.percentile(v, 99)), 3) for name, v in late.items()}
    details: dict[str, Any] = {
        "decisions": NUM_DECISIONS,
        "step_ms_by_replicas": {str(n): round(1e3 * s, 2) for n, s in steps_s.items()},
        "share_percent_by_replicas": {str(n): round(100 * s, 3) for n, s in shares.items()},
    }
    added_ms = p99_ms["product"] - p99_ms["alone"]
    return [
        Bar(
            "router/regret_share", 100 * max(shares.values()), "%", 100 * MAX_SHARE, details=details
        ),
        Bar("router/regret_late_p99_added", added_ms, "ms", 1.0, details={"p99_ms": p99_ms}),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf regret_cost",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "regret_cost.json")
    options = parser.parse_args()
    rings = {n: full_ring(n) for n in options.replicas}
    steps_s = {n: step_s(ring) for n, ring in rings.items()}
    ring = rings[options.replicas[0]]
    ways = {"alone": nullcontext, "product": product, "unpaused": unpaused}
    late: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, way in ways.items():
            with way(ring):
                late[name] += asyncio.run(late_s())
    bars = bars_of(steps_s, late)
    for bar in bars:
        print(bar.to_json())
    write(options.out, "python -m tests.perf regret_cost", bars)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
