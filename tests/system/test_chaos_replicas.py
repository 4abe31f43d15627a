"""Every stream survives the death of its replica with the very answer it would have had.

Real Ray, real SIGKILLs: three replicas and two routers; streams of every kind over HTTP and gRPC are asked once in
peace and once while replicas are killed at random, and have to be equal: token ids, text, log-probabilities, finish
reasons, usage. `CHAOS_SIZE=long` is the long run, `CHAOS_OUT` names a file for the numbers (`make chaos`).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from chaos_streams import KINDS, Outcome, Refused, Spec, Watch, ask_grpc, ask_http
from live import Cluster, start_cluster, wait_until

from quire.bench.report import Bar, write
from quire.protos import generation_pb2_grpc

SIZES = {"ci": (300, 8), "long": (5000, 100)}  # streams, kills
SIZE = os.environ.get("CHAOS_SIZE", "ci")
NUM_STREAMS, NUM_KILLS = SIZES[SIZE]
CONCURRENCY = 24
MAX_REFUSED_S = 240.0  # for which a client comes back
NUM_REPLICAS = 3

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,
    # Under 4 minutes on two idle cores; a limit for what hangs.
    pytest.mark.timeout(900 if SIZE == "ci" else 7200),
]


@pytest.fixture(scope="module")
def chaos_cluster(tmp_path_factory) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args |= {"replicas": NUM_REPLICAS, "routers": 2, "engine": {"deterministic": True}}
        # However slow the machine is: all replicas may be dead until the first is back.
        # And the slower it is, the more of the kills each stream lives to see.
        args["router"] = {"max_move_s": 240.0, "max_migrations": 100}

    yield from start_cluster(tmp_path_factory.mktemp("chaos"), change)


class Killer:
    """Kills a random replica at random moments; and once, when half of the work is done, all of them."""

    def __init__(self, cluster: Cluster, rng: random.Random):
        self._cluster = cluster
        self._rng = rng
        self.num_kills = 0
        self.had_all = False

    def pids(self) -> list[int]:
        """Of the replicas that run, as Serve says."""
        application = self._cluster.serve_status()["applications"]["quire"]
        replicas = application["deployments"]["Replica"]["replicas"]
        return [r["pid"] for r in replicas if r["state"] == "RUNNING" and r["pid"]]

    async def run(self) -> None:
        """Until cancelled. The next blow waits for two replicas, so that the machine comes along."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 3.0))
            pids = await asyncio.to_thread(self.pids)
            if len(pids) < 2:
                continue
            doomed = [self._rng.choice(pids)]
            if not self.had_all and self.num_kills >= NUM_KILLS // 2:
                self.had_all, doomed = True, pids
            for pid in doomed:
                try:
                    os.kill(pid, signal.SIGKILL)
                    self.num_kills += 1
                    print(f"kill {self.num_kills}: one of {len(pids)}", flush=True)
                except ProcessLookupError:  # Serve's news are a second old
                    continue


