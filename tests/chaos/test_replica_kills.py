"""Every stream survives the death of its replica with the very answer it would have had.

Real Ray, real SIGKILLs: three replicas and two routers; streams of every kind over HTTP and gRPC are asked once in
peace and once while replicas are killed at random, and have to be equal: token ids, text, log-probabilities, finish
reasons, usage. The replicas share the node's pool, so those that start restore what others have computed.
`CHAOS_SIZE=long` is the long run, `CHAOS_OUT` names a file for the numbers (`make chaos`).

The added stall is the longest time without a message, less that of the same stream in peace. Three things make it up,
and the details of the bar keep them apart: where survivors had room (`lone_kill`: few streams, and the next kill waits
until all replicas are back), where the replacements' start-ups take the survivors' cores (`storm`), and where there was
no survivor (`blackout`). `noticed_to_token` is the router's own part of it: choosing again and recomputing.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_clients import Clients
from chaos_streams import KINDS, Spec
from live import CHANGE_TIMEOUT_S, Cluster, wait_until

from quire.cluster.bench.results.report import Bar, write

SIZES = {"ci": (300, 8, 3), "long": (5000, 100, 20)}  # streams, kills, kills one at a time
SIZE = os.environ.get("CHAOS_SIZE", "ci")
NUM_STREAMS, NUM_KILLS, NUM_LONE_KILLS = SIZES[SIZE]
NUM_REPLICAS = 3
LONE_STREAMS = 8  # at a time, while replicas are killed one by one

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    # Under 4 minutes on two idle cores; a limit for what hangs.
    pytest.mark.timeout(900 if SIZE == "ci" else 7200),
]


class Killer:
    """Kills a random replica at random moments; and once, when half of the work is done, all of them."""

    def __init__(self, cluster: Cluster, rng: random.Random):
        self._cluster = cluster
        self._rng = rng
        self.num_kills = 0
        self.blackout_s: float | None = None  # when it killed all

    async def run(self) -> None:
        """Until cancelled. The next blow waits for two replicas, so that the machine comes along."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 3.0))
            pids = await asyncio.to_thread(self._cluster.pids, "Replica")
            if len(pids) < 2:
                continue
            doomed = [self._rng.choice(pids)]
            if self.blackout_s is None and self.num_kills >= NUM_KILLS // 2:
                self.blackout_s, doomed = time.monotonic(), pids
            self.num_kills += kill(doomed)
            print(f"kill {self.num_kills}: {len(doomed)} of {len(pids)}", flush=True)


def kill(pids: list[int]) -> int:
    """How many of them were there to be killed: Serve's news are a second old."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except ProcessLookupError:
            continue
    return count


def until_enough(killer: Killer) -> Iterator[int]:
    """The numbers of streams: all of them once, and on until the kills are done."""
    number = 0
    while number < NUM_STREAMS or killer.num_kills < NUM_KILLS:
        yield number
        number += 1


def move_metrics(cluster: Cluster) -> tuple[int, float]:
    """How often streams moved, and the 99th percentile of the time to the next token, as a bucket's bound."""
    buckets = cluster.buckets("quire_migration_seconds")
    total = max(buckets.values(), default=0)
    p99 = min((le for le, count in buckets.items() if count >= 0.99 * total), default=0.0)
    return int(cluster.metric("quire_migrations_total")), p99


def restored_tokens(cluster: Cluster) -> int:
    """Tokens that the living replicas have restored from the node's pool instead of computing them."""
    return int(cluster.metric("quire_prefix_hit_tokens_total", tier="host"))


def wait_at_rest(cluster: Cluster) -> None:
    wait_until(
        lambda: len(cluster.loads()) == NUM_REPLICAS, CHANGE_TIMEOUT_S, "all replicas are back"
    )
    wait_until(
        lambda: all(
            load.num_running + load.num_waiting == 0
            and tier.blocks_free + tier.blocks_cached == tier.blocks_total
            for load in cluster.loads()
            for tier in load.cache.tiers
        ),
        20,
        "free + cached = total",
    )


@pytest.fixture(scope="module")
def calm(chaos_cluster) -> Clients:
    """All streams in peace."""
    calm = Clients(chaos_cluster, NUM_STREAMS)
    began_s = time.monotonic()
    asyncio.run(calm.run(iter(range(NUM_STREAMS))))
    print(f"{NUM_STREAMS} streams in peace: {time.monotonic() - began_s:.0f} s", flush=True)
    assert [n for n, outcome in calm.outcomes.items() if isinstance(outcome, str)] == []
    long_enough = (
        Spec(n).kind
        for n, outcome in calm.outcomes.items()
        if outcome.done and outcome.usage[1] > 20
    )
    assert set(long_enough) == set(KINDS), "each kind has answers long enough to be interrupted"
    for number, outcome in calm.outcomes.items():
        for choice in outcome.choices:
            num_scores = len(choice.token_ids) if Spec(number).kind == "logprobs" else 0
            assert len(choice.logprobs) == num_scores, Spec(number)
    return calm


