"""Clients that leave at any moment: nothing of them stays, in the router or on a replica.

Two real engines with a small cache and a host tier, so that requests are also offloaded; bus, table and lifecycle are
real. `CHAOS_SIZE=long` is the long run (`make chaos`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_serve import LocalCluster, LocalReplica, assert_idle, start_replica

from quire.bench.report import Bar, write
from quire.protos.errors import Unavailable
from quire.protos.wire import Grammar
from quire.replica.embedded import CHECKPOINT
from quire.router.index import PrefixIndex
from quire.router.params import GenerationDefaults, Limits
from quire.router.policy import make_policy
from quire.router.replicas import ReplicaTable
from quire.router.service import ModelFacts, RouterService
from quire.router.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.types import GenerationRequest

SIZE = os.environ.get("CHAOS_SIZE", "ci")
NUM_CLIENTS = {"ci": 1000, "long": 20_000}[SIZE]
CONCURRENCY = 24
STAGES = ("before the answer", "in the prompt", "in the answer", "while moving", "at the end")
NUM_BLOCKS = 40  # of 16 tokens: some six of the requests at a time
LONG_PROMPT = "The harbour, the tide, the quay and the light. " * 6


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replicas(runner, patch) -> Iterator[list[LocalReplica]]:
    async def start() -> list[LocalReplica]:
        limits = dict(num_blocks=NUM_BLOCKS, block_size=16, max_batch_tokens=64, max_model_len=512)
        limits |= dict(cpu_offload_gib=0.02, num_threads=1, max_prefill_ms=None)
        return [await start_replica(name, patch, **limits) for name in "ab"]

    replicas = runner.run(start())
    yield replicas
    for replica in replicas:
        replica.engine.close()


class Visitors:
    """Clients that leave; each is in one stage when it does."""

    def __init__(self, service: RouterService, replicas: dict[str, LocalReplica], seed: int):
        self._service = service
        self._replicas = replicas
        self._rng = random.Random(seed)
        self.left: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.num_refused = 0
        self.most_offloaded = 0

    async def run(self, num: int) -> None:
        numbers = iter(range(num))

        async def worker() -> None:
            for number in numbers:
                await self._visit(number)

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))

    def _request(self, number: int) -> GenerationRequest:
        rng = self._rng
        fields: dict = dict(seed=number, max_tokens=rng.choice((16, 64, 160)), ignore_eos=True)
        if number % 7 == 0:
            fields |= dict(n=2)
        if number % 11 == 0:
            fields |= dict(grammar=Grammar("regex", "[a-z ]{200}", "regex"), ignore_eos=False)
        prompt = f"Story {rng.randrange(40)}. {LONG_PROMPT if rng.random() < 0.5 else ''}"
        return GenerationRequest(request_id=str(number), prompt=prompt, **fields)

    async def _visit(self, number: int) -> None:
        stage = STAGES[number % len(STAGES)]
        rng = self._rng
        opening = asyncio.ensure_future(self._service.generate(self._request(number)))
        if stage in ("before the answer", "in the prompt"):
            await asyncio.sleep(rng.uniform(0, 0.002 if stage == "before the answer" else 0.1))
            if not opening.done():
                self.left[stage] += 1
            opening.cancel()
            (stream,) = await asyncio.gather(opening, return_exceptions=True)
            if hasattr(stream, "aclose"):  # it was faster
                await stream.aclose()
            return
        try:
            stream = await opening
            await self._read(stream, number, stage)
        except Unavailable:
            self.num_refused += 1  # both streams were cut
        except Exception as error:
            self.failed[repr(error)] += 1

    async def _read(self, stream, number: int, stage: str) -> None:
        rng = self._rng
        try:
            num_read = 10**9 if stage == "at the end" else rng.randrange(1, 40)
            async for _ in stream:
                num_read -= 1
                loads = [replica.engine.load() for replica in self._replicas.values()]
                offloaded = sum(load.host_blocks_in_use for load in loads)
                self.most_offloaded = max(self.most_offloaded, offloaded)
                if not num_read:
                    break
            if stage == "while moving" and number % 50 == 3:  # it takes everybody there along
                await self._replicas[stream.explain.replica].cut_streams()
            if stage == "while moving":
                await asyncio.sleep(rng.uniform(0, 0.01))
            self.left[stage] += 1
        finally:
            await stream.aclose()


@pytest.mark.timeout(300 if SIZE == "ci" else 3600)
@pytest.mark.chaos
def test_nothing_stays_of_clients_that_leave(runner, replicas):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")

    async def run() -> Visitors:
        cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
        service = RouterService(
            ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
            router_id=cluster.router_id,
            tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
            template=None,
            table=cluster.table,
            policy=make_policy("slo"),
            transport=cluster.bus,
            max_migrations=1000,  # every cut moves everybody
        )
        await cluster.start()
        visitors = Visitors(service, cluster.replicas, seed)
        await visitors.run(NUM_CLIENTS)
        await cluster.stop()  # nothing is left on a replica, in the bus or in the table
        return visitors

    visitors = runner.run(run())
    print(dict(visitors.left), f"at most {visitors.most_offloaded} blocks offloaded")
    assert not visitors.failed
    assert visitors.num_refused < NUM_CLIENTS // 10
    assert all(visitors.left[stage] > NUM_CLIENTS // 20 for stage in STAGES), visitors.left
    assert visitors.most_offloaded > 0, "nobody was offloaded: the cache is too large for this test"
    for replica in replicas:
        runner.run(assert_idle(replica, "nobody"))
        assert replica.actor._leases._streams == {}
        load = replica.engine.load()
        assert load.blocks_free + load.blocks_cached == load.blocks_total == NUM_BLOCKS
        assert load.host_blocks_in_use == 0
    left = sum(visitors.left.values())
    bar = Bar(
        "chaos/disconnects",
        left,
        "clients",
        0.9 * NUM_CLIENTS,
        at_most=False,
        details=dict(visitors.left),
    )
    leaks = Bar("chaos/disconnect_leaks", 0, "blocks, rows, leases", 0)
    out = os.environ.get("CHAOS_OUT")
    if out:
        write(
            Path(out).with_name("chaos_disconnects.json"), f"make chaos SIZE={SIZE}", [bar, leaks]
        )