class Clients:
    """Asks streams, many at a time, and remembers how each went."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self.watches: dict[int, Watch] = {}
        self.outcomes: dict[int, Outcome | str] = {}

    async def run(self, numbers: Iterator[int]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._cluster.url, timeout=120, limits=limits) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{self._cluster.grpc_port}") as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)

            async def worker() -> None:
                for number in numbers:
                    await self._one(client, stub, number)

            await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))

    async def _one(self, client, stub, number: int) -> None:
        spec = Spec(number % NUM_STREAMS)
        watch = self.watches[number] = Watch()
        began_s = time.monotonic()
        while True:
            try:
                if spec.over_http:
                    self.outcomes[number] = await ask_http(client, spec, watch)
                else:
                    self.outcomes[number] = await ask_grpc(stub, spec, watch)
                return
            except Refused as refusal:
                watch.refusals += 1
                if time.monotonic() - began_s > MAX_REFUSED_S:
                    self.outcomes[number] = f"refused for {MAX_REFUSED_S} s: {refusal}"
                    return
                await asyncio.sleep(0.25)
            except Exception as error:
                self.outcomes[number] = repr(error)
                return


def until_enough(killer: Killer) -> Iterator[int]:
    """The numbers of streams: all of them once, and on until the kills are done."""
    number = 0
    while number < NUM_STREAMS or killer.num_kills < NUM_KILLS:
        yield number
        number += 1


def num_migrations(cluster: Cluster) -> int:
    lines = re.findall(r"^ray_quire_migrations\S* (\S+)$", cluster.ray_metrics(), re.MULTILINE)
    return int(sum(map(float, lines)))


def test_streams_equal_their_uninterrupted_selves_under_random_kills(chaos_cluster):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    calm = Clients(chaos_cluster)
    began_s = time.monotonic()
    asyncio.run(calm.run(iter(range(NUM_STREAMS))))
    calm_s = time.monotonic() - began_s
    print(f"{NUM_STREAMS} streams in peace: {calm_s:.0f} s", flush=True)
    assert [n for n, outcome in calm.outcomes.items() if isinstance(outcome, str)] == []
    kinds = Counter(
        Spec(n).kind
        for n, outcome in calm.outcomes.items()
        if outcome.done and outcome.usage[1] > 20
    )
    assert set(kinds) == set(KINDS), "each kind has answers long enough to be interrupted"
    for number, outcome in calm.outcomes.items():
        for choice in outcome.choices:
            num_scores = len(choice.token_ids) if Spec(number).kind == "logprobs" else 0
            assert len(choice.logprobs) == num_scores, Spec(number)

    killer = Killer(chaos_cluster, random.Random(seed))
    storm = Clients(chaos_cluster)

    async def run() -> None:
        killing = asyncio.create_task(killer.run())
        await storm.run(until_enough(killer))
        killing.cancel()

    began_s = time.monotonic()
    asyncio.run(run())
    storm_s = time.monotonic() - began_s
    bad = {
        n: (Spec(n % NUM_STREAMS), outcome, calm.outcomes[n % NUM_STREAMS])
        for n, outcome in storm.outcomes.items()
        if outcome != calm.outcomes[n % NUM_STREAMS]
    }
    wait_until(lambda: len(chaos_cluster.loads()) == NUM_REPLICAS, 60, "all replicas are back")
    wait_until(
        lambda: all(
            load.num_running + load.num_waiting == 0
            and tier.blocks_free + tier.blocks_cached == tier.blocks_total
            for load in chaos_cluster.loads()
            for tier in load.cache.tiers
        ),
        20,
        "free + cached = total",
    )
    moved = [n for n, watch in storm.watches.items() if watch.attempts > 1]
    wait_until(lambda: num_migrations(chaos_cluster) > 0, 30, "the routers' count of migrations")
    report(calm, storm, killer, len(bad), num_migrations(chaos_cluster), storm_s)
    assert not bad, "\n".join(
        f"{spec} {spec.kind} {'HTTP' if spec.over_http else 'gRPC'}: {difference(outcome, whole)}"
        for spec, outcome, whole in bad.values()
    )
    assert killer.num_kills >= NUM_KILLS
    assert moved, "no stream moved: the kills hit nobody"


def difference(outcome: Outcome | str, whole: Outcome) -> str:
    """What is wrong with an answer, in one line."""
    if isinstance(outcome, str):
        return outcome
    for i, (got, wanted) in enumerate(zip(outcome.choices, whole.choices, strict=True)):
        for name in ("token_ids", "text", "logprobs", "finish_reason", "stop_reason"):
            one, other = getattr(got, name), getattr(wanted, name)
            if one != other:
                return f"choice {i}: {name} {one!r}, expected {other!r}"
    return f"usage {outcome.usage}, expected {whole.usage}; done: {outcome.done}"


def report(
    calm: Clients, storm: Clients, killer: Killer, num_bad: int, migrations: int, storm_s: float
) -> None:
    """Print the bars, and write them where `CHAOS_OUT` says."""
    stalls = sorted(
        max(0.0, watch.stall_s - calm.watches[n % NUM_STREAMS].stall_s)
        for n, watch in storm.watches.items()
    )
    refused = sum(watch.refusals > 0 for watch in storm.watches.values())
    stall_p99_s = stalls[int(0.99 * (len(stalls) - 1))]
    details = {
        "seconds": round(storm_s),
        "refused_first": refused,
        "added_stall_p50_s": round(stalls[len(stalls) // 2], 2),
        "added_stall_p99_s": round(stall_p99_s, 2),
        "added_stall_max_s": round(stalls[-1], 2),
    }
    wanted_migrations = 1000 if SIZE == "long" else 1
    bars = [
        Bar("chaos/bad_streams", num_bad, "streams", 0, details=details),
        Bar("chaos/streams", len(storm.outcomes), "streams", NUM_STREAMS, at_most=False),
        Bar("chaos/kills", killer.num_kills, "SIGKILL", NUM_KILLS, at_most=False),
        Bar("chaos/migrations", migrations, "attempts", wanted_migrations, at_most=False),
    ]
    if SIZE == "long":  # the time without any replica is all of p99 in 300 streams, not in 5000
        bars.append(Bar("chaos/added_stall_p99", stall_p99_s, "s", 3.0))
    for bar in bars:
        print(bar.to_json())
    out = os.environ.get("CHAOS_OUT")
    if out:
        write(Path(out), f"make chaos SIZE={SIZE}", bars)
