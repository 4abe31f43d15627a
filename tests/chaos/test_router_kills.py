"""A router that is killed: its clients see that their streams broke, and go on at another one with the next token.

Real Ray, real SIGKILLs, streams of every kind over HTTP and gRPC: three rounds, thirty with `CHAOS_SIZE=long`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from chaos_clients import Clients
from live import CHANGE_TIMEOUT_S, Cluster, wait_until

from quire.cluster.bench.results.report import Bar, write

SIZE = os.environ.get("CHAOS_SIZE", "ci")
NUM_ROUNDS = {"ci": 2, "long": 30}[SIZE]
CONCURRENCY = 24
NUM_STREAMS = 48
# HTTP streams that have just begun on a router when it is killed: of one that is further its end may be on the way,
# however much of it a busy client has read.
NUM_YOUNG = 3
YOUNG_MESSAGES = 10
PROBE_S = 0.2
GHOST = {"prompt": "The harbour", "max_tokens": 3000, "ignore_eos": True, "stream": True}

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.timeout(600 if SIZE == "ci" else 3600),
]


@dataclass(slots=True)
class Round:
    """What one kill did."""

    streams: int
    truncated: int
    wrong: list[str]
    outage_s: float  # from the kill to the last request that was not served
    orphaned_s: float  # from the kill until the replicas do nothing
    restarted_s: float  # from the kill until there is a router in its place


async def ask_now_and_then(cluster: Cluster, ends: asyncio.Event) -> float:
    """When the last request failed that began before `ends`; 0.0 if none did."""
    failed_s = 0.0
    body = {"prompt": "A", "max_tokens": 1}
    while not ends.is_set():
        began_s = time.monotonic()
        try:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=10) as client:
                ok = (await client.post("/v1/completions", json=body)).status_code == 200
        except httpx.TransportError:
            ok = False
        if not ok:
            failed_s = time.monotonic()
        await asyncio.sleep(max(0.0, began_s + PROBE_S - time.monotonic()))
    return failed_s


async def ghost(cluster: Cluster, ends: asyncio.Event) -> None:
    """A client that does not come back when its stream breaks."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        try:
            async with client.stream("POST", "/v1/completions", json=GHOST) as response:
                async for _ in response.aiter_lines():
                    if ends.is_set():
                        return
        except httpx.TransportError:
            return


def is_at_rest(cluster: Cluster) -> bool:
    try:
        loads = cluster.loads()
    except grpc.RpcError:  # while a router is replaced there may be nobody to ask
        return False
    return bool(loads) and all(
        load.num_running + load.num_waiting == 0
        and tier.blocks_free + tier.blocks_cached == tier.blocks_total
        for load in loads
        for tier in load.cache.tiers
    )


def router_pids(cluster: Cluster) -> dict[str, int]:
    """Of the processes by the names of their routers."""
    deployments = cluster.serve_status()["applications"]["quire"]["deployments"]
    return {f"router-{r['replica_id']}": r["pid"] for r in deployments["Router"]["replicas"]}


async def kill_a_router(cluster: Cluster) -> tuple[float, float, Clients]:
    """Kill one in the middle of streams and follow them to their ends; returns when it was killed, when the last
    request failed, and the streams."""
    clients = Clients(cluster, NUM_STREAMS, resumes=True, concurrency=CONCURRENCY)
    ends, ghosts_end, killed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def until_killed() -> Iterator[int]:
        for number in itertools.count():
            if number >= NUM_STREAMS and killed.is_set():
                return
            yield number

    asking = asyncio.create_task(ask_now_and_then(cluster, ends))
    ghosts = [asyncio.create_task(ghost(cluster, ghosts_end)) for _ in range(4)]
    running = asyncio.create_task(clients.run(until_killed()))
    pids = await asyncio.to_thread(router_pids, cluster)
    young: Counter[str] = Counter()
    while max(young.values(), default=0) < NUM_YOUNG:
        await asyncio.sleep(0.01)
        watches = [watch for n, watch in clients.watches.items() if clients.is_open(n)]
        young = Counter(w.router for w in watches if w.router and w.messages <= YOUNG_MESSAGES)
    (busiest, _), *_ = young.most_common(1)
    os.kill(pids[busiest], signal.SIGKILL)
    killed_s = time.monotonic()
    killed.set()
    await running
    ghosts_end.set()
    await asyncio.gather(*ghosts)
    await asyncio.sleep(max(0.0, killed_s + 5.0 - time.monotonic()))
    ends.set()
    return killed_s, await asking, clients


def play(cluster: Cluster, calm: Clients) -> Round:
    wait_until(lambda: len(cluster.pids("Router")) == 2, CHANGE_TIMEOUT_S, "two routers")
    wait_until(lambda: is_at_rest(cluster), 20, "free + cached = total")
    killed_s, failed_s, clients = asyncio.run(kill_a_router(cluster))
    # Those of the clients have ended; whatever is left was the dead router's.
    wait_until(lambda: is_at_rest(cluster), 15, "no orphan runs, free + cached = total")
    orphaned_s = time.monotonic() - killed_s
    wait_until(lambda: len(cluster.pids("Router")) == 2, 60, "the router is replaced")
    return Round(
        len(clients.watches),
        sum(watch.truncations > 0 for watch in clients.watches.values()),
        clients.wrong(calm),
        max(0.0, failed_s - killed_s),
        orphaned_s,
        time.monotonic() - killed_s,
    )


def num_hits(rounds: list[Round]) -> int:
    """Kills that broke streams."""
    return sum(played.truncated > 0 for played in rounds)


def peace(cluster: Cluster) -> Clients:
    calm = Clients(cluster, NUM_STREAMS)
    asyncio.run(calm.run(iter(range(NUM_STREAMS))))
    assert [n for n, outcome in calm.outcomes.items() if isinstance(outcome, str)] == []
    return calm


def test_routers_are_killed_again_and_again(chaos_cluster):
    calm = peace(chaos_cluster)
    rounds: list[Round] = []
    # Streams may end at the very moment: a kill that broke none is not one of those that are wanted.
    while num_hits(rounds) < NUM_ROUNDS and len(rounds) < 3 * NUM_ROUNDS:
        rounds.append(play(chaos_cluster, calm))
        print(f"round {len(rounds)}: {rounds[-1]}", flush=True)
    wrong = [line for played in rounds for line in played.wrong]
    bars = [
        Bar("chaos/router_kills", num_hits(rounds), "SIGKILL", NUM_ROUNDS, at_most=False),
        Bar(
            "chaos/router_kill_bad_streams",
            len(wrong),
            "streams",
            0,
            details={
                "streams": sum(played.streams for played in rounds),
                "resumed": sum(played.truncated for played in rounds),
            },
        ),
        Bar("chaos/router_kill_outage", max(p.outage_s for p in rounds), "s", 10),
        Bar("chaos/router_kill_orphans", max(p.orphaned_s for p in rounds), "s", 15),
        Bar("chaos/router_restart", max(p.restarted_s for p in rounds), "s", 60),
    ]
    for bar in bars:
        print(bar.to_json())
    out = os.environ.get("CHAOS_OUT")
    if out:
        write(Path(out).with_name("chaos_routers.json"), f"make chaos SIZE={SIZE}", bars)
    assert not wrong, "\n".join(wrong)
    assert num_hits(rounds) == NUM_ROUNDS, "routers that were killed had no streams"
