"""Clients that disconnect at any moment leave no state behind, in the router or on a replica.

Two real engines with a small cache and one pool of the node, so that requests are also offloaded; bus, table and
lifecycle are real. `CHAOS_SIZE=long` is the long run (`make chaos`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
from local_serve import LocalCluster, LocalReplica, assert_idle, start_replica, until

from quire.cluster.bench.results.report import Bar, write
from quire.protos.errors import Unavailable
from quire.protos.sampling_params import Grammar
from quire.protos.wire import TokenDelta
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.core.request import Phase
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.scheduler.scheduler import Scheduler
from quire.replica.serving import actor as actor_module
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.types import GenerationRequest

SIZE = os.environ.get("CHAOS_SIZE", "ci")
NUM_CLIENTS = {"ci": 600, "long": 21_000}[SIZE]
CONCURRENCY = 24
STAGES = (
    "before the answer",
    "in the prompt",
    "in the answer",
    "while offloaded",
    "while moving",
    "at the end",
)
NUM_BLOCKS = 40  # of 16 tokens: some six of the requests at a time
CREDIT_TOKENS = 96  # so far a request runs ahead of its client
MAX_STALL_S = 3.0
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
def replicas(runner, patch, tmp_path_factory) -> Iterator[list[LocalReplica]]:
    place = PoolPlace("visited", folder=tmp_path_factory.mktemp("pool"))
    patch.setattr(actor_module, "_pool_place", lambda application: place)

    async def start() -> list[LocalReplica]:
        limits = dict(num_blocks=NUM_BLOCKS, block_size=16, max_batch_tokens=64, max_model_len=512)
        limits |= dict(node_pool_gib=0.02, num_threads=1, max_prefill_ms=None)
        limits |= dict(step_timeout_s=300.0)  # a machine that others use is not a step that hangs
        return [await start_replica(name, patch, **limits) for name in "ab"]

    replicas = runner.run(start())
    yield replicas
    for replica in replicas:
        replica.engine.close()
    assert not list(place.folder.iterdir())


@pytest.fixture(scope="module")
def aborted_in(patch) -> list[Phase]:
    """What requests did on their replica when they were aborted."""
    phases: list[Phase] = []
    abort = Scheduler.abort

    def record(scheduler: Scheduler, key: Hashable) -> TokenDelta | None:
        if key in scheduler.book.requests:
            phases.append(scheduler.book.requests[key].phase)
        return abort(scheduler, key)

    patch.setattr(Scheduler, "abort", record)
    return phases


class Visitors:
    """Clients that leave; each is in one stage when it does."""

    def __init__(self, service: RouterService, replicas: dict[str, LocalReplica], seed: int):
        self._service = service
        self._replicas = replicas
        self._rng = random.Random(seed)
        self.left: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.num_refused = 0
        self.num_moved = 0

    async def run(self, num: int) -> None:
        numbers = iter(range(num))

        async def worker() -> None:
            for number in numbers:
                await self._visit(number)

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))

    def _request(self, number: int) -> GenerationRequest:
        rng = self._rng
        fields: dict = dict(seed=number, max_tokens=rng.choice((16, 64, 160)), ignore_eos=True)
        if STAGES[number % len(STAGES)] == "while offloaded":
            fields["max_tokens"] = 160  # longer than its credit
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
            if stage == "while offloaded":
                is_offloaded = await self._wait_until_offloaded(stream)
                self.left[stage if is_offloaded else "while paused"] += 1
                return
            num_read = 10**9 if stage == "at the end" else rng.randrange(1, 40)
            async for _ in stream:
                num_read -= 1
                if not num_read:
                    break
            if stage == "while moving" and number // len(STAGES) % 10 == 0:
                # All streams of the replica migrate.
                await self._replicas[stream.explain.replica].cut_streams()
            if stage == "while moving":
                await asyncio.sleep(rng.uniform(0, 0.01))
            self.left[stage] += 1
        finally:
            self.num_moved += stream.explain.attempts > 1
            await stream.aclose()

    async def _wait_until_offloaded(self, stream) -> bool:
        """Stop reading, so that the request pauses and is the first to be preempted; return whether it was."""
        await anext(aiter(stream))
        with contextlib.suppress(TimeoutError):
            await until(lambda: self._is_offloaded(stream), MAX_STALL_S)
            return True
        return False

    def _is_offloaded(self, stream) -> bool:
        streams = getattr(stream, "_streams", [stream])  # of the choices
        attempts = [s.attempts.current for s in streams if s.attempts.current is not None]
        for attempt in attempts:
            requests = self._replicas[attempt.replica].engine._loop._scheduler.book.requests
            request = requests.get((self._service.router_id, attempt.stream_id))
            if request is not None and request.phase is Phase.OFFLOADED:
                return True
        return False


def leaks(cluster: LocalCluster) -> Counter[str]:
    """What is still held though every client has gone."""
    left: Counter[str] = Counter()
    for replica in cluster.replicas.values():
        load, actor = replica.engine.load(), replica.actor
        left["blocks"] += load.blocks_total - load.blocks_free - load.blocks_cached
        left["host blocks"] += load.host_blocks_in_use
        left["slots of the pool"] += replica.engine._node_pool.num_leased()
        left["rows"] += load.num_running + load.num_waiting
        left["leases"] += len(actor._leases._streams)
        left["open calls"] += len(actor._finished)
    left["attempts"] += len(cluster.bus._attempts)
    left["bookings"] += sum(
        entry.bookings.num_unreported for entry in cluster.table._replicas.values()
    )
    return left


def write_bars(visitors: Visitors, left: Counter[str], aborted_in: list[Phase]) -> None:
    out = os.environ.get("CHAOS_OUT")
    if not out:
        return
    phases = Counter(phase.value for phase in aborted_in)
    num_left = sum(visitors.left.values())
    goal = {"ci": 0.9 * NUM_CLIENTS, "long": 20_000}[SIZE]
    bars = [
        Bar("chaos/disconnects", num_left, "clients", goal, at_most=False, details=visitors.left),
        Bar(
            "chaos/disconnects_moved",
            visitors.num_moved,
            "clients",
            NUM_CLIENTS // 100,
            at_most=False,
        ),
        Bar(
            "chaos/disconnects_offloaded",
            phases[Phase.OFFLOADED.value],
            "requests",
            NUM_CLIENTS // 100,
            at_most=False,
            details={"aborted while": dict(phases)},
        ),
        Bar("chaos/disconnect_leaks", left.total(), "blocks, rows, leases", 0, details=left),
        Bar("chaos/disconnect_failures", visitors.failed.total(), "clients", 0),
    ]
    write(Path(out).with_name("chaos_disconnects.json"), f"make chaos SIZE={SIZE}", bars)


@pytest.mark.timeout(300 if SIZE == "ci" else 3600)
@pytest.mark.chaos
def test_nothing_stays_of_clients_that_leave(runner, replicas, aborted_in):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")

    async def run() -> None:
        cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
        service = RouterService(
            ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
            router_id=cluster.router_id,
            tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
            template=None,
            table=cluster.table,
            policy=make_policy("slo"),
            transport=cluster.bus,
            max_migrations=1000,  # Every cut migrates all streams of a replica.
            # Waits depend on the machine here; other tests check this bound.
            admission=AdmissionLimits(max_wait_s=3600.0),
        )
        cluster.bus.credit_tokens = CREDIT_TOKENS
        await cluster.start()
        visitors = Visitors(service, cluster.replicas, seed)
        try:
            await visitors.run(NUM_CLIENTS)
        finally:  # also of a run that is cut short
            with contextlib.suppress(TimeoutError):
                await until(lambda: not leaks(cluster).total())
            left = leaks(cluster)
            write_bars(visitors, left, aborted_in)
        num_offloads = sum(replica.engine.load().num_offloads for replica in replicas)
        print(dict(visitors.left), visitors.num_moved, Counter(aborted_in), num_offloads)
        assert not left.total(), left
        assert not visitors.failed
        assert visitors.num_refused < NUM_CLIENTS // 10
        few = {stage for stage in STAGES if visitors.left[stage] <= NUM_CLIENTS // 20}
        assert few <= {"while offloaded"}, visitors.left
        assert visitors.num_moved > NUM_CLIENTS // 100, "the replicas are cut off too seldom"
        assert aborted_in.count(Phase.OFFLOADED) > NUM_CLIENTS // 100, "the cache is too large"
        await cluster.stop()  # nothing is left on a replica, in the bus or in the table

    runner.run(run())
    for replica in replicas:
        runner.run(assert_idle(replica, "nobody"))
        load = replica.engine.load()
        assert load.blocks_free + load.blocks_cached == load.blocks_total == NUM_BLOCKS