@pytest.fixture(scope="module")
def lone_stalls(chaos_cluster, calm) -> list[float]:
    """Added stalls in seconds of streams whose replica was killed while the two others had room."""
    stalls: list[float] = []
    numbers = iter(range(10**9))
    for _ in range(NUM_LONE_KILLS):
        wait_at_rest(chaos_cluster)
        clients = Clients(chaos_cluster, NUM_STREAMS, concurrency=LONE_STREAMS)
        killed_s = asyncio.run(_kill_one_while(chaos_cluster, clients, numbers))
        assert clients.wrong(calm) == []
        stalls += [
            watch.stall_s - calm.watches[number % NUM_STREAMS].stall_s
            for number, watch in clients.watches.items()
            # Its longest wait was that for the dead replica, or at least at that time.
            if watch.gap[0] <= killed_s <= watch.gap[1]
        ]
    return sorted(stalls)


async def _kill_one_while(cluster: Cluster, clients: Clients, numbers: Iterator[int]) -> float:
    """Kill a replica in the middle of some streams; returns when."""
    (pid, *_) = await asyncio.to_thread(cluster.pids, "Replica")
    killed_s: list[float] = []

    def until_killed() -> Iterator[int]:
        for number in numbers:
            yield number
            if killed_s and time.monotonic() - killed_s[0] > 0.5:
                return

    running = asyncio.create_task(clients.run(until_killed()))
    await asyncio.sleep(1.5)
    assert kill([pid]) == 1
    killed_s.append(time.monotonic())
    await running
    return killed_s[0]


def test_streams_equal_their_uninterrupted_selves_under_random_kills(
    chaos_cluster, calm, lone_stalls
):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    killer = Killer(chaos_cluster, random.Random(seed))
    storm = Clients(chaos_cluster, NUM_STREAMS)

    async def run() -> None:
        killing = asyncio.create_task(killer.run())
        await storm.run(until_enough(killer))
        killing.cancel()

    began_s = time.monotonic()
    asyncio.run(run())
    storm_s = time.monotonic() - began_s
    wait_at_rest(chaos_cluster)
    moved = [n for n, watch in storm.watches.items() if watch.attempts > 1]
    wait_until(lambda: move_metrics(chaos_cluster)[0] > 0, 30, "the routers' count of migrations")
    wrong = storm.wrong(calm)
    report(chaos_cluster, calm, storm, killer, len(wrong), lone_stalls, storm_s)
    assert not wrong, "\n".join(wrong)
    assert killer.num_kills >= NUM_KILLS
    assert moved, "no stream moved: the kills hit nobody"


def spread(seconds: list[float]) -> dict[str, float]:
    """Of sorted values."""
    if not seconds:
        return {"num": 0}
    last = len(seconds) - 1
    return {
        "num": len(seconds),
        "p50_s": round(seconds[last // 2], 2),
        "p99_s": round(seconds[int(0.99 * last)], 2),
        "max_s": round(seconds[last], 2),
    }


def report(
    cluster: Cluster,
    calm: Clients,
    storm: Clients,
    killer: Killer,
    num_wrong: int,
    lone_stalls: list[float],
    storm_s: float,
) -> None:
    """Print the bars, and write them where `CHAOS_OUT` says."""
    stalls, blackout = [], []
    for number, watch in storm.watches.items():
        added_s = max(0.0, watch.stall_s - calm.watches[number % NUM_STREAMS].stall_s)
        begin_s, end_s = watch.gap
        dark = killer.blackout_s is not None and begin_s - 1 <= killer.blackout_s <= end_s
        (blackout if dark else stalls).append(added_s)
    stalls.sort()
    migrations, noticed_s = move_metrics(cluster)
    everything = sorted(stalls + blackout)
    details = {
        "lone_kill": spread(lone_stalls),
        "storm": spread(stalls),
        "blackout": spread(sorted(blackout)),
        "noticed_to_token_p99_at_most_s": noticed_s,
    }
    seconds = {"seconds": round(storm_s)}
    seconds["refused_first"] = sum(watch.refusals > 0 for watch in storm.watches.values())
    bars = [
        Bar("chaos/bad_streams", num_wrong, "streams", 0, details=seconds),
        Bar("chaos/streams", len(storm.outcomes), "streams", NUM_STREAMS, at_most=False),
        Bar("chaos/kills", killer.num_kills, "SIGKILL", NUM_KILLS, at_most=False),
        Bar(
            "chaos/migrations",
            migrations,
            "attempts",
            1000 if SIZE == "long" else 1,
            at_most=False,
        ),
    ]
    bars.append(Bar("chaos/restored_tokens", restored_tokens(cluster), "tokens", 1, at_most=False))
    # The time without any replica is all of p99 in 300 streams, not in 5000.
    counted = everything if SIZE == "long" else stalls
    bars.append(Bar("chaos/added_stall_p99", spread(counted)["p99_s"], "s", 3.0, details=details))
    lone = spread(lone_stalls).get("p99_s")
    bars.append(Bar("chaos/added_stall_lone_kill_p99", lone, "s", 3.0))
    for bar in bars:
        print(bar.to_json())
    out = os.environ.get("CHAOS_OUT")
    if out:
        write(Path(out), f"make chaos SIZE={SIZE}", bars)
