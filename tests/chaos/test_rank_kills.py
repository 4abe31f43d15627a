"""Streams survive the death of any rank of a tensor-parallel replica with the answers that they would have had.

Real Ray, real SIGKILLs: two replicas of two ranks; streams of every kind are asked once in peace and once while random
ranks, leaders or not, are killed. `make tp` runs it and writes the numbers to `TP_OUT`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_clients import Clients
from live import CHANGE_TIMEOUT_S, Cluster, processes, start_cluster, wait_until
from test_replica_kills import kill

from quire.cluster.bench.results.report import Bar, write

NUM_STREAMS, NUM_KILLS = 100, 4
NUM_REPLICAS = 2

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def rank_cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Two replicas of two ranks, and a router."""

    def change(config: dict) -> None:
        application = config["applications"][0]
        args = application["args"]
        args |= {"replicas": NUM_REPLICAS, "routers": 1}
        args["engine"] = {"deterministic": True, "tensor_parallel": 2, "num_threads": 1}
        # All replicas may be dead until the first is back.
        args["router"] = {"max_move_s": 300.0, "drain_timeout_s": 0.0}
        application["deployments"] = [{"name": "Router", "graceful_shutdown_timeout_s": 300.0}]

    yield from start_cluster(tmp_path_factory.mktemp("ranks"), change)


def rank_pids(cluster: Cluster) -> list[int]:
    """Processes of the ranks that do not lead."""
    return [pid for pid, command in processes(cluster).items() if "RankActor" in command]


class RankKiller:
    """Kills rank 1 of a replica, and every other time a leader, when all replicas have room."""

    def __init__(self, cluster: Cluster, rng: random.Random):
        self._cluster = cluster
        self._rng = rng
        self.killed: list[str] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
            leaders = await asyncio.to_thread(self._cluster.pids, "Replica")
            ranks = await asyncio.to_thread(rank_pids, self._cluster)
            if len(leaders) < NUM_REPLICAS or len(ranks) < NUM_REPLICAS:
                continue
            kind, pids = (("rank 1", ranks), ("leader", leaders))[len(self.killed) % 2]
            if kill([self._rng.choice(pids)]):
                self.killed.append(kind)
                print(f"kill {len(self.killed)}: {kind}", flush=True)
            # Serve's news are a second old.
            await asyncio.sleep(2.0)


def test_streams_equal_their_uninterrupted_selves_when_ranks_are_killed(rank_cluster):
    calm = Clients(rank_cluster, NUM_STREAMS)
    began_s = time.monotonic()
    asyncio.run(calm.run(iter(range(NUM_STREAMS))))
    calm_s = time.monotonic() - began_s
    assert [n for n, outcome in calm.outcomes.items() if isinstance(outcome, str)] == []

    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}; {calm_s:.0f} s in peace", flush=True)
    killer = RankKiller(rank_cluster, random.Random(seed))
    storm = Clients(rank_cluster, NUM_STREAMS)

    def until_enough() -> Iterator[int]:
        number = 0
        while number < NUM_STREAMS or len(killer.killed) < NUM_KILLS:
            yield number
            number += 1

    async def run() -> None:
        killing = asyncio.create_task(killer.run())
        await storm.run(until_enough())
        killing.cancel()

    began_s = time.monotonic()
    asyncio.run(run())
    storm_s = time.monotonic() - began_s
    wrong = storm.wrong(calm)
    on_host = rank_cluster.metric("quire_prefix_hit_tokens_total", tier="host")
    moved = sum(watch.attempts > 1 for watch in storm.watches.values())
    wait_until(
        lambda: len(rank_cluster.loads()) == NUM_REPLICAS, CHANGE_TIMEOUT_S, "all replicas are back"
    )
    wait_until(
        lambda: len(rank_pids(rank_cluster)) == NUM_REPLICAS, 60, "no rank outlives its replica"
    )
    if out := os.environ.get("TP_OUT"):
        details = {
            "kills": killer.killed,
            "replicas": NUM_REPLICAS,
            "ranks_of_a_replica": 2,
            "seconds_in_peace": round(calm_s),
            "seconds": round(storm_s),
        }
        bars = [
            Bar("tp/bad_streams", len(wrong), "streams", 0, details=details),
            Bar("tp/streams", len(storm.outcomes), "streams", NUM_STREAMS, at_most=False),
            Bar("tp/kills", len(killer.killed), "SIGKILL", NUM_KILLS, at_most=False),
            Bar("tp/moved_streams", moved, "streams", 1, at_most=False),
        ]
        write(Path(out), "make tp", bars)
    assert not wrong, "\n".join(wrong)
    assert len(killer.killed) >= NUM_KILLS
    assert moved, "kills hit running streams"
    assert on_host, "what the dead replicas have computed is in the node's pool"
